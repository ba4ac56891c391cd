"""sinks.parquet: every sink of every sequence, one row an event; and the sinks beyond the first token in the
summary."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np
import pandas as pd

from sinkscope.capture import Site
from sinkscope.metrics.quantities import EVENT_FIELDS
from sinkscope.runs.schema.stream import SinksBeyondFirst, SinkToken, StreamSummary
from sinkscope.runs.schema.summary import Summary
from sinkscope.runs.words import beyond_words, says_nothing
from sinkscope.tables.values import Domain, Places, PlacesOf

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
        site_places = places[domain.name, site.name]
        where = sequence[start : start + len(rows)], position[start : start + len(rows)]
        start += len(rows)
        regions.append(site_places.regions[where])
        ids.append(np.full(len(rows), np.nan) if site_places.ids is None else site_places.ids[where])
        texts.append(_texts(site_places, ids[-1]))
    whole = [np.concatenate([np.empty(0, kind), *pieces]) for pieces, kind in ((texts, object), (regions, str))]
    token_ids = _optional(np.concatenate([np.empty(0), *ids]), "Int64")
    return token_ids, *(pd.array(column, dtype="string") for column in whole)


def _texts(places: Places, ids: np.ndarray) -> np.ndarray:
    if places.ids is None:
        return np.full(len(ids), None, dtype=object)
    distinct, index = np.unique(ids, return_inverse=True)
    texts = places.texts(distinct)
    return np.array([texts[int(token)] for token in distinct], dtype=object)[index]


def _optional(values: np.ndarray, kind: str) -> pd.api.extensions.ExtensionArray:
    """Integers of a pandas type; missing where the value is NaN."""
    missing = np.isnan(values.astype(float))
    numbers = np.where(missing, 0, values).astype(kind.lower())
    return pd.arrays.IntegerArray(numbers, missing)


def _repeated(names: list[str], counts: list[int]) -> pd.api.extensions.ExtensionArray:
    return pd.array(np.repeat(np.array(names, dtype=object), counts), dtype="string")


KEYS = ["stream", "kind", "first", "region", "id"]
"""What makes a row: occurrences at position 0 are counted apart from all others."""

COLUMNS = {
    "stream": "string", "kind": "string", "token": "string", "id": "Int64", "region": "string", "first": "bool",
    "occurrences": "Int64", "sinks": "int64", "rate": "float64", "heads": "Int64", "sequences": "int64",
    "first_layer": "int64", "last_layer": "int64", "lifetime": "float64", "mean_alpha": "float64",
    "sink_share": "float64",
}  # fmt: skip


Occurring = tuple[str, bool, bool, str, int]
"""(stream, whether enough queries must see it, first, region, id or -1)."""


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
    if sinks.empty:
        return pd.DataFrame({name: pd.array([], dtype=kind) for name, kind in COLUMNS.items()})
    row = sinks.assign(first=sinks["position"] == 0).groupby(KEYS, sort=False, dropna=False).ngroup().to_numpy()
    events = sinks.groupby(row, sort=False)
    where = np.unique(row, return_index=True)[1]
    table = sinks[["stream", "kind", "token", "id", "region"]].iloc[where].reset_index(drop=True)
    table["first"] = sinks["position"].to_numpy()[where] == 0
    table["first_layer"], table["last_layer"] = events["layer"].min(), events["layer"].max()
    table["mean_alpha"], table["mass"] = events["alpha"].mean(), events["alpha"].sum()
    sequence = _numbered(sinks["domain"], sinks["sequence"])
    occurrence = _numbered(sequence, sinks["position"])
    table["sinks"] = _distinct(row, occurrence, len(table))
    table["sequences"] = _distinct(row, sequence, len(table))
    of_a_head = sinks["head"].notna().to_numpy()
    heads = _distinct(row[of_a_head], _numbered(sinks["layer"], sinks["head"])[of_a_head], len(table))
    table["heads"] = pd.Series(heads).where(heads > 0)
    table["lifetime"] = _distinct(row, _numbered(occurrence, sinks["layer"]), len(table)) / table["sinks"]
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
    return pd.DataFrame({name: table[name].astype(kind) for name, kind in COLUMNS.items()})


def _numbered(first: pd.Series | np.ndarray, second: pd.Series) -> np.ndarray:
    """A number for each pair of values, the same where both are."""
    numbers, others = pd.factorize(first)[0], pd.factorize(second, use_na_sentinel=False)[0]
    return pd.factorize(numbers * (others.max(initial=0) + 1) + others)[0]


def _distinct(row: np.ndarray, number: np.ndarray, rows: int) -> np.ndarray:
    """How many distinct numbers the events of each of the table's rows have."""
    width = number.max(initial=0) + 1
    return np.bincount(np.unique(row * width + number) // width, minlength=rows)


def _occurrences(table: pd.DataFrame, domains: list[Domain], sites: list[Site], places: PlacesOf) -> list[int]:
    """How often what a row stands for occurs; for the kind `attention`, where enough queries see it."""
    counts: Counter[Occurring] = Counter()
    for domain in domains:
        for stream in dict.fromkeys(site.stream for site in sites):
            for shared, among in _by_places(domain, [site for site in sites if site.stream == stream], places):
                for attention in (True, False):
                    counted = _seen_enough(domain, among) if attention else shared.regions != ""
                    counts.update(_counts(shared, counted, (stream, attention)))
    ids = table["id"].fillna(-1).astype(int)
    rows = zip(table["stream"], table["kind"] == "attention", table["first"], table["region"], ids, strict=True)
    return [counts[row] for row in rows]


def _by_places(domain: Domain, sites: list[Site], places: PlacesOf) -> Iterator[tuple[Places, list[Site]]]:
    """The distinct places of a stream, and the attention calls that share each."""
    named = [(places[domain.name, site.name], site) for site in sites if site.name in domain.sites]
    for shared in {id(shared): shared for shared, _ in named}.values():
        yield shared, [site for site_places, site in named if site_places is shared]


def _seen_enough(domain: Domain, sites: list[Site]) -> np.ndarray:
    """[sequence, position]: the positions that enough queries see in some attention call."""
    return np.any([domain.sites[site.name].counted for site in sites], axis=0)


def _counts(own: Places, counted: np.ndarray, key: tuple[str, bool]) -> Counter[Occurring]:
    """Occurrences at the `counted` positions, [sequence, position]."""
    place = np.arange(own.regions.shape[1])
    valid = counted & (own.regions != "")
    ids = np.full(own.regions.shape, -1) if own.ids is None else own.ids
    counts: Counter[Occurring] = Counter()
    for first in (True, False):
        for region in np.unique(own.regions):
            chosen = valid & (own.regions == region) & ((place == 0) == first)
            tokens, numbers = np.unique(ids[chosen], return_counts=True)
            counts.update({
                (*key, first, str(region), int(token)): int(number)
                for token, number in zip(tokens, numbers, strict=True)
            })  # fmt: skip
    return counts


# The sinks beyond the first token in a stream's summary: which tokens, how many heads, which layers.


NAMED = 3
"""Most tokens that the sentence names."""


def add_sinks(
    summary: Summary, domains: list[Domain], sites: list[Site], sinks: pd.DataFrame, tokens: pd.DataFrame,
    places: PlacesOf,
) -> None:  # fmt: skip
    """Adds the sinks beyond the first token, and a sentence about them, to every stream of the run and of each domain.

    `sinks` and `tokens`: the run's tables of these names.
    """
    pooled = tokens if len(domains) == 1 else sink_tokens(domains, sites, sinks, places)
    _add(summary.streams, domains, sites, pooled, summary.epsilon)
    for domain in domains if summary.domains else []:
        rows = tokens[tokens["domain"] == domain.name]
        _add(summary.domains[domain.name].streams, [domain], sites, rows, summary.epsilon)


def _add(
    streams: dict[str, StreamSummary], domains: list[Domain], sites: list[Site], tokens: pd.DataFrame, epsilon: float
) -> None:
    later = tokens[~tokens["first"]]
    for name, stream in streams.items():
        stream_sites = [site for site in sites if site.stream == name]
        rows = later[later["stream"] == name]
        if not any(_could_be_found(domain, site) for domain in domains for site in stream_sites):
            continue
        stream.sinks_beyond_first = beyond = _beyond(rows, [site.layer for site in stream_sites])
        if not says_nothing(stream.uniform_alpha_0.T, epsilon):
            stream.in_words.append(beyond_words(beyond, epsilon))


def _could_be_found(domain: Domain, site: Site) -> bool:
    """Whether attention on a sink beyond the first token would have been seen in this attention call."""
    values = domain.sites.get(site.name)
    return values is not None and not bool(pd.isna(values.head("sink_elsewhere")).all())


def _beyond(events: pd.DataFrame, layers: list[int]) -> SinksBeyondFirst:
    attention = events[events["kind"] == "attention"]
    rows = events[events["kind"] == "state"] if attention.empty else attention
    named = rows.head(NAMED)
    if named.empty:
        return SinksBeyondFirst(tokens=[], others=0, created=None, gone=None)
    last = int(rows["last_layer"].max())
    return SinksBeyondFirst(
        tokens=[
            SinkToken.model_validate(
                {name: None if pd.isna(row[name]) else row[name] for name in SinkToken.model_fields}
            )
            for row in named.to_dict("records")
        ],
        others=len(rows) - len(named),
        created=int(rows["first_layer"].min()),
        gone=min((layer for layer in layers if layer > last), default=None),
    )
