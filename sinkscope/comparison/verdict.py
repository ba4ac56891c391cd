"""What a check against a baseline says: passed, or every place that moved too far."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from sinkscope.comparison.policy import Rule

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Breach:
    """One place that moved too far.

    Attributes:
        baseline, now: the two means. allowed: the largest |now - baseline| that the rule allows.
        q: where the texts differ, the false discovery rate at which the change exceeds `allowed`, over all comparisons
            of the check; None where the run read the baseline's text.
    """

    metric: str
    level: str
    domain: str
    stream: str
    layer: int | None
    head: int | None
    baseline: float | None
    now: float | None
    allowed: float
    q: float | None

    @property
    def place(self) -> str:
        """`layer 3 head 2`, `layer 3`, or `all heads`; begins with the stream's name unless that is text."""
        parts = [] if self.stream == "text" else [self.stream]
        parts += [
            f"{name} {number}" for name, number in (("layer", self.layer), ("head", self.head)) if number is not None
        ]
        return " ".join(parts if self.layer is not None else [*parts, "all heads"])


@dataclass(frozen=True)
class Tally:
    """The outcome of one rule on one domain: number of places judged, the largest change, and the breaches.

    Attributes:
        moved: one row for each place: stream, layer and head as the rule's level has them, the means `baseline` and
            `now`, `allowed`, and whether it is a `breach`.
    """

    rule: Rule
    domain: str
    places: int
    largest: float | None
    breaches: list[Breach]
    moved: pd.DataFrame = field(default_factory=pd.DataFrame, repr=False, compare=False)


@dataclass(frozen=True)
class Verdict:
    """The outcome of a check.

    Attributes:
        same_text: for each domain, whether the run read the baseline's token sequences.
        tallies: one for each rule and domain. notes: sentences that the reader must know.
    """

    model: str
    baseline_model: str
    same_text: dict[str, bool]
    tallies: list[Tally]
    notes: list[str] = field(default_factory=list)

    @property
    def breaches(self) -> list[Breach]:
        """Every breach of every rule."""
        return [breach for tally in self.tallies for breach in tally.breaches]

    @property
    def passed(self) -> bool:
        """Whether there is no breach."""
        return not self.breaches

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON, schema_version first."""
        rules = [
            {**tally.rule.model_dump(), "domain": tally.domain, "places": tally.places, "largest_change": tally.largest,
             "breaches": [vars(breach) | {"place": breach.place} for breach in tally.breaches]}
            for tally in self.tallies
        ]  # fmt: skip
        facts = {"model": self.model, "baseline_model": self.baseline_model, "same_text": self.same_text}
        return {"schema_version": SCHEMA_VERSION, "passed": self.passed, **facts, "notes": self.notes, "rules": rules}
