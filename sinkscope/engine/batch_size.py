"""Chooses how many sequences a forward pass takes, tells what memory is free, and words the errors of a pass that runs
out of it, or gives NaN or infinity although its weights are finite.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import torch

from sinkscope.capture import private_doors
from sinkscope.errors import OutOfMemory

CPU_BATCH_TOKENS, DEVICE_BATCH_TOKENS = 2048, 16384


def chosen_batch(length: int, device: torch.device) -> int:
    """Default number of sequences of `length` tokens in one forward pass."""
    return max(1, (CPU_BATCH_TOKENS if device.type == "cpu" else DEVICE_BATCH_TOKENS) // length)


def not_square(sequences: int, length: int) -> int:
    """The number of sequences for one pass; one less where there are as many as tokens in each.

    Some models put positions first. Their tensors are told from others by their shape, which a square batch would hide.
    """
    return sequences - 1 if sequences == length > 1 else sequences


@contextmanager
def memory_needed(what: str) -> Iterator[None]:
    """Raises OutOfMemory, naming `what` did not fit, where the block runs out of memory."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemory(
            f"out of memory in {what}: try --dtype bfloat16, --device-map auto or another --device"
        ) from None


def free_bytes(device: torch.device) -> int | None:
    """Free memory in bytes; None on accelerators other than CUDA."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available) if device.type == "cpu" else None


def return_freed() -> None:
    """Gives the system the memory that was freed, where the C library keeps it (glibc): small tensors by the thousand
    leave theirs in pieces that large tables cannot use."""
    trim = None if os.name == "nt" else getattr(ctypes.CDLL(None), "malloc_trim", None)  # no CDLL(None) on Windows
    if trim is not None:
        trim(0)


def is_out_of_memory(error: RuntimeError | MemoryError) -> bool:
    """Whether an error says that memory ran out, of the machine or of an accelerator."""
    return isinstance(error, MemoryError) or private_doors.is_out_of_memory(error)


def what_would_fit(length: int) -> str:
    """The error where a single sequence of `length` tokens does not fit: what to try instead."""
    return (
        f"out of memory with one sequence of {length} tokens: try --seq-len {max(2, length // 2)}, --dtype bfloat16, "
        "or --device-map auto"
    )


WIDER = {"float16": "float32", "bfloat16": "float32", "float32": "float64"}
"""The dtype that holds what overflows in another."""


def overflow_words(dtype: str) -> str:
    """What overflows, and which dtype to try; of float64 that there is none. `dtype`: that the model computes in."""
    name = dtype.removeprefix("torch.")
    if name not in WIDER:
        return f"{name} overflows, and no dtype is wider: the model's own numbers are not finite"
    return f"{name} overflows; try --dtype {WIDER[name]}"
