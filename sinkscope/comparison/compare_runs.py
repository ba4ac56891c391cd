"""Compares two runs per head, layer and stream: differences with errors, intervals and false discovery rates."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pandas as pd

from sinkscope.comparison.levels import (
    CHANGED,
    Changes,
    Listed,
    Pair,
    concatenated,
    depth_rows,
    head_changes,
    level_rows,
    massive_rows,
    sink_token_rows,
)
from sinkscope.errors import SinkscopeError
from sinkscope.runs.catalogue import hides_keys, moved, refuse_moved
from sinkscope.runs.per_sequence import (
    LEVELS,
    PLACE,
    chosen_metrics,
    domains,
    metric_names,
    other_lengths,
    same_text,
    tokens_of,
)
from sinkscope.runs.run import need_run
from sinkscope.runs.showing import ShownComparison

if TYPE_CHECKING:
    from sinkscope.runs.run import Run
    from sinkscope.runs.schema.manifest import DomainFacts


SCHEMA_VERSION = 1
DEFAULT_METRICS = ("bos_mass", "sink_score", "entropy", "honor")
TABLES = {"summary": "summary", "layer": "layers", "head": "heads"}


ONE_BY_DEFINITION = ("honor",)
"""Columns divided by their mean over the layer's heads, besides those that end in `_ln`: that mean is 1 in any run."""


class NotPaired(SinkscopeError):
    """Two runs that read no dataset alike, or one of the same name otherwise. `reason`: what differs."""

    def __init__(self, reason: str, remedy: str = "compare(..., paired=False) compares separate samples") -> None:
        super().__init__(f"{reason}; {remedy}")
        self.reason = reason


