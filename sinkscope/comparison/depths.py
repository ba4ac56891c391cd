"""Profiles of two runs whose layers cannot be matched one by one, over relative depth.

The first layer with attention of a model has depth 0, its last depth 1, the others stand at equal steps between. The
profile of the model with fewer layers is interpolated linearly, sequence by sequence, at the depths of the other's
layers, so that every depth has a test of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from sinkscope.comparison.level_rows import Pair, concatenated
from sinkscope.runs.per_sequence import cells
from sinkscope.runs.statistics import SIGNIFICANT, false_discovery, paired_difference, welch_difference

if TYPE_CHECKING:
    from sinkscope.runs.run import Run


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
    for (stream, name), (one, other) in _profiles(a, b, pair, names).items():
        grid = max(one.depths, other.depths, key=len)
        x, y = one.at(grid), other.at(grid)
        result = paired_difference(x, y) if paired else welch_difference(x, y)
        frames.append(pd.DataFrame({
            "domain": pair[0], "stream": stream, "metric": name, "depth": grid,
            "layer_a": np.interp(grid, one.depths, one.layers), "layer_b": np.interp(grid, other.depths, other.layers),
            "a": result.a, "b": result.b, "difference": result.difference, "sem": result.sem,
            "low": result.low, "high": result.high, "p": result.p, "q": false_discovery(result.p),
        }))  # fmt: skip
    return concatenated(frames)


def _profiles(a: Run, b: Run, pair: Pair, names: list[str]) -> dict[tuple[str, str], tuple[Profile, Profile]]:
    """The profiles of both runs, by stream and metric that both have."""
    first, second = (_of_run(run, domain, names, pair[2]) for run, domain in ((a, pair[0]), (b, pair[1])))
    return {key: (found, second[key]) for key, found in first.items() if key in second}


def _of_run(run: Run, domain: str, names: list[str], count: int | None) -> dict[tuple[str, str], Profile]:
    found = cells(run, domain, "layer", names)
    profiles = {}
    for stream, places in found.places.groupby("stream", sort=False):
        layers = places["layer"].to_numpy(float)
        for number, name in enumerate(found.names):
            values = found.values[:count, places.index, number]
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
