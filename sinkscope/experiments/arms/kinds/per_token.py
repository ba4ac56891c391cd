"""Heads that act on each token by itself: their outputs replaced by the best affine map of what their layer reads."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from sinkscope.capture import Site
from sinkscope.capture.attention_names import uncompiled
from sinkscope.errors import SinkscopeError
from sinkscope.experiments.arms.arm import Arm, Pass, Setting
from sinkscope.experiments.arms.grammar import number
from sinkscope.experiments.arms.per_token import Map, gather, read_and_written
from sinkscope.experiments.arms.zeroing import check_sites, projections
from sinkscope.runs.saved.ablation import Heads


@dataclass(frozen=True)
class PerToken(Arm):
    """Heads given by layer and number, or all of a layer, replaced by their maps.

    Attributes:
        pairs: (layer, head); empty where `layer` is given.
        ridge: weight of |A|^2 beside the mean squared error; 0 for plain least squares.
        chosen: the heads by site, once the arm is ready. maps: those of each site, once they are fitted.
    """

    pairs: tuple[tuple[int, int], ...] = ()
    layer: int | None = None
    ridge: float = 0.0
    chosen: Heads = field(default_factory=dict)
    maps: dict[str, Map] = field(default_factory=dict)

    @property
    def name(self) -> str:
        heads = f"layer{self.layer}" if self.layer is not None else "+".join(f"{at}.{head}" for at, head in self.pairs)
        return f"map:{heads}" + (f"/ridge{self.ridge:g}" if self.ridge else "")

    def ready(self, setting: Setting) -> Arm:
        check_sites(setting.sites)
        chosen: Heads = {}
        if self.layer is not None:
            site = self._site(setting, self.layer, 0)
            chosen[site.name] = list(range(site.heads))
        for layer, head in self.pairs:
            chosen.setdefault(self._site(setting, layer, head).name, []).append(head)
        setting.to_map |= chosen.keys()
        return replace(self, chosen=chosen)

    def _site(self, setting: Setting, layer: int, head: int) -> Site:
        sites = [site for site in setting.sites if site.layer == layer and head < site.heads]
        if len(sites) != 1:
            raise SinkscopeError(f"--arm {self.name}: the model has no head {head} in layer {layer}")
        return sites[0]

    def prepared(self, setting: Setting) -> Arm:
        gather(setting)
        maps = {
            site.name: setting.maps[site.name].solved(columns(site, self.chosen[site.name]), self.ridge)
            for site in setting.sites
            if site.name in self.chosen
        }
        return replace(self, maps=maps)

    def changes(self, forward: Pass) -> Iterable[str] | None:
        return projections(forward.setting.sites, self.chosen)

    @contextmanager
    def applied(self, forward: Pass) -> Iterator[None]:
        forward.touches(sum(map(len, self.chosen.values())))
        with ExitStack() as stack:
            stack.enter_context(uncompiled())  # compiled code would not call the hooks
            for site in forward.setting.sites:
                if site.name in self.chosen:
                    change = _mapped(self.maps[site.name], columns(site, self.chosen[site.name]))
                    stack.enter_context(read_and_written(forward.setting, site, change))
            yield

    def told(self) -> list[str]:
        return [
            f"{self.name}: the map of {len(self.chosen[name])} head{'s' * (len(self.chosen[name]) != 1)} of {name} has "
            f"R2 {found.r2:.4f} on the {found.tokens:,} tokens that it was fitted on, from {found.rank} directions."
            for name, found in self.maps.items()
        ]


def columns(site: Site, heads: list[int]) -> Tensor:
    """Which numbers of a token the output projection reads of these heads."""
    width = site.value_dim or 0
    return (torch.tensor(heads)[:, None] * width + torch.arange(width)).flatten()


def _mapped(found: Map, places: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    def change(x: Tensor, y: Tensor) -> Tensor:
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        weight, offset = (part.to(x.device, wide) for part in (found.weight, found.offset))
        changed = y.clone()
        changed[:, places.to(y.device)] = (x.to(wide) @ weight + offset).to(y)
        return changed

    return change


def read_map(rest: str) -> Arm:
    """Reads what follows `map:`."""
    parts = re.fullmatch(r"(?:layer(\d+)|(\d+\.\d+(?:\+\d+\.\d+)*))(?:/ridge(\d+(?:\.\d+)?(?:e-?\d+)?))?", rest)
    if parts is None:
        raise SinkscopeError(f"{rest[:40]!r} names no heads to map")
    ridge = float(parts[3] or 0)
    if parts[3] is not None and not 0 < ridge < 1e9:
        raise SinkscopeError(f"the ridge {parts[3][:20]} is no number above 0")
    if parts[1] is not None:
        return PerToken(layer=number(parts[1], "the layer", 0), ridge=ridge)
    pairs = [part.split(".") for part in parts[2].split("+")]
    return PerToken(
        tuple(sorted({(number(layer, "the layer", 0), number(head, "the head", 0)) for layer, head in pairs})),
        ridge=ridge,
    )
