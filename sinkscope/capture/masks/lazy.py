"""Masks of long sequences without T x T memory: transformers' own mask function makes the rows that are asked for.

A bool mask of 32,768 tokens takes 1 GiB for each kind of layer, an additive mask 4 GiB. While a pass is watched, a mask
of LARGE or more elements is a LazyMask. It has the mask's shape and stays lazy when a model slices it. Any other
operation gets the real mask, which is kept from then on, so that what a model writes into it is not lost. A model that
computes with its mask therefore stays correct, but saves no memory.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from transformers.masking_utils import AttentionMaskInterface

from sinkscope.capture.private_doors import (
    asking,
    empty_wrapper,
    map_tensors,
    mask_arguments,
    mask_sizes,
    mask_strip,
    mask_window,
    registry_of,
    times_written,
    writes,
)
from sinkscope.capture.registries import READ, layered

LARGE = 8 * 2**20
"""A mask with fewer elements (up to about 2,900 queries and keys) stays as transformers makes it."""

Strip = Callable[[int, int, int, int], Tensor]
"""Takes (start, stop, low, high); returns rows start..stop and keys low..high of a mask, (b, h | 1, rows, keys)."""

Ranges = tuple[tuple[int, int], ...]


@dataclass(eq=False)
class _Source:
    """What all slices of one mask share. `whole` is the real mask, once an operation other than slicing needed it."""

    make: Strip
    queries: int
    keys: int
    whole: Tensor | None = None

    def strip(self, start: int, stop: int, low: int, high: int) -> Tensor:
        if self.whole is None:
            return self.make(start, stop, low, high)
        return self.whole[:, :, start:stop, low:high]

    def materialise(self) -> None:
        """Makes the real mask, which is used from now on."""
        if self.whole is None:
            self.whole = self.make(0, self.queries, 0, self.keys)


class LazyMask(Tensor):
    """A mask (b, h | 1, query, key) without storage, made in strips on demand."""

    _source: _Source
    _ranges: Ranges

    @staticmethod
    def __new__(cls, source: _Source, ranges: Ranges, dtype: torch.dtype, device: torch.device) -> LazyMask:
        shape = [stop - start for start, stop in ranges]
        mask: LazyMask = empty_wrapper(cls, shape, dtype, device)
        mask._source, mask._ranges = source, ranges
        return mask

    @property
    def identity(self) -> tuple[Any, ...]:
        """A key that is equal for equal slices of one mask, and changes when something is written into the mask."""
        whole = self._source.whole
        return (id(self._source), self._ranges, 0 if whole is None else times_written(whole), times_written(self))

    def strip(self, start: int, stop: int, low: int, high: int) -> Tensor:
        """Makes rows start..stop and keys low..high of this mask."""
        (first, last), _, (row, _), (column, _) = self._ranges
        made = self._source.strip(row + start, row + stop, column + low, column + high)
        return made if made.shape[0] == 1 else made[first:last]

    def whole(self) -> Tensor:
        """The real mask, T x T."""
        self._source.materialise()
        rows, keys = self.shape[-2:]
        return self.strip(0, rows, 0, keys).expand(self.shape)

    def __getitem__(self, index: Any) -> Tensor:
        ranges = _cut(self._ranges, index)
        if ranges is None:
            return self.whole()[index]
        return self if ranges == self._ranges else LazyMask(self._source, ranges, self.dtype, self.device)

    def __setitem__(self, index: Any, value: Any) -> None:
        self.whole()[index] = value

    def __repr__(self) -> str:  # type: ignore[override]
        return f"LazyMask({tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        real_args, real_kwargs = map_tensors(LazyMask, LazyMask.whole, (args, kwargs or {}))
        result = function(*real_args, **real_kwargs)
        if writes(function):  # torch does not count writes inside __torch_dispatch__
            map_tensors(LazyMask, lambda mask: increment_version(mask._source.whole), (args, kwargs))
        return result


def identity(mask: Tensor | None) -> tuple[Any, ...]:
    """A key for a mask that changes when something is written into it. Valid only while `mask` is alive."""
    if isinstance(mask, LazyMask):
        return mask.identity
    return (id(mask), 0 if mask is None else times_written(mask))


def _cut(ranges: Ranges, index: Any) -> Ranges | None:
    """The ranges after plain slices; None for any other index, and where the head axis is sliced."""
    slices = list(index) if isinstance(index, tuple) else [index]
    if slices.count(Ellipsis) == 1:
        place = slices.index(Ellipsis)
        slices[place : place + 1] = [slice(None)] * (len(ranges) - len(slices) + 1)
    slices += [slice(None)] * (len(ranges) - len(slices))
    if len(slices) != len(ranges) or not all(isinstance(part, slice) and part.step in (None, 1) for part in slices):
        return None
    cut = []
    for part, (start, stop) in zip(slices, ranges, strict=True):
        low, high, _ = part.indices(stop - start)
        cut.append((start + low, start + max(low, high)))
    return None if cut[1] != ranges[1] else tuple(cut)


@contextmanager
def lazy_masks(large: int | None = None) -> Iterator[None]:
    """Makes this thread's masks of `large` elements or more (None = LARGE) lazy until the block ends."""
    registry = registry_of(AttentionMaskInterface)
    makers = {name: registry[name] for name in READ if name in registry}
    lazily = {name: _lazily(make, LARGE if large is None else large) for name, make in makers.items()}
    with layered(AttentionMaskInterface, lazily):
        yield


