"""What the report shows of a head that is clicked: scores, alpha_0 by length, alpha by position."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from sinkscope.present.numbers import rounded

if TYPE_CHECKING:
    from sinkscope.runs.run import Run

SCORES = (
    "bos_mass", "sink_score", "sink_rate", "sink_margin", "first_argmax", "entropy", "uniformity", "self_mass",
    "previous_mass", "honor", "residual_write_ln", "value_drain", "ov_drain", "gate_open", "pattern", "dormant",
)  # fmt: skip
POINTS = 64
"""Points of alpha by position that are kept for each head (see `thinned`)."""


def head_data(run: Run) -> dict[str, Any]:
    """The scores and curves of every head, in the order of the head table."""
    heads = run.heads.reset_index(drop=True)
    scores = [name for name in SCORES if name in heads]
    keys = [key for key in ("domain", "stream", "layer", "head") if key in heads and key in run.length_curve]
    curves = dict(iter(run.length_curve.groupby(keys, sort=False)))
    alphas = dict(iter(_alpha_points(run, keys).groupby(keys, sort=False)))
    named = [key for key in keys if key != "stream" or heads[key].nunique() > 1]
    rows = []
    for row in heads.to_dict("records"):
        place = tuple(row[key] for key in keys)
        curve = curves[place]
        points = alphas[place]
        places, values = thinned(points["alpha"].to_numpy(float))
        rows.append({
            "name": " ".join(f"{key} {row[key]}" for key in named),
            "scores": [rounded(row[name]) for name in scores],
            "lengths": curve["length"].tolist(),
            "curve": [rounded(value) for value in curve["sink_score"]],
            "positions": points["position"].iloc[places].tolist(),
            "alpha": [rounded(value) for value in values],
        })  # fmt: skip
    return {"scores": scores, "heads": rows}


def _alpha_points(run: Run, keys: list[str]) -> pd.DataFrame:
    """Alpha by position; beyond positions.parquet the largest alpha of each stretch, at its position."""
    wanted = [*keys, "position", "alpha"]
    if run.stretches is None:
        return run.positions[wanted]
    beyond = run.stretches.dropna(subset="alpha_max").astype({"alpha_max_position": int})
    found = beyond[[*keys, "alpha_max_position", "alpha_max"]].set_axis(wanted, axis=1)
    return pd.concat([run.positions[wanted], found], ignore_index=True)


def thinned(alpha: np.ndarray) -> tuple[list[int], list[float]]:
    """Places and alpha of at most POINTS points: the first 16, then the largest of each of some equal stretches."""
    known = np.where(np.isnan(alpha), -np.inf, alpha)
    places = [start + int(known[start:end].argmax()) for start, end in _stretches(len(alpha))]
    return places, alpha[places].astype(float).tolist()


@cache
def _stretches(length: int) -> list[tuple[int, int]]:
    """First and past-last position of each stretch: 16 of one position, then equal ones, at most POINTS in all."""
    head = min(16, length)
    rest = np.array_split(np.arange(head, length), min(POINTS - head, max(1, length - head)))
    first = [(place, place + 1) for place in range(head)]
    return first + [(int(stretch[0]), int(stretch[-1]) + 1) for stretch in rest if len(stretch)]
