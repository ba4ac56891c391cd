"""What a claim is: a paper's words, what is measured, and a rule that turns one number into a verdict. Finds the
claims."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from sinkscope.errors import SinkscopeError
from sinkscope.lookup import Lookup, of_that_name

if TYPE_CHECKING:
    from sinkscope.claims.subject import Subject
    from sinkscope.runs.forecast import Forecast


HOLDS, IN_PART, FAILS, NOT_TESTED = VERDICTS = ("holds", "holds in part", "fails", "not tested")


class NotTested(SinkscopeError):
    """A claim cannot be put to a model; the words say why."""


@dataclass(frozen=True)
class Number:
    """A number of a claim: as it is shown, its value, and what is known of its error.

    Attributes:
        low, high: ends of a 95 % interval; of a share of heads, Wilson's, as if heads were drawn independently; of an
            odds ratio, Woolf's.
        sem: standard error of a mean over n sequences. n: those sequences, or the number of which a share is one; NaN
            for any other number.
    """

    shown: str
    value: float = np.nan
    low: float = np.nan
    high: float = np.nan
    sem: float = np.nan
    n: float = np.nan

    @property
    def told(self) -> str:
        """The number with its interval, where it has one."""
        if np.isnan(self.low):
            return self.shown
        low, high = (f"{end:.2f}" if end < 10 else f"{end:.3g}" for end in (self.low, self.high))
        return f"{self.shown} ({low} to {high})"


def number(value: float, digits: int = 3) -> Number:
    """A number without an error; `-` where it is missing."""
    return Number("-" if np.isnan(value) else f"{value:.{digits}f}", float(value))


def share(flags: Iterable[Any]) -> Number:
    """How many are true of all: the share, with Wilson's interval."""
    from scipy.stats import binomtest

    outcomes = np.asarray(list(flags), dtype=bool)
    count, total = int(outcomes.sum()), len(outcomes)
    if not total:
        return Number("0 of 0", n=0)
    interval = binomtest(count, total).proportion_ci(method="wilson")
    return Number(f"{count} of {total}", count / total, float(interval.low), float(interval.high), n=total)


def mean(values: Iterable[float], digits: int = 3) -> Number:
    """The mean of one value a sequence, with its standard error; missing ones are left out."""
    each = np.asarray(list(values), dtype=float)
    each = each[~np.isnan(each)]
    if not len(each):
        return Number("-")
    sem = each.std(ddof=1) / len(each) ** 0.5 if len(each) > 1 else np.nan
    shown = f"{each.mean():.{digits}f}" + ("" if np.isnan(sem) else f" ± {sem:.{digits}f}")
    return Number(shown, float(each.mean()), sem=float(sem), n=len(each))


def ratio(above: Iterable[float], below: Iterable[float], digits: int = 3) -> Number:
    """The ratio of the means of two values a sequence, with its standard error; missing where it is over 0.

    Both means vary, and together: the error is that of the mean of (a - r b) / mean b, with r the ratio (delta method).
    """
    one, other = np.asarray(list(above), dtype=float), np.asarray(list(below), dtype=float)
    there = ~np.isnan(one + other)
    one, other = one[there], other[there]
    if not len(one) or not other.mean():
        return Number("-")
    value = one.mean() / other.mean()
    error = mean((one - value * other) / other.mean()).sem
    shown = f"{value:.{digits}f}" + ("" if np.isnan(error) else f" ± {error:.{digits}f}")
    return Number(shown, float(value), sem=error, n=len(one))


def correlation(first: Iterable[float], second: Iterable[float]) -> Number:
    """Spearman's rank correlation; missing below three pairs, and where either does not vary."""
    from scipy.stats import spearmanr

    one, other = np.asarray(list(first), dtype=float), np.asarray(list(second), dtype=float)
    if len(one) < 3 or np.ptp(one) == 0 or np.ptp(other) == 0:
        return Number("-")
    return number(float(spearmanr(one, other).statistic), 2)