@contextmanager
def windows_of_masks() -> Iterator[Callable[[Tensor | None, nn.Module], int | None]]:
    """Tells the sliding window of each mask that transformers makes for this thread until the block ends.

    Such a mask is never left out (None), as transformers does where no key lies before the window: it tells whose call
    has the window. A model may make a mask of its own from it, as Doge does: where all masks of transformers have the
    window that the calling module's configuration names, that mask has it, too.
    """
    windows: dict[int, tuple[Tensor, int]] = {}  # with the masks, because a freed address could be used again
    made = set[int | None]()

    def noting(original: Callable[..., Tensor | None]) -> Callable[..., Tensor | None]:
        def make(*args: Any, **kwargs: Any) -> Tensor | None:
            arguments = mask_arguments(original, args, kwargs)
            window = mask_window(arguments)
            made.add(window)
            if window is None:
                return original(**arguments)
            _, queries, keys = mask_sizes(arguments)
            mask = mask_strip(original, arguments, range(queries), range(keys))
            if (address := _address(mask)) is not None:
                windows[address] = mask, window
            return mask

        make.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]  # it may be wrapped once more
        return make

    def window_of(mask: Tensor | None, module: nn.Module) -> int | None:
        address = None if mask is None else _address(mask)
        if address in windows:
            return windows[address][1]
        named = vars(getattr(module, "config", None) or object).get("sliding_window")  # NeoMME's raises an error
        return named if address is not None and made == {named} else None

    registry = registry_of(AttentionMaskInterface)
    with layered(AttentionMaskInterface, {name: noting(registry[name]) for name in READ if name in registry}):
        yield window_of


def _address(mask: Tensor) -> int | None:
    """The same for a mask and its slices; None where its numbers stand nowhere."""
    if mask.is_meta or isinstance(mask, LazyMask):
        return None
    try:
        return mask.untyped_storage().data_ptr() or None
    except RuntimeError:  # a tensor of somebody's own kind, whose storage is none of torch's
        return None


class _MaskNeeded(Exception):
    """Raised when transformers evaluates the mask function: it does not leave this mask out."""


def _raise_mask_needed(*_: Any) -> Any:
    raise _MaskNeeded


def _lazily(original: Callable[..., Tensor | None], large: int) -> Callable[..., Tensor | None]:
    """Wraps a function of transformers' mask interface: it returns a LazyMask in place of a large mask."""

    def make(*args: Any, **kwargs: Any) -> Tensor | None:
        arguments = mask_arguments(original, args, kwargs)
        batch, queries, keys = mask_sizes(arguments)
        if batch * queries * keys < large:
            return original(**arguments)
        try:  # returns without calling the mask function where transformers leaves the mask out (None)
            return original(**asking(arguments, _raise_mask_needed))
        except _MaskNeeded:
            part = _strip_maker(original, arguments)
        return made_in_strips(part, batch, queries, keys)

    make.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]  # it may be wrapped once more
    return make


def made_in_strips(part: Strip, batch: int, queries: int, keys: int) -> LazyMask:
    """The mask (batch, h | 1, queries, keys) whose strips `part` makes, each for one sequence where all share them."""
    corner = part(0, 1, 0, 1)
    source = _Source(part, queries, keys)
    ranges = ((0, batch), (0, corner.shape[1]), (0, queries), (0, keys))
    return LazyMask(source, ranges, corner.dtype, corner.device)


def _strip_maker(original: Callable[..., Tensor | None], given: dict[str, Any]) -> Strip:
    def part(start: int, stop: int, low: int, high: int) -> Tensor:
        made = mask_strip(original, given, range(start, stop), range(low, high))
        return made[:1] if made.stride(0) == 0 else made

    return part
