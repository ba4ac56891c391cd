"""tokens.csv: the sinks of a run by what stands there, one row a token (or region, where positions hold no tokens)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np
import pandas as pd

from sinkscope.capture import Site
from sinkscope.metrics.events import keys_seen_enough
from sinkscope.runs.places import Places, PlacesOf
from sinkscope.runs.values import Domain

KEYS = ["stream", "kind", "first", "region", "id"]
"""What makes a row: occurrences at position 0 are counted apart from all others."""

COLUMNS = {
    "stream": "string", "kind": "string", "token": "string", "id": "Int64", "region": "string", "first": "bool",
    "occurrences": "Int64", "sinks": "int64", "rate": "float64", "heads": "Int64", "sequences": "int64",
    "first_layer": "int64", "last_layer": "int64", "lifetime": "float64", "mean_alpha": "float64",
    "sink_share": "float64",
}  # fmt: skip


Occurring = tuple[str, bool, bool, str, int]
"""(stream, whether enough query rows must see it, first, region, id or -1)."""


def token_table(domains: list[Domain], sites: list[Site], sinks: pd.DataFrame, places: PlacesOf) -> pd.DataFrame:
    """One row a (stream, kind of sink, first or not, region, token) that is a sink somewhere, for each domain where
    there are several; in each stream and kind the largest sum of alpha stands first."""
    if len(domains) == 1:
        return sink_tokens(domains, sites, sinks, places)
    frames = []
    for domain in domains:
        rows = sink_tokens([domain], sites, sinks[sinks["domain"] == domain.name], places)
        rows.insert(0, "domain", pd.array([domain.name] * len(rows), dtype="string"))
        frames.append(rows)
    return pd.concat(frames, ignore_index=True)


def sink_tokens(domains: list[Domain], sites: list[Site], sinks: pd.DataFrame, places: PlacesOf) -> pd.DataFrame:
    """The rows of tokens.csv over all sequences of the domains given; `sinks`: their rows of sinks.parquet."""
    events = sinks.assign(first=sinks["position"] == 0)
    grouped = events.groupby(KEYS, sort=False, dropna=False)
    table = grouped.agg(
        token=("token", "first"), first_layer=("layer", "min"), last_layer=("layer", "max"),
        mean_alpha=("alpha", "mean"), mass=("alpha", "sum"),
    )  # fmt: skip
    table = table.reset_index()
    events["row"] = grouped.ngroup()  # of the table
    occurrence = ["domain", "sequence", "position"]
    table["sinks"] = _distinct(events, occurrence, len(table))
    table["sequences"] = _distinct(events, ["domain", "sequence"], len(table))
    heads = _distinct(events[events["head"].notna()], ["layer", "head"], len(table))
    table["heads"] = heads.where(heads > 0)
    table["lifetime"] = _distinct(events, [*occurrence, "layer"], len(table)) / table["sinks"]
    attention = table["kind"] == "attention"
    total = table[attention].groupby("stream")["mass"].transform("sum")
    table["sink_share"] = (table["mass"] / total).where(attention)
    table["occurrences"] = _occurrences(table, domains, sites, places)
    table["rate"] = table["sinks"] / table["occurrences"]
    table["_stream"] = table["stream"].map({site.stream: order for order, site in enumerate(reversed(sites))})
    table = table.sort_values(
        ["_stream", "kind", "mass", "sinks", "first", "region", "id"],
        ascending=[False, True, False, False, False, True, True], ignore_index=True,
    )  # fmt: skip
    return table[list(COLUMNS)].astype(COLUMNS)


def _distinct(events: pd.DataFrame, names: list[str], rows: int) -> pd.Series:
    """The number of distinct combinations of these columns among the events of each of the table's rows."""
    once = events[["row", *names]].drop_duplicates()
    return pd.Series(np.bincount(once["row"], minlength=rows))


def _occurrences(table: pd.DataFrame, domains: list[Domain], sites: list[Site], places: PlacesOf) -> list[int]:
    """How often what a row stands for occurs; for the kind `attention`, where enough query rows see it."""
    found: Counter[Occurring] = Counter()
    for domain in domains:
        for stream in dict.fromkeys(site.stream for site in sites):
            for own, among in _by_places(domain, [site for site in sites if site.stream == stream], places):
                for attention in (True, False):
                    counted = _seen_enough(domain, own, among) if attention else own.lengths
                    found.update(_counts(own, counted, (stream, attention)))
    ids = table["id"].fillna(-1).astype(int)
    rows = zip(table["stream"], table["kind"] == "attention", table["first"], table["region"], ids, strict=True)
    return [found[row] for row in rows]


def _by_places(domain: Domain, sites: list[Site], places: PlacesOf) -> Iterator[tuple[Places, list[Site]]]:
    """The distinct places of a stream, and the attention calls that share each."""
    named = [(places[domain.name, site.name], site) for site in sites if site.name in domain.sites]
    for own in {id(own): own for own, _ in named}.values():
        yield own, [site for each, site in named if each is own]


def _seen_enough(domain: Domain, own: Places, sites: list[Site]) -> np.ndarray:
    """[sequence]: the number of first positions that enough query rows see in some attention call."""
    counts = []
    for site in sites:
        values = domain.sites[site.name]
        queries = [values.queries] * len(own.lengths) if site.cross else own.lengths
        counts.append([
            keys_seen_enough(int(rows), int(keys), values.causal)
            for rows, keys in zip(queries, own.lengths, strict=True)
        ])  # fmt: skip
    return np.asarray(counts).max(0)


def _counts(own: Places, counted: np.ndarray, key: tuple[str, bool]) -> Counter[Occurring]:
    """Occurrences among the first `counted` [sequence] positions of each sequence."""
    place = np.arange(own.regions.shape[1])
    valid = (place < counted[:, None]) & (own.regions != "")
    ids = np.full(own.regions.shape, -1) if own.ids is None else own.ids
    found: Counter[Occurring] = Counter()
    for first in (True, False):
        for region in np.unique(own.regions):
            chosen = valid & (own.regions == region) & ((place == 0) == first)
            tokens, numbers = np.unique(ids[chosen], return_counts=True)
            found.update({
                (*key, first, str(region), int(token)): int(number)
                for token, number in zip(tokens, numbers, strict=True)
            })  # fmt: skip
    return found
