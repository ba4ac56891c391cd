"""Linear maps recognised by what they do: which module gave these numbers, its matrix, the gain of a norm."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from sinkscope.capture.output_projection import projection_weight
from sinkscope.capture.precision import float64

SAME_DIRECTION = 1e-5
"""1 - cosine below which two features, seen over a dozen tokens and more, are one and the same."""

FIT = {torch.float64: 1e-5, torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 4e-3}
"""Relative error up to which a map read from weights accounts for what the model computed in a dtype (RMS norms
compute in float32 whatever the model's)."""

PROBE = 100.0
"""Size of a norm's test input: large beside any epsilon, its square within half precision's range."""

CHUNK = 512


@dataclass(frozen=True)
class Record:
    """A module with what it read and what it returned."""

    module: nn.Module
    read: Tensor
    returned: Tensor


@dataclass(frozen=True)
class InputNorm:
    """z = gain * n + bias, n = the normalised token: x (less its mean where `centred`) times a number of its own.

    Without a norm (`absent`) n is x itself, gain 1 and bias 0.
    """

    gain: Float[Tensor, " channel"]
    bias: Float[Tensor, " channel"]
    centred: bool = False
    absent: bool = False

    def normalised(
        self, x: Float[Tensor, "*batch token channel"], z: Float[Tensor, "*batch token channel"]
    ) -> Float[Tensor, "*batch token channel"]:
        """n of every token, from x and z. Its number a token is the least-squares one, so that a gain of 0 is borne."""
        if self.absent:
            return x
        tokens = x - x.mean(-1, keepdim=True) if self.centred else x
        shaped = self.gain * tokens
        size = shaped.square().sum(-1, keepdim=True)
        scale = ((z - self.bias) * shaped).sum(-1, keepdim=True) / torch.where(size > 0, size, 1.0)
        return scale * tokens


@dataclass(frozen=True)
class Projection:
    """Rows of a linear layer, one a feature of every head, and what it returns for 0. Float64."""

    weight: Float[Tensor, "head dim channel"]
    constant: Float[Tensor, "head dim"]


def find_norm(x: Tensor, z: Tensor, records: list[Record]) -> InputNorm | None:
    """The norm that turns x into z; the absent one where z is x; None where no single module does it."""
    width = x.shape[-1]
    if torch.equal(x, z):
        return InputNorm(float64(x.new_ones(width)), float64(x.new_zeros(width)), absent=True)
    for record in records:
        if not (_same(record.read, x) and _same(record.returned, z)):
            continue
        gain, bias = gain_and_bias(record.module, x)
        for centred in (False, True):
            norm = InputNorm(gain, bias, centred)
            again = gain * norm.normalised(float64(x), float64(z)) + bias
            if _fits(again, float64(z), z.dtype):
                return norm
    return None


def gain_and_bias(norm: nn.Module, like: Tensor) -> tuple[Float[Tensor, " channel"], Float[Tensor, " channel"]]:
    """What an RMS or layer norm does after normalising, asked of the module itself (gains may be w or 1 + w).

    The probe has mean 0, so that both kinds only divide it by its root mean square.
    """
    width = like.shape[-1]
    probe = like.new_ones(width)
    probe[1::2] = -1.0
    if width % 2:
        probe[-1] = 0.0
    rest = torch.zeros_like(probe)
    if width % 2:  # the odd channel by a second probe, in which it stands against the first
        rest[0], rest[-1] = 1.0, -1.0
    parts = []
    for pattern in (probe, rest) if width % 2 else (probe,):
        plus = float64(norm((PROBE * pattern)[None, None])[0, 0])
        minus = float64(norm((-PROBE * pattern)[None, None])[0, 0])
        unit = float64(pattern) / float64(pattern).square().mean().sqrt()
        parts.append(((plus - minus) / 2 / torch.where(unit == 0, 1.0, unit), (plus + minus) / 2, unit != 0))
    gain, bias, _ = parts[0]
    for other, _, there in parts[1:]:
        gain = torch.where(there & (float64(probe) == 0), other, gain)
    return gain, bias


def find_projection(
    signal: Float[Tensor, "batch head token dim"], z: Tensor, records: list[Record], exact: bool = False
) -> Projection | None:
    """The linear layer that reads z and gives `signal`; its rows in the signal's order, whatever layout it has.

    Not `exact`: up to a factor, at all positions or (rotated) at position 0 only, and past an RMS norm over each head
    or over all of them, whose gain joins the rows (its division, a number a token, does not). None where no layer
    does it, or two features cannot be told apart.
    """
    linear = [record for record in records if _same(record.read, z) and record.returned.dim() == 3]
    for tokens in (slice(None),) if exact else (slice(None), slice(0, 1)):
        wanted = _features(signal[:, :, tokens].transpose(1, 2))
        found = _through_linear(wanted, linear, tokens, exact)
        if found is None and not exact:
            found = _through_norm(wanted, linear, records, tokens, signal.shape)
        if found is None:
            continue
        module, rows, gain = found
        width = z.shape[-1]
        weight = float64(projection_weight(module, width))
        constant = float64(module(z.new_zeros(1, 1, width))[0, 0])
        record = next(record for record in linear if record.module is module)
        if not _fits(float64(z) @ weight.mT + constant, float64(record.returned), z.dtype):
            return None
        heads, dim = signal.shape[1], signal.shape[3]
        rows = rows.to(weight.device)
        missing = rows < 0  # a feature that is 0 whatever the token: a pruned head
        weight = (weight[rows] * gain[:, None]).masked_fill(missing[:, None], 0.0)
        constant = (constant[rows] * gain).masked_fill(missing, 0.0)
        return Projection(weight.unflatten(0, (heads, dim)), constant.unflatten(0, (heads, dim)))
    return None


Found = tuple[nn.Module, Int[Tensor, " feature"], Float[Tensor, " feature"]]


def _through_linear(wanted: Tensor, linear: list[Record], tokens: slice, exact: bool) -> Found | None:
    for record in linear:
        rows = _match(wanted, _features(record.returned[:, tokens]), exact)
        if rows is not None:
            return record.module, rows, float64(wanted.new_ones(len(rows)))
    return None


def _through_norm(
    wanted: Tensor, linear: list[Record], records: list[Record], tokens: slice, shape: torch.Size
) -> Found | None:
    """A norm gave the wanted features; a linear layer gave what that norm read."""
    for record in records:
        if record.read.shape != record.returned.shape or record.read.numel() != shape.numel():
            continue
        for turned in (False, True):
            read, returned = (_by_token(tensor, shape, turned) for tensor in (record.read, record.returned))
            if read is None or returned is None:
                continue
            places = _match(wanted, _features(returned[:, tokens]))
            if places is None:
                continue
            found = _through_linear(_features(read[:, tokens]), linear, tokens, True)
            if found is None or not _only_scales(record):
                continue
            gain, _ = gain_and_bias(record.module, record.read)
            gain = gain.repeat(wanted.shape[1] // len(gain))[places.to(gain.device)]
            return found[0], torch.where(places < 0, -1, found[1][places]), gain  # gain 0: no such feature
    return None


def _by_token(tensor: Tensor, shape: torch.Size, turned: bool) -> Tensor | None:
    """(batch, token, head, dim) or (batch, head, token, dim) if `turned`, or (batch, token, all) -> (b, t, all)."""
    batch, heads, length, dim = shape
    if tensor.dim() == 3:
        return tensor if not turned and tensor.shape[:2] == (batch, length) else None
    if tensor.shape != ((batch, heads, length, dim) if turned else (batch, length, heads, dim)):
        return None
    return (tensor.transpose(1, 2) if turned else tensor).flatten(2)


def _only_scales(record: Record) -> bool:
    """The norm is an RMS norm: each vector times the gain and a number of its own; no mean taken off, no bias."""
    gain, bias = gain_and_bias(record.module, record.read)
    read, returned = float64(record.read), float64(record.returned)
    norm = InputNorm(gain, bias)
    return bool((bias == 0).all()) and _fits(gain * norm.normalised(read, returned), returned, record.read.dtype)


def _features(tensor: Tensor) -> Tensor:
    """(batch, token, ...) -> [all tokens, feature]."""
    return tensor.flatten(2).flatten(0, 1).float()


def _match(wanted: Tensor, offered: Tensor, exact: bool = False) -> Int[Tensor, " feature"] | None:
    """For each wanted column the one offered column of the same direction, -1 for a column of zeros; else None.

    `exact`: of the same size too. None where a column has no counterpart, or two of them.
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
        if not ((close.sum(-1) == 1) | zero).all():
            return None
        places.append(torch.where(zero, -1, close.float().argmax(-1)))
    rows = torch.cat(places)
    there = rows >= 0
    if exact and not torch.allclose(sizes[there], offered_sizes[rows[there]], rtol=SAME_DIRECTION):
        return None
    return rows


def _same(left: Tensor, right: Tensor) -> bool:
    return left is right or (left.shape == right.shape and torch.equal(left, right))


def _fits(predicted: Tensor, seen: Tensor, dtype: torch.dtype) -> bool:
    error = torch.linalg.vector_norm(predicted - seen)
    return bool(error <= FIT.get(dtype, FIT[torch.float32]) * torch.linalg.vector_norm(seen))


def stable_rank(
    left: Float[Tensor, "head channel dim"], right: Float[Tensor, "group channel dim"]
) -> Float[Tensor, " head"]:
    """|M|_F^2 / |M|_2^2 of M = left_h right_g^T, from d x d factors; NaN where M is 0. A group's heads are adjacent."""
    first = torch.linalg.qr(float64(left), mode="r").R
    second = torch.linalg.qr(float64(right), mode="r").R.repeat_interleave(len(left) // len(right), dim=0)
    squares = torch.linalg.svdvals(first @ second.mT).square()
    return squares.sum(-1) / torch.where(squares[:, 0] > 0, squares[:, 0], torch.nan)
