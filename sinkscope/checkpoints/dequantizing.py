"""Says how many bytes of a GGUF file's weights are dequantised while transformers loads them, which takes minutes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Report = Callable[[str, int, int], None]
"""Called with (stage, done, total)."""

FLOAT32 = 4


def silent(stage: str, done: int, total: int) -> None:
    """No progress shown."""


@contextmanager
def dequantizing(report: Report, stage: str = "dequantizing") -> Iterator[None]:
    """Reports (stage, bytes of float32 weights so far, bytes in all) for each tensor until the block ends.

    transformers takes both functions of the package gguf anew for each file, so they are replaced for that time.
    """
    import gguf

    read, convert = gguf.GGUFReader, gguf.dequantize
    done = total = 0

    def noted_read(*given: Any, **options: Any) -> Any:
        nonlocal done, total
        reader = read(*given, **options)
        done, total = 0, FLOAT32 * sum(int(tensor.n_elements) for tensor in reader.tensors)
        return reader

    def noted_convert(*given: Any, **options: Any) -> Any:
        nonlocal done
        weights = convert(*given, **options)
        done += FLOAT32 * int(weights.size)
        report(stage, done, total)
        return weights

    gguf.GGUFReader, gguf.dequantize = noted_read, noted_convert
    try:
        yield
    finally:
        gguf.GGUFReader, gguf.dequantize = read, convert
