"""regions.csv: how each head attends from the words of each speaker of a conversation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from sinkscope.capture import Site
from sinkscope.inputs.chats import REGIONS
from sinkscope.inputs.documents import ROLES
from sinkscope.questions.regions import QUESTION
from sinkscope.runs.catalogue import table_columns
from sinkscope.runs.schema.stream import StreamSummary
from sinkscope.runs.statistics import mean, sem
from sinkscope.tables.frames import site_keys
from sinkscope.tables.values import Domain

COLUMNS = ("queries", "bos_mass", "self_mass", "marker_mass", "entropy")
"""The values of a region, in the order in which they are measured."""


def region_table(domains: list[Domain], sites: list[Site]) -> pd.DataFrame:
    """One row per (stream, layer, head, region) for every region that some sequence has, and for each domain."""
    frames = []
    for domain in domains:
        for site in sites:
            values = domain.sites[site.name].arrays.get("regions") if site.name in domain.sites else None
            if values is not None:
                frames += _of_site(domain.name if len(domains) > 1 else None, site, values)
    return pd.concat(frames, ignore_index=True) if frames else _nothing(len(domains) > 1)


def _nothing(with_domain: bool) -> pd.DataFrame:
    """The table without a row, of a scan that read no conversations."""
    types = {"string": "string", "integer": "int64", "number": "float64"}
    columns = [column for column in table_columns(QUESTION.tables[0]) if with_domain or column.name != "domain"]
    return pd.DataFrame({column.name: pd.Series(dtype=types[column.type]) for column in columns})


def _of_site(domain: str | None, site: Site, found: np.ndarray) -> list[pd.DataFrame]:
    values = found.reshape(len(found), site.heads, len(REGIONS), len(COLUMNS))
    frames = []
    for index, region in enumerate(REGIONS):
        of_region = values[:, :, index]
        if not (of_region[..., 0] > 0).any():
            continue
        rows: dict[str, Any] = {} if domain is None else {"domain": domain}
        rows |= site_keys(site) | {"head": np.arange(site.heads), "region": region}
        rows |= {"sequences": (of_region[..., 0] > 0).sum(0), "queries": of_region[..., 0].sum(0).astype(int)}
        for column, name in enumerate(COLUMNS[1:], 1):
            rows |= {name: mean(of_region[..., column]), f"{name}_sem": sem(of_region[..., column])}
        frames.append(pd.DataFrame(rows))
    return frames


def add_regions(streams: dict[str, StreamSummary], table: pd.DataFrame) -> None:
    """Adds each region's mean over heads and over the sequences of all domains, and a sentence, to the summary of each
    stream."""
    for name, stream in streams.items():
        rows = table[table["stream"] == name]
        if rows.empty:
            continue
        names = list(COLUMNS[1:])
        weights = rows[names].notna().mul(rows["sequences"], axis=0)  # entropy is missing where there is no softmax
        sums, counts = (part.groupby(rows["region"], sort=False).sum() for part in (rows[names] * weights, weights))
        means = sums / counts
        by_domain = ["region", *(["domain"] if "domain" in rows else [])]
        queries = rows.groupby(by_domain, sort=False)["queries"].max().groupby("region", sort=False).sum()
        summary: dict[str, Any] = {
            region: {"queries": int(queries[region]), **{key: float(value) for key, value in row.items()}}
            for region, row in means.to_dict("index").items()
        }
        shown = ", ".join(f"{region} {means.loc[region, 'bos_mass']:.3f}" for region in means.index)
        most = str(means["marker_mass"].idxmax())
        markers = "The template's markers" if {*ROLES} & {*means.index} else "Special tokens"
        summary["in_words"] = (
            f"Mean attention on the first token, by the region of the query: {shown}. {markers} get most attention "
            f"from {most} ({means.loc[most, 'marker_mass']:.3f})."
        )
        stream.measured["regions"] = summary
