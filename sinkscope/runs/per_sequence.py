"""The per-sequence values of a run as arrays, for one domain; a cell is a head, a layer or a stream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import TYPE_CHECKING, Protocol

import numpy as np
import pandas as pd

from sinkscope.errors import SinkscopeError
from sinkscope.runs.catalogue import catalogue, near_column
from sinkscope.runs.words import says_nothing, sequences_of_tokens

if TYPE_CHECKING:
    from sinkscope.runs.run import Run
    from sinkscope.runs.schema.manifest import DomainFacts


LEVELS = ("summary", "layer", "head")
PLACE = {"summary": ["stream"], "layer": ["stream", "layer"], "head": ["stream", "layer", "head"]}
NOT_METRICS = ("domain", "stream", "layer", "module", "sequence", "document", "head")
PLACES = ("max_abs_token", "max_abs_dim")
"""Per-sequence columns that are positions or channels: their means have no meaning."""


class Known(Protocol):
    """The sequences of a domain, as a manifest or a baseline knows them."""

    domain: str
    fingerprint: str


class Sized(Protocol):
    """The lengths of the sequences of a domain, as a manifest or a baseline knows them."""

    @property
    def seq_len(self) -> int: ...

    @property
    def shortest(self) -> int | None: ...


@dataclass(frozen=True)
class Cells:
    """The values of one domain at one level.

    Attributes:
        places: one row per cell; its columns are PLACE[level].
        values: [sequence, cell, metric].
        names: names of the metrics, in the order of `values`.
    """

    places: pd.DataFrame
    values: np.ndarray
    names: list[str]


def same_text(own: Sequence[Known], others: Sequence[Known]) -> dict[str, str]:
    """For each domain, the name of the other run's domain that holds the same sequences, where one does.

    Several domains may hold the same, under two labels of a watch: those of one name belong together.
    """
    left = {other.domain: other.fingerprint for other in others}
    pairs = {data.domain: data.domain for data in own if left.get(data.domain) == data.fingerprint}
    for data in own:
        free = (
            name for name, fingerprint in left.items() if fingerprint == data.fingerprint and name not in pairs.values()
        )
        if data.domain not in pairs and (name := next(free, None)) is not None:
            pairs[data.domain] = name
    return pairs


def same_places(own: pd.DataFrame, others: pd.DataFrame) -> np.ndarray:
    """For each place (a row of Cells.places), the row of `others` that is the same place; -1 where none is.

    Raises SinkscopeError where `others` holds a place twice.
    """
    index = pd.MultiIndex.from_frame(others)
    if not index.is_unique:
        raise SinkscopeError("a run holds a head twice: it is damaged, or of an older sinkscope; measure it again")
    return np.asarray(index.get_indexer(pd.MultiIndex.from_frame(own)))


def not_shares(run: Run) -> dict[str, list[str]]:
    """The scores other than softmax, by the streams that have some: what stands in bos_mass there is no share of 1."""
    scores: dict[str, set[str]] = {}
    for site in run.manifest.attention:
        scores.setdefault(site.stream, set()).add(site.score)
    return {stream: sorted(names) for stream, names in scores.items() if names != {"softmax"}}


THRESHOLDED = ("sink_rate", "sink_rate_t64", "sinks_per_sequence", "sink_elsewhere", "sink_heads")
"""The columns that hold attention against the sink threshold."""


ZERO_OR_ONE = ("sink_rate", "sink_rate_t64", "sink_elsewhere")
"""The columns of heads that are 0 or 1 in each sequence."""
COUNTED = ("positions", "tokens", "groups", "dimension")
"""Units of columns that count something in each sequence."""


def whole_numbers(metric: str, level: str) -> bool:
    """Whether sinkscope's own metric is a whole number in each sequence at a level; above it, it is a mean of such."""
    return any(
        column.name == metric
        and level == ("layer" if column.table == "layers" else "head")
        and (metric in ZERO_OR_ONE or column.unit in COUNTED)
        for column in catalogue()
        if column.per == "sequence"
    )


def tells_sinks(run: Run, stream: str, uniform: float | None, threshold: float) -> bool:
    """Whether passing a threshold is a sign of a sink in the stream: its scores are a softmax's, and uniform attention,
    whose alpha_0 is `uniform`, does not pass it."""
    return stream not in not_shares(run) and not says_nothing(uniform, threshold)


def unit_in(runs: Sequence[Run], unit: str, stream: str | None = None) -> str:
    """The unit of a column as it is in these runs: attention whose rows are not divided by their sum is no probability.

    `stream`: the only one that is meant; all of the runs' where it is None.
    """
    if unit != "probability":
        return unit
    sites = [site for run in runs for site in run.manifest.attention if stream in (None, site.stream)]
    units = {"unnormalised weight" if site.score != "softmax" and not site.normalised else unit for site in sites}
    return " or ".join(sorted(units)) or unit


def metric_names(run: Run) -> tuple[list[str], list[str]]:
    """Names of the head metrics and of the layer metrics that have a value in the table of sequences."""
    table = run.sequences
    columns = [name for name in table.columns if name not in NOT_METRICS and name not in PLACES]
    is_head, present = table["head"].notna().to_numpy(), table[columns].notna().to_numpy()
    of_heads, of_layers = present[is_head].any(0), present[~is_head].any(0)
    return list(compress(columns, of_heads)), list(compress(columns, of_layers))


