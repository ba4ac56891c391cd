"""What a linear module's input would lose in 8-bit integers, without quantising anything.

Each function takes the input of some sequences as `Sizes` and returns one number a sequence. Symmetric round-to-nearest
is meant: an entry x becomes round(x / s) with s = amax / 127, one s for the whole tensor or one for each token, so that
|x| <= s / 2 becomes 0. Entries that are 0 before are left out, since they lose nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from sinkscope.capture import loops
from sinkscope.metrics.registry import Metric, metric_of
from sinkscope.metrics.residual import median_abs

PerSequence = Float[Tensor, " sequence"]
PerToken = Float[Tensor, "sequence token"]
Inputs = Float[Tensor, "sequence token feature"]
Counts = Int[Tensor, "sequence token"]

LEVELS = 127
ANNIHILATED = 0.9
FLAGS = 2**16
"""Flags that a CPU sets before it counts them: 256 KiB."""


@dataclass(frozen=True)
class Sizes:
    """What columns share of a module's input, [sequence, token, feature].

    Attributes:
        of_tokens, of_features: the largest |x| of each token, of each feature.
        entries: number of a token's entries other than 0.
        lost_in_tensor: number of these that round to 0 with one scale for the whole tensor.
        lost_in_token: number of these that round to 0 with a scale for each token.
    """

    of_tokens: PerToken
    of_features: Float[Tensor, "sequence feature"]
    entries: Counts
    lost_in_tensor: Counts
    lost_in_token: Counts

    @classmethod
    def of(cls, read: Inputs) -> Sizes:
        """Reads an input of any float type. A compiled loop reads it all at once on a CPU; without one, torch reads one
        sequence at a time, which the caches hold."""
        loop = loops.loops_over("inputs", read, read.shape[1] * read.shape[2])
        if loop is not None:
            return cls(*_looped(loop, read))
        sizes = [_read(part) for part in (read.split(1) if read.device.type == "cpu" else (read,))]
        return cls(*(torch.cat(parts) for parts in zip(*sizes, strict=True)))


def _looped(loop: ModuleType, read: Inputs) -> tuple[Tensor, ...]:
    """The fields of Sizes, from the compiled loop."""
    sequences, tokens, width = read.shape
    of_tokens, of_features = torch.empty(sequences, tokens), torch.empty(sequences, width)
    counts = torch.empty(3, sequences, tokens, dtype=torch.int64)
    outputs = of_tokens.numpy(), of_features.numpy(), counts.numpy()
    loops.run(loop.read_inputs, loops.in_rows(read), np.float32(2 * LEVELS), *outputs)
    return of_tokens, of_features, *counts[[loop.ENTRIES, loop.LOST_IN_TENSOR, loop.LOST_IN_TOKEN]]


def _read(read: Inputs) -> tuple[Tensor, ...]:
    """The fields of Sizes."""
    values = (read if read.dtype == torch.float64 else read.float()).abs()
    of_tokens, width = values.amax(-1), values.shape[-1]
    if values.device.type == "cpu" and bool((values.amin(-1) > 0).all()):  # a GPU would have to be waited for
        entries = torch.full(of_tokens.shape, width)
    else:
        entries = _count(torch.gt, values, torch.zeros_like(of_tokens))

    def lost(largest: PerToken) -> Counts:
        """Ties round to the even 0."""
        return (_count(torch.le, values, largest / (2 * LEVELS)) - (width - entries)).clamp(min=0)

    whole = lost(of_tokens.amax(-1, keepdim=True).expand_as(of_tokens))
    return of_tokens, values.amax(1), entries, whole, lost(of_tokens)


def _count(compare: Callable[..., Tensor], values: Inputs, bounds: PerToken) -> Counts:
    """Number of each token's values that compare with its bound; some tokens at a time, so that caches hold the flags.

    Flags are floats, which count exactly below 2^24: summing booleans takes eight times as long on a CPU.
    """
    rows = max(1, FLAGS // values.shape[-1]) if values.device.type == "cpu" else values.shape[1]
    pieces = zip(values.split(rows, 1), bounds.unsqueeze(-1).split(rows, 1), strict=True)
    flags = torch.empty_like(values[:, :rows])
    counts = [compare(piece, bound, out=flags[:, : piece.shape[1]]).sum(-1) for piece, bound in pieces]
    return torch.cat(counts, 1).long()


INPUT_COLUMNS: dict[str, Metric] = {}
"""The columns of modules.csv that are means over sequences, by name, in the order of the table: `compute` takes Sizes
and returns a value for each sequence."""


def _column(unit: str, range: str) -> Callable[[Callable[[Sizes], PerSequence]], Callable[[Sizes], PerSequence]]:
    def declare(compute: Callable[[Sizes], PerSequence]) -> Callable[[Sizes], PerSequence]:
        column = metric_of(compute, "modules", unit, range)
        INPUT_COLUMNS[column.name] = column
        return compute

    return declare


@_column("ratio", "[1, inf)")
def row_dispersion(sizes: Sizes) -> PerSequence:
    """Largest |x| of the sequence, divided by the median over tokens of each token's largest |x|: what one scale for
    the whole tensor costs the median token. Empty where that median is 0."""
    return _dispersion(sizes.of_tokens)


@_column("ratio", "[1, inf)")
def column_dispersion(sizes: Sizes) -> PerSequence:
    """Largest |x| of the sequence, divided by the median over features of each feature's largest |x|. It is large where
    there are outlier channels. Empty where that median is 0."""
    return _dispersion(sizes.of_features)


@_column("share", "[0, 1]")
def underflow_tensor(sizes: Sizes) -> PerSequence:
    """Share of the entries that round to 0 with one scale for the whole tensor: |x| <= amax / 254, where amax is the
    largest |x| of the sequence. Entries that are 0 before are left out."""
    return sizes.lost_in_tensor.sum(-1) / sizes.entries.sum(-1)


@_column("share", "[0, 1]")
def underflow_token(sizes: Sizes) -> PerSequence:
    """Share of the entries that round to 0 with a scale for each token: |x| <= amax / 254, where amax is the largest
    |x| of the token. Entries that are 0 before are left out. It is at most underflow_tensor."""
    return sizes.lost_in_token.sum(-1) / sizes.entries.sum(-1)


@_column("share", "[0, 1]")
def annihilated(sizes: Sizes) -> PerSequence:
    """Share of the tokens in which more than 90 % of the entries round to 0 with one scale for the whole tensor.
    Entries that are 0 before are left out, and so are tokens of zeros alone."""
    entries = sizes.entries
    gone = sizes.lost_in_tensor > ANNIHILATED * entries
    return (gone & (entries > 0)).sum(-1) / (entries > 0).sum(-1)


@_column("activation", "[0, inf)")
def amax_first(sizes: Sizes) -> PerSequence:
    """Largest |x| of the first token."""
    return sizes.of_tokens[:, 0]


@_column("activation", "[0, inf)")
def amax_other(sizes: Sizes) -> PerSequence:
    """Largest |x| of all other tokens. Empty where there is none."""
    others = sizes.of_tokens[:, 1:]
    return others.amax(-1) if others.shape[1] else torch.full_like(sizes.of_tokens[:, 0], torch.nan)


def _dispersion(peaks: Float[Tensor, "sequence any"]) -> PerSequence:
    middle = median_abs(peaks)
    return peaks.amax(-1) / torch.where(middle > 0, middle, torch.nan)
