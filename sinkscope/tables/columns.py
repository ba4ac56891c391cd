"""Columns with one value for the whole run and no standard error: maxima and their places, patterns, rules, counts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from sinkscope.errors import SinkscopeError
from sinkscope.metrics import Metric, MetricSet, registered
from sinkscope.metrics.extension import with_own_metrics
from sinkscope.metrics.registry import Table, metric_of
from sinkscope.runs.dormancy import parse_rule
from sinkscope.runs.questions import QUESTIONS
from sinkscope.runs.request import Request
from sinkscope.runs.statistics import pairwise_cosine
from sinkscope.tables.values import SiteValues

PATTERN_MASS = 0.5
PATTERN_UNIFORM = 0.9


RUN_COLUMNS: dict[Table, dict[str, Metric]] = defaultdict(dict)
"""By table and name. `compute` takes a HeadRun, a LayerRun or, in a table of a question, what that question hands it.
Those of a question's tables are declared by its module `tables`; `run_columns` loads it."""


def columns(table: Table, metrics: MetricSet | None = None) -> dict[str, Metric]:
    """Every column of a table in its order: per-sequence metrics, then run columns. `metrics` None means sinkscope's
    own."""
    metrics = registered() if metrics is None else metrics
    return {**metrics.tables.get(table, {}), **run_columns()[table]}


def run_columns() -> dict[Table, dict[str, Metric]]:
    """RUN_COLUMNS with those of every question."""
    for question in QUESTIONS.values():
        question.part("tables")
    return RUN_COLUMNS


def metric_set(given: Iterable[Any] = ()) -> MetricSet:
    """The metrics of a scan: sinkscope's, those of installed packages, and `given`: decorated functions, or paths of
    Python files that contain some. Raises SinkscopeError where one cannot be loaded or its name is taken."""
    return with_own_metrics(given, reserved=[name for columns in run_columns().values() for name in columns])


def run_column(
    table: Table, *, unit: str, range: str, source: str = "ours", map_place: int | None = None
) -> Callable[..., Callable[..., object]]:
    """Declares a function of the whole run's values as a column without a standard error. Raises SinkscopeError where
    the name is taken."""

    def declare(compute: Callable[..., object]) -> Callable[..., object]:
        column = replace(metric_of(compute, table, unit, range, source), per="run", map_place=map_place)
        if column.name in RUN_COLUMNS[table]:
            raise SinkscopeError(f"column {column.name} of the whole run is declared a second time")
        RUN_COLUMNS[table][column.name] = column
        return compute

    return declare


@dataclass
class HeadRun:
    """What the run columns of heads are computed from, for one attention site and domain: the per-sequence values,
    their means [H] by name, and the request."""

    values: SiteValues
    means: dict[str, np.ndarray]
    request: Request

    def peaks(self) -> tuple[np.ndarray, np.ndarray]:
        """The key with the largest mean alpha_k of those that enough queries see, and that alpha_k, both [H]; NaN where
        no key has one."""
        alpha = np.where(self.values.ranked, self.values.alpha, np.nan)
        places = np.where(np.isnan(alpha), -np.inf, alpha).argmax(1)
        return places, alpha[np.arange(len(alpha)), places]


@run_column("heads", unit="position", range="[0, T)", source="ours")
def peak_position(run: HeadRun) -> np.ndarray | pd.arrays.IntegerArray:
    """The key k with the largest mean of alpha_k; in a tie the lowest k. The mean is over the sequences that reach k.
    Only keys with n_k >= n_max/4 in some sequence, and n_k > 0 in all that reach k, are considered. Empty where there
    is none."""
    places, scores = run.peaks()
    missing = np.isnan(scores)
    return pd.arrays.IntegerArray(places, missing) if missing.any() else places


@run_column("heads", unit="probability", range="[0, 1]", source="ours")
def peak_score(run: HeadRun) -> np.ndarray:
    """The largest mean of alpha_k, at k = peak_position. The mean is over the sequences that reach k. Empty where
    peak_position is."""
    return run.peaks()[1].astype(float)


