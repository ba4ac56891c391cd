"""The table of runs for a paper: a row for each head, layer or model, and a mean with its interval in each cell."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from sinkscope.errors import SinkscopeError, did_you_mean
from sinkscope.runs.catalogue import columns_of, elsewhere, find_column, near_column, refuse_mixed
from sinkscope.runs.per_sequence import (
    THRESHOLDED,
    cells,
    counted,
    domains,
    metric_names,
    not_shares,
    tokens_of,
    unit_in,
    whole_numbers,
)
from sinkscope.runs.statistics import mean, sem, t_half_width, with_floor
from sinkscope.runs.words import first_mass

if TYPE_CHECKING:
    from sinkscope.runs.run import Run


LEVELS = ("head", "layer", "model")
DEFAULTS = {
    "head": ("bos_mass", "sink_score", "entropy", "honor", "pattern"),
    "layer": ("bos_mass", "entropy", "cos_first_residual", "norm_ratio", "sink_heads", "dormant_heads"),
    "model": ("sink_rate", "bos_mass", "sink_score", "entropy", "first_argmax"),
}
CONFIDENCE = 0.95


@dataclass(frozen=True)
class PaperColumn:
    """A metric of the table; `interval`: whether its cells have a standard error and an interval."""

    name: str
    unit: str
    source: str
    interval: bool


@dataclass(frozen=True)
class PaperTable:
    """The table as data, for any writer.

    Attributes:
        keys: names of the leading columns.
        columns: the metrics.
        frame: the keys, then NAME, NAME_sem, NAME_low, NAME_high of each metric (low, high: 95 % Student's t interval
            over sequences); only NAME where there is no standard error.
        notes: one line per run: what was measured.
        first_mass: what the runs' attention on the first token is called.
        caption, label: of the table in a paper; None where the user gives none.
    """

    keys: list[str]
    columns: list[PaperColumn]
    frame: pd.DataFrame
    notes: list[str]
    first_mass: str = "BOS mass"
    caption: str | None = None
    label: str | None = None


def paper_table(runs: list[Run], level: str | None = None, metrics: list[str] | None = None) -> PaperTable:
    """Builds the table, one row per head, layer or model; by default layers of one run, models of several.

    At level `layer` head metrics are means over the layer's heads. At level `model` head metrics are means over all
    heads, layer metrics over all layers. Raises SinkscopeError for an unknown level or metric, and for one that
    some of the runs measured otherwise.
    """
    if level is None:
        level = "layer" if len(runs) == 1 else "model"
    if level not in LEVELS:
        raise SinkscopeError(f"--level {level!r}: choose one of {', '.join(LEVELS)}{did_you_mean(level, LEVELS)}")
    names = metrics or [name for name in DEFAULTS[level] if all(_has(run, level, name) for run in runs)]
    for name in names:
        lacking = [place for place, run in enumerate(runs) if not _has(run, level, name)]
        if lacking:
            raise SinkscopeError(_refusal(runs, lacking[0], level, name))
    refuse_mixed([name.removeprefix("mean_") for name in names], [run.manifest for run in runs])
    build = {"head": _rows, "layer": _rows, "model": _models}[level]
    frames = [
        _told(run, build(run, level, names)).assign(model=label)
        for run, label in zip(runs, model_labels(runs), strict=True)
    ]
    frame = pd.concat(frames, ignore_index=True)
    if metrics is None:
        names = [name for name in names if frame[name].notna().any()]
    keys = [key for key in ("model", "domain", "stream", "layer", "head") if key in frame]
    droppable = {"model": level != "model" and len(runs) == 1, "domain": True, "stream": True}
    keys = [key for key in keys if not (droppable.get(key, False) and frame[key].nunique() == 1)]
    columns = [_column(runs, name, f"{name}_sem" in frame) for name in dict.fromkeys(names)]
    firsts = [run.summary.first_token for run in runs]
    return PaperTable(
        keys, columns, frame[keys + _value_columns(columns)], [describe_run(run) for run in runs], first_mass(*firsts)
    )


def sources_table(runs: list[Run]) -> PaperTable:
    """Every metric that all runs measured for heads or layers, without rows: for those who cite what a run measured."""
    every = [column for column in columns_of(runs[0].manifest) if column.shown and column.table in ("heads", "layers")]
    shared = [column for column in every if all(column.name in getattr(run, column.table) for run in runs)]
    columns = [PaperColumn(column.name, unit_in(runs, column.unit), column.source, False) for column in shared]
    return PaperTable([], columns, pd.DataFrame(), [describe_run(run) for run in runs])


ENDS = ("", "_sem", "_low", "_high")
"""What a metric's columns of the frame end in."""


def _value_columns(columns: list[PaperColumn]) -> list[str]:
    return [f"{column.name}{end}" for column in columns for end in (ENDS if column.interval else ENDS[:1])]


def _has(run: Run, level: str, name: str) -> bool:
    of_heads, of_layers = metric_names(run)
    if level == "model":
        return name in of_heads or name in of_layers
    if name.endswith("_sem") or name in ("stream", "layer", "head", "module", "kind", "kv_group", "domain", "heads"):
        return False
    return name in run.heads if level == "head" else name in run.layers or f"mean_{name}" in run.layers


