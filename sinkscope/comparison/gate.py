"""Checks a run against a baseline under a policy: it passes, or the verdict lists every place that moved too far."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from sinkscope.comparison.baseline import Baseline, Level, as_kept, baseline_of
from sinkscope.comparison.policy import DEFAULT, Policy, Rule
from sinkscope.errors import SinkscopeError
from sinkscope.runs.catalogue import catalogue, refuse_moved
from sinkscope.runs.per_sequence import other_lengths, same_places, same_text, whole_numbers
from sinkscope.runs.statistics import beyond, false_discovery, with_floor
from sinkscope.runs.words import computed_in

if TYPE_CHECKING:
    from sinkscope.runs.run import Run
    from sinkscope.runs.schema.baseline import BaselineDomain


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
    """The outcome of one rule on one domain: number of places judged, with those whose value is missing on one side,
    the largest change, and the breaches.

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
        model, baseline_model: the models for people to read; where both have one name, with what differs.
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


# Checks a run against a baseline under a policy: it passes, or the verdict lists every place that moved too far.


SAMPLED = frozenset(column.name for column in catalogue() if column.sampled)
"""Columns measured on some of the sequences only: two scans of the same text may have measured different ones."""


def check(run: Run, baseline: Baseline, policy: Policy = DEFAULT) -> Verdict:
    """Judges a run by a baseline.

    Where the run read the baseline's token sequences, a place fails if |now - baseline| exceeds what its rule allows:
    both means are over the same text, so there is no sampling error. If both ran in float32, the bounds are multiplied
    by the policy's `same_precision`. Where the run read other text, a place fails if the change exceeds what is allowed
    by more than sampling explains: Welch's t-test of |change| <= allowed, Benjamini-Hochberg over all places of all
    rules and domains, q below the significance, which thus bounds the chance that an unchanged model fails. A value
    that is missing on one side only always fails.

    Raises SinkscopeError where layers or heads differ from the baseline's, the run lacks one of its domains, neither
    holds a rule's metric, the run was interrupted, nothing can be compared, or the texts differ and one has fewer than
    2 sequences.
    """
    now = baseline_of(run)
    if not isinstance(baseline, Baseline):
        kind = type(baseline).__name__
        raise SinkscopeError(f"a Baseline is needed, not {kind}: read_baseline(FILE) reads, baseline_of(run) makes one")
    if not isinstance(policy, Policy):
        raise SinkscopeError(f"a Policy is needed, not {type(policy).__name__}: read_policy(Path(FILE)) reads one")
    names = [rule.metric for rule in policy.rules]
    refuse_moved(names, now.measured, baseline.measured, "write the baseline again from a new scan of its model")
    same, notes = dict[str, bool](), list[str]()
    pairs = _pairs(now, baseline)
    for domain, reference in pairs:
        same[domain] = _fingerprint(now, domain) == _fingerprint(baseline, reference)
        if not same[domain]:
            notes.append(
                f"{domain}: other token sequences than the baseline's; a change counts where it is significant"
            )
            notes += other_lengths(domain, {"the run": _data(now, domain), "the baseline": _data(baseline, reference)})
    first, before = (_first_token(side) for side in (now, baseline))
    if first != before:
        notes.append(f"the run's first token is {first}, the baseline's is {before}")
    if policy.same_precision < 1 and any(same.values()) and _both_float32(now, baseline):
        notes.append(
            f"bounds are {policy.same_precision:g} x those of the policy (same_precision): both runs are float32 over "
            "the same text, where rounding explains less"
        )
    judged = [
        _judge(
            _tightened(rule, policy.same_precision) if same[domain] and _both_float32(now, baseline) else rule,
            domain,
            now.levels[domain, rule.level],
            baseline.levels[reference, rule.level],
            same[domain],
        )
        for domain, reference in pairs
        for rule in policy.rules
    ]
    tallies = [_tally(judgement, q, policy.significance) for judgement, q in zip(judged, _pooled(judged), strict=True)]
    if not any(tally.places for tally in tallies):
        raise SinkscopeError("nothing was compared: no value that the policy names is in both the run and the baseline")
    notes += [_idle(tally) for tally in tallies if not tally.places]
    for domain, reference in pairs:
        heads = now.levels[domain, "head"], baseline.levels[reference, "head"]
        told = [_other_heads(rule, domain, *heads, same[domain]) for rule in policy.rules]
        notes += [note for note in told if note is not None]
    return Verdict(_named(now, baseline), _named(baseline, now), same, tallies, notes)


