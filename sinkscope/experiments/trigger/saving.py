"""Writes models and states of trainings, or says in one line why it cannot."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from sinkscope.checkpoints.quiet import quiet_transformers
from sinkscope.errors import SinkscopeError


@contextmanager
def saving(folder: Path) -> Iterator[None]:
    """Raises SinkscopeError where the block cannot write to the folder. Transformers is quiet inside it.

    A full disk is an OSError to Python and a SafetensorError where safetensors meets it.
    """
    try:
        with quiet_transformers():
            yield
    except (OSError, SafetensorError) as error:
        raise SinkscopeError(f"cannot write {folder}: {getattr(error, 'strerror', None) or error}") from None