@run_column("heads", unit="name", range="sink, diagonal, previous, uniform, mixed", source="ours", map_place=3)
def pattern(run: HeadRun) -> np.ndarray:
    """The first of these names whose condition holds for the head's means: sink if bos_mass >= 0.5, diagonal if
    self_mass >= 0.5, previous if previous_mass >= 0.5, uniform if uniformity >= 0.9. If none holds: mixed. Empty where
    one of these means is missing, as in cross-attention."""
    bounds = dict.fromkeys(("bos_mass", "self_mass", "previous_mass"), PATTERN_MASS) | {"uniformity": PATTERN_UNIFORM}
    means = {name: run.means[name] for name in bounds}
    with np.errstate(invalid="ignore"):
        conditions = [means[name] >= bound for name, bound in bounds.items()]
    names = np.select(conditions, ["sink", "diagonal", "previous", "uniform"], "mixed").astype(object)
    names[np.isnan(np.stack(list(means.values()))).any(0)] = None
    return names


@run_column(
    "heads",
    unit="bool",
    range="true, false",
    source="ours (rule); scores of Sandoval-Segura et al. 2504.03889",
    map_place=3,
)
def dormant(run: HeadRun) -> pd.arrays.BooleanArray:
    """Whether the dormant rule holds for the head, honor < 0.4 by default. The rule reads the head's mean over
    sequences. Empty where that mean is missing."""
    rule = parse_rule(run.request.dormant_rule)
    if rule.column not in run.means:  # a metric of others that failed
        return pd.arrays.BooleanArray(np.zeros(len(run.values.alpha), bool), np.ones(len(run.values.alpha), bool))
    return pd.arrays.BooleanArray(rule(run.means), np.isnan(run.means[rule.column]))


@dataclass
class LayerRun:
    """What the run columns of layers are computed from, for one attention site and domain: the per-sequence values,
    the site's rows of the head table, and the request."""

    values: SiteValues
    heads: pd.DataFrame
    request: Request

    def sequence_of_max(self) -> int | None:
        """The sequence in which |x| is largest; None where x was not seen."""
        peaks = self.values.layer("inf_norm")
        return None if np.isnan(peaks).all() else int(np.nanargmax(peaks))

    def at_max(self, name: str) -> float:
        """The value of a layer metric in that sequence; NaN where x was not seen."""
        sequence = self.sequence_of_max()
        return float("nan") if sequence is None else float(self.values.layer(name)[sequence])


@run_column("layers", unit="cosine", range="[-1, 1]", source="ours")
def first_constancy(run: LayerRun) -> float:
    """Mean of the cosine between the x_0 of two sequences, over all pairs of different sequences: 1 if x_0 has the same
    direction whatever the text. Empty for a single sequence."""
    units = run.values.first_unit
    return float("nan") if units is None else pairwise_cosine(units)


@run_column("layers", unit="activation", range="[0, inf)", source="Sun et al. 2402.17762")
def max_abs(run: LayerRun) -> float:
    """Largest absolute value of the elements of x, over all sequences."""
    return run.at_max("inf_norm")


@run_column("layers", unit="position", range="[0, T)", source="Sun et al. 2402.17762")
def max_abs_token(run: LayerRun) -> float:
    """Position of the element that has max_abs. In a tie, the first of the sequences counts, and in it the lowest
    position."""
    return run.at_max("max_abs_token")


@run_column("layers", unit="channel", range="[0, D)", source="Sun et al. 2402.17762")
def max_abs_dim(run: LayerRun) -> float:
    """Channel of the element that has max_abs, at the position max_abs_token; in a tie the lowest channel."""
    return run.at_max("max_abs_dim")


@run_column("layers", unit="heads", range="[0, H]", source="Gu et al. 2410.10781 (threshold)")
def sink_heads(run: LayerRun) -> int:
    """Number of the layer's heads whose mean sink_score exceeds epsilon."""
    return int((run.heads["sink_score"] > run.request.epsilon).sum())


@run_column("layers", unit="heads", range="[0, H]", source="ours (rule)")
def dormant_heads(run: LayerRun) -> int | None:
    """Number of the layer's heads for which the dormant rule holds. Empty where the rule's column is missing in every
    head."""
    dormant = run.heads["dormant"]
    return None if dormant.isna().all() else int(dormant.fillna(False).sum())
