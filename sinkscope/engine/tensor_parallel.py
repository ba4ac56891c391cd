"""--tp: transformers spreads a model's heads over processes; this module joins what they measure into whole layers.

Every process has the whole residual stream, and so measures all of it. The heads are in the order of the processes:
transformers cuts q, k and v by rows, the output projection by columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from sinkscope.capture import Plan, Site
from sinkscope.capture.output_projection import output_projection
from sinkscope.engine.collector import Part, Parts
from sinkscope.engine.shards import Shard
from sinkscope.errors import SinkscopeError
from sinkscope.metrics.quantities import EVENT_FIELDS, UNSEEN, QuantitySet


@dataclass(frozen=True)
class HeadShards:
    """`count`: processes. `sites`: names of the sites whose heads are spread over them; each process has all others."""

    count: int
    sites: frozenset[str]

    def mean(self, site: Site, local: Tensor) -> Tensor:
        """Returns the mean over all heads of the layer, from this process's mean; every process must call it."""
        from accelerate.utils import reduce

        return reduce(local, "mean") if site.name in self.sites else local

    def whole_count(self, site: Site) -> int:
        """The number of heads of the layer in all processes."""
        return site.heads * (self.count if site.name in self.sites else 1)

    def whole_sites(self, sites: Sequence[Site]) -> list[Site]:
        """Returns the sites with the heads of all processes counted."""
        return [
            replace(site, heads=site.heads * self.count, kv_groups=site.kv_groups * self.count)
            if site.name in self.sites
            else site
            for site in sites
        ]

    def whole(self, batches: Sequence[Shard], quantities: QuantitySet) -> Shard:
        """Joins a batch from what each process measured of it, in the order of the processes."""
        parts: Parts = {}
        for name in batches[0].parts:
            views = zip(*(batch.parts[name] for batch in batches), strict=True)
            parts[name] = [_joined(view, quantities) if name in self.sites else view[0] for view in views]
        return replace(batches[0], parts=parts)


def _joined(parts: Sequence[Part], quantities: QuantitySet) -> Part:
    """Joins the parts of one layer: quantities with a `head` axis along that axis, the events of heads from all parts,
    the others from the first part."""
    parts = [_with_unseen(part, parts) for part in parts]
    values = dict(parts[0].values)
    for quantity in quantities.quantities:
        if quantity.of_events and quantity.name in values:
            values[quantity.name] = _joined_events(quantity.name, parts)
        if "head" in quantity.dims and quantity.name in values:
            values[quantity.name] = torch.cat(
                [part.values[quantity.name] for part in parts], quantity.dims.index("head")
            )
    return replace(parts[0], values=values)


def _with_unseen(part: Part, parts: Sequence[Part]) -> Part:
    """The part, with zeros in place of a quantity of UNSEEN that it lacks and another part has: its own heads see every
    key."""
    values = {
        unseen: torch.zeros_like(part.values[name])
        for name, unseen in UNSEEN.items()
        if unseen not in part.values and any(unseen in other.values for other in parts)
    }
    return replace(part, values=part.values | values)


def _joined_events(name: str, parts: Sequence[Part]) -> Tensor:
    """Joins events: those of no head, which every part has, from the first; those of its own heads from each."""
    field, heads = EVENT_FIELDS.index("head"), parts[0].values["heads"].shape[1]
    events = [part.values[name].clone() for part in parts]
    joined = [events[0][events[0][:, field].isnan()]]
    for index, rows in enumerate(events):
        rows[:, field] += index * heads
        joined.append(rows[~rows[:, field].isnan()])
    return torch.cat(joined)


def spread(model: nn.Module, plan: Plan, count: int) -> tuple[Plan, HeadShards]:
    """Returns the plan with its output projections, and which sites are spread.

    One process cannot find a spread projection: it has columns for the heads of all `count` processes. Raises
    SinkscopeError where it is unclear which heads a process has.
    """
    sites, names = [], set()
    for site in plan.sites:
        width = None if site.value_dim is None else site.heads * site.value_dim * count
        path = None if width is None else output_projection(model, site.module, width)
        if path is not None and _spread_by_column(model.get_submodule(path)):
            sites.append(replace(site, projection=path))
            names.add(site.name)
        elif site.projection is not None and not _spread_by_column(model.get_submodule(site.projection)):
            sites.append(site)
        else:
            raise SinkscopeError(
                f"--tp: it is unclear which heads of {site.module} each process holds; scan it without --tp"
            )
    return replace(plan, sites=sites), HeadShards(count, frozenset(names))


def _spread_by_column(projection: nn.Module) -> bool:
    weight: Any = getattr(projection, "weight", None)
    if not hasattr(weight, "to_local") or not weight.is_floating_point():
        return False
    return any(placement.is_shard(1) for placement in weight.placements)
