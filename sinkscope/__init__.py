"""sinkscope measures attention sinks in pretrained transformers.

    run = sinkscope.scan("example:gemma-3-270m")
    run.heads, run.layers, run.summary
    run.save("runs/gemma"); sinkscope.load_run("runs/gemma")

These three lines judge a release:

    verdict = sinkscope.check(sinkscope.load_run("runs/new"), sinkscope.read_baseline("sinks.json"))
    for breach in verdict.breaches: print(breach.metric, breach.place, breach.baseline, breach.now)
    if not verdict.passed: raise SystemExit(1)

Importing this package loads neither torch nor transformers; the first use of a name loads what it needs.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from sinkscope.runs.defaults import VERSION
from sinkscope.runs.showing import drawn_by

if TYPE_CHECKING:
    from sinkscope.capture.kernels.sums import AttentionSums as AttentionSums
    from sinkscope.capture.view import LayerView as LayerView
    from sinkscope.capture.view import Missing as Missing
    from sinkscope.comparison.baseline import Baseline as Baseline
    from sinkscope.comparison.baseline import baseline_of as baseline_of
    from sinkscope.comparison.baseline import read_baseline as read_baseline
    from sinkscope.comparison.compare_runs import Comparison as Comparison
    from sinkscope.comparison.compare_runs import compare as compare
    from sinkscope.comparison.gate import Verdict as Verdict
    from sinkscope.comparison.gate import check as check
    from sinkscope.comparison.policy import Policy as Policy
    from sinkscope.comparison.policy import Rule as Rule
    from sinkscope.comparison.policy import read_policy as read_policy
    from sinkscope.engine.forecast.dry_run import dry_run as dry_run
    from sinkscope.engine.launch import start_processes as start_processes
    from sinkscope.engine.scan import Interrupted as Interrupted
    from sinkscope.engine.scan import scan as scan
    from sinkscope.engine.watching.watch import Watch as Watch
    from sinkscope.engine.watching.watch import watch as watch
    from sinkscope.errors import SinkscopeError as SinkscopeError
    from sinkscope.experiments.ablation import ablate as ablate
    from sinkscope.experiments.arms.arm import Arm as Arm
    from sinkscope.experiments.arms.experiment import arms as arms
    from sinkscope.experiments.arms.forecast import dry_run_arms as dry_run_arms
    from sinkscope.experiments.arms.grammar import arm_kind as arm_kind
    from sinkscope.experiments.bench import bench as bench
    from sinkscope.experiments.training.callback import SinkCallback as SinkCallback
    from sinkscope.metrics.registry import head_metric as head_metric
    from sinkscope.metrics.registry import layer_metric as layer_metric
    from sinkscope.runs.forecast import Forecast as Forecast
    from sinkscope.runs.run import Run as Run
    from sinkscope.runs.run import load_run as load_run
    from sinkscope.runs.saved.ablation import Ablation as Ablation
    from sinkscope.runs.saved.arms import Arms as Arms
    from sinkscope.runs.saved.speed import Speed as Speed

__version__ = VERSION

_PUBLIC = {
    "scan": ("engine.scan", "runs a model over text once and measures each of its attention heads; returns a Run"),
    "watch": (
        "engine.watching.watch",
        "measures any model's attention while your own code runs it; returns a Watch",
    ),
    "Watch": ("engine.watching.watch", "what `watch` returns: `with` it, then `run()` gives the Run"),
    "Run": ("runs.run", "what a scan measured: tables of heads and layers, a summary, and how it was measured"),
    "load_run": ("runs.run", "reads the folder that Run.save or `sinkscope scan` wrote; returns a Run"),
    "compare": (
        "comparison.compare_runs",
        "compares two runs: differences, standard errors, p-values; returns a Comparison",
    ),
    "Comparison": ("comparison.compare_runs", "what `compare` found: tables of differences, heads that changed"),
    "check": ("comparison.gate", "judges a run against a baseline: did any metric move too far? returns a Verdict"),
    "Verdict": ("comparison.gate", "what `check` found: passed or not, and every place that moved too far"),
    "Policy": ("comparison.policy", "how far metrics may move before `check` fails: a list of Rules"),
    "Rule": ("comparison.policy", "how far one metric may move, for each head, each layer or the whole model"),
    "read_policy": ("comparison.policy", "reads a Policy from a TOML file or from pyproject.toml"),
    "Baseline": ("comparison.baseline", "a run's means and standard errors, which later runs are judged against"),
    "baseline_of": ("comparison.baseline", "makes a Baseline of a run"),
    "read_baseline": ("comparison.baseline", "reads the file that `sinkscope baseline` wrote; returns a Baseline"),
    "ablate": (
        "experiments.ablation",
        "zeroes heads and measures what the model loses; returns an Ablation",
    ),
    "Ablation": ("runs.saved.ablation", "what `ablate` found: the loss with and without those heads"),
    "arms": (
        "experiments.arms.experiment",
        "measures what a model loses under interventions: keys hidden, caches rounded; returns Arms",
    ),
    "Arms": ("runs.saved.arms", "what `arms` found: a row for each arm, paired with the unablated model"),
    "Arm": ("experiments.arms.arm", "what an intervention of your own derives from, to be measured by `arms`"),
    "arm_kind": ("experiments.arms.grammar", "gives your own kind of arm a name that `arms` reads"),
    "dry_run": (
        "engine.forecast.dry_run",
        "says what a scan would read, hold and cost; returns a Forecast",
    ),
    "dry_run_arms": ("experiments.arms.forecast", "says the same of a measurement of arms, and how many there are"),
    "Forecast": ("runs.forecast", "what a dry run found: attention calls, memory, forward passes, time"),
    "bench": ("experiments.bench", "times a scan against a plain forward pass and against eager attention maps"),
    "Speed": ("runs.saved.speed", "what `bench` found: time and memory of each of them"),
    "SinkCallback": (
        "experiments.training.callback",
        "measures sinks while a model trains and logs them beside the loss; for the Trainer or a loop of your own",
    ),
    "start_processes": ("engine.launch", "joins the processes that torchrun started, so that they share the work"),
    "head_metric": ("metrics.registry", "makes your own function a column of heads.csv"),
    "layer_metric": ("metrics.registry", "makes your own function a column of layers.csv"),
    "LayerView": ("capture.view", "what a metric reads: one attention layer's numbers for a batch of sequences"),
    "AttentionSums": (
        "capture.kernels.sums",
        "what `LayerView.sums` holds: sums over the attention of one call, from which masses are computed",
    ),
    "Missing": ("capture.view", "what a metric raises where a layer lacks what it needs; its cell stays empty"),
    "Interrupted": ("engine.scan", "raised by `scan` on Ctrl-C; holds what was measured until then"),
    "SinkscopeError": ("errors", "raised for errors that you can fix, such as a wrong name or a damaged file"),
}
"""Every public name: the module that defines it, and what it is."""

drawn_by("sinkscope.present.notebook")

__all__ = ["__version__", *_PUBLIC]  # noqa: PLE0604 - the keys are strings
__doc__ = "\n".join([f"{__doc__}", *(f"    {name:15} {what}" for name, (_, what) in _PUBLIC.items()), ""])


@contextmanager
def _importing() -> Iterator[None]:
    """Imports inside take no time for looking for garbage.

    Importing torch and transformers makes a million objects and no garbage. Python would look at all of them again and
    again: an eighth of the processor time of a scan of a small model.
    """
    if not gc.isenabled() or gc.get_freeze_count():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.unfreeze()  # all objects are now in the oldest generation, which Python looks at least often
        gc.enable()


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with _importing():
        value = getattr(import_module(f"sinkscope.{_PUBLIC[name][0]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
