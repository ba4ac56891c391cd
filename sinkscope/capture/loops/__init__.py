"""Loops compiled by numba for the CPU. Each replaces several of torch's passes over memory by one, row by row in cache.

torch computes the same wherever numba does not run, on every other device, and in float64. Only what reads much loads
a loop, because loading them takes half a second.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from sinkscope.capture.loops.compilation import COMPILATION

LEAST = 128 * 128
"""The elements of one sequence from which a loop is used: queries times keys, or tokens times channels. The number of
sequences does not count, so that a sequence's numbers do not depend on the others in its batch."""


@functools.cache
def loops(name: str) -> ModuleType | None:
    """A module of loops, compiled; None where numba does not run, as on a Python or numpy that it does not know yet."""
    with COMPILATION.awaited():
        try:
            return import_module(f"sinkscope.capture.loops.{name}")
        except ImportError:
            return None


def preload() -> None:
    """Loads the loops that every scan wants, half a second that may pass while something else is awaited."""
    for name in ("attention", "vectors"):
        loops(name)


def reads(tensor: Tensor) -> bool:
    """Whether loops read a tensor: it is on the CPU and is summed in float32."""
    return tensor.device.type == "cpu" and tensor.dtype != torch.float64


def loops_over(name: str, x: Tensor, elements: int) -> ModuleType | None:
    """The loops that read a tensor with so many elements a sequence; None where torch does."""
    return loops(name) if reads(x) and elements >= LEAST else None


def in_rows(tensor: Tensor) -> Any:
    """A numpy array of the tensor in float32, with its rows one after the other in memory."""
    return tensor.detach().float().contiguous().numpy()


def rows(tensor: Tensor) -> tuple[Any, int, int, int]:
    """A tensor (item, row, number) in float32 as a loop reads it where it lies (compiling.ROWS): the memory from its
    first number on, how far apart items and rows are in it, and the width."""
    tensor = tensor.detach().float()
    if tensor.stride(-1) != 1:
        tensor = tensor.contiguous()
    items, count, width = tensor.shape
    by_item, by_row, _ = tensor.stride()
    reach = (items - 1) * by_item + (count - 1) * by_row + width if tensor.numel() else 0
    return tensor.as_strided((reach,), (1,)).numpy(), by_item, by_row, width


def fill(sums: object, found: Mapping[str, Any]) -> None:
    """Gives cached properties the values that a loop has read, so that they are not computed. Raises TypeError for a
    name that is no cached property of `sums`."""
    for name, value in found.items():
        if not isinstance(getattr(type(sums), name, None), functools.cached_property):
            raise TypeError(f"{type(sums).__name__} has no cached property {name}")
        setattr(sums, name, value)


def run(loop: Callable[..., None], *arguments: Any) -> None:
    """Runs a loop on as many threads as torch uses. A loop's last two arguments, which `arguments` lack, are the first
    item that a call takes and the distance to its next one."""
    count = torch.get_num_threads()
    jobs = [_pool(count).submit(loop, *arguments, turn, count) for turn in range(1, count)]
    loop(*arguments, 0, count)
    for job in jobs:
        job.result()


@functools.cache
def _pool(count: int) -> ThreadPoolExecutor:
    """Threads beside the one that asks. They are kept: starting them takes as long as reading a layer's keys."""
    return ThreadPoolExecutor(count - 1, "sinkscope-loops")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.cache_clear)  # a fork has none of its parent's threads
