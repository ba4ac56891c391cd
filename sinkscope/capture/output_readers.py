"""Finds an attention module's output projection by the values that it reads: in a model's own code before any name, in
transformers' attention where no name tells it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from sinkscope.capture.hooks import first_returned, hooked
from sinkscope.capture.inline.calls import as_output, check_axes
from sinkscope.capture.output_projection import is_linear

SORTED_AT_MOST = 1 << 20
"""Numbers that are sorted at the most, to see whether a layer reads them in another order: as many as a dry run has."""


class OutputReaders:
    """The linear layers that read what attention calls return, just as they return it.

    A model may give its output projection any name. It is the layer that reads the output of an attention call, where
    the attending module returns what this layer returns; of a layer outside of it, the nearest module around both does.
    Nothing else then changes what heads write. Where several layers read the output, none is known to be the
    projection, unless its name says so.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._readers: dict[str, set[str]] = {}
        self._open: dict[str, tuple[str, Tensor | None]] = {}
        self._alone: dict[str, bool] = {}
        self._ran: set[str] = set()
        self._ran_after: dict[str, set[str]] = {}
        self._turned: set[str] = set()
        self._last: tuple[str, Tensor] | None = None
        self._steered: dict[str, str] = {}

    def given(self, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Takes note of a layer that was given something beside what it reads, its first argument."""
        if not args:
            return
        named = kwargs
        if len(args) > 1 and is_linear(module):
            names = [*inspect.signature(module.forward).parameters][1 : len(args)]
            named = dict(zip(names, args[1:], strict=False)) | kwargs
        if named and (beside := _steering(module, named)):
            self._steered[path] = beside

    def steered(self, path: str | None) -> str | None:
        """What the layer at a path was given beside what it reads, by name; None without such. See Site."""
        return None if path is None else self._steered.get(path)

    def forget_given(self) -> None:
        """Forgets which layers were given keywords: another pass begins."""
        self._steered.clear()

    def of(self, module: str) -> str | None:
        """The path of the layer that is known to be the projection of this attention module; None without one."""
        readers = self._readers.get(module, set())
        return next((path for path in readers if len(readers) == 1 and self._alone.get(path)), None)

    def read_by(self, module: str, path: str) -> bool:
        """Whether the layer at `path` was seen to read the output of a call of this module."""
        return path in self._readers.get(module, set())

    def returned_by(self, module: str) -> bool:
        """Whether the attention module is known to return what its projection returns: attention alone."""
        readers = self._readers.get(module, set())
        return any(self._alone.get(path) and self.target(module, path) == module for path in readers)

    def projection(self, module: str, named: str | None) -> str | None:
        """The projection of an attention module in a model's own code: the one that is known, else the one that its
        name tells, unless another layer reads the heads, or this one runs before attention alone or reads them in
        another order."""
        known = self.of(module)
        if known is not None or named is None:
            return known
        named = self._paths.get(self.model.get_submodule(named), named)  # a module may have several names
        readers = self._readers.get(module)
        if readers is not None:
            return named if named in readers else None
        before = named in self._ran and named not in self._ran_after.get(module, set())
        return None if before or named in self._turned else named

    @cached_property
    def _paths(self) -> dict[nn.Module, str]:
        return {module: path for path, module in self.model.named_modules()}

    def ran(self, path: str, after: str | None) -> None:
        """Takes note of a linear layer that runs, behind the last call of the module `after`, if any."""
        self._ran.add(path)
        if after is not None:
            self._ran_after.setdefault(after, set()).add(path)

    def compare(self, module: str, output: Tensor, path: str, read: Tensor) -> bool:
        """Whether the layer at `path` reads the `output`, (B, T, H, dv), of a call of this module. Raises as
        `check_axes`."""
        if read.numel() != output.numel():
            return False
        read = read.to(output.device)  # the layer may stand on the next device
        same = as_output(output, read) is not None
        if same:
            self._readers.setdefault(module, set()).add(path)
            self._open[path] = self.target(module, path), None
        elif _sorted_alike(output, read):
            check_axes(module, output, read)
            self._turned.add(path)
        return same

    def target(self, module: str, path: str) -> str:
        """The module that returns what the projection at `path` returns: the attending module where the layer is inside
        of it, else the nearest around both that is no mere list of modules."""
        above = module
        while above and (not path.startswith(f"{above}.") or self._is_list(above)):
            above = above.rpartition(".")[0]
        return above

    def _is_list(self, path: str) -> bool:
        return isinstance(self.model.get_submodule(path), nn.ModuleList | nn.ModuleDict)

    def awaits(self, path: str) -> bool:
        """Whether it needs to know what the module at this path returns: a layer that reads heads, or its target."""
        return path in self._open or any(path == target for target, _ in self._open.values())

    def returned(self, path: str, output: Any) -> None:
        """Takes what a module returns that it awaits."""
        given = first_returned(output)
        tensor = given if isinstance(given, Tensor) else None
        if path in self._open:
            self._open[path] = self._open[path][0], tensor
        for reader in [reader for reader, (target, _) in self._open.items() if target == path]:
            _, own = self._open.pop(reader)
            known = own is not None and tensor is not None and own.shape == tensor.shape
            same = known and torch.equal(own.to(tensor.device), tensor)  # type: ignore[union-attr, arg-type]
            self._alone[reader] = same and self._alone.get(reader, True)

    def attended(self, module: str, output: Tensor | None) -> None:
        """Takes note of what a call of this module returned, (B, T, H, dv), for `listening`."""
        self._last = None if output is None or output.is_meta else (module, output)

    @contextmanager
    def listening(self, aside: Callable[[], Any]) -> Iterator[None]:
        """Hears the model's modules until the block ends. `aside` makes a context for our own computations."""

        def before(path: str) -> Callable[..., None]:
            def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
                self.ran(path, None if self._last is None else self._last[0])
                if self._last is not None and args and isinstance(args[0], Tensor):
                    with aside():
                        self.compare(*self._last, path, args[0])

            return hook

        def after(path: str) -> Callable[..., None]:
            def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
                self.given(path, module, args, kwargs)
                if self.awaits(path):
                    with aside():
                        self.returned(path, output)

            return hook

        with ExitStack() as stack:
            for path, module in self.model.named_modules():
                if is_linear(module):
                    stack.enter_context(hooked(module, pre=before(path)))
                stack.enter_context(hooked(module, post=after(path), with_kwargs=True))
            yield


def _sorted_alike(output: Tensor, read: Tensor) -> bool:
    """Whether a layer reads the numbers of an attention output in another order."""
    if output.numel() > SORTED_AT_MOST or not read.is_floating_point():
        return False
    ours, theirs = (each.detach().flatten().float().sort().values for each in (output, read))
    return torch.allclose(ours, theirs, rtol=1e-3, atol=1e-6)


def _steering(module: nn.Module, kwargs: dict[str, Any]) -> str | None:
    """The first keyword with which a module was given more than what it reads. A switch, and a number or name that is
    its default, are none: they are the same for every token."""
    for keyword, given in kwargs.items():
        if given is None or isinstance(given, bool):
            continue
        if isinstance(given, int | float | str) and given == _default(module, keyword):
            continue
        return keyword
    return None


def _default(module: nn.Module, keyword: str) -> Any:
    known = inspect.signature(module.forward).parameters.get(keyword)
    return None if known is None else known.default
