"""A LayerView for the code of others: it reads as ours does, and what it does to it stays with it.

The tensors share memory with those that the model and sinkscope's own columns read, so that nothing is copied. A torch
operation that would write into that memory is refused before it runs, and numpy gets copies.
"""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

from torch import Tensor
from torch.overrides import TorchFunctionMode

from sinkscope.capture.kernels.sums import AttentionSums
from sinkscope.capture.private_doors import before_operations, written_by
from sinkscope.capture.query_sums import QuerySums
from sinkscope.capture.token_sums import TokenSums
from sinkscope.capture.view import LayerView
from sinkscope.errors import SinkscopeError

SEALED = (LayerView, AttentionSums, QuerySums, TokenSums)
"""Classes whose attributes cannot be set anew in what others see."""

HANDING_OVER = (Tensor.numpy, Tensor.__array__, Tensor.__dlpack__, Tensor.untyped_storage)
"""Methods that hand a tensor's memory to code whose writes torch does not see."""


@contextmanager
def sealed(view: LayerView) -> Iterator[LayerView]:
    """A view that reads as `view`, until the block ends. What is computed through it is kept in it alone.

    Within the block SinkscopeError is raised where an attribute of it is set anew, and where a torch operation would
    write into its tensors, in this thread.
    """
    memory = _Memory()
    shown = memory.seal(view)
    with before_operations(memory.refuse_writes), _Copying(memory):
        yield shown


class _Memory:
    """The stretches of memory that the tensors of a view lie in."""

    def __init__(self) -> None:
        self._stretches: dict[int, int] = {}
        self._begins: list[int] = []
        self._asking = False

    def seal(self, value: Any) -> Any:
        """A copy of `value` whose tensors are other objects over the same memory."""
        if isinstance(value, Tensor):
            self._note(value)
            return value.detach()
        if isinstance(value, SEALED):
            kind: Any = type(value)
            copy: Any = object.__new__(_sealed_class(kind))
            vars(copy).update({name: self.seal(own) for name, own in vars(value).items()})
            return copy
        if type(value) in (list, tuple):
            return type(value)(self.seal(each) for each in value)
        return {key: self.seal(each) for key, each in value.items()} if isinstance(value, dict) else value

    def _note(self, tensor: Tensor) -> None:
        begin, size = self._place(tensor)
        self._stretches[begin] = max(self._stretches.get(begin, 0), size)
        self._begins = sorted(self._stretches)

    def holds(self, tensor: Any) -> bool:
        """Whether a tensor lies in memory of the view."""
        if self._asking or not isinstance(tensor, Tensor):
            return False
        begin, size = self._place(tensor)
        before = bisect_right(self._begins, begin + size - 1) - 1 if size else -1
        return before >= 0 and begin < self._begins[before] + self._stretches[self._begins[before]]

    def refuse_writes(self, operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Raises SinkscopeError for an operation that would write into memory of the view."""
        if any(self.holds(tensor) for tensor in written_by(operator, args, kwargs)):
            raise SinkscopeError("it writes into what it was shown; work on a copy: .clone()")

    def _place(self, tensor: Tensor) -> tuple[int, int]:
        """Where the memory of a tensor begins, and its bytes; (0, 0) for one without memory, such as one on meta."""
        self._asking = True  # `_Copying` sees this question too
        try:
            storage = tensor.untyped_storage()
            return storage.data_ptr(), storage.nbytes()
        except RuntimeError:  # NotImplementedError is one
            return 0, 0
        finally:
            self._asking = False


class _Copying(TorchFunctionMode):
    """Gives numpy, and other code outside torch, a copy of the view's memory."""

    def __init__(self, memory: _Memory) -> None:
        super().__init__()
        self._memory = memory

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in HANDING_OVER and self._memory.holds(args[0]):
            args = (args[0].clone(), *args[1:])
        return func(*args, **(kwargs or {}))


@functools.cache
def _sealed_class(kind: Any) -> type:
    """A class whose attributes are set once."""

    def refuse(self: object, name: str, value: object) -> None:
        if name in vars(self) or isinstance(getattr(kind, name, None), functools.cached_property):
            _refused(name)
        object.__setattr__(self, name, value)

    def keep(self: object, name: str) -> NoReturn:
        _refused(name)

    return type(kind.__name__, (kind,), {"__setattr__": refuse, "__delattr__": keep, "__module__": kind.__module__})


def _refused(name: str) -> NoReturn:
    raise SinkscopeError(f"it sets `{name}` of what it was shown, which is there to be read")
