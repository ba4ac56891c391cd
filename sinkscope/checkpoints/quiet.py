"""Silences progress bars and load reports of transformers and accelerate; sinkscope reports how far it is itself."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr

Report = Callable[[str, int, int], None]
"""Called with (stage, done, total)."""


def silent(stage: str, done: int, total: int) -> None:
    """No progress shown."""


@contextmanager
def quiet_transformers(bars_too: bool = False) -> Iterator[None]:
    """Silences the logging of LOUD libraries, transformers' bars and all warnings until the block ends, then restores
    the user's settings.

    `bars_too`: also hides bars that ignore this setting (GGUF conversion's), by discarding stderr.
    """
    from transformers.utils import logging

    from sinkscope.capture.quiet_logs import quiet_logs  # its room loads torch, and names are looked up without it

    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        with ExitStack() as stack:
            stack.enter_context(quiet_logs())
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            if bars_too:
                stack.enter_context(redirect_stderr(io.StringIO()))
            yield
    finally:
        if bars:
            logging.enable_progress_bar()
