"""Recognises linear maps by what they compute: which module produced a tensor, its matrix, and the gain of a norm."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from sinkscope.capture.output_projection import holds_codes, projection_bias, projection_weight
from sinkscope.capture.precision import as_float64

SAME_DIRECTION = 1e-5
"""Two features are the same where 1 - cosine over a dozen or more tokens is below this."""

FIT = {torch.float64: 1e-5, torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 4e-3}
"""The largest relative error, by dtype, with which a map read from weights still explains what the model computed. (RMS
norms compute in float32 whatever the model's dtype.)"""

CODED_FIT = 0.2
"""The same for a quantised layer, which may also round what it reads: to int8 (0.006), to 8-bit floats (0.03), or to 4
bits (0.1 in NVFP4, 0.11 in MXFP4, 0.13 as integers)."""

SAME_FACTOR = 1e-3
"""Features are multiplied by the same number where the numbers differ by less than this share."""

PROBE = 100.0
"""The size of a norm's test input: large compared to any epsilon, and its square is in half precision's range."""
CHUNK = 512


@dataclass(frozen=True)
class LinearCall:
    """A module with its input and its output."""

    module: nn.Module
    read: Tensor
    returned: Tensor


@dataclass(frozen=True)
class InputNorm:
    """z = gain * n + bias. The normalised token n is x, less its mean where `centred`, times one number for each token.

    Without a norm (`absent`) n is x itself, gain is 1 and bias is 0.
    """

    gain: Float[Tensor, " channel"]
    bias: Float[Tensor, " channel"]
    centred: bool = False
    absent: bool = False

    def normalised(
        self, x: Float[Tensor, "*batch token channel"], z: Float[Tensor, "*batch token channel"]
    ) -> Float[Tensor, "*batch token channel"]:
        """n of every token, from x and z."""
        scale, shift = self.affine(x, z)
        return scale * (x - shift) if self.centred else scale * x

    def affine(
        self, x: Float[Tensor, "*batch token channel"], z: Float[Tensor, "*batch token channel"]
    ) -> tuple[Float[Tensor, "*batch token 1"], Float[Tensor, "*batch token 1"]]:
        """The numbers (a, b) of each token with n = a (x - b). a is the least-squares fit, which allows gains of 0."""
        shift = x.mean(-1, keepdim=True) if self.centred else x.new_zeros(*x.shape[:-1], 1)
        if self.absent:
            return torch.ones_like(shift), shift
        shaped = self.gain * (x - shift)
        size = shaped.square().sum(-1, keepdim=True)
        return ((z - self.bias) * shaped).sum(-1, keepdim=True) / torch.where(size > 0, size, 1.0), shift


@dataclass(frozen=True)
class Projection:
    """The rows of a linear layer for every feature of every head, and the layer's output for 0. Float64. `fit`: the
    largest relative error of both where the layer is quantised, else 0. `normed`: a norm divides what the layer
    returns, or its features are multiplied by several numbers."""

    weight: Float[Tensor, "head dim channel"]
    constant: Float[Tensor, "head dim"]
    fit: float = 0.0
    normed: bool = False


def find_norm(x: Tensor, z: Tensor, records: list[LinearCall]) -> InputNorm | None:
    """The norm that turns x into z; an `absent` norm where z equals x; None where no single module turns x into z."""
    width = x.shape[-1]
    if torch.equal(x, z):
        return InputNorm(as_float64(x.new_ones(width)), as_float64(x.new_zeros(width)), absent=True)
    for record in records:
        if not (_same(record.read, x) and _same(record.returned, z)):
            continue
        gain, bias = gain_and_bias(record.module, x)
        for centred in (False, True):
            norm = InputNorm(gain, bias, centred)
            predicted = gain * norm.normalised(as_float64(x), as_float64(z)) + bias
            if _fits(predicted, as_float64(z), z.dtype):
                return norm
    return None


def gain_and_bias(norm: nn.Module, like: Tensor) -> tuple[Float[Tensor, " channel"], Float[Tensor, " channel"]]:
    """The gain and bias that an RMS or layer norm applies, found by calling it (its gain may be w or 1 + w).

    The probe input has mean 0, so that both kinds of norm only divide it by its root mean square.
    """
    width = like.shape[-1]
    probe = like.new_ones(width)
    probe[1::2] = -1.0
    if width % 2:
        probe[-1] = 0.0
    rest = torch.zeros_like(probe)
    if width % 2:  # a second probe, in which the last channel balances the first, tests the odd channel
        rest[0], rest[-1] = 1.0, -1.0
    parts = []
    for pattern in (probe, rest) if width % 2 else (probe,):
        plus = as_float64(norm((PROBE * pattern)[None, None])[0, 0])
        minus = as_float64(norm((-PROBE * pattern)[None, None])[0, 0])
        unit = as_float64(pattern) / as_float64(pattern).square().mean().sqrt()
        parts.append(((plus - minus) / 2 / torch.where(unit == 0, 1.0, unit), (plus + minus) / 2, unit != 0))
    gain, bias, _ = parts[0]
    for second, _, tested in parts[1:]:
        gain = torch.where(tested & (as_float64(probe) == 0), second, gain)
    return gain, bias


def find_projection(
    signal: Float[Tensor, "batch head token dim"], z: Tensor, records: list[LinearCall], exact: bool = False
) -> Projection | None:
    """The linear layer that reads z and produces `signal`, with its rows in the signal's order, whatever its layout.

    Without `exact` the match is up to a factor, at all positions or (under a rotation) at position 0 only. It also goes
    through an RMS norm over each head or over all heads: the norm's gain is multiplied into the rows, its division by
    one number for each token is left out. None where no layer matches, or where two features cannot be distinguished.
    """
    linear = [record for record in records if _same(record.read, z) and record.returned.dim() == 3]
    for tokens in (slice(None),) if exact else (slice(None), slice(0, 1)):
        wanted = _features(signal[:, :, tokens].transpose(1, 2))
        match = _through_linear(wanted, linear, tokens, exact)
        if match is None and not exact:
            match = _through_norm(wanted, linear, records, tokens, signal.shape)
        if match is None:
            continue
        module, rows, gain = match
        width = z.shape[-1]
        weight = as_float64(projection_weight(module, width))
        fit = CODED_FIT if holds_codes(module) else 0.0
        constant = as_float64(projection_bias(module, width) if fit else module(z.new_zeros(1, 1, width))[0, 0])
        record = next(record for record in linear if record.module is module)
        if not _fits(as_float64(z) @ weight.mT + constant, as_float64(record.returned), z.dtype, fit):
            return None
        weight, constant = _in_order(weight, rows, gain), _in_order(constant, rows, gain)
        heads, dim = signal.shape[1], signal.shape[3]
        parts = weight.unflatten(0, (heads, dim)), constant.unflatten(0, (heads, dim))
        return Projection(*parts, fit, normed=gain is not None)
    return None


def _in_order(features: Tensor, rows: Int[Tensor, " feature"], gain: Float[Tensor, " feature"] | None) -> Tensor:
    """(row, ...) -> (feature, ...): the signal's features, times the gain. A row of -1 is a feature that is 0 for every
    token, as in a pruned head. Large weights are copied only where something changes."""
    rows = rows.to(features.device)
    if not torch.equal(rows, torch.arange(len(features), device=rows.device)):
        features = features[rows]
    if gain is None and bool((rows >= 0).all()):
        return features
    factors = features.new_ones(len(rows)) if gain is None else gain.to(features)
    return features * factors.masked_fill(rows < 0, 0.0).view(-1, *[1] * (features.dim() - 1))


Found = tuple[nn.Module, Int[Tensor, " feature"], Float[Tensor, " feature"] | None]
"""A linear layer, its row for each feature (-1 for a feature of zeros), and the gain of a norm behind it."""


def _through_linear(wanted: Tensor, linear: list[LinearCall], tokens: slice, exact: bool) -> Found | None:
    for record in linear:
        offered = _features(record.returned[:, tokens])
        rows = _match(wanted, offered, exact)
        if rows is not None:
            bound = max(SAME_FACTOR, FIT.get(record.returned.dtype, FIT[torch.float32]))
            return record.module, rows, None if exact else _factors(wanted, offered, rows, bound)
    return None


def _factors(
    wanted: Tensor, offered: Tensor, rows: Int[Tensor, " feature"], bound: float
) -> Float[Tensor, " feature"] | None:
    """What each feature is multiplied by behind its layer, as by an IA3 adapter, up to one number for all; None where
    these numbers differ by less than `bound`."""
    sizes = torch.linalg.vector_norm(wanted, dim=0) / torch.linalg.vector_norm(offered, dim=0)[rows.clamp(min=0)]
    sizes = torch.where(rows < 0, torch.nan, sizes)
    factors = (sizes / sizes.nanmedian()).nan_to_num(1.0)
    return factors if bool(((factors - 1).abs() > bound).any()) else None


def _through_norm(
    wanted: Tensor, linear: list[LinearCall], records: list[LinearCall], tokens: slice, shape: torch.Size
) -> Found | None:
    """Finds a norm that produced the wanted features, and the linear layer that produced the norm's input."""
    for record in records:
        if record.read.shape != record.returned.shape or record.read.numel() != shape.numel():
            continue
        for heads_first in (False, True):
            read, returned = (_by_token(tensor, shape, heads_first) for tensor in (record.read, record.returned))
            if read is None or returned is None:
                continue
            places = _match(wanted, _features(returned[:, tokens]))
            if places is None:
                continue
            match = _through_linear(_features(read[:, tokens]), linear, tokens, True)
            if match is None or not _is_rms_norm(record):
                continue
            gain, _ = gain_and_bias(record.module, record.read)
            gain = gain.repeat(wanted.shape[1] // len(gain))[places.to(gain.device)]
            return match[0], torch.where(places < 0, -1, match[1][places]), gain  # -1 where the gain is 0
    return None


def _by_token(tensor: Tensor, shape: torch.Size, heads_first: bool) -> Tensor | None:
    """(batch, token, head, dim), or (batch, head, token, dim) with `heads_first`, -> (batch, token, head * dim).

    (batch, token, any) stays as it is. None for any other shape.
    """
    batch, heads, length, dim = shape
    if tensor.dim() == 3:
        return tensor if not heads_first and tensor.shape[:2] == (batch, length) else None
    if tensor.shape != ((batch, heads, length, dim) if heads_first else (batch, length, heads, dim)):
        return None
    return (tensor.transpose(1, 2) if heads_first else tensor).flatten(2)


def _is_rms_norm(record: LinearCall) -> bool:
    """Whether the module is an RMS norm: it multiplies each vector by the gain and one number, without mean or bias."""
    gain, bias = gain_and_bias(record.module, record.read)
    read, returned = as_float64(record.read), as_float64(record.returned)
    norm = InputNorm(gain, bias)
    return bool((bias == 0).all()) and _fits(gain * norm.normalised(read, returned), returned, record.read.dtype)


def _features(tensor: Tensor) -> Tensor:
    """(batch, token, ...) -> (batch * token, feature), float32."""
    return tensor.flatten(2).flatten(0, 1).float()


def _match(wanted: Tensor, offered: Tensor, exact: bool = False) -> Int[Tensor, " feature"] | None:
    """For each wanted column the index of the offered column with the same direction; -1 for a column of zeros.

    Where as many wanted columns as offered ones have one direction (heads that share rows), they go by their order; of
    offered ones that are equal bit by bit (keys and values of one matrix), the first is taken. `exact` asks for the
    same norm too. None where a column has no counterpart, or several without such an order.
    """
    if exact and wanted.shape == offered.shape and torch.equal(wanted, offered):
        return torch.arange(wanted.shape[1], device=wanted.device)
    if wanted.shape[0] != offered.shape[0]:
        return None
    sizes, offered_sizes = (torch.linalg.vector_norm(columns, dim=0) for columns in (wanted, offered))
    units, offered_units = (torch.nn.functional.normalize(columns, dim=0) for columns in (wanted, offered))
    places = []
    for start in range(0, wanted.shape[1], CHUNK):
        close = (units[:, start : start + CHUNK].mT @ offered_units) > 1 - SAME_DIRECTION
        zero = sizes[start : start + CHUNK] == 0
        counts = close.sum(-1)
        if not ((counts > 0) | zero).all():
            return None
        place = close.float().argmax(-1)
        for column in ((counts > 1) & ~zero).nonzero().flatten():
            alike = (units.mT @ units[:, start + column] > 1 - SAME_DIRECTION).nonzero().flatten()
            offers = close[column].nonzero().flatten()
            if len(alike) == len(offers):
                place[column] = offers[alike == start + column][0]
            elif not bool((offered[:, offers] == offered[:, offers[:1]]).all()):
                return None
        places.append(torch.where(zero, -1, place))
    rows = torch.cat(places)
    matched = rows >= 0
    if exact and not torch.allclose(sizes[matched], offered_sizes[rows[matched]], rtol=SAME_DIRECTION):
        return None
    return rows


def _same(left: Tensor, right: Tensor) -> bool:
    return left is right or (left.shape == right.shape and torch.equal(left, right))


def _fits(predicted: Tensor, seen: Tensor, dtype: torch.dtype, fit: float = 0.0) -> bool:
    error = torch.linalg.vector_norm(predicted - seen)
    return bool(error <= max(fit, FIT.get(dtype, FIT[torch.float32])) * torch.linalg.vector_norm(seen))
