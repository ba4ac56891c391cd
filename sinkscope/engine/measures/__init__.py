"""The measurements that a scan makes on request: one module each, called as `--measure` names it.

Such a module has one subclass of `Measurement`, called MEASUREMENT. Its entry in `runs/schema/measures.py` makes it
known to every other part of a scan and of a run.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

from sinkscope.engine.measures.measurement import Findings, Measurement, Subject
from sinkscope.errors import SinkscopeError

__all__ = ["Findings", "Measurement", "Subject", "measurements", "refuse_spread"]


def measurements(names: Sequence[str]) -> list[type[Measurement]]:
    """The kinds of measurement of these names, in this order."""
    return [import_module(f"{__name__}.{name}").MEASUREMENT for name in names]


def refuse_spread(kinds: Sequence[type[Measurement]]) -> None:
    """Raises SinkscopeError where --tp leaves no process with the weights that one of these measurements reads."""
    for kind in kinds:
        why = "finding W_V takes the whole of it, and no process holds it all" if kind.wired else kind.spread
        if why:
            raise SinkscopeError(f"--tp with --measure {kind.name}: {why}")
