"""One neuron of an MLP set to 0, where the MLP's last projection reads it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from sinkscope.capture.output_projection import is_linear, widths
from sinkscope.errors import SinkscopeError
from sinkscope.experiments.arms.arm import Arm, Pass, Setting
from sinkscope.experiments.arms.grammar import number


@dataclass(frozen=True)
class ZeroedNeuron(Arm):
    """Neuron `neuron` of the MLP of layer `layer` set to 0 at every position; None draws one."""

    layer: int
    neuron: int | None

    @property
    def random(self) -> bool:
        return self.neuron is None

    @property
    def name(self) -> str:
        return f"neuron:{self.layer}.{'random' if self.neuron is None else self.neuron}"

    def ready(self, setting: Setting) -> Arm:
        width = down_projection(setting, self)[1]
        if self.neuron is not None and self.neuron >= width:
            raise SinkscopeError(f"--arm {self.name}: the MLP of layer {self.layer} has only {width} neurons")
        return self

    @contextmanager
    def applied(self, forward: Pass) -> Iterator[None]:
        projection, width = down_projection(forward.setting, self)
        neuron = self.neuron
        if neuron is None:
            neuron = int(forward.common_generator().integers(width))
        forward.touches(1)
        with forward.hooked(projection, _zero(neuron)):
            yield

    def changes(self, forward: Pass) -> Iterable[str] | None:
        return {site.block for site in forward.setting.sites if site.layer == self.layer and site.block is not None}

    def control(self) -> Arm | None:
        return None if self.neuron is None else ZeroedNeuron(self.layer, None)


def _zero(neuron: int) -> Callable[..., Any]:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x: Tensor = args[0].clone()
        x[..., neuron] = 0.0
        return (x, *args[1:]), kwargs

    return hook


def down_projection(setting: Setting, arm: ZeroedNeuron) -> tuple[nn.Module, int]:
    """The linear module by which the MLP of the arm's layer writes to the residual stream, and its number of inputs.

    It is the one linear module of the block, outside its attention, that is as wide as the residual stream on its way
    out and not on its way in. In a block without one it is, of several neighbours that are as wide both ways, the one
    that a pass calls last: such an MLP has as many neurons as the stream has channels.

    Raises SinkscopeError where there is not exactly one (experts, parallel MLPs), also where the matrices of experts
    are packed into one tensor beside an expert that all tokens share; and where it is called several times in a pass.
    """
    sites = [site for site in setting.sites if site.layer == arm.layer and site.block is not None]
    blocks = {site.block for site in sites}
    if len(blocks) != 1:
        raise SinkscopeError(f"--arm {arm.name}: the model has no layer {arm.layer}")
    inside = {site.module.removeprefix(f"{site.block}.") for site in sites}
    stream = setting.base.config.get_text_config().hidden_size  # type: ignore[union-attr, operator]
    path, projections, square, experts = str(blocks.pop()), list[tuple[nn.Module, int]](), dict[str, list[str]](), False
    for name, module in setting.base.get_submodule(path).named_modules():
        if any(name == attention or name.startswith(f"{attention}.") for attention in inside):
            continue
        experts |= any(parameter.ndim > 2 for parameter in module.parameters(recurse=False))
        if is_linear(module):
            wide, out = widths(module)
            if wide != out == stream:
                projections.append((module, wide))
            elif out == stream:
                square.setdefault(name.rpartition(".")[0], []).append(f"{path}.{name}")
    if not projections:
        projections = [(module, stream) for module in _last_of(setting, square.values())]
    if len(projections) != 1:
        raise SinkscopeError(
            f"--arm {arm.name}: layer {arm.layer} has {len(projections)} projections from neurons to the residual "
            "stream: one is needed"
        )
    if experts:
        raise SinkscopeError(
            f"--arm {arm.name}: layer {arm.layer} has experts, and only the one that all tokens share is in reach: its "
            "neurons are not those of the MLP"
        )
    if setting.called_again(projections[0][0]):
        raise SinkscopeError(
            f"--arm {arm.name}: the MLP of layer {arm.layer} is called several times in a pass: its neurons cannot be "
            "set to 0 apart"
        )
    return projections[0]


def _last_of(setting: Setting, square: Iterable[list[str]]) -> list[nn.Module]:
    """The linear module that a pass calls last among neighbours that are as wide both ways; none without such ones, or
    with some in several places."""
    called = [[call for call in setting.plan.calls if call in paths] for paths in square]
    neighbours = [paths for paths in called if len(paths) > 1]
    return [setting.base.get_submodule(paths[-1]) for paths in neighbours] if len(neighbours) == 1 else []


def read_neuron(rest: str) -> Arm:
    """Reads what follows `neuron:`."""
    parts = re.fullmatch(r"(\d+)\.(\d+|random)", rest)
    if parts is None:
        raise SinkscopeError(f"{rest[:40]!r} names no neuron")
    layer = number(parts[1], "the layer", 0)
    return ZeroedNeuron(layer, None if parts[2] == "random" else number(parts[2], "the neuron", 0))
