"""sinks.parquet: every sink of every sequence, one row an event."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pandas as pd

from sinkscope.capture import Site
from sinkscope.metrics.quantities import EVENT_FIELDS
from sinkscope.runs.places import Places, PlacesOf
from sinkscope.runs.values import Domain

MEASURED = EVENT_FIELDS[3:]


def sink_table(domains: list[Domain], sites: list[Site], places: PlacesOf) -> pd.DataFrame:
    """One row an event, in the order of domains, attention calls, kinds, sequences, heads and positions.

    Measured values are float32, as most models measure them: the table may have millions of rows.
    """
    parts = list(_events(domains, sites))
    events = np.concatenate([np.empty((0, len(EVENT_FIELDS))), *(rows for *_, rows in parts)])
    counts = [len(rows) for *_, rows in parts]
    sequence, position = (events[:, EVENT_FIELDS.index(name)].astype(np.int64) for name in ("sequence", "position"))
    ids, texts, regions = _what_stands_there(parts, sequence, position, places)
    return pd.DataFrame({
        "domain": _repeated([domain.name for domain, *_ in parts], counts),
        "sequence": sequence.astype(np.int32),
        "position": position.astype(np.int32),
        "id": ids,
        "token": texts,
        "region": regions,
        "stream": _repeated([site.stream for _, site, *_ in parts], counts),
        "layer": np.repeat(np.array([site.layer for _, site, *_ in parts], dtype=np.int32), counts),
        "head": _optional(events[:, EVENT_FIELDS.index("head")], "Int32"),
        "kind": _repeated([kind for _, _, kind, _ in parts], counts),
        **{name: events[:, EVENT_FIELDS.index(name)].astype(np.float32) for name in MEASURED},
    })  # fmt: skip


Part = tuple[Domain, Site, str, np.ndarray]
"""The events of one kind in one attention call and domain, [event, field]."""


def _events(domains: list[Domain], sites: list[Site]) -> Iterator[Part]:
    order = [EVENT_FIELDS.index(name) for name in ("position", "head", "sequence")]
    for domain in domains:
        for site in sites:
            values = domain.sites.get(site.name)
            for kind, rows in ({} if values is None else values.events).items():
                if len(rows):
                    yield domain, site, kind, rows[np.lexsort(rows[:, order].T)]


def _what_stands_there(
    parts: list[Part], sequence: np.ndarray, position: np.ndarray, places: PlacesOf
) -> tuple[pd.api.extensions.ExtensionArray, ...]:
    """Ids, texts and regions of the events' positions."""
    ids, texts, regions = [], [], []
    start = 0
    for domain, site, _, rows in parts:
        own = places[domain.name, site.name]
        where = sequence[start : start + len(rows)], position[start : start + len(rows)]
        start += len(rows)
        regions.append(own.regions[where])
        ids.append(np.full(len(rows), np.nan) if own.ids is None else own.ids[where])
        texts.append(_texts(own, ids[-1]))
    whole = [np.concatenate([np.empty(0, kind), *each]) for each, kind in ((texts, object), (regions, str))]
    found = _optional(np.concatenate([np.empty(0), *ids]), "Int64")
    return found, *(pd.array(each, dtype="string") for each in whole)


def _texts(places: Places, ids: np.ndarray) -> np.ndarray:
    if places.ids is None:
        return np.full(len(ids), None, dtype=object)
    own, index = np.unique(ids, return_inverse=True)
    texts = places.texts(own)
    return np.array([texts[int(each)] for each in own], dtype=object)[index]


def _optional(values: np.ndarray, kind: str) -> pd.api.extensions.ExtensionArray:
    """Integers of a pandas type; missing where the value is NaN."""
    missing = np.isnan(values.astype(float))
    numbers = np.where(missing, 0, values).astype(kind.lower())
    return pd.arrays.IntegerArray(numbers, missing)


def _repeated(names: list[str], counts: list[int]) -> pd.api.extensions.ExtensionArray:
    return pd.array(np.repeat(np.array(names, dtype=object), counts), dtype="string")
