"""Columns known for the whole run only: maxima with their place, patterns, rules and counts. No standard error."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from sinkscope.metrics.mass import eligible_keys
from sinkscope.metrics.registry import run_column
from sinkscope.runs.averages import pairwise_cosine
from sinkscope.runs.settings import Settings, parse_rule
from sinkscope.runs.values import SiteValues

PATTERN_MASS = 0.5
PATTERN_UNIFORM = 0.9


@dataclass
class HeadRun:
    """One site of one domain, for the run columns of heads: per-sequence values, their means [H], settings."""

    values: SiteValues
    means: dict[str, np.ndarray]
    settings: Settings

    def ranked_alpha(self) -> np.ndarray:
        """Mean alpha_k over the keys with at least T/4 query rows, [H, eligible]."""
        values = self.values
        return values.alpha[:, : eligible_keys(values.queries, values.keys, values.causal)]


@run_column("heads", unit="position", range="[0, T)", source="ours")
def peak_position(run: HeadRun) -> np.ndarray:
    """argmax_k of the sequence-mean alpha_k, over keys k with at least T/4 query rows; the lowest where several tie."""
    return run.ranked_alpha().argmax(-1)


@run_column("heads", unit="probability", range="[0, 1]", source="ours")
def peak_score(run: HeadRun) -> np.ndarray:
    """max_k of the sequence-mean alpha_k, over keys k with at least T/4 query rows."""
    return run.ranked_alpha().max(-1)


@run_column("heads", unit="name", range="sink, diagonal, previous, uniform, mixed", source="ours")
def pattern(run: HeadRun) -> np.ndarray:
    """The first that holds of: sink = bos_mass >= 0.5, diagonal = self_mass >= 0.5, previous = previous_mass >= 0.5,
    uniform = uniformity >= 0.9; else mixed."""
    means = run.means
    conditions = [
        means["bos_mass"] >= PATTERN_MASS,
        means["self_mass"] >= PATTERN_MASS,
        means["previous_mass"] >= PATTERN_MASS,
        means["uniformity"] >= PATTERN_UNIFORM,
    ]
    return np.select(conditions, ["sink", "diagonal", "previous", "uniform"], "mixed")


@run_column(
    "heads", unit="bool", range="true, false", source="ours (rule); scores of Sandoval-Segura et al. 2504.03889"
)
def dormant(run: HeadRun) -> pd.arrays.BooleanArray:
    """The dormant rule on the head's means: honor < 0.4 by default; empty where the score is missing."""
    rule = parse_rule(run.settings.dormant_rule)
    return pd.arrays.BooleanArray(rule(run.means), np.isnan(run.means[rule.column]))


@dataclass
class LayerRun:
    """One site of one domain, for the run columns of layers: its values and its rows of the head table."""

    values: SiteValues
    heads: pd.DataFrame
    settings: Settings

    def loudest(self) -> int | None:
        """The sequence that holds the run's largest abs of x; None where x was not seen."""
        peaks = self.values.layer("inf_norm")
        return None if np.isnan(peaks).all() else int(np.nanargmax(peaks))

    def at_loudest(self, name: str) -> float:
        sequence = self.loudest()
        return float("nan") if sequence is None else float(self.values.layer(name)[sequence])


@run_column("layers", unit="cosine", range="[-1, 1]", source="outlier-position-anatomy")
def first_constancy(run: LayerRun) -> float:
    """Mean pairwise cosine of x_0 over the run's sequences: 1 = the same vector whatever the text; empty for one."""
    units = run.values.first_unit
    return float("nan") if units is None else pairwise_cosine(units)


@run_column("layers", unit="activation", range="[0, inf)", source="Sun et al. 2402.17762")
def max_abs(run: LayerRun) -> float:
    """Largest abs of x over all sequences of the run."""
    return run.at_loudest("inf_norm")


@run_column("layers", unit="position", range="[0, T)", source="Sun et al. 2402.17762")
def max_abs_token(run: LayerRun) -> float:
    """Position of the token where max_abs sits."""
    return run.at_loudest("max_abs_token")


@run_column("layers", unit="channel", range="[0, D)", source="Sun et al. 2402.17762")
def max_abs_dim(run: LayerRun) -> float:
    """Channel where max_abs sits."""
    return run.at_loudest("max_abs_dim")


@run_column("layers", unit="heads", range="[0, H]", source="Gu et al. 2410.10781 (threshold)")
def sink_heads(run: LayerRun) -> int:
    """Number of the layer's heads whose mean sink_score exceeds epsilon."""
    return int((run.heads["sink_score"] > run.settings.epsilon).sum())


@run_column("layers", unit="heads", range="[0, H]", source="ours (rule)")
def dormant_heads(run: LayerRun) -> int:
    """Number of the layer's heads that the dormant rule names."""
    return int(run.heads["dormant"].fillna(False).sum())
