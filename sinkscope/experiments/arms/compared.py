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


@dataclass
class Reference:
    """The unablated model's next-token logits of a batch, [sequence, T, vocabulary], and the text's ids.

    `normalised`: float32 logits have been replaced by their log-probabilities.
    """

    logits: Tensor
    ids: Tensor
    normalised: bool = False

    @cached_property
    def best(self) -> Tensor:
        """The most probable tokens of each position, [sequence, T, TOP]."""
        return _best(self.logits)

    @property
    def _step(self) -> int:
        """How many positions are converted to float32 at once."""
        batch, _, vocabulary = self.logits.shape
        return max(1, CHUNK_BYTES // (4 * batch * vocabulary))

    def normalise(self) -> None:
        """Writes log-probabilities over float32 logits, which every comparison would compute anew."""
        if self.logits.dtype == torch.float32 and self.best.numel():  # the best are read from the logits before
            for start in range(0, self.logits.shape[1], self._step):
                rows = self.logits[:, start : start + self._step]
                rows.copy_(log_softmax(rows, -1))
            self.normalised = True

    def compare(self, logits: Tensor) -> dict[str, Tensor]:
        """Numbers of each sequence, float64: the loss, and four that compare the two next-token distributions.

        p is the unablated model's distribution, q the other one's. kl: mean over positions 0..T-2, those that the loss
        counts, of sum p log(p / q), in nats; kl_last: the same at position T-1. top1: share of positions 0..T-2 at
        which both find the same token most probable. top5: mean share of p's five most probable tokens that are among
        q's five.
        """
        batch, length, _ = logits.shape
        kl, same, shared = (torch.zeros(batch, length, dtype=torch.float64) for _ in range(3))
        total = torch.zeros(batch, dtype=torch.float64)
        for start in range(0, length, self._step):
            part = slice(start, min(start + self._step, length))
            q = log_softmax(logits[:, part].float(), -1)
            p = self.logits[:, part] if self.normalised else log_softmax(self.logits[:, part].float(), -1)
            kl[:, part] = as_float64(torch.linalg.vecdot(p.exp(), p - q)).cpu()
            total += next_token_losses(q, self.ids[:, start + 1 : part.stop + 1])
            ours, theirs = self.best[:, part], _best(logits[:, part])
            same[:, part] = (ours[..., 0] == theirs[..., 0]).cpu().double()
            shared[:, part] = (ours[..., None] == theirs[..., None, :]).any(-1).cpu().double().mean(-1)
        return {
            "loss": total / (length - 1),
            "kl": kl[:, :-1].mean(1),
            "kl_last": kl[:, -1],
            "top1": same[:, :-1].mean(1),
            "top5": shared[:, :-1].mean(1),
        }


def _best(logits: Tensor) -> Tensor:
    return logits.topk(min(TOP, logits.shape[-1]), -1).indices
