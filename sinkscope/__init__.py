"""sinkscope measures attention sinks in pretrained transformers.

    run = sinkscope.scan("example:gemma-3-270m")
    run.heads, run.layers, run.summary
    run.save("runs/gemma"); sinkscope.load_run("runs/gemma")

Importing this package loads neither torch nor transformers; the first use of a function does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sinkscope.ablation import Ablation, ablate
    from sinkscope.comparison import Comparison, compare
    from sinkscope.engine import Interrupted, scan
    from sinkscope.errors import SinkscopeError
    from sinkscope.run import Run, load_run

__version__ = "0.1.0"
__all__ = [
    "Ablation", "Comparison", "Interrupted", "Run", "SinkscopeError", "__version__", "ablate", "compare", "load_run",
    "scan",
]  # fmt: skip

_HOMES = {
    "Ablation": "sinkscope.ablation",
    "ablate": "sinkscope.ablation",
    "Comparison": "sinkscope.comparison",
    "Interrupted": "sinkscope.engine",
    "compare": "sinkscope.comparison",
    "Run": "sinkscope.run",
    "SinkscopeError": "sinkscope.errors",
    "load_run": "sinkscope.run",
    "scan": "sinkscope.engine",
}


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
