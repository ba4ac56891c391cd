"""What a streaming KV cache forgets: the attention that goes to distant keys, and what comes from them.

The cache keeps the first S keys and a window of the last W, in which query i counts itself: keys i - W + 1 .. i. All
keys between are distant. Means are over the queries i >= 1, also those that are too early to have a distant key, so
that a longer text has larger distant shares. The columns are missing where no query has a distant key (T <= S + W),
where some query sees later keys, and in cross-attention: nothing is forgotten there.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from sinkscope.capture.kernels.per_query import RegionSums
from sinkscope.capture.view import LayerView, Missing, need
from sinkscope.metrics.registry import layer_metric, measured_metric

TABLE = "streaming"
XIAO = "Xiao et al. 2309.17453 (the cache); ours (the column)"

HeadValues = Float[Tensor, "batch head"]


@measured_metric(TABLE, unit="probability", range="[0, 1]", source=XIAO)
def window_mass(view: LayerView) -> HeadValues:
    """Mean over i >= 1 of the sum of A[i,j] over the last W keys, i - W < j <= i."""
    return _later(_regions(view).recent)


@measured_metric(TABLE, unit="probability", range="[0, 1]", source=XIAO)
def streaming_mass(view: LayerView) -> HeadValues:
    """Mean over i >= 1 of the sum of A[i,j] over the keys that the cache keeps: the last W and the first S."""
    regions = _regions(view)
    return _later(regions.recent + regions.first)


@measured_metric(TABLE, unit="probability", range="[0, 1]", source=XIAO, dormant="low")
def distant_mass(view: LayerView) -> HeadValues:
    """Mean over i >= 1 of the sum of A[i,j] over the distant keys, S <= j <= i - W. It is 1 - streaming_mass, less the
    mass of a learned sink."""
    return _later(_regions(view).distant)


@measured_metric(TABLE, unit="ratio", range="[0, inf)", source="ours", dormant="low")
def distant_write(view: LayerView) -> HeadValues:
    """(sum over i >= 1 of |W_O^h sum_{distant j} A[i,j] v_j|^2) / (sum over i >= 1 of |W_O^h o_i|^2): the energy that
    comes from the distant keys, relative to that of the whole output. Attention to a value that writes nothing adds
    nothing. Above 1, the rest of the output cancels a part of it. Empty where a gate or norm lies between attention and
    the output projection, and in a head that writes nothing."""
    regions, whole, factors = _regions(view), need(view.output), need(view.factors)
    if not torch.equal(view.projected, whole):
        raise Missing
    written = _energy(whole, factors)
    return _energy(need(regions.distant_output), factors) / torch.where(written > 0, written, torch.nan)


@layer_metric(
    unit="probability", range="[0, 1]", source="SimLayerKV 2410.13846, as kvpress computes it (n_last = 1)",
    measure=TABLE,
)  # fmt: skip
def lazy_score(view: LayerView) -> Float[Tensor, " batch"]:
    """Mean over the layer's heads of the sum of A[i,j] of the last query i over the keys that the cache keeps: the
    first S (--sinks) and the last W (--window). The paper calls a layer lazy if this is above a threshold, and keeps
    only these keys for it. Empty where T <= S + W, and where a query sees later keys, since nothing is cached then."""
    regions = _regions(view)
    return view.layer_mean((regions.first + regions.recent)[..., -1])[:, 0]


def _regions(view: LayerView) -> RegionSums:
    sums = view.readings.get(TABLE)
    if not isinstance(sums, RegionSums) or not view.attention.causal:
        raise Missing
    return sums


def _later(rows: Float[Tensor, "batch head query"]) -> HeadValues:
    return rows[..., 1:].mean(-1)


def _energy(output: Float[Tensor, "batch query head vdim"], factors: Float[Tensor, "head rank vdim"]) -> HeadValues:
    """sum over i >= 1 of |R_h y_i|^2."""
    return torch.einsum("bthd,hrd->bthr", output[:, 1:], factors).square().sum((1, 3))
