"""Positions of long sequences, taken together in stretches: what a table keeps of them grows with log T, not with T.

Positions below EVERY stand alone. From EVERY on, STRETCHES stretches of equal length lie between a position and its
double, so that each is at most 1/STRETCHES as long as the number of its first position. Of each stretch and head four
numbers are kept: the sum of the values and their number, whose quotient is the mean, and the largest value of one
sequence with its position. Sums and numbers add up over sequences, and the larger of two values is the largest of both:
batches may be joined in any grouping.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from sinkscope.capture.precision import as_float64
from sinkscope.capture.view import LayerView, Missing

if TYPE_CHECKING:
    from sinkscope.metrics.quantities import Quantity

EVERY = 4096
"""Positions that are kept one by one: 0 .. EVERY - 1."""
STRETCHES = 64
"""Stretches between a position and its double, from EVERY on."""
PARTS = ("sum", "number", "largest", "position")
"""What is kept of a stretch, in this order: over the positions that have a value, in all sequences."""


def name(each: Quantity) -> str:
    """The name of the quantity that holds the stretches of a quantity by position."""
    return f"{each.name}_stretches"


def of_quantity(each: Quantity, view: LayerView) -> Float[Tensor, "sequence head stretch four"]:
    """PARTS of the stretches of a quantity by position. Raises Missing where the view's sequences have none."""
    if (view.keys if each.dims[-1] == "key" else view.queries) <= EVERY:
        raise Missing
    return stretched(each.compute(view))


def before(values: Tensor) -> Tensor:
    """The values of the positions that stand alone; a copy where there are others, whose memory is then free."""
    return values[..., :EVERY].clone() if values.shape[-1] > EVERY else values


def edges(length: int) -> list[int]:
    """The first position of every stretch of `length` positions, then `length`; [length] where there is no stretch."""
    starts = [place for start, stop, step in _octaves(length) for place in range(start, stop, step)]
    return [*starts, length]


def stretched(values: Float[Tensor, "sequence head position"]) -> Float[Tensor, "sequence head stretch four"]:
    """PARTS of every stretch in float64. NaN is no value; a stretch without any has NaN as its largest."""
    stretches = []
    for start, stop, step in _octaves(values.shape[-1]):
        piece = as_float64(values[..., start:stop])
        piece = torch.nn.functional.pad(piece, (0, -piece.shape[-1] % step), value=torch.nan).unflatten(-1, (-1, step))
        known = ~piece.isnan()
        largest, place = piece.where(known, -torch.inf).max(-1)
        first = torch.arange(start, stop, step, device=piece.device)
        there = known.any(-1)
        parts = (
            piece.nansum(-1),
            known.sum(-1),
            largest.where(there, torch.nan),
            (first + place).where(there, torch.nan),
        )
        stretches.append(torch.stack([part.double() for part in parts], -1))
    return torch.cat(stretches, -2)


def over_sequences(
    rows: Float[Tensor, "sequence head stretch four"],
) -> Float[Tensor, "one head stretch four"]:
    """PARTS over all sequences; the first of several sequences with the same largest value counts."""
    largest = rows[..., 2].where(~rows[..., 2].isnan(), -torch.inf)
    best = largest.argmax(0, keepdim=True)[..., None].expand(1, *rows.shape[1:3], 2)
    return torch.cat([rows[..., :2].sum(0, keepdim=True), rows[..., 2:].gather(0, best)], -1)


def joined(
    one: Float[Tensor, "one head stretch four"], other: Float[Tensor, "one head other four"]
) -> Float[Tensor, "one head longest four"]:
    """PARTS over the sequences of both. A stretch that one of them does not reach is the other's."""
    longest = max(one.shape[-2], other.shape[-2])
    blank = one.new_tensor([0.0, 0.0, torch.nan, torch.nan])
    filled = [
        torch.cat([part, blank.expand(*part.shape[:-2], longest - part.shape[-2], 4)], -2) for part in (one, other)
    ]
    return over_sequences(torch.cat(filled))


def _octaves(length: int) -> list[tuple[int, int, int]]:
    """(first position, past the last, positions in a stretch) of each span from a position to its double."""
    spans, start = [], EVERY
    while start < length:
        spans.append((start, min(2 * start, length), max(1, start // STRETCHES)))
        start *= 2
    return spans
