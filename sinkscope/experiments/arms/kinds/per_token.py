"""Heads that act on each token by itself: their outputs replaced by the best affine map of what their layer reads.

Tokens are added up in float64, so that a text of any length takes the same memory. With x a token as the attention
module reads it and y what the output projection reads of the heads, A = (S_xx + ridge n I)^+ S_xy and b = mean y - A^T
mean x, where S are sums over the n tokens of centred products. ^+ leaves out directions whose eigenvalue is at most
D 2^-52 times the largest: of all maps that fit equally well, A is the smallest."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from sinkscope.capture import Site
from sinkscope.capture.hooks import hooked
from sinkscope.capture.registries import uncompiled
from sinkscope.checkpoints.forward import Forward
from sinkscope.engine.batch_size import chosen_batch
from sinkscope.errors import SinkscopeError
from sinkscope.experiments.arms.arm import Arm, Pass, Setting
from sinkscope.experiments.arms.changes import check_sites, no_head, projections
from sinkscope.experiments.arms.grammar import number
from sinkscope.runs.saved.ablation import Heads

SEQUENCES = 32
"""Most sequences that maps are fitted on."""

SUM_BYTES = 2**30
"""Most memory for the sums of the layers that are read in one pass."""


@dataclass(frozen=True)
class Map:
    """y = x weight + offset, [D, W] and [W] float64.

    Attributes:
        r2: 1 - (squared error) / (squared distance of y from its mean), over all of W, on the text of the fit; NaN
            where y never changes.
        rank: directions of x that are used. tokens: how many the map was fitted on.
    """

    weight: Tensor
    offset: Tensor
    r2: float
    rank: int
    tokens: int


class Sums:
    """Sums over tokens x [n, D] and y [n, W], float64 on the CPU. The mean of the first ones is taken off all, so that
    centring what was added loses no digits."""

    def __init__(self, inputs: int, outputs: int) -> None:
        self.count = 0
        self._x, self._y = (torch.zeros(size, dtype=torch.float64) for size in (inputs, outputs))
        self._xx, self._xy = (torch.zeros(inputs, size, dtype=torch.float64) for size in (inputs, outputs))
        self._squares = torch.zeros(outputs, dtype=torch.float64)

    def add(self, x: Tensor, y: Tensor) -> None:
        """Adds some tokens."""
        x, y = x.cpu().double(), y.cpu().double()
        if not self.count:
            self._origin = x.mean(0), y.mean(0)
        x, y = x - self._origin[0], y - self._origin[1]
        self.count += len(x)
        self._x += x.sum(0)
        self._y += y.sum(0)
        self._squares += y.square().sum(0)
        self._xx += x.T @ x
        self._xy += x.T @ y

    def solved(self, columns: Tensor, ridge: float) -> Map:
        """The map to some columns of y."""
        mean_x, mean_y = self._x / self.count, self._y[columns] / self.count
        xx = self._xx - self.count * torch.outer(mean_x, mean_x)
        xy = self._xy[:, columns] - self.count * torch.outer(mean_x, mean_y)
        values, vectors = torch.linalg.eigh(xx + ridge * self.count * torch.eye(len(xx), dtype=torch.float64))
        used = values > values[-1] * len(values) * torch.finfo(torch.float64).eps
        basis = vectors[:, used]
        weight = basis @ ((basis.T @ xy) / values[used, None])
        total = float((self._squares[columns] - self.count * mean_y.square()).sum())
        error = total - float((weight * (2 * xy - xx @ weight)).sum())
        r2 = 1 - error / total if total > 0 else float("nan")
        offset = mean_y + self._origin[1][columns] - (mean_x + self._origin[0]) @ weight
        return Map(weight, offset, r2, int(used.sum()), self.count)


def groups_of(setting: Setting, names: Iterable[str]) -> list[list[Site]]:
    """The sites of these names, cut into groups whose sums take SUM_BYTES at most, or one site: each takes a pass."""
    width = setting.base.config.get_text_config().hidden_size  # type: ignore[union-attr, operator]
    wanted = set(names)
    groups: list[list[Site]] = []
    left = 0
    for site in setting.sites:
        if site.name not in wanted:
            continue
        size = 8 * width * (width + site.heads * (site.value_dim or 0))
        if size > left or not groups:
            groups.append([])
            left = SUM_BYTES
        groups[-1].append(site)
        left -= size
    return groups


def gather(setting: Setting) -> None:
    """Fills `setting.maps` for all sites that arms have named: runs the unablated model over text that is not measured.

    Raises SinkscopeError where there is none.
    """
    missing = setting.to_map - setting.maps.keys()
    if not missing:
        return
    if setting.more_text is None:
        raise SinkscopeError("a map is fitted on further text, and there is none: give --data")
    ids = setting.more_text(SEQUENCES)
    size = chosen_batch(ids.shape[1], setting.checkpoint.device)
    for group in groups_of(setting, missing):
        sums: dict[str, Sums] = {}
        for batch in ids.split(size):
            with torch.no_grad(), ExitStack() as stack:
                for site in group:
                    stack.enter_context(read_and_written(setting, site, _adding(sums, site)))
                Forward(setting.base)(batch.to(setting.checkpoint.device))
        setting.maps |= sums


def _adding(found: dict[str, Sums], site: Site) -> Callable[[Tensor, Tensor], Tensor]:
    def add(x: Tensor, y: Tensor) -> Tensor:
        found.setdefault(site.name, Sums(x.shape[-1], y.shape[-1])).add(x, y)
        return y

    return add


@contextmanager
def read_and_written(setting: Setting, site: Site, change: Callable[[Tensor, Tensor], Tensor]) -> Iterator[None]:
    """Calls `change` with x, what the attention module reads of every token, [token, D], and y, what the output
    projection reads of the heads, [token, heads x width]; the projection reads what it returns."""
    assert site.projection is not None  # `check_sites` saw to it
    read: list[Tensor] = []

    def keep(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = kwargs.get("hidden_states", args[0] if args else None)
        read[:] = [hidden] if isinstance(hidden, Tensor) and hidden.dim() == 3 else []

    def write(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        y = args[0] if args else None
        width = site.heads * (site.value_dim or 0)
        if not read or not isinstance(y, Tensor) or y.shape[-1] != width:
            raise SinkscopeError(f"what {site.module} reads of a token and writes for it was not found: no map fits")
        x, rows = read[0].flatten(0, -2), y.reshape(-1, width)
        if len(x) != len(rows):
            raise SinkscopeError(f"{site.projection} does not read a row for each token of {site.module}: no map fits")
        return (change(x, rows).reshape(y.shape), *args[1:]), kwargs

    attention, projection = (setting.base.get_submodule(path) for path in (site.module, site.projection))
    with (
        uncompiled(),  # compiled code would not call the hooks
        hooked(attention, pre=keep, with_kwargs=True),
        hooked(projection, pre=write, with_kwargs=True),
    ):
        yield


# Heads that act on each token by itself: their outputs replaced by the best affine map of what their layer reads.


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
        check_sites(setting)
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
            raise SinkscopeError(f"--arm {self.name}: {no_head(setting, layer, head)}")
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
            for site in forward.setting.sites:
                if site.name in self.chosen:
                    change = _mapped(self.maps[site.name], columns(site, self.chosen[site.name]))
                    stack.enter_context(read_and_written(forward.setting, site, change))
            yield

    def told(self) -> list[str]:
        return [
            f"{self.name}: the map of {len(self.chosen[name])} head{'s' * (len(self.chosen[name]) != 1)} of {name} has "
            f"R2 {fit.r2:.4f} on the {fit.tokens:,} tokens that it was fitted on, from {fit.rank} directions."
            for name, fit in self.maps.items()
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
