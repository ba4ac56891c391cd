"""The record of one attention call: what the model gave, with every keyword resolved and the mask read on demand."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import Tensor

from sinkscope.capture.masks.lazy import identity
from sinkscope.capture.masks.visibility import Visibility, read_mask


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """One call of an attention function. `dataclasses.replace` cuts it or changes it; the mask is then read anew.

    Attributes:
        query: (B, H, Tq, d), after rotary embeddings and norms.
        key, value: (B, G, Tk, d) and (B, G, Tk, dv); H is a multiple of G.
        mask: as the model hands it over, (b, h, Tq | 1, >= Tk), bool (True = attend) or added to the logits.
        causal: query i sees keys 0..i. Counts where `mask` is None; a mask holds its own causal order.
        scaling: logits are scaling * q.k.
        softcap: c in c * tanh(logits / c), before bias and mask; None = no cap.
        bias: added to the logits, (b, h, Tq | 1, Tk).
        sinks: extra logits in the denominator of the softmax, (B | 1, H, Tq | 1, n).
        window: the sliding window that the model names. For information: the mask already holds it.
        score: how logits become attention: softmax, or a name in `kernels.unnormalised.SCORES`.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None = None
    causal: bool = False
    scaling: float = 1.0
    softcap: float | None = None
    bias: Tensor | None = None
    sinks: Tensor | None = None
    window: int | None = None
    score: str = "softmax"

    @property
    def lengths(self) -> tuple[int, int]:
        """Tq and Tk."""
        return self.query.shape[2], self.key.shape[2]

    @property
    def square(self) -> bool:
        """Queries and keys are the same positions (self-attention)."""
        return self.query.shape[2] == self.key.shape[2]

    @property
    def of_positions(self) -> bool:
        """Positions attend to positions. False for one query: pooling, or a layer that attends to earlier layers."""
        return self.query.shape[2] > 1

    @cached_property
    def visible(self) -> Visibility:
        """Which keys each query sees. Raises ValueError where the mask does not fit the queries and keys."""
        return read_mask(self.mask, self.causal, *self.lengths, self.query.device)

    @property
    def linear(self) -> bool:
        """Logits are plain scaled dot products, so that their means need no logits."""
        return self.softcap is None and self.bias is None and not self.visible.has_bias

    def seen_as(self, visible: Visibility) -> AttentionCall:
        """The same call with `visible`, what an equal mask was read as: this one is not read again."""
        known = replace(self)
        known.__dict__["visible"] = visible  # where cached_property looks
        return known


class MaskReadings:
    """Reads each mask of a pass once, however many layers share it, and again once it is written into.

    Keeps the masks too: the id of a mask that is gone could come back as the id of another.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[Any, ...], tuple[Tensor | None, Visibility]] = {}

    def read(self, call: AttentionCall, whole: Tensor | None = None, row: int | None = None) -> AttentionCall:
        """`call` with its mask read. A call cut out of a padded batch names the batch's `whole` mask and its `row`."""
        owner = call.mask if whole is None else whole
        key = (identity(owner), row, call.causal, *call.lengths, call.query.device)
        if key not in self._kept:
            self._kept[key] = (owner, call.visible)
        return call.seen_as(self._kept[key][1])
