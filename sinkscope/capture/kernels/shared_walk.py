"""Reads the sequences of one attention call on several threads, each with torch's products on that thread alone.

Where all threads work on each block together, they wait for each other three times a block: after the product of
queries and keys, after the loop over the rows, and after the product with the values. Here they wait once a call.
"""

from __future__ import annotations

import functools
import itertools
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from sinkscope.capture.calls import AttentionCall
from sinkscope.capture.kernels.sums import AttentionSums

Read = Callable[[AttentionCall], tuple[Tensor, AttentionSums]]


def shares(call: AttentionCall) -> int:
    """How many threads share the sequences of a call; 1 where they do not.

    There must be as many sequences as threads, since each thread has whole ones, and one mask for all. What torch keeps
    for each thread, as autocast, must be as at a thread's start.
    """
    count = torch.get_num_threads()
    plain = not torch.is_inference_mode_enabled() and not torch.is_autocast_enabled("cpu")
    spans = call.visible.spans
    alike = spans is not None and all(len(edge) == 1 for edge in spans)
    return count if plain and alike and len(call.query) >= count else 1


def read_shared(call: AttentionCall, count: int, read: Read) -> tuple[Tensor, AttentionSums]:
    """Returns what `read` returns, of which each of `count` threads reads its share of the sequences."""
    edges = [len(call.query) * part // count for part in range(count + 1)]
    learns = torch.is_grad_enabled()

    def part(first: int, past: int) -> tuple[Tensor, AttentionSums]:
        rows = slice(first, past)
        own = replace(call, query=call.query[rows], key=call.key[rows], value=call.value[rows])
        with torch.set_grad_enabled(learns):
            return read(own.with_visible(call.visible))

    jobs = [_pool(count).submit(part, first, past) for first, past in itertools.pairwise(edges)]
    parts = [job.result() for job in jobs]
    return torch.cat([out for out, _ in parts]), _joined([sums for _, sums in parts])


def _joined(parts: list[AttentionSums]) -> AttentionSums:
    """The sums of all sequences; what has one sequence for all is that of the first part."""
    found: dict[str, Any] = {}
    for name in (field.name for field in fields(AttentionSums)):
        values = [getattr(each, name) for each in parts]
        shared = name in ("visible", "sees_first", "seen_by", "early_seen_by")
        found[name] = values[0] if shared or not isinstance(values[0], Tensor) else torch.cat(values)
    return AttentionSums(**found)


@functools.cache
def _pool(count: int) -> ThreadPoolExecutor:
    """Threads in which torch uses one thread each. They are kept, as they keep their scratch memory."""
    before, ready = torch.get_num_threads(), threading.Barrier(count + 1)

    def begin() -> None:
        torch.get_num_threads()  # a new thread first takes over what others have set
        torch.set_num_threads(1)
        ready.wait()

    pool = ThreadPoolExecutor(count, "sinkscope-walk", begin)
    for _ in range(count):
        pool.submit(int)  # starts a thread: none of them is idle until all have begun
    ready.wait()
    torch.set_num_threads(before)  # setting it there also sets it for threads that start later
    return pool


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.cache_clear)  # a fork has none of its parent's threads
