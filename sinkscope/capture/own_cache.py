"""Tells whether a model may go on with a pass over a cache that no object of transformers holds.

A model's own code keeps keys and values in whatever it likes: tensors that it returns, buffers, an object that it is
given. What was kept shows in the next pass: its first keys are, bit by bit, those of this one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from sinkscope.capture.calls import MaskReadings
from sinkscope.capture.heard import Heard, Pass
from sinkscope.capture.sites import stream_of

DEPTH = 4
"""Containers within containers that are looked into: layers, then keys and values, in an output or an object."""


class OwnCache:
    """Stands for a cache that a model keeps in its own way."""


def may_go_on(model: nn.Module, now: Pass, given: object, output: object) -> bool:
    """Whether a later pass may go on with the keys of this one: it begins sequences, and something that outlives it
    could hold their keys.

    `given`: what the model was called with. `output`: what it returned. Only a model's own code is asked:
    transformers' models keep keys in caches that tell how many they hold.
    """
    if type(model).__module__.startswith("transformers.") or not _begins(model, now):
        return False
    keys = [heard.key for heard in now.heard if heard.key is not None]
    paths = {heard.module for heard in now.heard}
    holders = {"", now.root, *paths, *(path.rpartition(".")[0] for path in paths)}
    held = (tensor for name, module in model.named_modules() if name in holders for tensor in _own_tensors(module))
    passed = (tensor for whole in (given, output) for tensor in _tensors(whole) if tensor.dim() > 3)
    return any(_holds(tensor, keys) for tensors in (passed, held) for tensor in tensors)


def reads_earlier_keys(model: nn.Module, now: Pass) -> bool:
    """Whether the queries of a pass see keys that an earlier one brought."""
    return now.over_cache is not None or (bool(now.heard) and not _begins(model, now))


def _holds(tensor: Tensor, keys: list[Tensor]) -> bool:
    """Whether a tensor could hold the keys of some head, (B, G, T, d): it has as many channels, and room for all."""
    return tensor.dim() > 2 and any(
        tensor.numel() >= key[:, :1].numel() and {key.shape[3], key.shape[1] * key.shape[3]} & {*tensor.shape}
        for key in keys
    )


def _begins(model: nn.Module, now: Pass) -> bool:
    """Whether no query of a pass sees keys of an earlier one. A call whose queries all see every key reads another
    text, a picture or learned vectors."""
    masks = MaskReadings()
    return bool(now.heard) and all(
        heard.keys == heard.queries or stream_of(model, heard.module, False) == "cross" or _of_own(heard, masks)
        for heard in now.heard
    )


def _of_own(heard: Heard, masks: MaskReadings) -> bool:
    """Whether the queries of a call see as many keys as there are queries, at most, or all see every key."""
    if heard.call is None:
        return all(not bool(rows.seen_by[..., heard.queries :].any()) for _, _, rows in heard.parts or ())
    visible = masks.read(heard.call).visible
    last = int(visible.reach[3].max())
    return last <= heard.queries or (heard.queries > 1 and bool((visible.counts == heard.keys).all()))


def _own_tensors(module: nn.Module) -> Iterator[Tensor]:
    """What a module keeps beside its weights."""
    yield from module.buffers()
    for value in vars(module).values():
        yield from _tensors(value)


def _tensors(value: object, depth: int = DEPTH) -> Iterator[Tensor]:
    """The tensors in containers and objects, but for modules and their weights."""
    if isinstance(value, Tensor):
        if not isinstance(value, nn.Parameter):
            yield value
        return
    if depth == 0 or isinstance(value, nn.Module | type | str | bytes | int | float):
        return
    parts: Any = ()
    if isinstance(value, Mapping):
        parts = value.values()
    elif isinstance(value, list | tuple):
        parts = value
    elif hasattr(value, "__dict__"):
        parts = vars(value).values()
    for part in [*parts]:
        yield from _tensors(part, depth - 1)
