"""Two runs level by level: every place's difference, tested; the heads whose state differs; profiles over depth; and
beside their heads, massive activations and the tokens that are attention sinks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from sinkscope.runs.dormancy import parse_rule
from sinkscope.runs.per_sequence import PLACE, cells, not_shares, same_places, whole_numbers
from sinkscope.runs.statistics import (
    SIGNIFICANT,
    equivalence,
    false_discovery,
    holm,
    paired_difference,
    welch_difference,
)

if TYPE_CHECKING:
    from sinkscope.runs.run import Run

Pair = tuple[str, str, int | None]
"""(domain of a, domain of b, number of sequences taken from each; None takes all)."""


def level_rows(
    a: Run, b: Run, pair: Pair, level: str, names: list[str], paired: bool, margins: Mapping[str, float] | None = None
) -> pd.DataFrame:  # fmt: skip
    """One row per (metric, place) of a pair of domains that both runs have, with the columns of Comparison's tables.

    `names`: per-sequence metrics; those that a run lacks at this level are left out. `margins`: margins of equivalence
    by metric; without any, the columns on equivalence are left out.
    """
    if level != "head":
        a, b = _with_shared_values(a, b, pair, names, paired)
    first, second = cells(a, pair[0], level, names), cells(b, pair[1], level, names)
    shared = [name for name in first.names if name in second.names]
    partner = same_places(first.places, second.places)
    matched = np.flatnonzero(partner >= 0)
    if not len(matched):
        return pd.DataFrame()
    places, frames = first.places.iloc[matched].reset_index(drop=True), []
    for name in shared:
        x = first.values[: pair[2], matched, first.names.index(name)]
        y = second.values[: pair[2], partner[matched], second.names.index(name)]
        tested = paired_difference if paired else welch_difference
        result = tested(x, y, whole_numbers(name, level))
        rows = places.assign(
            metric=name, a=result.a, b=result.b, difference=result.difference, sem=result.sem,
            low=result.low, high=result.high, p=result.p, q=false_discovery(result.p),
        )  # fmt: skip
        rows.insert(0, "domain", pair[0])
        if margins:
            margin = margins.get(name, float("nan"))
            p = equivalence(result, margin)
            rows = rows.assign(margin=margin, p_equivalent=p, p_equivalent_holm=holm(p))
        frames.append(rows)
    return concatenated(frames)


def _with_shared_values(a: Run, b: Run, pair: Pair, names: list[str], paired: bool) -> tuple[Run, Run]:
    """The runs without the values that the other one lacks: if paired, at the same place of the same sequence, else at
    the same place in all sequences.

    A mean over heads would else be over other heads in each run, and their difference no difference of any head.
    """
    keys = [*(["sequence"] if paired else []), "stream", "layer", "head"]
    tables = [run.sequences[run.sequences["domain"] == domain] for run, domain in ((a, pair[0]), (b, pair[1]))]
    indexed = [rows.assign(head=rows["head"].fillna(-1).astype(int)).set_index(keys)[names].isna() for rows in tables]
    lacking = [missing.groupby(level=keys, sort=False).all() for missing in indexed]
    order = lacking[0].index.intersection(lacking[1].index)
    own, other = (missing.loc[order] for missing in lacking)
    if own.equals(other):
        return a, b
    masked = []
    for run, rows, missing, others in ((a, tables[0], indexed[0], other), (b, tables[1], indexed[1], own)):
        gone = others.reindex(missing.index, fill_value=False).set_axis(rows.index)
        table = run.sequences.copy()
        table.loc[rows.index, names] = rows[names].mask(gone)
        masked.append(replace(run, sequences=table))
    return masked[0], masked[1]


def concatenated(frames: list[pd.DataFrame]) -> pd.DataFrame:
    """All rows in one table; empty tables, which have no columns, are left out."""
    frames = [frame for frame in frames if len(frame)]
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()


# The heads whose state differs between two runs: a sink gained or lost, dormant or no longer.
#
# A mean that lies near a threshold crosses it with every other text. A change of state therefore counts only where the
# difference behind it holds: q < 0.05, by the same test and over the same heads as everywhere in the comparison.


CHANGED = {
    "gained_sink": "gained a sink",
    "lost_sink": "lost a sink",
    "woke": "became active (no longer dormant)",
    "fell_dormant": "became dormant",
}
"""How the state of a head may change: the name in files, and words."""

Listed = dict[str, list[dict[str, Any]]]
"""Heads by change: place (with the domain where there are several), metric, its means a and b, and q."""


@dataclass
class Changes:
    """Heads whose state differs. `held`: their difference holds. `within_noise`: it does not, or could not be tested.

    `notes`: sentences on what was not judged.
    """

    held: Listed = field(default_factory=lambda: {name: [] for name in CHANGED})
    within_noise: Listed = field(default_factory=lambda: {name: [] for name in CHANGED})
    notes: list[str] = field(default_factory=list)

    def add(self, name: str, rows: pd.DataFrame, crossed: pd.Series, keys: list[str]) -> None:
        """Files the rows that crossed a threshold by whether their difference holds."""
        for row in rows.loc[crossed, [*keys, "metric", "a", "b", "q"]].to_dict("records"):
            (self.held if row["q"] < SIGNIFICANT else self.within_noise)[name].append(row)


def head_changes(a: Run, b: Run, pairs: list[Pair], paired: bool) -> Changes:
    """Compares the states of every head of each pair of domains; the runs must have the same heads.

    A sink: mean sink_score above the run's epsilon. Dormant: the run's dormant rule holds for the mean of its column.
    Dormancy is left out where the runs' rules name different columns, whose values have no difference.
    """
    asked_a, asked_b = a.manifest.request, b.manifest.request
    rules = parse_rule(asked_a.dormant_rule), parse_rule(asked_b.dormant_rule)
    keys = (["domain"] if len(pairs) > 1 else []) + PLACE["head"]
    changes = Changes()
    one_column = rules[0].column == rules[1].column
    if not one_column:
        changes.notes.append("the dormant rules name different columns, so changes of dormancy are not listed")
    scores = [not_shares(run) for run in (a, b)]
    for side, unjudged in zip("AB", scores, strict=True):
        if unjudged:
            names = ", ".join(sorted({score for found in unjudged.values() for score in found}))
            changes.notes.append(f"{side} has {names} in softmax's place: its sinks are not judged by a threshold")
    for pair in pairs:
        rows = level_rows(a, b, pair, "head", ["sink_score"], paired)
        if len(rows):
            rows = rows[~rows["stream"].isin({*scores[0], *scores[1]})].reset_index(drop=True)
            before, after = rows["a"] > asked_a.epsilon, rows["b"] > asked_b.epsilon
            changes.add("gained_sink", rows, ~before & after, keys)
            changes.add("lost_sink", rows, before & ~after, keys)
        rows = level_rows(a, b, pair, "head", [rules[0].column], paired) if one_column else pd.DataFrame()
        if len(rows):
            before, after = (
                pd.Series(rule({rule.column: rows[side].to_numpy()})) for rule, side in zip(rules, "ab", strict=True)
            )
            changes.add("woke", rows, before & ~after, keys)
            changes.add("fell_dormant", rows, ~before & after, keys)
    return changes


# Profiles of two runs whose layers cannot be matched one by one, over relative depth.
#
# The first layer with attention of a model has depth 0, its last depth 1, the others stand at equal steps between. The
# profile of the model with fewer layers is interpolated linearly, sequence by sequence, at the depths of the other's
# layers, so that every depth has a test of its own.


@dataclass(frozen=True)
class Profile:
    """One metric of one run: its layers' numbers and depths, and its values, [sequence, layer]."""

    layers: np.ndarray
    depths: np.ndarray
    values: np.ndarray

    def at(self, depths: np.ndarray) -> np.ndarray:
        """Values at other depths, [sequence, depth]: linear between the two layers around each. A depth that is a
        layer's own has that layer's value, also where a layer beside it has none."""
        place = np.interp(depths, self.depths, np.arange(len(self.depths)))
        place = np.where(np.isclose(place, np.rint(place), atol=1e-9), np.rint(place), place)
        low = np.floor(place).astype(int)
        share = place - low
        high = np.minimum(low + 1, len(self.depths) - 1)
        between = (1 - share) * self.values[:, low] + share * self.values[:, high]
        return np.where(share == 0, self.values[:, low], between)


