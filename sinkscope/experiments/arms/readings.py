"""What is read of one pass of an arm: the loss of each sequence, the logits beside the unablated model's, sink rates,
and how alike the tokens are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import log_softmax

from sinkscope.capture.hooks import first_returned, hooked
from sinkscope.capture.kernels.sums import AttentionSums
from sinkscope.capture.precision import as_float64
from sinkscope.capture.token_sums import token_sums
from sinkscope.capture.uncalled import is_uncalled
from sinkscope.errors import SinkscopeError
from sinkscope.experiments.arms.arm import Setting
from sinkscope.metrics.mass import ranked, received

LOGIT_BYTES = 512 * 2**20
"""Most memory for the logits of a batch, in the model's dtype."""

CHUNK_BYTES = 64 * 2**20
"""Most memory for the logits that are converted to float32 at once."""


def next_token_losses(log_probabilities: Tensor, targets: Tensor) -> Tensor:
    """Sums of losses, [batch] float64, from log-probabilities, [batch, position, vocabulary], and the tokens that
    follow, [batch, position]; without the last position where no token follows it."""
    picked = log_probabilities[:, : targets.shape[1]].gather(-1, targets.to(log_probabilities.device)[..., None])
    return picked[..., 0].neg().cpu().double().sum(-1)


def batch_size(model: nn.Module, length: int) -> int:
    """Number of sequences whose logits stay within LOGIT_BYTES; at least 1."""
    embedding = model.get_input_embeddings()  # type: ignore[operator]
    row = embedding.weight.shape[0] * embedding.weight.element_size()
    return max(1, LOGIT_BYTES // (row * length))


# What one pass over a batch shows beside the unablated model's: numbers of each sequence, from both models' logits.


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
        counts, of sum p log(p / q), in nats; a sum that rounding leaves below 0 is 0. kl_last: the same at position
        T-1. top1: share of positions 0..T-2 at which both find the same token most probable. top5: mean share of p's
        five most probable tokens that are among q's five.
        """
        batch, length, _ = logits.shape
        kl, same, shared = (torch.zeros(batch, length, dtype=torch.float64) for _ in range(3))
        total = torch.zeros(batch, dtype=torch.float64)
        for start in range(0, length, self._step):
            part = slice(start, min(start + self._step, length))
            q = log_softmax(logits[:, part].float(), -1)
            p = self.logits[:, part] if self.normalised else log_softmax(self.logits[:, part].float(), -1)
            kl[:, part] = as_float64(torch.linalg.vecdot(p.exp(), p - q)).clamp(min=0).cpu()
            total += next_token_losses(q, self.ids[:, start + 1 : part.stop + 1])
            best_p, best_q = self.best[:, part], _best(logits[:, part])
            same[:, part] = (best_p[..., 0] == best_q[..., 0]).cpu().double()
            shared[:, part] = (best_p[..., None] == best_q[..., None, :]).any(-1).cpu().double().mean(-1)
        return {
            "loss": total / (length - 1),
            "kl": kl[:, :-1].mean(1),
            "kl_last": kl[:, -1],
            "top1": same[:, :-1].mean(1),
            "top5": shared[:, :-1].mean(1),
        }


def _best(logits: Tensor) -> Tensor:
    return logits.topk(min(TOP, logits.shape[-1]), -1).indices


# Sink rates of one forward pass, from the sums of its attention calls. They show whether a hidden sink moved.


class SinkCount:
    """Counts the heads of one pass that have a sink, for each sequence of the batch."""

    def __init__(self, epsilon: float) -> None:
        self._epsilon = epsilon
        self._found: list[tuple[Tensor, Tensor]] = []

    def receive(self, sums: AttentionSums) -> None:
        """Takes the sums of one attention call."""
        over = (received(sums.columns, sums.seen_by) > self._epsilon) & ranked(sums.seen_by)
        first = sums.columns[..., 0] / sums.first.shape[-1] > self._epsilon
        heads = torch.stack([first, over.any(-1)], -1).cpu().double()  # (batch, head, 2)
        self._found.append((heads, over.any(1).cpu()))

    @property
    def calls(self) -> int:
        """How many attention calls were counted so far."""
        return len(self._found)

    def take(self, other: SinkCount, calls: slice) -> None:
        """Takes over what another pass counted in some of its calls."""
        self._found += other._found[calls]

    def rates(self) -> Tensor:
        """Share of heads with alpha_0 > epsilon, and with alpha_k > epsilon at any key k with n_k >= n_max/4;
        [sequence, 2] float64."""
        return torch.cat([heads for heads, _ in self._found], 1).mean(1)

    @property
    def keys(self) -> Tensor:
        """The keys that are a sink of some head, bool [sequence, T]."""
        return reduce(torch.logical_or, (keys for _, keys in self._found))


# How alike the tokens of a sequence are behind every layer of one forward pass: does an arm smooth them?


def layers_of(setting: Setting) -> dict[int, nn.Module]:
    """The layers that hold the model's attention, by number, in order. Raises SinkscopeError where one is not known, or
    is called several times in a pass."""
    layers = {}
    for site in setting.sites:
        if site.block is None or is_uncalled(setting.base.get_submodule(site.block)):
            raise SinkscopeError(f"--cosines: the layer around {site.module} was not found in the model")
        layers[site.layer] = setting.base.get_submodule(site.block)
        if setting.called_again(layers[site.layer]):
            raise SinkscopeError(
                f"--cosines: {site.block} is called several times in a pass: it returns several streams"
            )
    return dict(sorted(layers.items()))


class Cosines:
    """Reads what the layers return in one pass."""

    def __init__(self, layers: dict[int, nn.Module]) -> None:
        self._layers = layers
        self._found: dict[nn.Module, Tensor] = {}

    def take(self, other: Cosines, layers: Iterable[nn.Module]) -> None:
        """Takes over what another pass found of some layers; what they return in this one is not read."""
        self._found |= {layer: other._found[layer] for layer in layers if layer in other._found}

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Reads the pass that runs in the block."""
        with ExitStack() as stack:
            for layer in self._layers.values():
                stack.enter_context(hooked(layer, post=self._read))
            yield

    def _read(self, layer: nn.Module, args: Any, output: Any) -> None:
        hidden = first_returned(output)
        if not isinstance(hidden, Tensor) or hidden.dim() != 3:
            raise SinkscopeError(f"--cosines: {type(layer).__name__} returns no single residual stream")
        if layer not in self._found:
            wide = hidden if hidden.dtype == torch.float64 else hidden.float()
            self._found[layer] = token_sums(wide).pair_cosine.cpu().double()

    @property
    def values(self) -> Tensor:
        """Mean cosine over pairs i != j, both >= 1, of what each layer returns, [sequence, layer] float64; NaN with
        fewer than three tokens."""
        return torch.stack([self._found[layer] for layer in self._layers.values()], 1)
