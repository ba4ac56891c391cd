"""Reads the sequences of a LayerView into FoldedHeads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from sinkscope.capture.precision import float64, like
from sinkscope.capture.view import LayerView
from sinkscope.capture.wiring.folded import FoldedHeads
from sinkscope.capture.wiring.linear_maps import InputNorm
from sinkscope.capture.wiring.mixes import OutputWeights
from sinkscope.capture.wiring.trace import Wiring


def fold(view: LayerView, wiring: Wiring, weights: OutputWeights | None) -> Iterator[FoldedHeads]:
    """Reads each sequence of a view. What the view or the wiring lacks stays None."""
    margins = float64(view.attention.margin[..., 1:])
    sequences = [FoldedHeads(view.site.heads, margin=margin, scale=wiring.scale) for margin in margins]
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
    read = _read(view.x[:, 1:], weights) if mixed and weights is not None else None
    for number, folded in enumerate(sequences):
        folded.x, folded.weights = view.x[number, 1:], weights
        if norm is not None:
            _normalise(folded, folded.x, view.z[number, 1:], norm)
        if weights is not None and view.raw_projected is not None:
            folded.written = view.projected[number, 1:].transpose(0, 1)
            folded.written_out = view.written[number, :, 1:]
        if weights is not None and constant is not None and read is not None:
            folded.x_out = read[number]
            _add_mixes(folded, weights, view, like(constant, view.x), number)
        yield folded


def _read(x: Float[Tensor, "batch token channel"], weights: OutputWeights) -> Float[Tensor, "batch head more vdim"]:
    """`FoldedHeads.x_out` of each sequence, in one product."""
    mean = x.mean(1, keepdim=True)
    return weights.read(torch.cat([x - mean, mean], 1))


def _normalise(
    folded: FoldedHeads, x: Float[Tensor, "token channel"], z: Float[Tensor, "token channel"], norm: InputNorm
) -> None:
    scale, shift = norm.affine(x, z)
    folded.affine = (scale, shift if norm.centred else None)
    folded.z = x if norm.absent else scale * (x - shift if norm.centred else x)


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
        sums = view.attention
        total = 1 - sums.learned_sink if sums.row_total is None else sums.row_total
        shares = total[sequence, :, 1:].unsqueeze(-1)
        repeated = constant.repeat_interleave(folded.heads // len(constant), dim=0).unsqueeze(1)
        folded.attended = folded.written - shares * repeated
        folded.attended_out = folded.written_out - shares * offset
