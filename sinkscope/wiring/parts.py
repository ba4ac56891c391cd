"""Finds what a block adds to the residual stream, attention's part and the MLP's, by the values and not by names.

A block with residual stream x at its input and e at its output adds e - x. Where that is the sum of what two of its
children return (attention and MLP, or the norms after them), these two write the parts. A block that normalises the
stream itself (BERT), multiplies what it adds, or adds three parts (T5's decoder), has no such two, and nothing is
guessed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn

from sinkscope.capture.axes import by_sequence
from sinkscope.capture.hooks import first_returned, hooked
from sinkscope.capture.output_projection import is_linear
from sinkscope.capture.plan import Plan
from sinkscope.capture.precision import as_float64
from sinkscope.capture.private_doors import times_written

FIT = 1e-3
"""Largest error of x + parts = e, over the size of the parts, at the median token; FIT_HALF in half precision."""
FIT_HALF = 0.2


@dataclass(frozen=True)
class Parts:
    """The modules that write a block's parts, as paths.

    Attributes:
        attention, mlp: modules whose outputs are added to the residual stream; `mlp` None where attention is all.
        neurons: the linear layer that reads the MLP's neurons and gives its output; None where several do (experts).
    """

    attention: str
    mlp: str | None
    neurons: str | None


def first_tensor(output: Any) -> Tensor | None:
    """What a module returns, or the first of several; None where that is no tensor."""
    first = first_returned(output)
    return first if isinstance(first, Tensor) else None


def stream_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """The residual stream that a block is called with."""
    stream = kwargs.get("hidden_states", args[0] if args else None)
    return stream if isinstance(stream, Tensor) and stream.dim() == 3 else None


def find_parts(model: nn.Module, plan: Plan, forward: Callable[[], Any]) -> dict[str, Parts]:
    """The parts of every block, by its path; one that they cannot be found in is left out.

    `forward` runs the model on a few short sequences.
    """
    parts: dict[str, Parts] = {}
    with ExitStack() as stack, torch.no_grad():
        for site in plan.sites:
            if site.block is not None and not site.cross:
                for hooks in _Search(model, site.block, site.module, parts).hooks():
                    stack.enter_context(hooks)
        forward()
    return parts


def _children(module: nn.Module, path: str, attention: str) -> Iterator[str]:
    """The paths of a block's children. A list that holds attention is never called: T5's blocks keep in it two modules
    that add their part themselves, and their children write the parts."""
    for name, child in module.named_children():
        if isinstance(child, nn.ModuleList) and attention.startswith(f"{path}.{name}."):
            for number, member in child.named_children():
                yield from (f"{path}.{name}.{number}.{inner}" for inner, _ in member.named_children())
        else:
            yield f"{path}.{name}"


class _Search:
    """The outputs of one block's modules during the pass."""

    def __init__(self, model: nn.Module, block: str, attention: str, found: dict[str, Parts]) -> None:
        self.module, self.block, self.found = model.get_submodule(block), block, found
        self.children = list(_children(self.module, block, attention))
        self.attended = next((path for path in self.children if f"{attention}.".startswith(f"{path}.")), None)
        self.outputs: dict[str, Tensor] = {}
        self.linear: dict[str, Tensor] = {}
        self.versions: dict[str, int] = {}
        self.x: Tensor | None = None

    def hooks(self) -> Iterator[AbstractContextManager[None]]:
        yield hooked(self.module, pre=self._begin, with_kwargs=True)
        for name, module in self.module.named_modules():
            path = f"{self.block}.{name}"
            if path in self.children:
                yield hooked(module, post=self._keep(path, self.outputs))
            if is_linear(module):
                yield hooked(module, post=self._keep(path, self.linear))
        yield hooked(self.module, post=self._end)

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.outputs.clear()
        self.linear.clear()
        self.x = stream_in(args, kwargs)

    def _keep(self, path: str, kept: dict[str, Tensor]) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            tensor = first_tensor(output)
            if tensor is None or self.x is None or tensor.shape[-1:] != self.x.shape[-1:]:
                return
            rows = by_sequence(tensor, *self.x.shape[:2])  # OPT's MLP runs on the tokens of all sequences in one row
            if rows is not None:
                kept.pop(path, None)  # the order of the last calls
                kept[path] = rows
                self.versions[path] = times_written(rows)

        return hook

    def _end(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        e = first_tensor(output)
        if self.x is None or e is None or e.shape != self.x.shape or self.attended is None:
            return
        pair = self._pair(e)
        if pair is not None:
            self.found[self.block] = self._parts(pair)
        self.outputs.clear()
        self.linear.clear()

    def _pair(self, e: Tensor) -> tuple[str, ...] | None:
        """The children that add up to e - x, in the order of their calls; of equal ones the first."""
        assert self.x is not None
        change = as_float64(e) - as_float64(self.x)
        bound = FIT if e.dtype in (torch.float32, torch.float64) else FIT_HALF
        best: tuple[str, ...] | None = None
        for pair in [*combinations(self.outputs, 2), *((path,) for path in self.outputs)]:
            parts = sum(as_float64(self.outputs[path]) for path in pair)
            assert isinstance(parts, Tensor)
            size = torch.linalg.vector_norm(parts, dim=-1).clamp(min=1e-30)
            error = float((torch.linalg.vector_norm(parts - change, dim=-1) / size).median())
            if error < bound:
                best, bound = pair, error
        return best

    def _parts(self, pair: tuple[str, ...]) -> Parts:
        order = list(self.outputs)
        after = [path for path in pair if order.index(path) >= order.index(self.attended or pair[0])]
        attention = after[0] if after else pair[0]
        mlp = next((path for path in pair if path != attention), None)
        return Parts(attention, mlp, None if mlp is None else self._neurons())

    def _neurons(self) -> str | None:
        """The last linear layer outside attention, where a child of the block returns just what it returns."""
        outside = [path for path in self.linear if not f"{path}.".startswith(f"{self.attended}.")]
        for path in reversed(outside):
            child = next(child for child in self.children if f"{path}.".startswith(f"{child}."))
            # Llama-4 adds what the experts give to the tensor that its shared expert has returned.
            untouched = times_written(self.linear[path]) == self.versions[path]
            same = child in self.outputs and torch.equal(self.outputs[child], self.linear[path])
            return path if same and untouched else None
        return None
