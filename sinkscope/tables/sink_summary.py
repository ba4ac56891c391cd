"""The sinks beyond the first token in a stream's summary: which tokens, how many heads, which layers."""

from __future__ import annotations

import pandas as pd

from sinkscope.capture import Site
from sinkscope.metrics.events import STATE_COSINE, STATE_NORM
from sinkscope.runs.schema.stream import SinksBeyondFirst, SinkToken, StreamSummary
from sinkscope.runs.schema.summary import Summary
from sinkscope.runs.words import says_nothing
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
            stream.in_words.append(in_words(beyond, epsilon))


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


def in_words(beyond: SinksBeyondFirst, epsilon: float) -> str:
    """The sentence about the sinks beyond the first token, or that there are none."""
    bound = f"alpha_k > {epsilon:g}"
    if not beyond.tokens:
        return f"Sinks beyond the first token ({bound}): none."
    names = ", ".join(_named(token) for token in beyond.tokens)
    more = f", and {beyond.others} more in tokens.csv" if beyond.others else ""
    end = "still there in the last layer" if beyond.gone is None else f"gone at {beyond.gone}"
    where = f"{names}{more}; created at layer {beyond.created}, {end}."
    if beyond.tokens[0].kind == "attention":
        return f"Sinks beyond the first token ({bound}): {where}"
    alike = f"|cos with x_0| > {STATE_COSINE:g}, norm > {STATE_NORM:g} x the median"
    return f"Sinks beyond the first token ({bound}): none. Alike to the first token's state ({alike}): {where}"


def _named(sink: SinkToken) -> str:
    """The token with its counts; repr escapes what cannot be printed."""
    name = sink.region if sink.token is None else repr(sink.token)
    heads = "" if sink.heads is None else f" in {sink.heads} head{'s' if sink.heads != 1 else ''}"
    return f"{name} ({sink.sinks} of {sink.occurrences}{heads})"
