"""Finds an attention module's output projection by the values that it reads, where no name tells it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from sinkscope.capture.hooks import hooked
from sinkscope.capture.inline.calls import as_output
from sinkscope.capture.output_projection import is_linear


class OutputReaders:
    """The linear layers that read what attention calls return, just as they return it.

    A model may give its output projection any name. It is the layer that reads the output of an attention call, where
    the module around this layer returns what the layer returns: nothing else then changes what heads write. Where
    several layers read the output, none is known to be the projection.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._readers: dict[str, set[str]] = {}
        self._open: dict[str, Tensor | None] = {}
        self._alone: dict[str, bool] = {}
        self._last: tuple[str, Tensor] | None = None

    def of(self, module: str) -> str | None:
        """The path of the projection of this attention module; None where no layer is known to be it."""
        readers = self._readers.get(module, set())
        return next((path for path in readers if len(readers) == 1 and self._alone.get(path)), None)

    def compare(self, module: str, output: Tensor, path: str, read: Tensor) -> bool:
        """Whether the layer at `path` reads the `output`, (B, T, H, dv), of a call of this module."""
        same = read.numel() == output.numel() and as_output(output, read) is not None
        if same:
            self._readers.setdefault(module, set()).add(path)
            self._open[path] = None
        return same

    def around(self, path: str) -> str:
        """The path of the module that calls the layer at `path`: the nearest around it that is no mere list of
        modules."""
        above = path.rpartition(".")[0]
        lists = isinstance(self.model.get_submodule(above), nn.ModuleList | nn.ModuleDict)
        return self.around(above) if lists and above else above

    def awaits(self, path: str) -> bool:
        """Whether it needs to know what the module at this path returns: a layer that reads heads, or one around it."""
        return path in self._open or path in map(self.around, self._open)

    def returned(self, path: str, output: Any) -> None:
        """Takes what a module returns that it awaits."""
        given = output[0] if isinstance(output, tuple) and output else output
        tensor = given if isinstance(given, Tensor) else None
        if path in self._open:
            self._open[path] = tensor
        for reader in [reader for reader in self._open if self.around(reader) == path]:
            own = self._open.pop(reader)
            same = own is not None and tensor is not None and own.shape == tensor.shape and torch.equal(own, tensor)
            self._alone[reader] = same and self._alone.get(reader, True)

    def attended(self, module: str, output: Tensor | None) -> None:
        """Takes note of what a call of this module returned, (B, T, H, dv), for `listening`."""
        self._last = None if output is None or output.is_meta else (module, output)

    @contextmanager
    def listening(self, aside: Callable[[], Any]) -> Iterator[None]:
        """Hears the model's linear layers until the block ends. `aside` makes a context for our own computations."""

        def before(path: str) -> Callable[..., None]:
            def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
                if self._last is not None and args and isinstance(args[0], Tensor):
                    with aside():
                        self.compare(*self._last, path, args[0])

            return hook

        def after(path: str) -> Callable[..., None]:
            def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
                if self.awaits(path):
                    with aside():
                        self.returned(path, output)

            return hook

        linear = {path: module for path, module in self.model.named_modules() if is_linear(module)}
        with ExitStack() as stack:
            for path, module in linear.items():
                stack.enter_context(hooked(module, pre=before(path)))
            for path in sorted({*linear, *map(self.around, linear)}):
                stack.enter_context(hooked(self.model.get_submodule(path), post=after(path)))
            yield
