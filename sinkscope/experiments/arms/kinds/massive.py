"""Massive activations of the run replaced, at the input of the block where each first is massive."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from sinkscope.capture.registries import uncompiled
from sinkscope.capture.uncalled import is_uncalled
from sinkscope.checkpoints.forward import Forward
from sinkscope.errors import SinkscopeError
from sinkscope.experiments.arms.arm import Arm, Pass, Setting
from sinkscope.experiments.arms.readings import batch_size
from sinkscope.metrics.residual import MASSIVE_ABS, MASSIVE_RATIO, median_abs

Elements = dict[str, list[int]]
"""Channels by the path of the block whose input is changed."""

Means = dict[str, Tensor]
"""By block: sums and counts of the massive elements, [2, sequence, 2, channel]: first token, then the others."""


@dataclass(frozen=True)
class ReplacedElements(Arm):
    """The massive elements set to 0, or to their mean.

    Attributes:
        how: `zero`; `mean`, over the massive elements of that channel in all other sequences; `random`, which sets as
            many elements of the same tokens in random channels to 0.
        where: `first` or `others`: only elements of the first token, or only those of later ones; empty = all.
        elements: the run's channels. means: what their elements are in each sequence; both once the arm is ready.
    """

    how: str
    where: str = ""
    elements: Elements = field(default_factory=dict)
    means: Means = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"massive:{self.how}" + (f"/{self.where}" if self.where else "")

    @property
    def random(self) -> bool:
        return self.how == "random"

    @property
    def from_run(self) -> str:
        return "the elements are those that a run found massive"

    def ready(self, setting: Setting) -> Arm:
        return replace(self, elements=massive_elements(setting, self.name))

    @property
    def reads_first(self) -> bool:
        return self.how == "mean"

    def prepared(self, setting: Setting) -> Arm:
        return replace(self, means=measured_means(setting, self.elements)) if self.how == "mean" else self

    def control(self) -> Arm | None:
        return None if self.random else replace(self, how="random", means={})

    @contextmanager
    def applied(self, forward: Pass) -> Iterator[None]:
        counts = torch.zeros(len(forward.ids), dtype=torch.float64)
        with ExitStack() as stack:
            for path, channels in self.elements.items():
                change = self._change(forward, path, torch.tensor(channels), counts)
                stack.enter_context(forward.hooked(forward.setting.base.get_submodule(path), block_hook(change)))
            yield
        forward.touches(counts)

    def changes(self, forward: Pass) -> Iterable[str] | None:
        return self.elements

    def _change(self, forward: Pass, path: str, channels: Tensor, counts: Tensor) -> Callable[[Tensor], Tensor]:
        def change(x: Tensor) -> Tensor:
            massive = self._chosen(x, channels)
            counts.add_(massive.sum((1, 2)).cpu())
            target = self._drawn(forward, path, x.shape[-1]) if self.random else channels
            values = x[..., target.to(x.device)]
            changed = x.clone()
            changed[..., target.to(x.device)] = torch.where(massive, self._instead(forward, path, values), values)
            return changed

        return change

    def _drawn(self, forward: Pass, path: str, width: int) -> Tensor:
        """As many random channels as are changed at this block. No channel is drawn at two blocks."""
        paths = [*self.elements]
        before = sum(len(self.elements[path]) for path in paths[: paths.index(path)])
        order = forward.common_generator().permutation(width)
        return torch.from_numpy(order[before : before + len(self.elements[path])].copy())

    def _chosen(self, x: Tensor, channels: Tensor) -> Tensor:
        """Which elements of these channels are massive and asked for, bool (batch, T, channel)."""
        massive = is_massive(x, channels)
        if self.where == "first":
            massive[:, 1:] = False
        elif self.where == "others":
            massive[:, 0] = False
        return massive

    def _instead(self, forward: Pass, path: str, values: Tensor) -> Tensor:
        """What the elements become, (batch, T, channel); where no other sequence has such an element it stays."""
        if self.how != "mean":
            return torch.zeros_like(values)
        sums, counts = self.means[path]
        rows = slice(forward.start, forward.start + len(values))
        others = (sums.sum(0) - sums[rows]) / (counts.sum(0) - counts[rows])  # (batch, 2, channel)
        wanted = others.to(values.device, values.dtype)
        spread = torch.cat([wanted[:, :1], wanted[:, 1:].expand(-1, values.shape[1] - 1, -1)], 1)
        return torch.where(spread.isfinite(), spread, values)


def block_hook(change: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    """A forward pre-hook of a block that replaces its residual stream, (batch, T, channel)."""

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if isinstance(kwargs.get("hidden_states"), Tensor):
            return args, kwargs | {"hidden_states": change(kwargs["hidden_states"])}
        if not args or not isinstance(args[0], Tensor):
            raise SinkscopeError(f"{type(module).__name__} does not read the residual stream as its first argument")
        return (change(args[0]), *args[1:]), kwargs

    return hook


def is_massive(x: Tensor, channels: Tensor) -> Tensor:
    """Which elements of these channels exceed both bounds of Sun et al., bool (batch, T, channel)."""
    bound = (MASSIVE_RATIO * median_abs(x.flatten(1).float())).clamp(min=MASSIVE_ABS)
    return x[..., channels.to(x.device)].abs() > bound[:, None, None]


def massive_elements(setting: Setting, name: str) -> Elements:
    """The run's channels with massive elements, by the block at whose input each first has some.

    Raises SinkscopeError where the run found none, or the block's path is not known or is called several times in a
    pass.
    """
    assert setting.run is not None  # `check_run` saw to it
    blocks = {site.layer: site for site in setting.sites if site.stream == "text"}
    stream = setting.run.summary.streams.get("text")
    elements: Elements = {}
    for channel in stream.massive_activations.channels if stream else ():
        site = blocks.get(min(channel.layers))
        if site is None or site.block is None or is_uncalled(setting.base.get_submodule(site.block)):
            raise SinkscopeError(f"--arm {name}: the input of layer {min(channel.layers)} was not found in the model")
        if setting.called_again(setting.base.get_submodule(site.block)):
            raise SinkscopeError(
                f"--arm {name}: {site.block} is called several times in a pass: its inputs cannot be changed apart"
            )
        elements.setdefault(site.block, []).append(channel.channel)
    if not elements:
        raise SinkscopeError(f"--arm {name}: the run found no massive activations in this model")
    return elements


def measured_means(setting: Setting, elements: Elements) -> Means:
    """Runs the unablated model over all sequences and sums up its massive elements."""
    sums = {
        path: torch.zeros(2, len(setting.ids), 2, len(channels), dtype=torch.float64)
        for path, channels in elements.items()
    }
    size = batch_size(setting.model, setting.ids.shape[1])
    for start in range(0, len(setting.ids), size):
        batch = setting.ids[start : start + size].to(setting.checkpoint.device)
        forward = Pass(setting, batch, start)
        with ExitStack() as stack:
            for path, channels in elements.items():
                keep = _keep(sums[path][:, start : start + len(batch)], torch.tensor(channels))
                stack.enter_context(forward.hooked(setting.base.get_submodule(path), block_hook(keep)))
            stack.enter_context(torch.no_grad())
            stack.enter_context(uncompiled())  # compiled code would not call the hooks
            Forward(setting.base)(batch)
    return sums


def _keep(target: Tensor, channels: Tensor) -> Callable[[Tensor], Tensor]:
    def keep(x: Tensor) -> Tensor:
        massive = is_massive(x, channels)
        values = torch.where(massive, x[..., channels.to(x.device)], 0.0).double()
        for place, part in ((0, slice(0, 1)), (1, slice(1, None))):
            target[0, :, place] = values[:, part].sum(1).cpu()
            target[1, :, place] = massive[:, part].sum(1).cpu()
        return x

    return keep


def read_massive(rest: str) -> Arm:
    """Reads what follows `massive:`."""
    parts = re.fullmatch(r"(zero|mean|random)(?:/(first|others))?", rest)
    if parts is None:
        raise SinkscopeError(f"{rest[:40]!r} replaces nothing")
    return ReplacedElements(parts[1], parts[2] or "")
