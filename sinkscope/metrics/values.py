"""Values, outputs and dormancy: what a head writes when it is dormant.

Names follow Sandoval-Segura et al. 2504.03889; `_ln` marks their layer-normalised (LN) form. All columns are per query
head; columns that depend on values alone are constant within a key/value group. o_i is what the attention call returns,
w_i is what the output projection reads. They are equal unless a gate or norm lies between.
"""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from sinkscope.capture.view import LayerView
from sinkscope.metrics import mass
from sinkscope.metrics.registry import head_metric

DORMANT = "Sandoval-Segura et al. 2504.03889"
GUO = "Guo et al. 2410.13835"

HeadValues = Float[Tensor, "batch head"]


@head_metric(unit="probability", range="[0, 1]", source=DORMANT, normalised=True)
def awft(view: LayerView) -> HeadValues:
    """Attention weight of the first token: alpha_0. It equals sink_score."""
    return mass.sink_score(view)


@head_metric(unit="nats", range="[0, log T]", source=DORMANT, normalised=True)
def aeqd(view: LayerView) -> HeadValues:
    """Attention entropy of the query distribution. It equals entropy."""
    return mass.entropy(view)


@head_metric(unit="norm", range="[0, inf)", source=DORMANT, normalised=True)
def ftvvn(view: LayerView) -> HeadValues:
    """First token's value vector norm: norm v_0. Heads of one key/value group have the same value."""
    return view.value_norms[..., 0]


@head_metric(unit="norm", range="[0, inf)", source=DORMANT, normalised=True)
def avvn(view: LayerView) -> HeadValues:
    """Average value vector norm: mean over all j, j = 0 included, of norm v_j. Heads of one key/value group have the
    same value."""
    return view.value_norms.mean(-1)


@head_metric(unit="norm", range="[0, inf)", source=DORMANT)
def lthon(view: LayerView) -> HeadValues:
    """Last token's head output norm: norm w_{T-1}."""
    return view.projected_norms[..., -1]


@head_metric(unit="ratio", range="[0, inf)", source=DORMANT)
def lthon_ln(view: LayerView) -> HeadValues:
    """norm w_{T-1} divided by the mean of ahon over the heads of the same layer, in the same sequence."""
    return lthon(view) / view.layer_mean(ahon(view))


@head_metric(unit="ratio", range="[0, inf)", source=DORMANT)
def lthon_hn(view: LayerView) -> HeadValues:
    """norm w_{T-1} divided by ahon of the same head, in the same sequence."""
    return lthon(view) / ahon(view)


@head_metric(unit="norm", range="[0, inf)", source=DORMANT)
def ahon(view: LayerView) -> HeadValues:
    """Average head output norm: mean over all queries i of norm w_i."""
    return view.projected_norms.mean(-1)


@head_metric(unit="ratio", range="[0, H]", source=DORMANT, map_place=3)
def honor(view: LayerView) -> HeadValues:
    """AHON (LN): ahon, the mean over all queries i of norm w_i, divided by the mean of ahon over the heads of the same
    layer, in the same sequence."""
    values = ahon(view)
    return values / view.layer_mean(values)


@head_metric(unit="norm", range="[0, inf)", normalised=True, dormant="low", map_place=3)
def residual_write(view: LayerView) -> HeadValues:
    """Mean over all queries i of norm(W_O^h w_i): the size of what the head adds to the residual stream, before any
    later norm."""
    return view.written_norms.mean(-1)


@head_metric(unit="ratio", range="[0, inf)", source=GUO, dormant="low", map_place=3)
def value_drain(view: LayerView) -> HeadValues:
    """norm v_0 / (mean over j >= 1 of norm v_j). Heads of one key/value group have the same value."""
    return view.value_norms[..., 0] / view.value_norms[..., 1:].mean(-1)


@head_metric(unit="ratio", range="[0, inf)", source=GUO, dormant="low", map_place=3)
def ov_drain(view: LayerView) -> HeadValues:
    """norm(W_O^h v_0) / (mean over j >= 1 of norm(W_O^h v_j)): value_drain as the residual stream sees it."""
    norms = view.written_value_norms
    return norms[..., 0] / norms[..., 1:].mean(-1)


@head_metric(
    unit="ratio",
    range="[0, inf)",
    source="Lampert et al. 2605.08453 (hard switch); estimator ours",
    dormant="low",
    map_place=3,
)
def gate_open(view: LayerView) -> HeadValues:
    """(mean over all queries i of norm o_i) / (mean over j >= 1 of norm v_j). It is 0 where the output is always 0. It
    is about 1 where each query copies one value."""
    return view.output_norms.mean(-1) / view.value_norms[..., 1:].mean(-1)
