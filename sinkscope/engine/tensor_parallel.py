"""--tp: one model's heads spread over processes by transformers. Each sees its own; here they become a layer again.

The residual stream is whole in every process, so what is measured on it is too. Heads lie in the order of the
processes: transformers cuts q, k and v by rows, the output projection by columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from sinkscope.capture import Plan, Site
from sinkscope.capture.output_projection import output_projection
from sinkscope.engine.collector import Part, Parts
from sinkscope.engine.shards import Shard
from sinkscope.errors import SinkscopeError

BY_HEAD = ("heads", "curve", "alpha", "early", "first", "first_share")
"""Fields of a Part whose axis 1 is the head."""


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

    def whole(self, batches: Sequence[Shard]) -> Shard:
        """One batch from what each process measured of it, in their order."""
        parts: Parts = {
            name: [self._joined(name, each) for each in zip(*(batch.parts[name] for batch in batches), strict=True)]
            for name in batches[0].parts
        }
        return replace(batches[0], parts=parts)

    def _joined(self, name: str, own: Sequence[Part]) -> Part:
        if name not in self.sites:
            return own[0]
        first = own[0]
        joined: dict[str, Any] = {
            field.name: torch.cat([getattr(part, field.name) for part in own], 1)
            for field in fields(Part)
            if field.name in BY_HEAD and getattr(first, field.name) is not None
        }
        return replace(first, **joined)


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
