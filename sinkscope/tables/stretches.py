"""stretches.parquet: what positions.parquet would hold from position `stretches.EVERY` on, stretch by stretch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from sinkscope.capture import Site
from sinkscope.metrics.stretches import edges, name
from sinkscope.tables.frames import domain_key, placed_at_keys, site_keys, sites_of
from sinkscope.tables.values import Domain, SiteValues


def stretch_table(domains: list[Domain], sites: list[Site]) -> pd.DataFrame | None:
    """One row per (stream, layer, head, stretch); None where no site has a position beyond positions.parquet.

    For each column of positions.parquet the mean over the positions of the stretch, the largest value of one sequence
    at one position of it, and that position.
    """
    frames = []
    for domain, site, values in sites_of(domains, sites):
        bounds = np.array(edges(values.keys))
        if len(bounds) == 1:
            continue
        rows: dict[str, Any] = domain_key(domains, domain) | site_keys(site)
        rows |= {"head": np.repeat(np.arange(site.heads), len(bounds) - 1)}
        rows |= {"first": np.tile(bounds[:-1], site.heads), "last": np.tile(bounds[1:] - 1, site.heads)}
        frames.append(pd.DataFrame(rows | _columns(values, site.heads, len(bounds) - 1)))
    return pd.concat(frames, ignore_index=True) if frames else None


def _columns(values: SiteValues, heads: int, count: int) -> dict[str, Any]:
    """The measured columns of one site, each value in the order of the rows."""
    columns: dict[str, Any] = {}
    for column, quantity in values.quantities.shown_in("positions").items():
        if not quantity.long:
            continue
        parts = np.full((heads, count, 4), np.nan)
        array = values.arrays.get(name(quantity))
        if array is not None and placed_at_keys(values, quantity):
            parts[:, : array.shape[1]] = array
        total, number, largest, place = parts.reshape(-1, 4).T
        with np.errstate(invalid="ignore"):
            columns[column] = total / number
        columns |= {f"{column}_max": largest, f"{column}_max_position": pd.array(place, dtype="Int64")}
    return columns
