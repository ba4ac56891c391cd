"""Tells whether a model may go on with a pass over a cache that no object of transformers holds.

A model's own code keeps keys and values in whatever it likes: tensors that it returns, buffers, an object that it is
given. What was kept shows in the next pass: its first keys are, bit by bit, those of this one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import islice
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from sinkscope.capture.calls import MaskReadings
from sinkscope.capture.heard import Heard, Pass
from sinkscope.capture.sites import stream_of

LOOKED_AT = 2000
"""Containers and objects that are looked into for a cache, the outer ones first: what a model is given may lead to
anything, such as a whole dataset."""

OF_TORCH = frozenset(vars(nn.Module()))
"""What every module has: its weights, children and hooks."""


PLAIN = (str, bytes, int, float, complex, type(None), type, ModuleType, FunctionType)
"""What holds no cache."""


class OwnCache:
    """Stands for a cache that a model keeps in its own way."""


def may_keep_keys(model: nn.Module) -> bool:
    """Whether a model may keep keys in a cache of its own: those of transformers are in caches that tell how many they
    hold."""
    return not type(model).__module__.startswith("transformers.")


def may_go_on(model: nn.Module, now: Pass, given: object, output: object) -> bool:
    """Whether a later pass may go on with the keys of this one: it begins sequences, and its calls have room for more
    keys, or something that outlives it holds their keys or values.

    `given`: what the model was called with. `output`: what it returned.
    """
    if not may_keep_keys(model) or not _begins(model, now):
        return False
    masks = MaskReadings()
    own = [heard for heard in now.heard if stream_of(model, heard.module, False) != "cross"]
    return any(heard.has_room(masks) for heard in own) or _is_held(model, now, given, output)


def reads_earlier_keys(model: nn.Module, now: Pass) -> bool:
    """Whether the queries of a pass see keys that an earlier one brought."""
    return now.over_cache is not None or (bool(now.heard) and not _begins(model, now))


def _begins(model: nn.Module, now: Pass) -> bool:
    """Whether no query of a pass sees keys of an earlier one. A call whose queries all see every key reads another
    text, a picture or learned vectors."""
    masks = MaskReadings()
    return bool(now.heard) and all(
        heard.keys == heard.queries or stream_of(model, heard.module, False) == "cross" or _of_own(heard, masks)
        for heard in now.heard
    )


def _of_own(heard: Heard, masks: MaskReadings) -> bool:
    """Whether the queries of a call see as many keys as there are queries, at most, or all see the same keys."""
    if heard.call is None:
        seen = [rows.seen_by for _, _, rows in heard.parts or ()]
        return all(not bool(by[..., heard.queries :].any()) or bool((by % heard.queries == 0).all()) for by in seen)
    visible = masks.read(heard.call).visible
    if heard.queries > 1 and visible.spans is not None and all(bool((e == e[..., :1]).all()) for e in visible.spans):
        return True
    return int(visible.reach[3].max()) <= heard.queries


def _is_held(model: nn.Module, now: Pass, given: object, output: object) -> bool:
    """Whether what a pass was given, what it returned or a module of the model holds some of its keys or values."""
    tensors = ((tensor, heard.queries) for heard in now.heard for tensor in (heard.key, heard.value))
    samples = [_Sample(tensor, queries) for tensor, queries in tensors if tensor is not None]
    modules = {*model.get_submodule(now.root).modules(), model}
    held = [part for module in modules for part in _parts(module)]
    return any(sample.in_it(tensor) for tensor in _tensors([given, output, *held], modules) for sample in samples)


class _Sample:
    """The first channels of a token in a call's keys or values, (B, G, T, d): the last of its `own` tokens, since slots
    behind these are empty."""

    def __init__(self, tensor: Tensor, own: int) -> None:
        _, groups, slots, self._width = tensor.shape
        self._all = groups * self._width
        self._numbers = tensor[0, 0, min(own, slots) - 1, :2]

    def in_it(self, tensor: Tensor) -> bool:
        """Whether a tensor holds these channels, along an axis as long as those of one head or of several."""
        if tensor.device != self._numbers.device or not tensor.is_floating_point():
            return False
        axes = [axis for axis, size in enumerate(tensor.shape) if size and not (size % self._width or self._all % size)]
        return tensor.dim() > 1 and any(bool(self._along(tensor, axis).any()) for axis in axes)

    def _along(self, tensor: Tensor, axis: int) -> Tensor:
        return torch.stack([tensor.select(axis, at) == self._numbers[at] for at in range(len(self._numbers))]).all(0)


def _tensors(wholes: list[object], modules: set[nn.Module]) -> Iterator[Tensor]:
    """The tensors in containers and objects, but for weights and what `modules` hold."""
    ahead, seen = deque(wholes), {id(module) for module in modules}
    first = len(seen)
    while ahead and len(seen) < first + LOOKED_AT:
        value = ahead.popleft()
        if isinstance(value, Tensor):
            if not isinstance(value, nn.Parameter):
                yield value
        elif not isinstance(value, PLAIN) and id(value) not in seen:
            seen.add(id(value))
            ahead.extend(islice(_parts(value), LOOKED_AT))


def _parts(value: object) -> list[Any]:
    """What a container or an object holds."""
    if isinstance(value, dict):
        return [*dict.values(value)]
    if isinstance(value, list | tuple | deque):
        return [*value]
    inside = _attribute(value, "__dict__") or {}
    if isinstance(value, nn.Module):
        return [*value.buffers(recurse=False), *value.children(), *(inside[name] for name in inside.keys() - OF_TORCH)]
    slots = (name for kind in type(value).__mro__ for name in _names(kind.__dict__.get("__slots__", ())))
    return [*inside.values(), *(_attribute(value, name) for name in slots)]


def _attribute(value: object, name: str) -> Any:
    """An attribute, without what an object's own code does for one that is missing."""
    try:
        return object.__getattribute__(value, name)
    except AttributeError:
        return None


def _names(slots: Any) -> tuple[str, ...]:
    return (slots,) if isinstance(slots, str) else tuple(slots)