@dataclass(frozen=True)
class Rule:
    """A verdict by two thresholds on the deciding number.

    Attributes:
        of: what the number is, in words.
        holds, fails: from which number on the claim holds, and from which it fails, both included. With `holds` above
            `fails` more speaks for the claim, below it less. Between them it holds in part.
    """

    of: str
    holds: float
    fails: float

    def __post_init__(self) -> None:
        if self.holds == self.fails:
            raise SinkscopeError(f"a rule on {self.of}: the thresholds must differ, for every number needs one verdict")

    def verdict(self, value: float) -> str:
        """The verdict on a number, to the nine digits that tables hold; `not tested` for one that is missing.

        So a mean that is a threshold but for rounding, as of shares in thirds, is one.
        """
        if np.isnan(value):
            return NOT_TESTED
        value = float(f"{value:.9g}")
        sign = 1 if self.holds > self.fails else -1
        if sign * value >= sign * self.holds:
            return HOLDS
        return FAILS if sign * value <= sign * self.fails else IN_PART

    @property
    def words(self) -> str:
        """The rule as a sentence."""
        more, less = ("or more", "or less") if self.holds > self.fails else ("or less", "or more")
        return f"{self.of}: holds at {self.holds:g} {more}, fails at {self.fails:g} {less}, holds in part between."


@dataclass(frozen=True)
class Found:
    """What a claim found in one model.

    Attributes:
        deciding: the number that the rule judges; None where the claim is not tested, and `reason` says why.
        contrast: the number that the claim's contrast row shows.
        figures: further numbers by their names.
    """

    deciding: Number | None
    contrast: Number | None = None
    figures: dict[str, Number] = field(default_factory=dict)
    reason: str = ""


class Need(Protocol):
    """Something to measure. `of` gives what a claim's `find` reads; it raises NotTested where that cannot be had."""

    @property
    def words(self) -> str:
        """What is measured, in words."""

    def of(self, subject: Subject) -> Any:
        """What was measured of a model or a saved run."""

    def measurements(self) -> Mapping[str, Measurable]:
        """What a dry run tells the cost of, by name: see `claims.needs`. Empty where that is next to nothing."""


class Measurable(Protocol):
    """A measurement of a model. `forecast` says what it would cost; it raises NotTested as `Need.of` does."""

    def forecast(self, subject: Subject, machine: str | None) -> Forecast:
        """No weights are loaded. `machine`: as `sinkscope.dry_run` takes it."""


@dataclass(frozen=True)
class Claim:
    """One claim of a paper.

    Attributes:
        name: short, in words with hyphens; what `--claim` takes.
        paper: its arXiv number. by: its author, or who else says or asks it.
        title: the claim in a few words. says: in full.
        source: what of the paper was read, and where it stands there. assumes: what of it is our reading.
        needs: what is measured of a model. also: what `find` measures beside it, for the contrast.
        find: the deciding number and others, from what was measured of the subject, and the subject itself.
        rule: the verdict.
        contrast: what the contrast row shows, in words: a number that would be alike if the claim said nothing.
        not_shown: what the verdict does not show.
        causal: whether the claim is about causal attention alone.
        figure: a figure over several runs (`sinkscope plot --figure`) that goes with it; empty for none.
        place: its place among its paper's claims.
    """

    name: str
    paper: str
    by: str
    title: str
    says: str
    source: str
    needs: Need
    find: Callable[[Any, Subject], Found]
    rule: Rule
    contrast: str
    not_shown: str
    assumes: str = ""
    also: tuple[Need, ...] = ()
    causal: bool = False
    figure: str = ""
    place: int = 1000


# Finds the claims: those of the folders beside this file, and those of installed packages.
#
# A package adds a claim by an entry point of the group `sinkscope.claims`, whose name is the claim's and whose object
# is a `Claim`:
#
#     [project.entry-points."sinkscope.claims"]
#     my-claim = "my_package.my_claim:CLAIM"


PAPERS = ("ran_milo", "lampert", "gu")
"""The folders of claims, in the order of the page."""


def _built_in() -> dict[str, str]:
    home = Path(str(files("sinkscope") / "claims"))
    return {
        module.name.replace("_", "-"): f"sinkscope.claims.{paper}.{module.name}:CLAIM"
        for paper in PAPERS
        for module in pkgutil.iter_modules([str(home / paper)])
    }


CLAIMS: Lookup[Claim] = Lookup("--claim", _built_in(), "sinkscope.claims", of_that_name(Claim))


def chosen_claims(names: Sequence[str] = ()) -> list[Claim]:
    """The claims of these names, or all that load: in the order of papers, then of their places.

    Raises SinkscopeError for a name that is no claim, and for one that does not load.
    """
    every = [CLAIMS[name] for name in CLAIMS if CLAIMS.loads(name)]
    wanted = [CLAIMS[name] for name in dict.fromkeys(names)] if names else every
    papers = list(dict.fromkeys(claim.paper for claim in every))
    return sorted(wanted, key=lambda claim: (papers.index(claim.paper), claim.place, claim.name))
