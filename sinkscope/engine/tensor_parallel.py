"""--tp: one model's heads spread over processes by transformers. Each sees its own; here they become a layer again.

The residual stream is whole in every process, so what is measured on it is too. Heads lie in the order of the
processes: transformers cuts q, k and v by rows, the output projection by columns.
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
from sinkscope.metrics.quantities import QuantitySet


@dataclass(frozen=True)
class HeadShards:
    """`sites`: names of those whose heads are spread over the processes; the others are whole in each."""

    count: int
    sites: frozenset[str]

    def mean(self, site: Site, own: Tensor) -> Tensor:
        """The mean over all heads of the layer, from the mean over those of this process; every process must call."""
        from accelerate.utils import reduce

        return reduce(own, "mean") if site.name in self.sites else own

    def whole_sites(self, sites: Sequence[Site]) -> list[Site]:
        """The sites with the numbers of heads they have in all."""
        return [
            replace(site, heads=site.heads * self.count, kv_groups=site.kv_groups * self.count)
            if site.name in self.sites
            else site
            for site in sites
        ]

    def whole(self, batches: Sequence[Shard], quantities: QuantitySet) -> Shard:
        """One batch from what each process measured of it, in their order."""
        parts: Parts = {}
        for name in batches[0].parts:
            views = zip(*(batch.parts[name] for batch in batches), strict=True)
            parts[name] = [_joined(each, quantities) if name in self.sites else each[0] for each in views]
        return replace(batches[0], parts=parts)


def _joined(own: Sequence[Part], quantities: QuantitySet) -> Part:
    """The parts of one layer as one: every quantity with a `head` axis joined along it, the others from the first."""
    values = dict(own[0].values)
    for each in quantities.quantities:
        if "head" in each.dims and each.name in values:
            values[each.name] = torch.cat([part.values[each.name] for part in own], each.dims.index("head"))
    return replace(own[0], values=values)


def spread(model: nn.Module, plan: Plan, count: int) -> tuple[Plan, HeadShards]:
    """The plan with the output projections, which hold more columns than a process has heads, and who holds what.

    Raises SinkscopeError where it cannot be told which heads a process has.
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
                f"--tp: which heads of {site.module} each process holds cannot be told; scan it without --tp"
            )
    return replace(plan, sites=sites), HeadShards(count, frozenset(names))


def _spread_by_column(projection: nn.Module) -> bool:
    weight: Any = getattr(projection, "weight", None)
    if not hasattr(weight, "to_local") or not weight.is_floating_point():
        return False
    return any(placement.is_shard(1) for placement in weight.placements)
