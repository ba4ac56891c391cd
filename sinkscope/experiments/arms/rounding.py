"""Fake quantisation: numbers are rounded to the nearest of 2^bits levels and kept in their own type."""

from __future__ import annotations

import torch
from torch import Tensor

WHOLE = 16
"""From this many bits on, nothing is rounded: these are the 16 bits that a cache has without quantisation."""


def between_ends(x: Tensor, bits: int, axis: int, kept: Tensor | None = None) -> Tensor:
    """Rounds to 2^bits levels, evenly spaced from the smallest to the largest number along `axis` (asymmetric).

    `kept`: True where a number stays as it is and has no part in the ends; it broadcasts with x.
    """
    if bits >= WHOLE:
        return x
    wide = x.double() if x.dtype == torch.float64 else x.float()
    low, high = _without(wide, kept, torch.inf).amin(axis, True), _without(wide, kept, -torch.inf).amax(axis, True)
    step = (high - low) / (2**bits - 1)
    rounded = torch.where(step > 0, ((wide - low) / step).round() * step + low, wide)
    return _restored(rounded.to(x.dtype), x, kept)


def around_zero(x: Tensor, bits: int, axes: tuple[int, ...], kept: Tensor | None = None) -> Tensor:
    """Rounds to the levels -(2^(bits-1) - 1) .. 2^(bits-1) - 1 times a step, so that the largest |x| over `axes` is a
    level (symmetric). `kept` is as in `between_ends`."""
    if bits >= WHOLE:
        return x
    wide = x.double() if x.dtype == torch.float64 else x.float()
    step = _without(wide.abs(), kept, 0.0).amax(axes, True) / (2 ** (bits - 1) - 1)
    rounded = torch.where(step > 0, (wide / step).round() * step, wide)
    return _restored(rounded.to(x.dtype), x, kept)


def _without(wide: Tensor, kept: Tensor | None, value: float) -> Tensor:
    return wide if kept is None else wide.masked_fill(kept, value)


def _restored(rounded: Tensor, x: Tensor, kept: Tensor | None) -> Tensor:
    return rounded if kept is None else torch.where(kept, x, rounded)
