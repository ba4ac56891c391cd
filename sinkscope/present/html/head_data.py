"""What the report's script knows of every head: scores with errors, alpha_0 by length and over sequences, alpha by
position; and of every score what it means and which colours show it."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from sinkscope.present.colors import CIVIDIS
from sinkscope.present.numbers import rounded
from sinkscope.present.text import token_cell
from sinkscope.runs.catalogue import find_column, map_scores
from sinkscope.runs.per_sequence import unit_in
from sinkscope.runs.questions import QUESTIONS

if TYPE_CHECKING:
    from sinkscope.runs.run import Run

POINTS = 64
"""Points of alpha by position that are kept for each head (see `thinned`)."""
FULL, MANY, FEW = 32, 2048, 9
"""Sequences of which a head's alpha_0 is kept one by one; with more heads than MANY, FEW quantiles stand for them."""
CALLED = {"domain": "dataset"}
"""Keys that a reader knows by another name."""
FIXED = {"[0, 1]": (0.0, 1.0), "[-1, 1]": (-1.0, 1.0)}
"""Ranges that the colours span whole; of any other the colours span the values of the run."""


def head_data(run: Run) -> dict[str, Any]:
    """The scores (`heads`) and the curves (`curves`) of every head, both in the order of the head table."""
    heads = run.heads.reset_index(drop=True)
    keys = [key for key in ("domain", "stream", "layer", "head") if key in heads and key in run.length_curve]
    scored, offered = _with_questions(run, heads, keys)
    metrics = [name for name in run.manifest.metrics if name in heads]
    scores = [name for name in dict.fromkeys([*map_scores("heads"), *metrics, *offered]) if name in scored]
    curves = dict(iter(run.length_curve.groupby(keys, sort=False)))
    alphas = dict(iter(_alpha_points(run, keys).groupby(keys, sort=False)))
    spreads = _spreads(run, keys, FULL if len(heads) <= MANY else FEW)
    named = [key for key in keys if key != "stream" or heads[key].nunique() > 1]
    groups = [tuple(row) for row in heads[keys[:-2]].drop_duplicates().itertuples(index=False)]
    rows, drawn = [], []
    for row in scored.to_dict("records"):
        place = tuple(row[key] for key in keys)
        curve = curves[place]
        points = alphas[place]
        places, values = thinned(points["alpha"].to_numpy(float))
        rows.append({
            "name": " ".join(f"{CALLED.get(key, key)} {row[key]}" for key in named),
            "place": [int(row["layer"]), int(row["head"])],
            "group": groups.index(place[:-2]),
            "scores": [rounded(row[name]) for name in scores],
            "sems": [rounded(row.get(f"{name}_sem"), 2) for name in scores],
        })  # fmt: skip
        drawn.append({
            "lengths": curve["length"].tolist(),
            "curve": [rounded(value) for value in curve["sink_score"]],
            "curve_sem": [rounded(value, 2) for value in curve["sink_score_sem"]],
            "spread": spreads.get(place, []),
            "positions": points["position"].iloc[places].tolist(),
            "alpha": [rounded(value) for value in values],
        })  # fmt: skip
    return {
        "scores": scores, "columns": [_column(run, scored, name) for name in scores], "scale": CIVIDIS,
        "epsilon": run.summary.epsilon, "tokens": _tokens(run, keys[:-2]), "heads": rows, "curves": drawn,
    }  # fmt: skip


def _with_questions(run: Run, heads: pd.DataFrame, keys: list[str]) -> tuple[pd.DataFrame, list[str]]:
    """The head table with the columns that questions offer for the map, where the run measured them; their names."""
    names: list[str] = []
    for question in QUESTIONS.values():
        for schema in question.tables:
            table = run.measured.get(schema.name)
            offered = [] if table is None or not set(keys) <= set(table) else [*table.columns]
            scores = [name for name in map_scores(*schema.measured) if name in offered]
            if table is not None and scores:
                columns = [column for name in scores for column in (name, f"{name}_sem") if column in offered]
                heads = heads.merge(table[[*keys, *columns]], on=keys, how="left", validate="one_to_one")
                names += scores
    return heads, names