@dataclass
class Comparison(ShownComparison):
    """What changed from run A to run B.

    Attributes:
        a, b: the model, dtype, data, number of sequences and folder of each run.
        paired: whether both runs read the same token sequences, so that each sequence is its own control.
        same_shape: whether both have the same streams, layers and heads; if not, `heads` and `layers` are empty.
        heads, layers, summary: long tables, one row per (domain, place, metric): a, b, difference (b - a), sem, low
            and high (95 % interval, Student's t), p (t-test), q (Benjamini-Hochberg over the places of that metric).
            honor and the `_ln` columns have rows in `heads` alone: their mean over a layer's heads is always 1.
            The interval leaves out 0 exactly where p < 0.05.
        changes: heads that gained_sink or lost_sink (mean sink_score against epsilon), woke or fell_dormant, by a
            difference with q < 0.05.
        within_noise: heads that crossed the same thresholds by a difference that does not hold.
        notes: sentences that the reader must know.
        depths: where heads cannot be matched, profiles over relative depth, one row per (domain, stream, metric,
            depth); see `comparison.levels.depth_rows`. Empty otherwise.
        massive: the massive activations of both, one row per stream; see `comparison.states.massive_rows`.
        tokens: the tokens that are attention sinks in either run; see `comparison.states.sink_token_rows`.

    With margins of equivalence the tables have margin, p_equivalent (two one-sided t-tests of "the true difference is
    at least the margin") and p_equivalent_holm (Holm's adjustment over the places of that metric). A place is shown to
    be equivalent where that is below 0.05; a large p says nothing.
    """

    a: dict[str, Any]
    b: dict[str, Any]
    paired: bool
    same_shape: bool
    metrics: list[str]
    heads: pd.DataFrame
    layers: pd.DataFrame
    summary: pd.DataFrame
    changes: Listed
    within_noise: Listed
    notes: list[str] = field(default_factory=list)
    depths: pd.DataFrame = field(default_factory=pd.DataFrame)
    massive: pd.DataFrame = field(default_factory=pd.DataFrame)
    tokens: pd.DataFrame = field(default_factory=pd.DataFrame)

    def __repr__(self) -> str:
        """One line: the tables would fill a notebook's screen."""
        kind = "paired" if self.paired else "unpaired"
        moved = ", ".join(f"{len(self.changes[change])} {words}" for change, words in CHANGED.items())
        return f"<Comparison of {self.a['model']} with {self.b['model']}, {kind}: {moved}>"

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON, schema_version first."""
        beside = [name for name in ("depths", "massive", "tokens") if len(getattr(self, name))]
        names = ("summary", "layers", "heads", *beside)
        tables = {name: getattr(self, name).to_dict("records") for name in names}
        facts = {"a": self.a, "b": self.b, "paired": self.paired, "same_shape": self.same_shape}
        rest = {"metrics": self.metrics, "notes": self.notes, "changes": self.changes}
        rest["within_noise"] = self.within_noise
        return {"schema_version": SCHEMA_VERSION, **facts, **rest, **tables}

    def as_table(self) -> pd.DataFrame:
        """All rows in one table with a `level` column in front; layer and head are empty where they do not apply."""
        named = [getattr(self, table).assign(level=level) for level, table in TABLES.items()]
        table = pd.concat([part for part in named if len(part)], ignore_index=True)
        order = ["level", "domain", "stream", "layer", "head"]
        table = table.reindex(columns=[*order, *(name for name in table.columns if name not in order)])
        return table.astype({"layer": "Int64", "head": "Int64"})


def compare(
    a: Run, b: Run, *, metrics: list[str] | str | None = None, paired: bool = True,
    equivalence_margin: Mapping[str, float] | None = None,
) -> Comparison:  # fmt: skip
    """Compares two runs. Differences are b - a.

    Args:
        metrics: names of per-sequence metrics, or one; None means bos_mass, sink_score, entropy and honor, [] all.
        paired: whether the runs read the same token sequences, each its own control; False treats them as separate
            samples (Welch's test), for runs over different text.
        equivalence_margin: for each metric that is tested for equivalence, the largest difference that does not matter,
            in the metric's unit.

    Raises:
        NotPaired: `paired` is True, and the runs read no dataset alike or one of the same name otherwise.
        SinkscopeError: they share no domain; a metric is unknown; a margin is not above 0, or of a metric that is not
            compared.
    """
    for run in a, b:
        need_run(run)
    pairs, notes = _matched(a, b, paired)
    asked = [metrics] if isinstance(metrics, str) else metrics
    names = chosen_metrics([a, b], _default_metrics(a, b, notes) if asked is None else asked)
    names = _comparable(a, b, names, bool(metrics), notes)
    _check_margins(equivalence_margin or {}, names)
    same = sorted(_shape(a, [in_a for in_a, _, _ in pairs])) == sorted(_shape(b, [in_b for _, in_b, _ in pairs]))
    notes += _without_partner(a, b, pairs, same)
    for in_a, in_b, _ in pairs:
        notes += other_lengths(in_a, {"A": _domain(a, in_a), "B": _domain(b, in_b)})
    if not same:
        notes.append(
            f"different shapes ({describe_shape(a)} against {describe_shape(b)}): heads cannot be matched; "
            "compared by summary and over relative depth"
        )
    asked_a, asked_b = a.manifest.request, b.manifest.request
    if asked_a.epsilon != asked_b.epsilon:
        notes.append("the runs have different epsilons: each run's sinks are judged by its own epsilon")
    if asked_a.dormant_rule != asked_b.dormant_rule:
        notes.append("the runs have different dormant rules: each run's heads are judged by its own rule")
    tables = {}
    for level in LEVELS:
        level_names = names if level == "head" else [name for name in names if not _is_one(name)]
        frames = [level_rows(a, b, pair, level, level_names, paired, equivalence_margin) for pair in pairs]
        tables[level] = concatenated(frames) if same or level == "summary" else pd.DataFrame()
    changes = head_changes(a, b, pairs, paired) if same else Changes()
    layered = [name for name in names if not _is_one(name)]
    depths = pd.DataFrame() if same else concatenated([depth_rows(a, b, pair, layered, paired) for pair in pairs])
    of_a = _facts(a, [(in_a, count) for in_a, _, count in pairs])
    of_b = _facts(b, [(in_b, count) for _, in_b, count in pairs])
    return Comparison(
        of_a, of_b, paired, same, names, tables["head"], tables["layer"], tables["summary"],
        changes.held, changes.within_noise, [*notes, *changes.notes], depths, massive_rows(a, b),
        sink_token_rows(a, b, pairs),
    )  # fmt: skip


def _check_margins(margins: Mapping[str, float], names: list[str]) -> None:
    for name, margin in margins.items():
        if name not in names:
            raise SinkscopeError(f"equivalence margin of {name}: that metric is not compared; {', '.join(names)} are")
        if not (math.isfinite(margin) and margin > 0):
            raise SinkscopeError(f"equivalence margin of {name}: {margin:g} is not above 0")


def _is_one(name: str) -> bool:
    """Whether the column's mean over a layer's heads is 1 by definition, and says nothing above the level of heads."""
    return name in ONE_BY_DEFINITION or name.endswith("_ln")


def _default_metrics(a: Run, b: Run, notes: list[str]) -> list[str]:
    """The default metrics that both runs have; adds a note on the others. An empty list means all metrics."""
    measured = [set().union(*metric_names(run)) for run in (a, b)]
    kept = [name for name in DEFAULT_METRICS if all(name in names for names in measured)]
    missing = [name for name in DEFAULT_METRICS if name not in kept]
    if missing:
        notes.append(f"not measured in both runs, so not compared: {', '.join(missing)}")
    return kept


def _comparable(a: Run, b: Run, names: list[str], named: bool, notes: list[str]) -> list[str]:
    """The metrics that both runs measured alike; adds a note on the others. Raises SinkscopeError where they were
    `named`."""
    first, second = ((run.manifest.schema_version, hides_keys(run.manifest)) for run in (a, b))
    if named:
        refuse_moved(names, first, second, "scan the older run's model again")
    left_out = [name for name in names if name in moved(first, second)]
    if left_out:
        notes.append(
            f"measured otherwise by one run, of schema version 2 or older, so not compared: {', '.join(left_out)}"
        )
    return [name for name in names if name not in left_out]


def _matched(a: Run, b: Run, paired: bool) -> tuple[list[Pair], list[str]]:
    """The pairs of domains that are compared, and notes for the reader."""
    of_a, of_b = domains(a), domains(b)
    notes: list[str] = []
    if not paired:
        if len(of_a) == len(of_b) == 1:
            return [(of_a[0].domain, of_b[0].domain, None)], notes
        shared = [data.domain for data in of_a if data.domain in {other.domain for other in of_b}]
        if not shared:
            raise SinkscopeError(
                f"the runs share no dataset ({_names(of_a)} against {_names(of_b)}): datasets of one name are "
                "compared, or the only ones of two runs; give them the same names, or scan each alone"
            )
        return [(name, name, None) for name in shared], [*notes, *_not_compared(of_a, of_b, shared, shared)]
    pairs, partners = [], same_text(of_a, of_b)
    alone_in_b = {data.domain for data in of_b} - set(partners.values())
    for data in of_a:
        in_b = partners.get(data.domain)
        if in_b is None:
            if data.domain in alone_in_b:
                raise NotPaired(_why_not_paired(a, b, data.domain))
            continue
        sizes = [run.sequences.loc[run.sequences["domain"] == d, "sequence"].nunique()
                 for run, d in ((a, data.domain), (b, in_b))]  # fmt: skip
        if sizes[0] != sizes[1]:
            notes.append(f"{data.domain}: one run was interrupted; its first {min(sizes)} sequences are compared")
        if in_b != data.domain:
            notes.append(f"{data.domain} of A is compared with {in_b} of B, which has the same token sequences")
        pairs.append((data.domain, in_b, min(sizes)))
    if not pairs:
        raise NotPaired(f"the runs read different data: {_names(of_a)} against {_names(of_b)}")
    return pairs, [*notes, *_not_compared(of_a, of_b, *zip(*(pair[:2] for pair in pairs), strict=True))]


def _not_compared(
    of_a: list[DomainFacts], of_b: list[DomainFacts], in_a: Sequence[str], in_b: Sequence[str]
) -> list[str]:
    """A note on each run's domains that are not among those compared."""
    notes = []
    for side, every, compared in (("A", of_a, in_a), ("B", of_b, in_b)):
        alone = [data.domain for data in every if data.domain not in compared]
        if alone:
            notes.append(f"only {side} has {', '.join(alone)}: not compared")
    return notes


def _without_partner(a: Run, b: Run, pairs: list[Pair], same: bool) -> list[str]:
    """A note on each pair of domains of which one run measured heads, or streams where the shapes differ, that the
    other did not. Raises SinkscopeError where they share none."""
    notes, shared = [], 0
    for in_a, in_b, _ in pairs:
        keys = PLACE["head" if same else "summary"]
        own, other = (_places(run, domain, keys) for run, domain in ((a, in_a), (b, in_b)))
        shared += len(own & other)
        alone = [
            f"{side}'s {_named(places, same)}" for side, places in (("A", own - other), ("B", other - own)) if places
        ]
        if alone:
            notes.append(f"{in_a}: {' and '.join(alone)} were not measured in the other run, so not compared")
    if not shared:
        sides = (sorted(set(run.sequences["stream"])) for run in (a, b))
        named = " and ".join(f"{side} has {', '.join(streams)}" for side, streams in zip("AB", sides, strict=True))
        raise SinkscopeError(f"the runs share no {'head' if same else 'stream'} that could be compared: {named}")
    return notes


def _places(run: Run, domain: str, keys: list[str]) -> set[tuple[Any, ...]]:
    rows = run.sequences[(run.sequences["domain"] == domain) & run.sequences["head"].notna()]
    return set(rows[keys].drop_duplicates().itertuples(index=False, name=None))


def _named(places: set[tuple[Any, ...]], heads: bool) -> str:
    streams = ", ".join(sorted({str(place[0]) for place in places}))
    return f"{len(places)} heads of {streams}" if heads else streams


def _why_not_paired(a: Run, b: Run, domain: str) -> str:
    """Says why the sequences of a domain that both runs have differ; names the first setting that differs."""
    facts_a, facts_b = _domain(a, domain), _domain(b, domain)
    if _tokenizer(a) != _tokenizer(b):
        return f"the runs' models have two tokenizers, which cut the text of {domain!r} into different tokens"
    checks = [
        ("sequences", facts_a.sequences, facts_b.sequences),
        ("tokens a sequence", tokens_of(facts_a), tokens_of(facts_b)),
        ("first token", *(_first_token(run) for run in (a, b))),
        ("seed", *(run.manifest.request.seed for run in (a, b))),
    ]
    for name, first, second in checks:
        if first != second:
            return f"the token sequences of {domain!r} differ ({name}: {first} against {second})"
    return f"the token sequences of {domain!r} differ (their fingerprints differ, their settings do not)"


def _tokenizer(run: Run) -> str | None:
    """What tells tokenizers apart: the hash of their files, or the class where runs of older versions have no hash."""
    return run.manifest.model.tokenizer_sha256 or run.manifest.model.tokenizer


def _first_token(run: Run) -> str:
    first = run.manifest.first_token
    return "one that differs between sequences" if first.id is None else repr(first.text)


def _names(data: list[DomainFacts]) -> str:
    return ", ".join(entry.domain for entry in data)


def _shape(run: Run, compared: Sequence[str] | None = None) -> list[tuple[str, int, int]]:
    """(stream, layer, heads) of every attention site; of those that some of the domains measured, where these are
    named."""
    heads = run.heads
    if compared is not None and "domain" in heads:
        heads = heads[heads["domain"].isin(compared)]
    counts = heads.drop_duplicates(["stream", "layer", "module", "head"]).groupby(
        ["stream", "layer", "module"], sort=False
    )
    return [(str(stream), int(layer), len(rows)) for (stream, layer, _), rows in counts]


def describe_shape(run: Run) -> str:
    """`18 layers x 4 heads`; the total number of heads where layers differ in it."""
    shape = _shape(run)
    counts = {count for _, _, count in shape}
    layers = _counted(len(shape), "layer")
    if len(counts) > 1:
        return f"{layers}, {_counted(sum(count for _, _, count in shape), 'head')} in all"
    return f"{layers} x {_counted(counts.pop(), 'head')}"


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def _domain(run: Run, domain: str) -> DomainFacts:
    return next(data for data in run.manifest.data if data.domain == domain)


def _facts(run: Run, compared: list[tuple[str, int | None]]) -> dict[str, Any]:
    """`compared`: the domains that are compared, each with the number of its sequences; None = all."""
    model = run.manifest.model
    counts = run.sequences.groupby("domain")["sequence"].nunique()
    return {
        "model": model.shown,
        "dtype": model.dtype,
        "quantization": model.quantization,
        "device": model.device,
        "weights_sha256": model.weights_sha256,
        "shape": describe_shape(run),
        "sequences": sum(int(counts[domain]) if count is None else count for domain, count in compared),
        "data": [domain for domain, _ in compared],
        "tokens": [tokens_of(_domain(run, domain)) for domain, _ in compared],
        "run": str(run.path) if run.path else None,
    }
