"""Loops compiled by numba for the CPU. Each replaces several of torch's passes over memory by one, row by row in cache.

torch computes the same wherever numba does not run, on every other device, and in float64. Only what reads much loads
a loop, because loading them takes half a second.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

LEAST = 128 * 128
"""The elements of one sequence from which a loop is used: queries times keys, or tokens times channels. The number of
sequences does not count, so that a sequence's numbers do not depend on the others in its batch."""


@functools.cache
def loops(name: str) -> ModuleType | None:
    """A module of loops, compiled; None where numba does not run, as on a Python or numpy that it does not know yet."""
    try:
        return import_module(f"sinkscope.capture.loops.{name}")
    except ImportError:
        return None


def reads(tensor: Tensor) -> bool:
    """Whether loops read a tensor: it is on the CPU and is summed in float32."""
    return tensor.device.type == "cpu" and tensor.dtype != torch.float64


def loops_over(name: str, x: Tensor) -> ModuleType | None:
    """The loops that read tokens or heads `x`, (sequence, ..., place, channel); None where torch does."""
    return loops(name) if reads(x) and x.shape[-2] * x.shape[-1] >= LEAST else None


def in_rows(tensor: Tensor) -> Any:
    """A numpy array of the tensor in float32, with its rows one after the other in memory."""
    return tensor.detach().float().contiguous().numpy()


class Threads:
    """As many threads as torch uses, among which the items of a loop are divided.

    A loop's last two arguments are its first item and the distance to its next one. Threads start only once there is
    work for them, and end with the `with` block.
    """

    def __init__(self) -> None:
        self.count = torch.get_num_threads()
        self.pool = ThreadPoolExecutor(max(1, self.count - 1))

    def run(self, loop: Callable[..., None], *arguments: Any) -> None:
        others = [self.pool.submit(loop, *arguments, turn, self.count) for turn in range(1, self.count)]
        loop(*arguments, 0, self.count)
        for other in others:
            other.result()

    def __enter__(self) -> Threads:
        return self

    def __exit__(self, *_: object) -> None:
        self.pool.shutdown()
