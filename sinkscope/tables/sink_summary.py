"""The sinks beyond the first token in a stream's summary: which tokens, how many heads, which layers."""

from __future__ import annotations

import pandas as pd

from sinkscope.capture import Site
from sinkscope.runs.schema.stream import SinksBeyondFirst, SinkToken, StreamSummary
from sinkscope.runs.schema.summary import Summary
from sinkscope.runs.words import beyond_words, says_nothing
from sinkscope.tables.places import PlacesOf
from sinkscope.tables.sinks import sink_tokens
from sinkscope.tables.values import Domain

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
        found = tokens[tokens["domain"] == domain.name]
        _add(summary.domains[domain.name].streams, [domain], sites, found, summary.epsilon)


def _add(
    streams: dict[str, StreamSummary], domains: list[Domain], sites: list[Site], tokens: pd.DataFrame, epsilon: float
) -> None:
    later = tokens[~tokens["first"]]
    for name, stream in streams.items():
        own = [site for site in sites if site.stream == name]
        found = later[later["stream"] == name]
        if not any(_could_be_found(domain, site) for domain in domains for site in own):
            continue
        stream.sinks_beyond_first = beyond = _beyond(found, [site.layer for site in own])
        if not says_nothing(stream.uniform_alpha_0.T, epsilon):
            stream.in_words.append(beyond_words(beyond, epsilon))


def _could_be_found(domain: Domain, site: Site) -> bool:
    """Whether attention on a sink beyond the first token would have been seen in this attention call."""
    values = domain.sites.get(site.name)
    return values is not None and not bool(pd.isna(values.head("sink_elsewhere")).all())


def _beyond(found: pd.DataFrame, layers: list[int]) -> SinksBeyondFirst:
    attention = found[found["kind"] == "attention"]
    rows = found[found["kind"] == "state"] if attention.empty else attention
    named = rows.head(NAMED)
    if named.empty:
        return SinksBeyondFirst(tokens=[], others=0, created=None, gone=None)
    last = int(named["last_layer"].max())
    return SinksBeyondFirst(
        tokens=[
            SinkToken.model_validate(
                {name: None if pd.isna(row[name]) else row[name] for name in SinkToken.model_fields}
            )
            for row in named.to_dict("records")
        ],
        others=len(rows) - len(named),
        created=int(named["first_layer"].min()),
        gone=min((layer for layer in layers if layer > last), default=None),
    )
