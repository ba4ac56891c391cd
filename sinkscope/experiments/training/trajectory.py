"""Sinks over training steps: the rows of trajectory.csv, and when each head's sink appeared (emergence.csv)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from sinkscope.runs.catalogue import table_columns
from sinkscope.runs.per_sequence import domains
from sinkscope.runs.schema.other_tables import TRAINING_TABLES

if TYPE_CHECKING:
    from sinkscope.runs.run import Run

TRAJECTORY, EMERGENCE = (
    tuple(column.name for column in table_columns(TRAINING_TABLES[name])) for name in ("trajectory", "emergence")
)

OF_HEADS = ("sink_score", "bos_mass", "entropy")
OF_LAYERS = ("mean_bos_mass", "norm_ratio", "inf_norm")
JUMP = 0.8
"""A head's sink came in a jump where one interval between two measured steps holds this share of its rise."""


def trajectory_rows(run: Run, step: int) -> pd.DataFrame:
    """The rows of trajectory.csv for the run of one training step.

    Heads: sink_score, bos_mass and entropy. Layers: mean_bos_mass, norm_ratio and inf_norm. Model: sink_rate (percent,
    at the run's epsilon), bos_mass, sink_score and entropy as summary.json holds them, dormant (number of heads).
    """
    only = domains(run)[0].domain
    parts = [_of_model(run, only)]
    for table, level, metrics in ((run.layers, "layer", OF_LAYERS), (run.heads, "head", OF_HEADS)):
        parts += [_of_table(table, only, level, metric) for metric in metrics]
    rows = pd.concat(parts, ignore_index=True).assign(step=step)
    return rows[list(TRAJECTORY)].astype({"layer": "Int64", "head": "Int64"})


def _of_model(run: Run, only: str) -> pd.DataFrame:
    epsilon = f"{run.manifest.request.epsilon:g}"
    answers = {name: each.streams for name, each in run.summary.domains.items()} or {only: run.summary.streams}
    rows: list[dict[str, Any]] = []
    for domain, streams in answers.items():
        for stream, found in streams.items():
            place = {"domain": domain, "stream": stream, "level": "model", "layer": None, "head": None}
            rate = found.sink_rate_percent[epsilon].T
            rows.append(place | {"metric": "sink_rate", "value": np.nan if rate is None else rate, "sem": np.nan})
            rows.append(place | {"metric": "dormant", "value": float(found.dormant.count), "sem": np.nan})
            for name in ("bos_mass", "sink_score", "entropy"):
                average = getattr(found, name)
                rows.append(place | {"metric": name, "value": average.mean, "sem": average.sem})
    return pd.DataFrame(rows)


def _of_table(table: pd.DataFrame, only: str, level: str, metric: str) -> pd.DataFrame:
    """`only`: the domain of a run that has one, whose tables leave the column out."""
    return pd.DataFrame({
        "domain": table.get("domain", only), "stream": table["stream"], "level": level, "layer": table["layer"],
        "head": table["head"] if level == "head" else None, "metric": metric, "value": table[metric],
        "sem": table.get(f"{metric}_sem", np.nan),
    })  # fmt: skip


def emergence(trajectory: pd.DataFrame, epsilon: float) -> pd.DataFrame:
    """When each head's sink appeared: a row per (domain, stream, layer, head), from its sink_score at every step.

    first, last: sink_score at the first and at the last step. emerged: the first step from which on sink_score exceeds
    `epsilon` at every later step; empty where it does not at the last one. half_rise: the first step from which on
    sink_score stays at or above the middle between `first` and `last`. largest_gain: the share of the rise (last -
    first) that the steepest interval between two measured steps holds. shape: `start` where the sink was there at the
    first step, `jump` where largest_gain is 0.8 or more, else `ramp`. All but `first` and `last` are empty for heads
    without a sink at the last step. The steps are those that were measured: what lies between is not seen. Ours.
    """
    scores = trajectory[(trajectory["level"] == "head") & (trajectory["metric"] == "sink_score")]
    keys = ["domain", "stream", "layer", "head"]
    rows = [
        dict(zip(keys, place, strict=True)) | _emergence_of(own["step"].to_numpy(), own["value"].to_numpy(), epsilon)
        for place, own in scores.sort_values("step").groupby(keys, sort=False)
    ]
    table = pd.DataFrame(rows, columns=list(EMERGENCE))
    return table.astype({"emerged": "Int64", "half_rise": "Int64"})


def _emergence_of(steps: np.ndarray, scores: np.ndarray, epsilon: float) -> dict[str, Any]:
    found: dict[str, Any] = dict.fromkeys(EMERGENCE[4:]) | {"first": scores[0], "last": scores[-1]}
    emerged = _stays(scores > epsilon)
    if emerged is None:
        return found
    found["emerged"] = steps[emerged]
    if emerged == 0:
        return found | {"shape": "start"}
    rise = scores[-1] - scores[0]
    half = _stays(scores >= scores[0] + rise / 2)
    gain = float(np.diff(scores).max() / rise)
    found |= {"half_rise": None if half is None else steps[half], "largest_gain": gain}
    return found | {"shape": "jump" if gain >= JUMP else "ramp"}


def _stays(holds: np.ndarray) -> int | None:
    """The first index from which on `holds` is true to the end; None where it is false at the end."""
    fails = np.flatnonzero(~holds)
    start = int(fails[-1]) + 1 if len(fails) else 0
    return start if start < len(holds) else None
