"""Puts claims to subjects: one table of every number, from which screens and pages are made; or says what it would
cost."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pandas as pd

from sinkscope.claims.claim import CLAIMS, NOT_TESTED, Claim, Found, NotTested, Number
from sinkscope.claims.needs import TEXT
from sinkscope.claims.subject import Subject
from sinkscope.present.paper.formats.csv import with_formulas

if TYPE_CHECKING:
    from sinkscope.runs.forecast import Forecast


VERDICT, DECIDING, CONTRAST, FIGURE = "verdict", "deciding", "contrast", "figure"
"""What a row of the table holds; a row `verdict` stands for each claim and subject, the others where there is one."""
COLUMNS = ("claim", "subject", "row", "quantity", "shown", "value", "low", "high", "sem", "n")


def put(claims: Sequence[Claim], subjects: Iterable[Subject]) -> pd.DataFrame:
    """COLUMNS, one row for each number. `shown` of a row `verdict` is the verdict, its `quantity` why it is not tested.

    Raises SinkscopeError for a model that cannot be scanned at all.
    """
    rows = []
    for subject in subjects:
        rows += [row for claim in claims for row in _rows(claim, subject)]
        subject.close()
    return pd.DataFrame(rows, columns=list(COLUMNS))


def judged(claim: Claim, subject: Subject) -> tuple[str, Found]:
    """The verdict on a claim, and what was found."""
    try:
        if claim.causal and not _causal(subject):
            raise NotTested("the claim is about causal attention")
        finding = _found(claim, claim.needs.of(subject), subject)
    except NotTested as reason:
        finding = Found(None, reason=str(reason))
    if finding.deciding is None:
        return NOT_TESTED, finding
    verdict = claim.rule.verdict(finding.deciding.value)
    if verdict == NOT_TESTED:
        finding = replace(finding, deciding=None, contrast=None, reason="the deciding number has no value")
    return verdict, finding


def _found(claim: Claim, measured: Any, subject: Subject) -> Found:
    """What the claim finds. Raises SinkscopeError where another package's fails, or finds no Number."""
    with CLAIMS.blaming(claim.name):
        found = claim.find(measured, subject)
        numbers = (found.deciding, found.contrast, *found.figures.values())
        if not all(isinstance(each, Number | None) for each in numbers):
            raise TypeError("find() returns a Found of something else than Numbers")
    return found


def _causal(subject: Subject) -> bool:
    return TEXT.of(subject).causal if subject.given is None else all(
        site.causal for site in subject.given.manifest.attention
    )  # fmt: skip


def _rows(claim: Claim, subject: Subject) -> list[dict[str, Any]]:
    verdict, finding = judged(claim, subject)
    key = {"claim": claim.name, "subject": subject.label}
    rows = [key | {"row": VERDICT, "quantity": finding.reason, "shown": verdict}]
    if finding.deciding is not None:
        rows.append(key | {"row": DECIDING, "quantity": claim.rule.of} | _of(finding.deciding))
    if finding.contrast is not None:
        rows.append(key | {"row": CONTRAST, "quantity": claim.contrast} | _of(finding.contrast))
    return rows + [key | {"row": FIGURE, "quantity": name} | _of(number) for name, number in finding.figures.items()]


def _of(number: Number) -> dict[str, Any]:
    names = ("shown", "value", "low", "high", "sem", "n")
    return {name: getattr(number, name) for name in names}


def number_of(row: Any) -> Number:
    """The number of a row."""
    return Number(str(row.shown), row.value, row.low, row.high, row.sem, row.n)


def to_csv(table: pd.DataFrame) -> str:
    """The table as claims.csv holds it."""
    return table.to_csv(index=False, float_format="%.9g", lineterminator="\n")


def read_csv(path: Any) -> pd.DataFrame:
    """claims.csv as the table, without the apostrophes that keep a spreadsheet from taking -0.4 for a formula."""
    table = pd.read_csv(path, dtype={"shown": "str", "quantity": "str"}, keep_default_na=False,
                        na_values={name: [""] for name in ("value", "low", "high", "sem", "n")})  # fmt: skip
    return with_formulas(table)


# The dry run of claims: what a model would be measured for, each measurement once, and what it would cost.


@dataclass(frozen=True)
class Costs:
    """What putting claims to one model would take. `notes`: what would not be measured, and why."""

    forecasts: list[Forecast]
    notes: list[str]


def costs(claims: Sequence[Claim], subject: Subject, machine: str | None) -> Costs:
    """The forecasts of all measurements that the claims need of a model, in the order in which they would be made.

    No weights are loaded. A saved run, and what `Subject.folder` keeps from an earlier call, is read and costs nothing.
    Whether that is of the same weights and text is not looked at. `machine`: as `sinkscope.dry_run` takes it.

    Raises SinkscopeError where the model cannot be scanned at all.
    """
    if subject.given is not None:
        return Costs([], [f"{subject.label} is a saved run: nothing is measured"])
    needs = (need for claim in claims for need in (*((TEXT,) if claim.causal else ()), claim.needs, *claim.also))
    named = {name: measurement for need in needs for name, measurement in need.measurements().items()}
    forecasts, notes = [], []
    for name, measurement in named.items():
        if subject.keeps(name):
            notes.append(f"{name} is read from {subject.folder}, if weights, text and settings are still the same")
            continue
        try:
            told = measurement.forecast(subject, machine)
        except NotTested as reason:
            notes.append(f"claims on {name} would not be tested: {reason}")
            continue
        forecasts.append(replace(told, command=f"claims ({name})"))
    return Costs(forecasts, notes)