def _named(side: Baseline, other: Baseline) -> str:
    """The model for people to read. Where the other has the same name, what differs stands behind it."""
    own, others = _told(side), _told(other)
    different = [words for fact, words in own.items() if words != others[fact]]
    return f"{side.shown} ({', '.join(different)})" if side.shown == other.shown and different else side.shown


def _told(side: Baseline) -> dict[str, str]:
    """What tells two models of one name apart, in words."""
    model = side.facts.model
    return {
        "revision": f"revision {model.revision or 'unknown'}",
        "weights": f"weights {(model.weights_sha256 or 'unknown')[:12]}",
        "computed in": computed_in(model.dtype, model.device, model.quantization),
    }


def _pairs(now: Baseline, baseline: Baseline) -> list[tuple[str, str]]:
    """Pairs of (domain of the run, domain of the baseline) that have the same tokens, or else the same name."""
    wanted = {data.domain for data in baseline.facts.data}
    if not wanted:
        raise SinkscopeError("the baseline names no data, so nothing can be compared: write it again")
    pairs, same = [], same_text(now.facts.data, baseline.facts.data)
    for data in now.facts.data:
        reference = same.get(data.domain, data.domain)
        if reference in wanted and (data.domain in same or reference not in same.values()):
            pairs.append((data.domain, reference))
    missing = wanted - {reference for _, reference in pairs}
    if missing:
        raise SinkscopeError(f"the run lacks the baseline's data {', '.join(sorted(missing))}: scan it too")
    return pairs


def _data(side: Baseline, domain: str) -> BaselineDomain:
    return next(data for data in side.facts.data if data.domain == domain)


def _fingerprint(baseline: Baseline, domain: str) -> str | None:
    return _data(baseline, domain).fingerprint


def _first_token(baseline: Baseline) -> str:
    first = baseline.facts.first_token
    return "not the same in all sequences" if first.id is None else repr(first.text)


def _both_float32(now: Baseline, baseline: Baseline) -> bool:
    return {side.facts.model.dtype for side in (now, baseline)} == {"float32"}


def _tightened(rule: Rule, share: float) -> Rule:
    bounds = {"max_change": rule.max_change, "max_relative_change": rule.max_relative_change}
    return rule.model_copy(update={name: None if bound is None else bound * share for name, bound in bounds.items()})


@dataclass(frozen=True)
class _Judged:
    """One rule on one domain, place by place.

    Attributes:
        a, b: means of the baseline and of the run.
        p: p-value of "it moved no farther than allowed"; None where the texts are the same and no test is needed.
    """

    rule: Rule
    domain: str
    level: Level
    a: np.ndarray
    b: np.ndarray
    allowed: np.ndarray
    p: np.ndarray | None


def _judge(rule: Rule, domain: str, now: Level, then: Level, same_text: bool) -> _Judged:
    if not now.places.equals(then.places):
        now = _in_order(rule, domain, now, then)
    if rule.metric not in then.mean and rule.metric not in now.mean:
        raise SinkscopeError(f"neither the run nor the baseline holds {rule.metric} at level {rule.level}")
    if not same_text and min(now.count, then.count) < 2:
        raise SinkscopeError(
            f"{domain}: judging other text than the baseline's needs at least 2 sequences "
            f"({now.count} in the run, {then.count} in the baseline)"
        )
    a, b = then.means(rule.metric), now.means(rule.metric)
    b = np.where(as_kept(b) == a, a, b)  # what the baseline's file does not tell apart is no change
    if same_text and rule.metric in SAMPLED and (then.counts(rule.metric) != now.counts(rule.metric)).any():
        raise SinkscopeError(
            f"{domain}: {rule.metric} was measured on other sequences of the same text than the baseline's: scan with "
            "the baseline's --spectra, or write a new baseline"
        )
    allowed = _allowed(rule, a)
    p = None
    if not same_text:
        p = beyond(np.abs(b - a), allowed, *_errors(then, rule), *_errors(now, rule))
    return _Judged(rule, domain, now, a, b, allowed, p)


def _errors(side: Level, rule: Rule) -> tuple[np.ndarray, np.ndarray]:
    """Standard errors of the rule's metric and numbers of sequences, [cell], as `beyond` takes them."""
    error, count = side.errors(rule.metric), side.counts(rule.metric)
    return with_floor(error, count) if whole_numbers(rule.metric, rule.level) else error, count


