"""Turns a name (hub id, folder, .gguf file, example:NAME) into a headless model, its tokenizer and their facts.

Its names are imported when they are first used: what only looks at names and examples does not wait for torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sinkscope.checkpoints.checkpoint import Checkpoint
    from sinkscope.checkpoints.examples import EXAMPLES, Example
    from sinkscope.checkpoints.loading import open_checkpoint, wrap_model, wrap_running
    from sinkscope.checkpoints.sources import LoadOptions

__all__ = ["EXAMPLES", "Checkpoint", "Example", "LoadOptions", "open_checkpoint", "wrap_model", "wrap_running"]

_MODULES = {"Checkpoint": "checkpoint", "EXAMPLES": "examples", "Example": "examples", "LoadOptions": "sources"}


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_MODULES.get(name, 'loading')}"), name)
    globals()[name] = value
    return value
