"""What a linear module's input would lose in 8-bit integers, without quantising anything.

Each function takes the input of some sequences as `Sizes` and returns one number a sequence. Symmetric round-to-nearest
is meant: an entry x becomes round(x / s) with s = amax / 127, one s for the whole tensor or one for each token, so that
|x| <= s / 2 becomes 0. Entries that are 0 before are left out, since they lose nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sinkscope.metrics.registry import formula_of

PerSequence = Float[Tensor, " sequence"]
PerToken = Float[Tensor, "sequence token"]
OfSequence = Float[Tensor, "sequence #token"]  # one number for each token, or for all of a sequence
Counts = Int[Tensor, "sequence token"]

LEVELS = 127
ANNIHILATED = 0.9
OURS = "ours"


@dataclass
class Sizes:
    """The absolute values of a module's input, [sequence, token, feature] in float32 or wider, and what columns share.

    Numbers below 2^24 are counted in floats: summing booleans takes eight times as long on a CPU.
    """

    values: Float[Tensor, "sequence token feature"]

    @cached_property
    def of_tokens(self) -> PerToken:
        """Each token's largest |x|."""
        return self.values.amax(-1)

    @cached_property
    def of_features(self) -> Float[Tensor, "sequence feature"]:
        """Each feature's largest |x|."""
        return self.values.amax(1)

    @cached_property
    def largest(self) -> PerSequence:
        return self.of_tokens.amax(-1)

    @cached_property
    def entries(self) -> Counts:
        """Number of a token's entries other than 0."""
        if self.values.device.type == "cpu" and bool((self.values.amin(-1) > 0).all()):  # a GPU would have to wait
            return torch.full(self.values.shape[:-1], self.values.shape[-1])
        return torch.gt(self.values, 0, out=self._flags).sum(-1).long()

    @cached_property
    def lost_in_tensor(self) -> Counts:
        """Number of these that round to 0 with one scale for the whole tensor."""
        return self._lost(self.largest[:, None])

    @cached_property
    def lost_in_token(self) -> Counts:
        """Number of these that round to 0 with a scale for each token."""
        return self._lost(self.of_tokens)

    def _lost(self, largest: OfSequence) -> Counts:
        """Ties round to the even 0."""
        small = torch.le(self.values, (largest / (2 * LEVELS)).unsqueeze(-1), out=self._flags).sum(-1).long()
        return (small - (self.values.shape[-1] - self.entries)).clamp(min=0)

    @cached_property
    def _flags(self) -> Tensor:
        return torch.empty_like(self.values)


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
    return _dispersion(sizes.of_tokens)


@_column("ratio", "[1, inf)")
def column_dispersion(sizes: Sizes) -> PerSequence:
    """Largest |x| over the median over features of a feature's largest |x|: outlier channels."""
    return _dispersion(sizes.of_features)


@_column("share", "[0, 1]")
def underflow_tensor(sizes: Sizes) -> PerSequence:
    """Share of the entries other than 0 that round to 0 in 8 bits with one scale for the whole tensor: |x| <= amax /
    254."""
    return sizes.lost_in_tensor.sum(-1) / sizes.entries.sum(-1)


@_column("share", "[0, 1]")
def underflow_token(sizes: Sizes) -> PerSequence:
    """Share of the entries other than 0 that round to 0 in 8 bits with a scale for each token; at most
    underflow_tensor."""
    return sizes.lost_in_token.sum(-1) / sizes.entries.sum(-1)


@_column("share", "[0, 1]")
def annihilated(sizes: Sizes) -> PerSequence:
    """Share of the tokens of which more than 90 % of the entries other than 0 round to 0 in 8 bits with one scale for
    the whole tensor; tokens of zeros alone are left out."""
    entries = sizes.entries
    gone = sizes.lost_in_tensor > ANNIHILATED * entries
    return (gone & (entries > 0)).sum(-1) / (entries > 0).sum(-1)


@_column("activation", "[0, inf)")
def amax_first(sizes: Sizes) -> PerSequence:
    """Largest |x| of the first token."""
    return sizes.of_tokens[:, 0]


@_column("activation", "[0, inf)")
def amax_other(sizes: Sizes) -> PerSequence:
    """Largest |x| of all other tokens; empty where there is none."""
    others = sizes.of_tokens[:, 1:]
    return others.amax(-1) if others.shape[1] else torch.full_like(sizes.largest, torch.nan)


def _dispersion(peaks: Float[Tensor, "sequence any"]) -> PerSequence:
    middle = peaks.quantile(0.5, dim=-1)
    return peaks.amax(-1) / torch.where(middle > 0, middle, torch.nan)
