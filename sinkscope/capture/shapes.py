"""Runs a model whose weights are shapes without numbers, and counts what the pass would compute and hold in memory.

The weights are on torch's meta device. What is computed of positions alone (indices, masks) has no weights in it, so it
is computed with its numbers, on the CPU: what a model decides by its positions, it decides as in a scan.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from sinkscope.capture.calls import AttentionCall
from sinkscope.capture.private_doors import dispatch_mode, flop_counts, grouped_product, storage_number

META, CPU = torch.device("meta"), torch.device("cpu")


def shape_of(call: AttentionCall) -> Tensor:
    """The output of a call without numbers, (B, Tq, H, dv)."""
    batch, heads, queries, _ = call.query.shape
    return call.query.new_empty(batch, queries, heads, call.value.shape[-1])


class Shapes(dispatch_mode()):  # type: ignore[misc]
    """While the context lasts, this thread's torch calls on weights give shapes.

    Attributes:
        flops: floating-point operations of the matrix products and convolutions, an addition and a multiplication
            counted as two.
        peak: most bytes that were held at once by results, without the weights.
        operations: the number of torch operations on shapes.

    A model that decides by a number which comes of its weights raises RuntimeError: there is no such number.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops = self.peak = self.operations = 0
        self._counts, self._grouped = flop_counts(), grouped_product()
        self._held: dict[int, int] = {}
        self._live = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors: list[Tensor] = []
        _tensors((args, kwargs), tensors)
        shaped = any(tensor.is_meta for tensor in tensors)
        if kwargs.get("device") is not None:
            # What a model makes on the device of its weights, such as positions, has numbers of its own.
            kwargs = {**kwargs, "device": META if shaped else CPU}
        if not shaped:
            return func(*args, **kwargs)
        if not all(tensor.is_meta for tensor in tensors):
            args, kwargs = _as_shapes(args), _as_shapes(kwargs)
        result = self._result(func, args, kwargs)
        made: list[Tensor] = []
        _tensors(result, made)
        if made:
            storages = {storage_number(tensor) for tensor in tensors if tensor.is_meta}
            for tensor in made:
                if tensor.is_meta and storage_number(tensor) not in storages:
                    self._hold(tensor)
        return result

    def _result(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs an operator on shapes and counts it."""
        self.operations += 1
        if func.overloadpacket is self._grouped:
            left, right = args[:2]
            self.flops += 2 * left.shape[-2] * left.shape[-1] * right.shape[-1]
            return left.new_empty(*left.shape[:-1], right.shape[-1])
        result = func(*args, **kwargs)
        count = self._counts.get(func.overloadpacket)
        if count is not None:
            self.flops += int(count(*args, **kwargs, out_val=result))
        return result

    def _hold(self, made: Tensor) -> None:
        storage, key = made.untyped_storage(), storage_number(made)
        if key in self._held:
            return
        self._held[key] = storage.nbytes()
        self._live += self._held[key]
        self.peak = max(self.peak, self._live)
        weakref.finalize(storage, self._release, key)

    def _release(self, key: int) -> None:
        self._live -= self._held.pop(key)


def _as_shapes(value: Any) -> Any:
    """The same nested lists, tuples and dictionaries with shapes for tensors."""
    if isinstance(value, Tensor):
        return value.to(META)
    if isinstance(value, list | tuple):
        return type(value)([_as_shapes(item) for item in value])
    return {name: _as_shapes(item) for name, item in value.items()} if isinstance(value, dict) else value


def _tensors(value: Any, found: list[Tensor]) -> None:
    """Collects the tensors in nested lists, tuples and dictionaries."""
    if isinstance(value, Tensor):
        found.append(value)
    elif isinstance(value, list | tuple):
        for item in value:
            _tensors(item, found)
    elif isinstance(value, dict):
        for item in value.values():
            _tensors(item, found)
