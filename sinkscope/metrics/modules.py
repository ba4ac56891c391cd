"""What a linear module's input would lose in 8-bit integers, without quantising anything.

Each function takes the absolute values of the input of some sequences, [sequence, token, feature] in float32 or wider,
and returns one number a sequence. Symmetric round-to-nearest is meant: an entry x becomes round(x / s) with s = amax /
127, one s for the whole tensor or one for each token, so that |x| <= s / 2 becomes 0. Entries that are 0 before are
left out, since they lose nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from sinkscope.metrics.registry import formula_of

Sizes = Float[Tensor, "sequence token feature"]
PerSequence = Float[Tensor, " sequence"]

LEVELS = 127
ANNIHILATED = 0.9
OURS = "ours"


@dataclass(frozen=True)
class InputColumn:
    """A column of modules.csv that is a mean over sequences."""

    unit: str
    range: str
    formula: str
    compute: Callable[[Sizes], PerSequence]


INPUT_COLUMNS: dict[str, InputColumn] = {}
"""By name, in the order of the table."""


def _column(unit: str, range: str) -> Callable[[Callable[[Sizes], PerSequence]], Callable[[Sizes], PerSequence]]:
    def declare(compute: Callable[[Sizes], PerSequence]) -> Callable[[Sizes], PerSequence]:
        INPUT_COLUMNS[compute.__name__] = InputColumn(unit, range, formula_of(compute), compute)
        return compute

    return declare


@_column("ratio", "[1, inf)")
def row_dispersion(sizes: Sizes) -> PerSequence:
    """Largest |x| over the median over tokens of a token's largest |x|: what one scale for the whole tensor costs the
    median token. A median over an even count is the mean of the two middle values."""
    return _dispersion(sizes.amax(-1))


@_column("ratio", "[1, inf)")
def column_dispersion(sizes: Sizes) -> PerSequence:
    """Largest |x| over the median over features of a feature's largest |x|: outlier channels."""
    return _dispersion(sizes.amax(1))


@_column("share", "[0, 1]")
def underflow_tensor(sizes: Sizes) -> PerSequence:
    """Share of the entries other than 0 that round to 0 in 8 bits with one scale for the whole tensor: |x| <= amax /
    254."""
    return _lost(sizes, sizes.amax((1, 2), keepdim=True)).sum((1, 2)) / _entries(sizes).sum((1, 2))


@_column("share", "[0, 1]")
def underflow_token(sizes: Sizes) -> PerSequence:
    """Share of the entries other than 0 that round to 0 in 8 bits with a scale for each token; at most
    underflow_tensor."""
    return _lost(sizes, sizes.amax(-1, keepdim=True)).sum((1, 2)) / _entries(sizes).sum((1, 2))


@_column("share", "[0, 1]")
def annihilated(sizes: Sizes) -> PerSequence:
    """Share of the tokens of which more than 90 % of the entries other than 0 round to 0 in 8 bits with one scale for
    the whole tensor; tokens of zeros alone are left out."""
    entries = _entries(sizes).sum(-1)
    gone = _lost(sizes, sizes.amax((1, 2), keepdim=True)).sum(-1) > ANNIHILATED * entries
    return (gone & (entries > 0)).sum(-1) / (entries > 0).sum(-1)


@_column("activation", "[0, inf)")
def amax_first(sizes: Sizes) -> PerSequence:
    """Largest |x| of the first token."""
    return sizes[:, 0].amax(-1)


@_column("activation", "[0, inf)")
def amax_other(sizes: Sizes) -> PerSequence:
    """Largest |x| of all other tokens; empty where there is none."""
    return sizes[:, 1:].amax((1, 2)) if sizes.shape[1] > 1 else torch.full_like(sizes[:, 0, 0], torch.nan)


def _dispersion(peaks: Float[Tensor, "sequence any"]) -> PerSequence:
    middle = peaks.quantile(0.5, dim=-1)
    return peaks.amax(-1) / torch.where(middle > 0, middle, torch.nan)


def _lost(sizes: Sizes, largest: Tensor) -> Tensor:
    """Where an entry other than 0 rounds to 0; ties round to the even 0."""
    return _entries(sizes) & (sizes <= largest / (2 * LEVELS))


def _entries(sizes: Sizes) -> Tensor:
    return sizes > 0
