"""sinkscope measures attention sinks in pretrained transformers.

    run = sinkscope.scan("example:gemma-3-270m")
    run.heads, run.layers, run.summary
    run.save("runs/gemma"); sinkscope.load_run("runs/gemma")

Importing this package loads neither torch nor transformers; the first use of a function does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sinkscope.comparison.compare_runs import Comparison, compare
    from sinkscope.engine.scan import Interrupted, scan
    from sinkscope.errors import SinkscopeError
    from sinkscope.experiments.ablation.experiment import ablate
    from sinkscope.experiments.ablation.result import Ablation
    from sinkscope.runs.run import Run, load_run

__version__ = "0.2.0"
__all__ = [
    "Ablation", "Comparison", "Interrupted", "Run", "SinkscopeError", "__version__", "ablate", "compare", "load_run",
    "scan",
]  # fmt: skip

_HOMES = {
    "Ablation": "sinkscope.experiments.ablation.result",
    "ablate": "sinkscope.experiments.ablation.experiment",
    "Comparison": "sinkscope.comparison.compare_runs",
    "Interrupted": "sinkscope.engine.scan",
    "compare": "sinkscope.comparison.compare_runs",
    "Run": "sinkscope.runs.run",
    "SinkscopeError": "sinkscope.errors",
    "load_run": "sinkscope.runs.run",
    "scan": "sinkscope.engine.scan",
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