def _column(run: Run, heads: pd.DataFrame, name: str) -> dict[str, Any]:
    """What a score means, and the values that its colours span; `low` is None where it is no number."""
    column = find_column(run.manifest, name, "heads", *run.measured)
    span: tuple[float | None, float | None] = (None, None)
    if pd.api.types.is_float_dtype(heads[name]):
        values = heads[name][np.isfinite(heads[name])]
        seen = (float(values.min()), float(values.max())) if len(values) else (0.0, 1.0)
        fixed = FIXED.get(column.range if column else "", seen)
        span = (min(fixed[0], seen[0]), max(fixed[1], seen[1]))  # weights that are no shares lie beyond 0 and 1
    unit, what = (unit_in([run], column.unit), column.formula) if column else ("", "")
    return {"unit": unit, "what": what, "low": rounded(span[0]), "high": rounded(span[1])}


def _spreads(run: Run, keys: list[str], points: int) -> dict[tuple[Any, ...], list[Any]]:
    """alpha_0 of each head's sequences, from the least to the largest."""
    table = run.sequences[run.sequences["head"].notna()]
    return {
        tuple(int(part) if isinstance(part, float) else part for part in place): spread(values.to_numpy(float), points)
        for place, values in table.groupby(keys, sort=False)["sink_score"]
    }


def spread(values: np.ndarray, points: int) -> list[Any]:
    """The values in order, missing ones left out; where they are more than `points`, equally spaced quantiles, the
    smallest and the largest among them."""
    ordered = np.sort(values[~np.isnan(values)])
    shown = ordered if len(ordered) <= points else np.quantile(ordered, np.linspace(0, 1, points))
    return [rounded(float(value)) for value in shown]


def _tokens(run: Run, keys: list[str]) -> list[dict[str, str]]:
    """For each domain and stream: the tokens that all its sequences have, by position."""
    groups = [rows for _, rows in run.positions.groupby(keys, sort=False)] if keys else [run.positions]
    texts = []
    for rows in groups:
        tokens = rows[["position", "token"]].drop_duplicates("position").dropna()
        pairs = zip(tokens["position"], tokens["token"], strict=True)
        texts.append({str(place): token_cell(str(token)) for place, token in pairs})
    return texts


def _alpha_points(run: Run, keys: list[str]) -> pd.DataFrame:
    """Alpha by position; beyond positions.parquet the largest alpha of each stretch, at its position."""
    wanted = [*keys, "position", "alpha"]
    if run.stretches is None:
        return run.positions[wanted]
    beyond = run.stretches.dropna(subset="alpha_max").astype({"alpha_max_position": int})
    peaks = beyond[[*keys, "alpha_max_position", "alpha_max"]].set_axis(wanted, axis=1)
    return pd.concat([run.positions[wanted], peaks], ignore_index=True)


def thinned(alpha: np.ndarray) -> tuple[list[int], list[float]]:
    """Places and alpha of at most POINTS points: the first 16, then the largest of each of some equal stretches."""
    filled = np.where(np.isnan(alpha), -np.inf, alpha)
    places = [start + int(filled[start:end].argmax()) for start, end in _stretches(len(alpha))]
    return places, alpha[places].astype(float).tolist()


@cache
def _stretches(length: int) -> list[tuple[int, int]]:
    """First and past-last position of each stretch: 16 of one position, then equal ones, at most POINTS in all."""
    head = min(16, length)
    rest = np.array_split(np.arange(head, length), min(POINTS - head, max(1, length - head)))
    first = [(place, place + 1) for place in range(head)]
    return first + [(int(stretch[0]), int(stretch[-1]) + 1) for stretch in rest if len(stretch)]
