"""What one pass over a batch shows beside the unablated model's: numbers of each sequence, from both models' logits."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import log_softmax

from sinkscope.capture.precision import as_float64
from sinkscope.experiments.arms.loss import CHUNK_BYTES, next_token_losses

TOP = 5


@dataclass(frozen=True)
class Reference:
    """The unablated model's next-token logits of a batch, [sequence, T, vocabulary], and the text's ids."""

    logits: Tensor
    ids: Tensor

    @cached_property
    def best(self) -> Tensor:
        """The most probable tokens of each position, [sequence, T, TOP]."""
        return _best(self.logits)

    def compare(self, logits: Tensor) -> dict[str, Tensor]:
        """Numbers of each sequence, float64: the loss, and four that compare the two next-token distributions.

        p is the unablated model's distribution, q the other one's. kl: mean over positions 0..T-2, those that the loss
        counts, of sum p log(p / q), in nats; kl_last: the same at position T-1. top1: share of positions 0..T-2 at
        which both find the same token most probable. top5: mean share of p's five most probable tokens that are among
        q's five.
        """
        batch, length, vocabulary = logits.shape
        kl, same, shared = (torch.zeros(batch, length, dtype=torch.float64) for _ in range(3))
        step = max(1, CHUNK_BYTES // (4 * batch * vocabulary))
        for start in range(0, length, step):
            part = slice(start, min(start + step, length))
            p, q = (log_softmax(rows[:, part].float(), -1) for rows in (self.logits, logits))
            kl[:, part] = as_float64(torch.linalg.vecdot(p.exp(), p.sub_(q))).cpu()
            ours, theirs = self.best[:, part], _best(logits[:, part])
            same[:, part] = (ours[..., 0] == theirs[..., 0]).cpu().double()
            shared[:, part] = (ours[..., None] == theirs[..., None, :]).any(-1).cpu().double().mean(-1)
        return {
            "loss": next_token_losses(logits, self.ids),
            "kl": kl[:, :-1].mean(1),
            "kl_last": kl[:, -1],
            "top1": same[:, :-1].mean(1),
            "top5": shared[:, :-1].mean(1),
        }


def _best(logits: Tensor) -> Tensor:
    return logits.topk(min(TOP, logits.shape[-1]), -1).indices