def relative_depths(count: int) -> np.ndarray:
    """Depths of `count` layers: 0 for the first, 1 for the last; 0 for a single one."""
    return np.arange(count) / max(1, count - 1)


def depth_rows(a: Run, b: Run, pair: Pair, names: list[str], paired: bool) -> pd.DataFrame:
    """One row for each stream and metric of a pair of domains, and each depth of a layer of the deeper run.

    Columns: domain, stream, metric, depth, layer_a and layer_b (the layers at that depth; a fraction lies between two),
    and a, b, difference, sem, low, high, p, q as in Comparison's tables; q is over the depths.
    """
    frames = []
    for (stream, name), (of_a, of_b) in _profiles(a, b, pair, names).items():
        grid = max(of_a.depths, of_b.depths, key=len)
        x, y = of_a.at(grid), of_b.at(grid)
        result = paired_difference(x, y) if paired else welch_difference(x, y)
        frames.append(pd.DataFrame({
            "domain": pair[0], "stream": stream, "metric": name, "depth": grid,
            "layer_a": np.interp(grid, of_a.depths, of_a.layers), "layer_b": np.interp(grid, of_b.depths, of_b.layers),
            "a": result.a, "b": result.b, "difference": result.difference, "sem": result.sem,
            "low": result.low, "high": result.high, "p": result.p, "q": false_discovery(result.p),
        }))  # fmt: skip
    return concatenated(frames)