def _in_order(rule: Rule, domain: str, now: Level, then: Level) -> Level:
    """The run's level with its places in the baseline's order. Raises SinkscopeError where these are others."""
    order = same_places(then.places, now.places)
    if len(now.places) != len(then.places) or (order < 0).any():
        raise SinkscopeError(
            f"{domain}: the run has other layers or heads than the baseline ({_listed(now)} at level {rule.level} "
            f"against {_listed(then)}): write a new baseline"
        )
    taken = ({name: values[order] for name, values in part.items()} for part in (now.mean, now.sem, now.fewer))
    mean, sem, fewer = taken
    return Level(then.places, mean, sem, now.count, fewer)


def _listed(level: Level) -> str:
    """How many places each stream has: `12 of text`; of heads, also in how many layers."""
    told = []
    for stream, places in level.places.groupby("stream", sort=False):
        number = places["layer"].nunique() if "head" in places else 0
        told.append(f"{len(places)} of {stream}" + (f" in {number} layer{'s' if number > 1 else ''}" if number else ""))
    return ", ".join(told)


def _pooled(judged: list[_Judged]) -> list[np.ndarray | None]:
    """q-values for each rule and domain. All places are corrected together, since any one of them fails the check."""
    tested = [judgement.p for judgement in judged if judgement.p is not None]
    ends = np.cumsum([len(p) for p in tested])[:-1]
    q = iter(np.split(false_discovery(np.concatenate(tested)), ends) if tested else [])
    return [None if judgement.p is None else next(q) for judgement in judged]


def _tally(judged: _Judged, q: np.ndarray | None, significance: float) -> Tally:
    rule, a, b = judged.rule, judged.a, judged.b
    change = np.abs(b - a)
    failed = change > judged.allowed if q is None else q < (rule.significance or significance)
    failed |= np.isnan(a) != np.isnan(b)
    breaches = [_breach(judged, int(index), q) for index in np.flatnonzero(failed)]
    largest = None if np.isnan(change).all() else float(np.nanmax(change))
    places = int((failed | ~np.isnan(change if judged.p is None else judged.p)).sum())
    moved = judged.level.places.assign(baseline=a, now=b, allowed=judged.allowed, breach=failed)
    return Tally(rule, judged.domain, places, largest, breaches, moved)


def _idle(tally: Tally) -> str:
    """Says that a rule judged nothing: a check that passes would read as if the rule held."""
    missing = tally.moved["baseline"].isna().all()
    why = "neither side has a value" if missing else "one sequence alone has a value, so that no test can be made"
    return f"{tally.domain}: {tally.rule.metric} at level {tally.rule.level} judged nothing: {why}"


def _other_heads(rule: Rule, domain: str, now: Level, then: Level, same_text: bool) -> str | None:
    """Says that a rule's means over heads are over other heads in the run than in the baseline; None where they are
    not. `now`, `then`: the levels of heads. Over other text, a head is another one only if it has no value at all.

    The baseline keeps means alone, so what one side lacks cannot be left out of the other's.
    """
    if rule.level == "head" or not (rule.metric in now.mean and rule.metric in then.mean):
        return None
    counts = []
    for side in (now, then):
        present = side.counts(rule.metric) if same_text else np.ones(len(side.places))
        known = np.where(np.isnan(side.means(rule.metric)), 0.0, present)
        counts.append(pd.Series(known, pd.MultiIndex.from_frame(side.places)))
    other = int((counts[0].sub(counts[1], fill_value=0.0) != 0).sum())
    if not other:
        return None
    has = "1 head has" if other == 1 else f"{other} heads have"
    return (
        f"{domain}: {rule.metric} at level {rule.level} is a mean over other heads than the baseline's: {has} values "
        "that one side lacks"
    )


def _allowed(rule: Rule, baseline: np.ndarray) -> np.ndarray:
    """The larger of the rule's two bounds, for each place."""
    absolute = np.full(len(baseline), rule.max_change or 0.0)
    relative = (rule.max_relative_change or 0.0) * np.abs(np.nan_to_num(baseline))
    return np.maximum(absolute, relative)


def _breach(judged: _Judged, index: int, q: np.ndarray | None) -> Breach:
    rule, level = judged.rule, judged.level
    place = level.places.iloc[index].to_dict()
    layer, head = (None if place.get(key) is None else int(place[key]) for key in ("layer", "head"))
    before, after = (None if np.isnan(values[index]) else float(values[index]) for values in (judged.a, judged.b))
    chance = None if q is None or np.isnan(q[index]) else float(q[index])
    where = (rule.metric, rule.level, judged.domain, str(place["stream"]), layer, head)
    return Breach(*where, before, after, float(judged.allowed[index]), chance)
