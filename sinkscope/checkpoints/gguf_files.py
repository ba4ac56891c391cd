"""GGUF files: whether their tokenizers can be read here, and how far the conversion of their weights is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sinkscope.checkpoints.private_doors import watching_gguf
from sinkscope.checkpoints.quiet import Report

FLOAT32 = 4


@contextmanager
def dequantizing(report: Report, stage: str = "dequantizing") -> Iterator[None]:
    """Reports (stage, bytes of float32 weights so far, bytes in all) for each tensor until the block ends."""
    done = total = 0

    def opened(reader: Any) -> None:
        nonlocal done, total
        done, total = 0, FLOAT32 * sum(int(tensor.n_elements) for tensor in reader.tensors)

    def converted(weights: Any) -> None:
        nonlocal done
        done += FLOAT32 * int(weights.size)
        report(stage, done, total)

    with watching_gguf(opened, converted):
        yield


RIGHT_SINCE = (5, 23)
"""The first transformers that does. Earlier ones leave out the BOS that the file asks for, which moves every sink, and
5.17 also splits Gemma's text into single letters."""


def gguf_problem() -> str | None:
    """Why no tokenizer can be made of a GGUF here; None where one can."""
    from transformers import __version__

    if tuple(int(part) for part in __version__.split(".")[:2]) >= RIGHT_SINCE:
        return None
    needed = ".".join(map(str, RIGHT_SINCE))
    return f"transformers {__version__} leaves out the BOS that a GGUF asks for: pip install 'transformers>={needed}'"
