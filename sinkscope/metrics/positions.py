"""Attention mass of every query head by position (positions.parquet) and by prefix length (length_curve.csv).

Windows and bidirectional layers are treated as in `mass`.
"""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from sinkscope.capture.precision import as_widest
from sinkscope.capture.view import LayerView, Missing, need
from sinkscope.metrics import mass
from sinkscope.metrics.quantities import quantity

HeadValues = Float[Tensor, "batch head"]


@quantity("sequence", "head", "key", unit="probability", range="[0, 1]", source=mass.GU)
def alpha(view: LayerView) -> Float[Tensor, "batch head key"]:
    """alpha_k, k = the position; empty for a key that no query may see."""
    return mass.alpha(view)


@quantity("sequence", "head", "early", unit="probability", range="[0, 1]", source=mass.GU, column="alpha_t64")
def early_alpha(view: LayerView) -> Float[Tensor, "batch head early"]:
    """alpha_k of the first 64 keys over those of the first 64 queries that may see them; empty where T < 64."""
    columns = need(view.attention.early_columns)
    assert view.attention.early_seen_by is not None
    return mass.received(columns, view.attention.early_seen_by)


@quantity("sequence", "head", "query", unit="probability", range="[0, 1]", column="bos_mass")
def first(view: LayerView) -> Float[Tensor, "batch head query"]:
    """A[i,0], i = the query at the position; empty in cross-attention, whose positions are keys."""
    return _by_query(view, view.attention.first)


@quantity("sequence", "head", "query", unit="share", range="[0, 1]", source=mass.GU, column="bos_share")
def first_share(view: LayerView) -> Float[Tensor, "batch head query"]:
    """|A[i,0]| / sum_j |A[i,j]|, i = the query at the position; 0 where the row is 0, empty in cross-attention."""
    return _by_query(view, view.attention.first_share)


def _by_query(view: LayerView, rows: Tensor) -> Tensor:
    if view.site.cross:
        raise Missing
    return rows


@quantity("sequence", "head", "length", unit="probability", range="[0, 1]", column="bos_mass")
def curve_bos_mass(view: LayerView, length: int) -> HeadValues:
    """bos_mass of the first `length` queries."""
    return mass.mean_rows(view.attention.first[..., 1:length])


@quantity("sequence", "head", "length", unit="probability", range="[0, 1]", source=mass.GU, column="sink_score")
def curve_sink_score(view: LayerView, length: int) -> HeadValues:
    """sink_score of the first `length` queries."""
    return mass.mean_rows(view.attention.first[..., :length])


@quantity("sequence", "head", "length", unit="share", range="[0, 1]", source=mass.GU, column="sink_rate")
def curve_sink_rate(view: LayerView, length: int) -> HeadValues:
    """sink_rate of the first `length` queries: the indicator per sequence first, then the mean over sequences."""
    return (as_widest(curve_sink_score(view, length)) > view.epsilon).float()
