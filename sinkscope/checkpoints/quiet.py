"""Silences progress bars and load reports of transformers and accelerate; sinkscope reports what matters itself."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr
from logging import ERROR, getLogger


@contextmanager
def quiet_transformers(bars_too: bool = False) -> Iterator[None]:
    """Silences transformers' and accelerate's logging and bars until the block ends, then restores the user's settings.

    `bars_too`: also hides bars that ignore this setting (GGUF conversion's), by discarding stderr.
    """
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    accelerate = getLogger("accelerate")
    level = accelerate.level
    logging.set_verbosity_error()
    accelerate.setLevel(ERROR)
    logging.disable_progress_bar()
    try:
        with ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            if bars_too:
                stack.enter_context(redirect_stderr(io.StringIO()))
            yield
    finally:
        logging.set_verbosity(verbosity)
        accelerate.setLevel(level)
        if bars:
            logging.enable_progress_bar()