def _profiles(a: Run, b: Run, pair: Pair, names: list[str]) -> dict[tuple[str, str], tuple[Profile, Profile]]:
    """The profiles of both runs, by stream and metric that both have."""
    first, second = (_of_run(run, domain, names, pair[2]) for run, domain in ((a, pair[0]), (b, pair[1])))
    return {key: (profile, second[key]) for key, profile in first.items() if key in second}


def _of_run(run: Run, domain: str, names: list[str], count: int | None) -> dict[tuple[str, str], Profile]:
    layer_cells = cells(run, domain, "layer", names)
    profiles = {}
    for stream, places in layer_cells.places.groupby("stream", sort=False):
        layers = places["layer"].to_numpy(float)
        for number, name in enumerate(layer_cells.names):
            values = layer_cells.values[:count, places.index, number]
            profiles[str(stream), name] = Profile(layers, relative_depths(len(layers)), values)
    return profiles


@dataclass(frozen=True)
class Parting:
    """Where two profiles are farthest apart.

    Attributes:
        peak: the row of the largest difference with q < 0.05.
        stretch: the rows around it with a difference of the same sign, at least half as large, and q < 0.05.
        differing, depths: how many depths have q < 0.05, of how many.
    """

    peak: pd.Series
    stretch: pd.DataFrame
    differing: int
    depths: int


def parting(rows: pd.DataFrame) -> Parting | None:
    """Where the profiles of one stream, metric and domain part; None where no depth has q < 0.05."""
    rows = rows.reset_index(drop=True)
    holds = (rows["q"] < SIGNIFICANT).to_numpy()
    if not holds.any():
        return None
    difference = rows["difference"].to_numpy(float)
    peak = int(np.where(holds, np.abs(difference), -1.0).argmax())
    near = holds & (difference * np.sign(difference[peak]) >= 0.5 * abs(difference[peak]))
    first = last = peak
    while first > 0 and near[first - 1]:
        first -= 1
    while last + 1 < len(rows) and near[last + 1]:
        last += 1
    return Parting(rows.loc[peak], rows.loc[first:last], int(holds.sum()), len(rows))


def massive_rows(a: Run, b: Run) -> pd.DataFrame:
    """One row for each stream that both runs have and whose residual stream was seen.

    Columns, of A and of B: `present` (whether any activation is massive), `max_abs` and `layer` (the largest one, and
    the layer whose input holds it), `massive_tokens` (tokens of a sequence with a massive activation, mean over all
    sequences of the run, in the layer with most).
    """
    rows = []
    for stream in (name for name in a.summary.streams if name in b.summary.streams):
        massive = {"a": _massive(a, stream), "b": _massive(b, stream)}
        if all(row["present"] is not None for row in massive.values()):
            rows.append({"stream": stream} | {f"{key}_{of}": row[key] for of, row in massive.items() for key in row})
    return pd.DataFrame(rows)


def _massive(run: Run, stream: str) -> dict[str, Any]:
    massive = run.summary.streams[stream].massive_activations
    of_layers = run.sequences["head"].isna() & (run.sequences["stream"] == stream)
    layers = run.sequences[of_layers].groupby("layer")
    return {
        "present": massive.present,
        "max_abs": massive.max_abs,
        "layer": np.nan if massive.layer is None else float(massive.layer),
        "massive_tokens": float(layers["massive_tokens"].mean().max()) if "massive_tokens" in run.sequences else np.nan,
    }


def sink_token_rows(a: Run, b: Run, pairs: list[Pair]) -> pd.DataFrame:
    """One row for each stream and token that is an attention sink in A or B, at position 0 (`first`) or beyond.

    `pairs`: the domains that are compared; no other is counted. Columns `sinks` and `occurrences`, of A and of B, are
    sums over the rows of tokens.csv; 0 and missing where the run has no such row, which counts no occurrences of what
    is never a sink. Tokens are matched by their text; by their id where no tokenizer gives one. Empty where an older
    sinkscope wrote a run, without tokens.csv.
    """
    if a.tokens is None or b.tokens is None:
        return pd.DataFrame()
    keys = ["stream", "token", "first"]
    tokens_a, tokens_b = (_sink_tokens(run.tokens, {pair[place] for pair in pairs}) for place, run in enumerate((a, b)))
    joined = tokens_a.merge(tokens_b, on=keys, how="outer", suffixes=("_a", "_b"), sort=False)
    joined[["sinks_a", "sinks_b"]] = joined[["sinks_a", "sinks_b"]].fillna(0).astype("int64")
    return joined.sort_values(["stream", "first", "sinks_a", "sinks_b"], ascending=[True, False, False, False],
                              ignore_index=True)  # fmt: skip


def _sink_tokens(table: pd.DataFrame, domains: set[Any]) -> pd.DataFrame:
    if "domain" in table:
        table = table[table["domain"].isin(domains)]
    rows = table[table["kind"] == "attention"]
    named = rows["token"].fillna("id " + rows["id"].astype("string")).fillna(rows["region"])
    groups = rows.assign(token=named).groupby(["stream", "token", "first"], sort=False)
    return groups[["sinks", "occurrences"]].sum().astype(float).reset_index()
