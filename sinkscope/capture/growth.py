"""Tells that a layer of a cache was only added to: it still held the tensors that the last pass left in it, and nothing
was written into them. Then its slots need no reading."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from sinkscope.capture.generation_doors import growing_layers, set_growing
from sinkscope.capture.listeners import Listeners
from sinkscope.capture.private_doors import times_written


@dataclass(eq=False, slots=True)  # frozen ones take three times as long to make
class Slots:
    """The keys and values (B, G, `count`, d) that a layer held, which this does not keep alive: the references, of
    which Python has one for each tensor, the places of the numbers, which `.data = ` changes, and how often torch
    counted that something was written into each."""

    key: weakref.ref[Tensor]
    value: weakref.ref[Tensor]
    places: tuple[int, int]
    written: tuple[int, int]
    count: int

    @classmethod
    def of(cls, layer: Any) -> Slots | None:
        """Those of a layer now; None where it is empty, or where torch does not count what is written."""
        key, value = getattr(layer, "keys", None), getattr(layer, "values", None)
        if not isinstance(key, Tensor) or not isinstance(value, Tensor) or key.dim() != 4 or value.dim() != 4:
            return None
        if key.is_inference() or value.is_inference() or key.shape[2] != value.shape[2]:
            return None
        return cls._of(key, value)

    @classmethod
    def _of(cls, key: Tensor, value: Tensor) -> Slots:
        places, written = (key.data_ptr(), value.data_ptr()), (times_written(key), times_written(value))
        return cls(weakref.ref(key), weakref.ref(value), places, written, key.shape[2])

    def same(self, other: Slots | None) -> bool:
        """Whether the other ones are these, unchanged."""
        if other is None or self.key is not other.key or self.value is not other.value:
            return False
        return self.places == other.places and self.written == other.written

    @property
    def unwritten(self) -> tuple[Tensor, Tensor] | None:
        """The keys and values; None where one is gone, or where something was written into it since."""
        key, value = self.key(), self.value()
        if key is None or value is None or not self.same(self._of(key, value)):
            return None
        return key, value


@dataclass(eq=False, slots=True)  # frozen ones take three times as long to make
class Growth:
    """What transformers did when it put a pass's keys and values behind those of a layer.

    `layer`: the layer's id. `key`, `value`: what the pass attends to, `written` times each. `before`: the slots that
    are its first ones; None where the layer was empty. `left`: the slots that the layer holds now, where they are the
    newest of `key` and `value`; else None.
    """

    layer: int
    key: Tensor
    value: Tensor
    written: tuple[int, int]
    before: Slots | None
    left: Slots | None

    def is_of(self, key: Tensor, value: Tensor) -> bool:
        """Whether a call attended with these tensors, into which nothing was written."""
        same = key is self.key and value is self.value
        return same and self.written == (times_written(key), times_written(value))


GrowthEar = Callable[[Growth], None]


def cache_growth(ear: GrowthEar) -> AbstractContextManager[None]:
    """Tells `ear` of every layer of transformers' growing caches to which a pass adds in this thread, until the end."""
    return _listeners.joined_by(ear)


def _put() -> Callable[[], None]:
    plain = growing_layers()
    for kind, method in plain.items():
        set_growing(kind, _telling(kind, method))

    def back() -> None:
        for kind, method in plain.items():
            set_growing(kind, method)

    return back


_listeners: Listeners[GrowthEar] = Listeners(_put)


def _telling(kind: type[Any], method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def update(self: Any, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if type(self) is not kind or torch.compiler.is_compiling() or not (ears := _listeners.here()):
            return method(self, key_states, value_states, *args, **kwargs)
        before = _slots(self)
        result = method(self, key_states, value_states, *args, **kwargs)
        with suppress(Exception):  # whatever it is, the cache is somebody else's and goes on
            growth = _growth(self, before, key_states.shape[-2], result)
            if growth is not None:
                for ear in ears:
                    ear(growth)
        return result

    return update


def _slots(layer: Any) -> Slots | None:
    """The slots of a layer; None also where they are no plain tensors, as in torch.vmap."""
    try:
        return Slots.of(layer)
    except Exception:  # as above
        return None


def _growth(layer: Any, before: Slots | None, new: int, result: Any) -> Growth | None:
    """None where the layer gave back something else than its slots and the new ones behind them."""
    key, value = result if isinstance(result, tuple) and len(result) == 2 else (None, None)
    left = Slots.of(layer)
    if left is None or not isinstance(key, Tensor) or not isinstance(value, Tensor) or key.dim() != 4:
        return None
    if key.shape[2] != (0 if before is None else before.count) + new:
        return None
    newest = _are_newest(layer.keys, key) and _are_newest(layer.values, value)
    written = times_written(key), times_written(value)
    return Growth(id(layer), key, value, written, before, left if newest else None)


def _are_newest(held: Tensor, whole: Tensor) -> bool:
    """Whether a tensor is another one, or shows the memory of its last slots."""
    if held is whole:
        return True
    first = (whole.shape[2] - held.shape[2]) * whole.stride(2) * whole.element_size()
    place = held.data_ptr() - whole.data_ptr()
    return (held.stride(), held.dtype, place) == (whole.stride(), whole.dtype, first)