def _refusal(runs: list[Run], lacking: int, level: str, name: str) -> str:
    """Why a table has no such metric, and near ones that it has. `lacking`: the place of the first run without it."""
    tables = (runs[lacking].heads, runs[lacking].layers)
    if level == "model" and any(name in table and table[name].isna().all() for table in tables):
        place = "this run" if len(runs) == 1 else model_labels(runs)[lacking]
        return f"metric {name!r} has no value in {place}"
    columns = [name for table in tables for name in table.select_dtypes("number")]
    choices = [name for name in columns if all(_has(run, level, name) for run in runs)]
    return (
        f"no metric {name!r} at level {level}{elsewhere(runs[0].manifest, name)}; `sinkscope metrics` lists "
        f"all{near_column(name, choices)}"
    )


def _column(runs: list[Run], name: str, interval: bool) -> PaperColumn:
    column = find_column(runs[0].manifest, name.removeprefix("mean_"), "heads", "layers")
    if column is None:
        return PaperColumn(name, "", "", interval)
    return PaperColumn(name, unit_in(runs, column.unit), column.source, interval)


def _rows(run: Run, level: str, names: list[str]) -> pd.DataFrame:
    table = run.heads if level == "head" else run.layers
    only = domains(run)[0].domain
    frame = pd.DataFrame({"model": "", "domain": table.get("domain", only)}, index=table.index)
    for key in ("stream", "layer", "head"):
        if key in table:
            frame[key] = table[key]
    for name in names:
        source = name if name in table else f"mean_{name}"
        frame[name] = table[source]
        if f"{source}_sem" in table:
            count = _measured(run, frame, source.removeprefix("mean_") if level == "layer" else source)
            whole = whole_numbers(name, level)
            _add_interval(frame, name, table[source], table[f"{source}_sem"], count, whole)
    return frame


def _told(run: Run, frame: pd.DataFrame) -> pd.DataFrame:
    """The rows without what holds other scores than a softmax's against the sink threshold: they are no shares."""
    unjudged = frame["stream"].isin(list(not_shares(run)))
    if not unjudged.any():
        return frame
    held = [f"{start}{name}{end}" for start in ("", "mean_") for name in THRESHOLDED for end in ENDS]
    return frame.assign(**{name: frame[name].mask(unjudged) for name in held if name in frame})


def _measured(run: Run, frame: pd.DataFrame, metric: str) -> np.ndarray:
    """Number of sequences that have a value of the metric, for each row: a scan may measure a metric on a few only."""
    table, of_heads = run.sequences, metric in metric_names(run)[0]
    rows = table[(table["head"].notna() == of_heads) & table[metric].notna()]
    keys = [key for key in ("domain", "stream", "layer", "head") if key in frame]
    counts = rows.groupby(keys, observed=True)["sequence"].nunique().rename("count").reset_index()
    return frame[keys].merge(counts.astype(frame[keys].dtypes), how="left")["count"].fillna(0).to_numpy(dtype=float)


def _models(run: Run, level: str, names: list[str]) -> pd.DataFrame:
    frames = []
    for data in domains(run):
        measured = cells(run, data.domain, "summary", names)
        frame = pd.DataFrame({"model": "", "domain": data.domain}, index=measured.places.index)
        frame["stream"] = measured.places["stream"]
        averages, errors, present = mean(measured.values), sem(measured.values), (~np.isnan(measured.values)).sum(0)
        for index, name in enumerate(measured.names):
            frame[name] = averages[:, index]
            _add_interval(frame, name, averages[:, index], errors[:, index], present[:, index])
        frames.append(frame)
    return pd.concat(frames, ignore_index=True)


def _add_interval(
    frame: pd.DataFrame, name: str, average: Any, error: Any, count: np.ndarray, whole: bool = False
) -> None:
    """`whole`: the values are whole numbers, whose interval is never a single point; see `with_floor`."""
    frame[f"{name}_sem"] = error
    error = with_floor(np.asarray(error, float), count) if whole else np.asarray(error, float)
    half = error * t_half_width(CONFIDENCE, np.maximum(count - 1, 1))
    frame[f"{name}_low"], frame[f"{name}_high"] = average - half, average + half


def model_labels(runs: list[Run]) -> list[str]:
    """A name for each run: the model's; where runs share it, with the dtype, the length or the text, whichever tells
    them apart, else with a number."""
    names = [run.manifest.model.shown for run in runs]
    told = [
        [str(run.manifest.model.dtype) for run in runs],
        [" and ".join(dict.fromkeys(f"T = {tokens_of(data)}" for data in domains(run))) for run in runs],
        [" and ".join(data.domain for data in domains(run)) for run in runs],
        [f"run {number}" for number in range(1, len(runs) + 1)],
    ]
    return [_label(names, told, place) for place in range(len(runs))]


def _label(names: list[str], told: list[list[str]], place: int) -> str:
    """The name of the run at `place`, with the first of the facts in which no run of the same name is like it."""
    alike = [index for index, name in enumerate(names) if name == names[place]]
    if len(alike) == 1:
        return names[place]
    apart = (facts[place] for facts in told if sum(facts[index] == facts[place] for index in alike) == 1)
    return f"{names[place]} ({next(apart)})"


def describe_run(run: Run) -> str:
    """The model, dtype and data of a run in one line."""
    model = run.manifest.model
    data = ", ".join(f"{counted(run, data)} of {data.domain}" for data in domains(run))
    return f"{model.shown} ({model.dtype}): {data}"
