"""Reads the sequences of a LayerView into FoldedHeads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType

import torch
from jaxtyping import Float
from torch import Tensor

from sinkscope.capture import loops
from sinkscope.capture.precision import are_equal, as_float64, like
from sinkscope.capture.view import LayerView
from sinkscope.wiring.folded import FoldedHeads
from sinkscope.wiring.linear_maps import InputNorm
from sinkscope.wiring.mixes import OutputWeights
from sinkscope.wiring.trace import Wiring


def fold(view: LayerView, wiring: Wiring, weights: OutputWeights | None) -> Iterator[FoldedHeads]:
    """Reads each sequence of a view. What the view or the wiring lacks stays None."""
    margins = as_float64(view.attention.margin[..., 1:])
    sequences = [FoldedHeads(view.site.heads, margin=margin, scale=wiring.scale) for margin in margins]
    if view.raw_projected is not None and view.factors is not None:
        for number, folded in enumerate(sequences):
            folded.written = view.projected[number, 1:].transpose(0, 1)
            folded.written_out = view.written[number, :, 1:]
    x, z = view.residual_in, view.attention_input
    if view.site.cross:  # W maps tokens of the other sequence, which is not z
        return iter(sequences)
    if x is None or z is None or x.shape != z.shape or view.queries != view.keys or view.queries < 2:
        return iter(sequences)
    return _folded(sequences, view, wiring, weights)


def _folded(
    sequences: list[FoldedHeads], view: LayerView, wiring: Wiring, weights: OutputWeights | None
) -> Iterator[FoldedHeads]:
    """Adds tokens and mixes."""
    norm, constant = wiring.norm, wiring.constant
    if norm is not None:
        norm = replace(norm, gain=like(norm.gain, view.x), bias=like(norm.bias, view.x))
    if weights is not None and weights.slices.shape[-1] != view.x.shape[-1]:
        weights = None
    mixed = weights is not None and constant is not None and view.raw_value is not None
    for folded, x in zip(sequences, view.x, strict=True):
        folded.x, folded.weights = x[1:], weights
    around = None if norm is None else read_tokens(sequences, view.x[:, 1:], view.z[:, 1:], norm)
    read = None
    if mixed and weights is not None:
        read = weights.read(_around(view.x[:, 1:]) if around is None else around)
    for number, folded in enumerate(sequences):
        if weights is not None and constant is not None and read is not None:
            folded.x_out = read[number]
            _add_mixes(folded, weights, view, like(constant, view.x), number)
        yield folded


Rows = Float[Tensor, "batch token channel"]
Around = Float[Tensor, "batch more channel"]
"""x_i - xbar of each sequence, and behind the last token xbar."""


def read_tokens(sequences: list[FoldedHeads], x: Rows, z: Rows, norm: InputNorm) -> Around | None:
    """Adds what the norm makes of each sequence's tokens x_i, i >= 1, of which attention reads z.

    A compiled loop reads large float32 tensors on a CPU. It fills in what FoldedHeads would compute itself otherwise,
    and returns the tokens around their mean.
    """
    loop = loops.loops_over("normalised", x, x.shape[1] * x.shape[2])
    if loop is not None:
        return _by_loop(loop, sequences, x, z, norm)
    for folded, tokens, read in zip(sequences, x, z, strict=True):
        scale, shift = norm.affine(tokens, read)
        folded.affine = (scale, shift if norm.centred else None)
        folded.z = tokens if norm.absent else scale * (tokens - shift if norm.centred else tokens)
    return None


def _around(x: Rows) -> Around:
    mean = x.mean(1, keepdim=True)
    return torch.cat([x - mean, mean], 1)


def _by_loop(loop: ModuleType, sequences: list[FoldedHeads], x: Rows, z: Rows, norm: InputNorm) -> Around:
    batch, count, width = x.shape
    shapes = (2, batch, count), (batch, count, width), (batch, count + 1, width)
    affine, normalised, around = (x.new_empty(shape) for shape in shapes)
    sizes, moments = (x.new_empty(shape, dtype=torch.float64) for shape in ((batch, count), (batch, 6)))
    loops.run(
        loop.read_normalised, loops.rows(x), loops.rows(z), norm.gain.numpy(), norm.bias.numpy(), norm.centred,
        norm.absent, *(tensor.numpy() for tensor in (affine, normalised, around, sizes, moments)),
    )  # fmt: skip
    equal = are_equal(moments[:, loop.SPREAD], moments[:, loop.MEAN_SQUARE])
    for number, (folded, facts) in enumerate(zip(sequences, moments, strict=True)):
        scale, shift = affine[:, number, :, None]
        folded.z, folded.affine = normalised[number], (scale, shift if norm.centred else None)
        loops.fill(folded, {
            "token_squares": sizes[number], "centred_tokens": around[number, :-1],
            "whole_spread": facts[loop.SPREAD], "equal": equal[number],
            "beta": torch.where(equal[number], torch.nan, facts[loop.JOINT] / facts[loop.SPREAD]),
            "tokens_spread": facts[loop.X_SPREAD],
            "mean_square": facts[loop.MEAN_SQUARE], "tokens_mean_square": facts[loop.X_MEAN_SQUARE],
            "unit_square": facts[loop.X_UNIT_SQUARE],
        })  # fmt: skip
    return around


def _add_mixes(
    folded: FoldedHeads, weights: OutputWeights, view: LayerView, constant: Float[Tensor, "group vdim"], sequence: int
) -> None:
    """Adds the mixes of u = v - constant. What W_O makes of v and of w, the view knows already."""
    values, out = view.value[sequence], view.written_values[sequence]
    offset = weights.through(constant.unsqueeze(1)) if constant.any() else None
    if offset is not None:
        values, out = values - constant.unsqueeze(1), out - offset
    folded.values, folded.values_out, folded.causal = values, out, view.attention.causal
    if folded.written is None or folded.written_out is None or not view.plain:
        return  # with a gate or norm after attention, the head does not add W sum_j A_ij z_j
    folded.attended, folded.attended_out = folded.written, folded.written_out
    if offset is not None:
        signed = view.attention.signed_total
        shares = (view.attention.total if signed is None else signed)[sequence, :, 1:].unsqueeze(-1)
        repeated = constant.repeat_interleave(folded.heads // len(constant), dim=0).unsqueeze(1)
        folded.attended = folded.written - shares * repeated
        folded.attended_out = folded.written_out - shares * offset
