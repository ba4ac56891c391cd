"""The inputs of all linear modules rounded, as quantised activations are."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from sinkscope.capture.axes import by_sequence
from sinkscope.capture.output_projection import is_linear
from sinkscope.capture.registries import uncompiled
from sinkscope.capture.sites import shown_name
from sinkscope.checkpoints.forward import Forward, several_probes
from sinkscope.errors import SinkscopeError
from sinkscope.experiments.arms.arm import Arm, Pass, Setting
from sinkscope.experiments.arms.changes import WHOLE, around_zero
from sinkscope.experiments.arms.grammar import number
from sinkscope.experiments.arms.positions import SINKS, PositionArm, Positions, read_kept


@dataclass(frozen=True)
class RoundedActivations(PositionArm):
    """The input of every linear module of the base model rounded; the rows of the kept positions stay."""

    bits: int
    per_token: bool

    @property
    def name(self) -> str:
        return f"acts:{self.bits}/{'token' if self.per_token else 'tensor'}{self.positions.plus}"

    def ready(self, setting: Setting) -> Arm:
        self.positions.check(setting, self.name)
        for name, module in setting.base.named_modules():
            if isinstance(module, nn.Embedding) or is_linear(module) or (name and not setting.runs(name)):
                continue
            if any(parameter.ndim > 1 for parameter in module.parameters(recurse=False)):
                raise SinkscopeError(
                    f"--arm {self.name}: {shown_name(name)} multiplies by a matrix outside of linear modules, so not "
                    "every linear input can be rounded"
                )
        return self

    def companions(self) -> list[Arm]:
        """The same with the sinks in 16 bits: the difference is what sinks cost (d_sink)."""
        whole = self.positions.count == 0 and self.bits < WHOLE
        return [replace(self, positions=Positions(SINKS))] if whole else []

    @property
    def tries(self) -> bool:
        return True

    def tried(self, setting: Setting) -> Arm:
        """Tries whether every linear module reads a row for each token, once for all such arms."""
        if not setting.rows_read:
            ids = several_probes(setting.checkpoint)
            none = torch.zeros_like(ids, dtype=torch.bool)
            with torch.no_grad(), uncompiled(), self.in_force(Pass(setting, ids), none):
                Forward(setting.model)(ids)
            setting.rows_read = True
        return self

    @contextmanager
    def in_force(self, forward: Pass, mask: Tensor) -> Iterator[None]:
        with ExitStack() as stack:
            for name, module in forward.setting.base.named_modules():
                if is_linear(module):
                    stack.enter_context(forward.hooked(module, self._hook(name, mask)))
            yield

    def _hook(self, name: str, mask: Tensor) -> Callable[..., Any]:
        some = bool(mask.any())

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            x = args[0] if args and isinstance(args[0], Tensor) else None
            rows = None if x is None else by_sequence(x, *mask.shape)
            if x is None or rows is None:
                raise SinkscopeError(f"--arm {self.name}: {name} does not read a row for each token of the batch")
            kept = mask[..., None].to(x.device) if some else None
            rounded = around_zero(rows, self.bits, (2,) if self.per_token else (1, 2), kept)
            return (rounded.reshape(x.shape), *args[1:]), kwargs

        return hook


def read_acts(rest: str) -> Arm:
    """Reads what follows `acts:`."""
    parts = re.fullmatch(r"(\d+)/(tensor|token)(?:\+(.+))?", rest)
    if parts is None:
        raise SinkscopeError(f"{rest[:40]!r} rounds nothing")
    return RoundedActivations(read_kept(parts[3]), number(parts[1], "BITS", 2, WHOLE), parts[2] == "token")