def chosen_metrics(runs: list[Run], wanted: list[str]) -> list[str]:
    """The metrics asked for, in that order; all that every run has where `wanted` is empty.

    Raises SinkscopeError for a name that is no per-sequence metric of every run.
    """
    sets = [set().union(*metric_names(run)) for run in runs]
    shared = set.intersection(*sets)
    if not wanted:
        heads, layers = metric_names(runs[0])
        return [name for name in [*heads, *layers] if name in shared]
    for name in wanted:
        if name in shared:
            continue
        if any(name in names for names in sets):
            raise SinkscopeError(f"metric {name!r}: not measured in all of the runs")
        if any(name in table.columns for run in runs for table in (run.heads, run.layers)):
            raise SinkscopeError(f"metric {name!r} has no value in these runs, or none for a single sequence")
        raise SinkscopeError(f"unknown metric {name!r}; `sinkscope metrics` lists them{near_column(name, shared)}")
    return list(dict.fromkeys(wanted))


def domains(run: Run) -> list[DomainFacts]:
    """The manifest's entries of the domains that have values; an interrupted run may lack some domains."""
    measured = set(run.sequences["domain"])
    return [data for data in run.manifest.data if data.domain in measured]


def sequences_of(run: Run, data: DomainFacts) -> int:
    """How many sequences of a domain were measured: fewer than the manifest tells where the run was interrupted."""
    if run.manifest.complete:
        return data.sequences
    return int(run.sequences.loc[run.sequences["domain"] == data.domain, "sequence"].nunique())


def counted(run: Run, data: DomainFacts) -> str:
    """`32 sequences of 256 tokens`; of an interrupted run, how many of how many."""
    if run.manifest.complete:
        return sequences_of_tokens(data.sequences, tokens_of(data))
    return f"{sequences_of(run, data)} of {sequences_of_tokens(data.sequences, tokens_of(data))} (interrupted)"


def tokens_of(data: Sized) -> str:
    """How many tokens the sequences have: `256`, or `33 to 100` where they differ."""
    return spread([data.shortest or data.seq_len, data.seq_len])


def other_lengths(domain: str, sides: Mapping[str, Sized]) -> list[str]:
    """A note where the sequences of two `sides`, each under its name, differ in length; else an empty list.

    Means over queries depend on the length, so that runs of one model differ, too, where their lengths differ.
    """
    tokens = {side: tokens_of(data) for side, data in sides.items()}
    if len(set(tokens.values())) == 1:
        return []
    told = ", ".join(f"{count} tokens in {side}" for side, count in tokens.items())
    return [
        f"{domain}: the sequences differ in length ({told}). bos_mass, sink_score, entropy and other means over "
        "queries depend on it, so a difference may come from it alone: give both the same length (scan: --seq-len)"
    ]


def spread(lengths: Sequence[int | None]) -> str:
    """`256`, or `33 to 100` where the lengths differ, or `? to 100` where one is not known."""
    known = [length for length in lengths if length is not None]
    least = min(known) if len(known) == len(lengths) else "?"
    return " to ".join(map(str, dict.fromkeys((least, max(known)))))


def queries_of(run: Run, domain: str, longest: int) -> tuple[int | None, int]:
    """How many queries the shortest and the longest sequence of a stream have. `longest`: those of the longest.

    The shortest is recorded of the sequences that the model is given. None for others, which it makes itself of
    sequences of unequal lengths.
    """
    data = next(data for data in run.manifest.data if data.domain == domain)
    if data.shortest is None:
        return longest, longest
    return data.shortest if longest == data.seq_len else None, longest


def cells(run: Run, domain: str, level: str, names: list[str]) -> Cells:
    """The values of one domain at one level.

    `head`: the head metrics. `layer`: the layer metrics, and the head metrics averaged over the layer's heads.
    `summary`: head metrics averaged over the stream's heads, layer metrics over its layers.
    Metrics that the level lacks are left out.
    """
    of_heads, of_layers = metric_names(run)
    table = run.sequences
    here, is_head = (table["domain"] == domain).to_numpy(), table["head"].notna().to_numpy()
    parts = [(here & is_head, [name for name in names if name in of_heads])]
    if level != "head":
        parts.append((here & ~is_head, [name for name in names if name in of_layers]))
    keys = ["sequence", *PLACE[level]]
    averaged = [_averaged(table.loc[rows, keys + chosen], level, chosen) for rows, chosen in parts if chosen]
    if not averaged:
        return Cells(pd.DataFrame(columns=PLACE[level]), np.empty((0, 0, 0)), [])
    order = [name for part in averaged for name in part.names]
    return Cells(averaged[0].places, np.concatenate([part.values for part in averaged], axis=2), order)


def _averaged(rows: pd.DataFrame, level: str, names: list[str]) -> Cells:
    """Cells from rows of one kind. Raises SinkscopeError unless every sequence has the same number of cells."""
    keys = PLACE[level]
    if level != "head":
        rows = rows.groupby(["sequence", *keys], sort=False)[names].mean().reset_index()
    sequences = rows["sequence"].to_numpy()
    order, count = np.argsort(sequences, kind="stable"), len(np.unique(sequences))
    if count == 0 or len(rows) % count:
        raise SinkscopeError("sequences.parquet is damaged: its sequences do not hold the same heads")
    size = len(rows) // count
    first = {key: rows[key].array[order[:size]] for key in keys}
    places = pd.DataFrame({key: at if key == "stream" else np.asarray(at, int) for key, at in first.items()})
    return Cells(places, rows[names].to_numpy(dtype=float)[order].reshape(count, size, len(names)), names)
