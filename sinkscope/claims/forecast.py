"""The dry run of claims: what a model would be measured for, each measurement once, and what it would cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from sinkscope.claims.claim import NotTested
from sinkscope.claims.needs import TEXT

if TYPE_CHECKING:
    from sinkscope.claims.claim import Claim
    from sinkscope.claims.subject import Subject
    from sinkscope.runs.forecast import Forecast


@dataclass(frozen=True)
class Costs:
    """What putting claims to one model would take. `notes`: what would not be measured, and why."""

    forecasts: list[Forecast]
    notes: list[str]


def costs(claims: Sequence[Claim], subject: Subject, machine: str | None) -> Costs:
    """The forecasts of all measurements that the claims need of a model, in the order in which they would be made.

    No weights are loaded. A saved run, and what `Subject.folder` keeps from an earlier call, is read and costs nothing.
    `machine`: as `sinkscope.dry_run` takes it.

    Raises SinkscopeError where the model cannot be scanned at all.
    """
    if subject.given is not None:
        return Costs([], [f"{subject.label} is a saved run: nothing is measured"])
    needs = (need for claim in claims for need in (*((TEXT,) if claim.causal else ()), claim.needs, *claim.also))
    named = {name: measurement for need in needs for name, measurement in need.measurements().items()}
    found, notes = [], []
    for name, measurement in named.items():
        if subject.keeps(name):
            notes.append(f"{name} is read from {subject.folder}")
            continue
        try:
            told = measurement.forecast(subject, machine)
        except NotTested as reason:
            notes.append(f"claims on {name} would not be tested: {reason}")
            continue
        found.append(replace(told, command=f"claims ({name})"))
    return Costs(found, notes)
