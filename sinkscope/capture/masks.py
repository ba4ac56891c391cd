"""Which keys a query may see, and what is added to its logits: one reading of every mask transformers hands over."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

ROWS = 128
"""Mask rows looked at together: no temporary as large as the mask itself."""


@dataclass(frozen=True)
class BlockMask:
    """What a block of queries needs: keys `low..high` are in reach, of those `hidden` are masked."""

    low: int
    high: int
    hidden: Bool[Tensor, "b h rows keys"] | None
    bias: Float[Tensor, "b h rows keys"] | None


@dataclass(frozen=True)
class Visibility:
    """The keys each query may attend, for one mask of one forward pass.

    Attributes:
        causal: no query sees a later key (decided by the mask's contents, not by the model's class).
        counts: keys query i may see; learned sinks are not keys and not counted. Shape (b, h, query), b and h
            may be 1 (shared).
        has_empty_rows: some query sees no key at all (padding); its attention is 0, as in torch's sdpa.
        has_bias: finite additive terms (ALiBi, relative positions) join the logits.
    """

    mask: Tensor | None
    causal: bool
    counts: Int[Tensor, "b h query"]
    keys: int
    has_empty_rows: bool = False
    has_bias: bool = False
    low: list[int] | None = None
    high: list[int] | None = None

    def block(self, start: int, stop: int, whole: bool = False) -> BlockMask:
        """Keys in reach of queries start..stop; `whole` keeps those a window hides from all of them in range."""
        if self.mask is None:
            high = stop if self.causal else self.keys
            return BlockMask(0, high, _triangle(start, stop, self.counts.device) if self.causal else None, None)
        assert self.low is not None
        assert self.high is not None
        low = 0 if whole else min(self.low[start:stop])
        high = (stop if self.causal else self.keys) if whole else max(self.high[start:stop])
        if high <= low:  # no query of the block sees a key: one hidden key stands for all
            low, high = 0, 1
        rows = self.mask[..., start:stop, low:high]
        if rows.dtype == torch.bool:
            return BlockMask(low, high, ~rows, None)
        hidden = _hidden(rows)
        return BlockMask(low, high, hidden, rows.float().masked_fill(hidden, 0.0) if self.has_bias else None)


def read_mask(mask: Tensor | None, causal: bool, queries: int, keys: int, device: torch.device) -> Visibility:
    """Reads a mask as transformers passes it: None (then `causal` decides), bool (True = attend) or additive float.

    Shapes (b|1, h|1, query|1, >= keys). Raises ValueError where the mask does not fit the queries and keys.
    """
    if mask is None:
        steps = torch.arange(1, queries + 1, device=device)
        counts = steps.clamp(max=keys) if causal else torch.full_like(steps, keys)
        return Visibility(None, causal, counts.view(1, 1, -1), keys)
    if mask.dim() != 4 or mask.shape[-2] not in (1, queries) or mask.shape[-1] < keys:
        raise ValueError(f"an attention mask of shape {tuple(mask.shape)} for {queries} queries and {keys} keys")
    mask = mask[..., :keys].expand(-1, -1, queries, keys)
    return _scan_rows(mask, queries, keys)


def _scan_rows(mask: Tensor, queries: int, keys: int) -> Visibility:
    counts, low, high = [], [], []
    later = bias = False
    columns = torch.arange(keys, device=mask.device)
    for start in range(0, queries, ROWS):
        rows = mask[..., start : start + ROWS, :]
        seen = rows if rows.dtype == torch.bool else ~_hidden(rows)
        counts.append(seen.sum(-1))
        index = torch.where(seen, columns, keys)
        low += index.amin(dim=(0, 1, 3)).tolist()
        last = torch.where(seen, columns, -1).amax(dim=(0, 1, 3))
        high += (last + 1).tolist()
        later |= bool((last > torch.arange(start, start + len(last), device=mask.device)).any())
        if rows.dtype != torch.bool:
            bias |= bool(((rows != 0) & seen).any())
    total = torch.cat(counts, dim=-1)
    return Visibility(mask, not later and queries == keys, total, keys, bool((total == 0).any()), bias, low, high)


def _hidden(rows: Tensor) -> Tensor:
    """Where an additive mask forbids a key: half of the dtype's most negative number or lower, or -inf.

    ALiBi and relative position biases stay far above that bound in every dtype; float16 masks use -65504.
    """
    return rows <= torch.finfo(rows.dtype).min / 2


def _triangle(start: int, stop: int, device: torch.device) -> Tensor:
    rows = torch.arange(start, stop, device=device)
    return (torch.arange(stop, device=device) > rows[:, None])[None, None]
