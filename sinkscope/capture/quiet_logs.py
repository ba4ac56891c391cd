"""Silences what other libraries log while a model or one of its layers runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from logging import ERROR, getLogger

LOUD = ("transformers", "accelerate", "bitsandbytes", "torchao")
"""Libraries that log on stderr how a model is loaded or run: which kernel is not installed, which type is cast."""


@contextmanager
def quiet_logs() -> Iterator[None]:
    """Silences what LOUD libraries log below an error until the block ends, then restores the user's settings."""
    loud = [logger for name in LOUD if (logger := getLogger(name)).level < ERROR]
    levels = [logger.level for logger in loud]
    for logger in loud:
        logger.setLevel(ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loud, levels, strict=True):
            logger.setLevel(level)
