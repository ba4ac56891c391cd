"""What one pass keeps of every block, so that tokens that are known only at its end need no second pass.

These are tensors that the model makes anyway, kept without a copy: what enters a block, what its parts write, and what
its MLP reads. The MLP's neurons are four times as wide, so that they are not kept: the MLP reads the few tokens again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from sinkscope.capture.axes import by_sequence
from sinkscope.capture.hooks import hooked
from sinkscope.capture.private_doors import times_written
from sinkscope.wiring.parts import Parts, first_tensor, stream_in

KEPT_BYTES = 3 * 2**28
"""The most that one batch keeps. A larger one keeps nothing."""

AGREED, AGREED_HALF = 1e-4, 2e-2
"""How far what a module writes at one token may differ, relatively to the largest element, between the pass and a
reading of this token alone, in float32 and in 16 bits."""

ENTERING, ATTENTION, MLP, READ, GIVEN = range(5)
"""What is kept of a block: the residual stream, what attention and the MLP write, what the module around the neurons
reads and what it gives, which a norm may follow."""


class Kept:
    """The tensors of one pass over a batch of `count` sequences, by block and place."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._tensors: dict[tuple[str, int], tuple[Tensor, int]] = {}
        self._sizes: dict[int, int] = {}
        self._in_one_row: set[str] = set()
        self._lost = False

    def hooks(self, model: nn.Module, block: str, parts: Parts) -> Iterator[AbstractContextManager[None]]:
        """Hooks that keep what one block reads and its parts write."""

        def entering(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._keep(block, ENTERING, stream_in(args, kwargs))

        def reading(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            alone = len(args) == 1 and not kwargs and isinstance(args[0], Tensor)
            self._keep(block, READ, args[0] if alone and args[0].dim() in (2, 3) else None)

        def writing(place: int) -> Callable[..., None]:
            return lambda module, args, output: self._keep(block, place, first_tensor(output))

        yield hooked(model.get_submodule(block), pre=entering, with_kwargs=True)
        yield hooked(model.get_submodule(parts.attention), post=writing(ATTENTION))
        if parts.mlp is not None:
            yield hooked(model.get_submodule(parts.mlp), post=writing(MLP))
        if parts.neurons is not None:
            around = model.get_submodule(_around(block, parts.neurons))
            yield hooked(around, pre=reading, with_kwargs=True)
            yield hooked(around, post=writing(GIVEN))

    def _keep(self, block: str, place: int, tensor: Tensor | None) -> None:
        rows = None if self._lost or tensor is None or tensor.is_inference() else self._rows(block, place, tensor)
        if tensor is None or rows is None:
            self._tensors.pop((block, place), None)
            return
        self._tensors[block, place] = rows, times_written(rows)
        if place == READ:
            (self._in_one_row.add if tensor.dim() == 2 else self._in_one_row.discard)(block)
        self._sizes[tensor.data_ptr()] = tensor.nbytes
        if sum(self._sizes.values()) > KEPT_BYTES:
            self._lost = True
            self.drop()

    def _rows(self, block: str, place: int, tensor: Tensor) -> Tensor | None:
        """[sequence, token, channel]; the residual stream of the block, which comes first, says how many tokens."""
        if place == ENTERING:
            return tensor if len(tensor) == self._count else None
        entering, _ = self._tensors.get((block, ENTERING), (None, 0))
        return None if entering is None else by_sequence(tensor, *entering.shape[:2])

    def drop(self) -> None:
        """Lets all tensors go."""
        self._tensors.clear()
        self._sizes.clear()

    def at(self, block: str, place: int, tokens: Tensor) -> Tensor | None:
        """[sequence, channel]: what was kept, at one token of each sequence; None where nothing was, or where the model
        has written into it since."""
        tensor, version = self._tensors.get((block, place), (None, 0))
        if tensor is None or times_written(tensor) != version:
            return None
        return tensor[torch.arange(self._count, device=tensor.device), tokens.to(tensor.device)]

    def neurons(self, model: nn.Module, block: str, path: str, tokens: Tensor) -> Tensor | None:
        """[sequence, neuron]: what the linear layer at `path` reads at one token of each sequence.

        The module around it reads these tokens again; None where it then gives something else than in the pass, as one
        may that mixes tokens.
        """
        read, given = self.at(block, READ, tokens), self.at(block, GIVEN, tokens)
        around = _around(block, path)
        if around == path:
            return read
        if read is None or given is None:
            return None
        seen: list[Tensor] = []
        with torch.no_grad(), hooked(model.get_submodule(path), pre=lambda module, args: seen.append(args[0])):
            again = first_tensor(model.get_submodule(around)(read if block in self._in_one_row else read[:, None]))
        written = None if again is None else by_sequence(again, self._count, 1)
        neurons = by_sequence(seen[-1], self._count, 1) if seen else None
        if written is None or neurons is None or written[:, 0].shape != given.shape:
            return None
        bound = AGREED if given.dtype.itemsize >= 4 else AGREED_HALF
        close = (written[:, 0] - given).abs().amax() <= bound * given.abs().amax()
        return neurons[:, 0] if bool(close) else None


def _around(block: str, path: str) -> str:
    """The child of the block that holds the module at a path, or is it."""
    return f"{block}.{path.removeprefix(f'{block}.').partition('.')[0]}"
