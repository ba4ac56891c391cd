"""Imports what every model is loaded and read with."""

from __future__ import annotations

import atexit
import gc
import sys
from contextlib import suppress


def import_libraries() -> None:
    """Imports torch, transformers, numba and what measures, without looking for garbage meanwhile.

    Imports make a million objects and no garbage. Python would look at all of them again and again: an eighth of the
    processor time of a scan of a small model.
    """
    if "torch" in sys.modules or not gc.isenabled():
        return
    gc.disable()
    try:
        import sinkscope.engine.scan  # noqa: F401

        with suppress(Exception):  # who needs what cannot be imported says so
            import numba  # noqa: F401 - the first pass would import it
            import transformers.modeling_utils  # noqa: F401 - as loading a model would
    finally:
        gc.freeze()
        atexit.register(gc.unfreeze)  # else libraries that count their objects call those that are left leaks
        gc.enable()
