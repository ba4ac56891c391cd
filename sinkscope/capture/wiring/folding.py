"""Reads one sequence of a LayerView into FoldedHeads."""

from __future__ import annotations

from dataclasses import replace

from jaxtyping import Float
from torch import Tensor

from sinkscope.capture.precision import float64
from sinkscope.capture.view import LayerView, need
from sinkscope.capture.wiring.folded import FoldedHeads, OutputWeights, running_mean
from sinkscope.capture.wiring.trace import Wiring


def fold(view: LayerView, wiring: Wiring, weights: OutputWeights | None, sequence: int) -> FoldedHeads:
    """Reads one sequence of a view. What the view or the wiring lacks stays None."""
    site = view.site
    folded = FoldedHeads(site.heads, margin=float64(view.attention.margin[sequence, :, 1:]), scale=wiring.scale)
    x, z = view.residual_in, view.attention_input
    if site.cross:  # W maps tokens of the other sequence, which is not z
        return folded
    if x is None or z is None or x.shape != z.shape or view.queries != view.keys or view.queries < 2:
        return folded
    folded.x = need(x[sequence, 1:])
    if wiring.norm is not None:
        norm = replace(wiring.norm, gain=wiring.norm.gain.to(folded.x), bias=wiring.norm.bias.to(folded.x))
        scale, shift = norm.affine(folded.x, need(z[sequence, 1:]))
        folded.affine = (scale, shift if norm.centred else None)
        folded.z = folded.x if norm.absent else scale * (folded.x - shift if norm.centred else folded.x)
    if weights is None or weights.slices.shape[-1] != x.shape[-1]:
        return folded
    folded.weights = weights
    if view.raw_projected is not None:
        folded.written = view.projected[sequence, 1:].transpose(0, 1)
        folded.written_out = view.written[sequence, :, 1:]
    if wiring.constant is not None and view.raw_value is not None:
        _add_mixes(folded, weights, view, wiring.constant.to(folded.x), sequence)
    return folded


def _add_mixes(
    folded: FoldedHeads, weights: OutputWeights, view: LayerView, constant: Float[Tensor, "group vdim"], sequence: int
) -> None:
    """Adds the mixes of u = v - constant. What W_O makes of v and of w, the view knows already."""
    values, out = view.value[sequence], view.written_values[sequence]
    offset = weights.through(constant.unsqueeze(1)) if constant.any() else None
    if offset is not None:
        values, out = values - constant.unsqueeze(1), out - offset
    folded.values, folded.values_out = values[:, 1:], out[:, 1:]
    if view.attention.causal:
        folded.uniform, folded.uniform_out = running_mean(values)[:, 1:], running_mean(out)[:, 1:]
    else:
        folded.uniform, folded.uniform_out = (
            each.mean(1, keepdim=True).expand_as(each)[:, 1:] for each in (values, out)
        )
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
