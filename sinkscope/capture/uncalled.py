"""Blocks that a model never calls: a block that is a mere list or dict of modules, which the model calls one by one.

    for attention, mlp in self.layers:
        x = x + attention(x)
        x = x + mlp(x)

What enters such a block (x) is what the first of its modules to run is given. What leaves it (e) is what enters the
next one. Of the last one it is not known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from sinkscope.capture.axes import hidden_given
from sinkscope.capture.hooks import hooked


def is_uncalled(module: nn.Module) -> bool:
    """Whether a module has no forward of its own: it only holds others."""
    return isinstance(module, nn.ModuleList | nn.ModuleDict)


def uncalled_around(model: nn.Module, path: str) -> tuple[str, ...]:
    """The paths of the blocks that the model never calls and that hold the module at `path`, the outermost first: the
    lists and dicts straight above it that stand in another."""
    parents = []
    above = path.rpartition(".")[0]
    while above and is_uncalled(model.get_submodule(above)):
        parents.append(above)
        above = above.rpartition(".")[0]
    return tuple(reversed([block for block in parents if is_uncalled(model.get_submodule(block.rpartition(".")[0]))]))


def members(model: nn.Module, block: str) -> Iterator[str]:
    """The paths of the modules in a block that the model calls: its children, and those of lists and dicts in it."""
    module = model.get_submodule(block)
    if not is_uncalled(module):
        yield block
        return
    for name, _ in module.named_children():
        yield from members(model, f"{block}.{name}")


def is_stream(hidden: object) -> bool:
    """Whether a module is given hidden states of three axes."""
    return isinstance(hidden, Tensor) and hidden.dim() == 3 and hidden.is_floating_point()


@dataclass
class _Open:
    """A block whose modules run: `begins`, the first of them; `again`, what this was given since in another call."""

    path: str
    begins: str
    given: Any
    again: Any = None


class Uncalled:
    """Follows those of `blocks` that the model never calls, through one pass after another.

    `begins(block, given)` is told what enters one, `ends(block, leaving)` what leaves it.
    """

    def __init__(
        self, model: nn.Module, blocks: Iterable[str], begins: Callable[[str, Any], None],
        ends: Callable[[str, Any], None],
    ) -> None:  # fmt: skip
        self._model, self._begins, self._ends = model, begins, ends
        self._paths = frozenset(block for block in blocks if is_uncalled(model.get_submodule(block)))
        self._open: dict[str, _Open] = {}

    def hooks(self) -> Iterator[AbstractContextManager[None]]:
        """The hooks on the modules of these blocks, and of those beside them in a list."""
        self._open.clear()
        holders = {path.rpartition(".")[0] for path in self._paths}
        for holder in sorted(holders):
            for name, _ in self._model.get_submodule(holder).named_children():
                for member in members(self._model, block := f"{holder}.{name}"):
                    hook = self._entering(holder, block, member)
                    yield hooked(self._model.get_submodule(member), pre=hook, with_kwargs=True)

    def _entering(self, holder: str, block: str, member: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given, now = hidden_given(args, kwargs), self._open.get(holder)
            if now is None or now.path != block:
                if now is not None:
                    self._ends(now.path, given)
                self._open[holder] = _Open(block, member, given)
                self._begins(block, given)
            elif member == now.begins:
                now.again = given
            elif not is_stream(now.given):
                now.given = given
                self._begins(block, given)

        return hook

    def attends(self, block: str | None, again: bool) -> None:
        """Takes note of an attention call in a block, before it is kept. `again`: its module attended before in this
        round, so that the block is a loop's and begins anew."""
        now = self._open.get((block or "").rpartition(".")[0])
        if now is None or now.path != block:
            return
        if again and now.again is not None:
            self._ends(block, now.again)
            self._begins(block, now.again)
        now.again = None
