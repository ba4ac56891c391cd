"""Reads one sequence of a LayerView into FoldedHeads."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from sinkscope.capture.precision import float64
from sinkscope.capture.view import LayerView
from sinkscope.capture.wiring.folded import FoldedHeads, Mixed, OutputWeights, running_mean
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
    folded.x = float64(x[sequence, 1:])
    if wiring.norm is not None:
        scale, shift = folded.affine = wiring.norm.affine(folded.x, float64(z[sequence, 1:]))
        folded.z = scale * (folded.x - shift)
    if weights is None or weights.slices.shape[-1] != x.shape[-1]:
        return folded
    folded.weights = weights
    if view.raw_projected is not None:
        folded.written = _by_head(view.raw_projected[sequence, 1:])
    if wiring.constant is not None and view.raw_value is not None:
        _add_mixes(folded, view, wiring.constant, sequence)
    return folded


def _add_mixes(folded: FoldedHeads, view: LayerView, constant: Float[Tensor, "group vdim"], sequence: int) -> None:
    repeat = view.site.heads // constant.shape[0]
    constant = constant.repeat_interleave(repeat, dim=0).unsqueeze(1)
    values = float64(view.value[sequence]).repeat_interleave(repeat, dim=0) - constant
    folded.values = values[:, 1:]
    if view.attention.causal:
        folded.first = values[:, :1]
        folded.uniform = running_mean(values)[:, 1:]
    else:
        folded.uniform = values.mean(1, keepdim=True).expand_as(values)[:, 1:]
    if folded.written is not None and view.plain:
        # With a gate or norm after attention, the head does not add W sum_j A_ij z_j.
        sums = view.attention
        total = 1 - sums.learned_sink if sums.row_total is None else sums.row_total
        shares = float64(total[sequence, :, 1:]).unsqueeze(-1)
        folded.offset = (shares, constant)
        folded.attended = folded.written - shares * constant


def _by_head(rows: Float[Tensor, "token head vdim"]) -> Mixed:
    return float64(rows).transpose(0, 1)
