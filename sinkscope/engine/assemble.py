"""Builds the Run of a scan from what its loop measured: tables, summary, manifest."""

from __future__ import annotations

import time
from typing import Any, Protocol

import pandas as pd

from sinkscope.capture import Plan, Site, not_softmax
from sinkscope.checkpoints import Checkpoint
from sinkscope.engine.batch_size import return_freed
from sinkscope.engine.input_kinds import blaming
from sinkscope.engine.input_kinds.kind import InputKind, Reading
from sinkscope.engine.manifest import (
    Attended,
    spectra_measured,
    timing,
    with_failures,
    with_guests,
    with_hidden,
    with_late_keywords,
    with_warnings,
)
from sinkscope.engine.measurement import Findings, Measurement
from sinkscope.engine.shards import Shards, with_weights
from sinkscope.runs.dormancy import dormant_in_some
from sinkscope.runs.papers import published_for
from sinkscope.runs.run import Run
from sinkscope.runs.schema.base import plain
from sinkscope.runs.schema.manifest import FirstToken, Manifest
from sinkscope.runs.schema.summary import Summary
from sinkscope.tables.frames import curve_table, head_table, layer_table, position_table, sequence_table
from sinkscope.tables.sinks import add_sinks, sink_table, token_table
from sinkscope.tables.stretches import stretch_table
from sinkscope.tables.summary import contrast_summary, contrast_table, domain_summaries, stream_summaries
from sinkscope.tables.values import Domain, PlacesOf


class Measured(Attended, Protocol):
    """What a run is built of: a scan's loop, or what was measured of a model that somebody else ran.

    Its attributes are those of `Loop`. `domains` and `places` hold the sequences measured so far.
    """

    checkpoint: Checkpoint
    plan: Plan
    reading: Reading
    measurements: list[Measurement]
    shards: Shards | None
    smallest_batch: int | None
    failures: list[str]

    @property
    def sites(self) -> list[Site]: ...

    @property
    def done(self) -> int: ...

    def domains(self) -> list[Domain]: ...

    def places(self, domains: list[Domain]) -> PlacesOf: ...


def build_run(loop: Measured, manifest: Manifest, started: float, complete: bool) -> Run:
    """Builds the Run of the sequences measured so far. `started`: time.perf_counter() when the scan began."""
    sites, domains, request = loop.sites, loop.domains(), manifest.request
    return_freed()
    manifest = with_late_keywords(with_weights(manifest, loop.checkpoint), loop.plan)
    manifest = with_guests(with_failures(manifest, [*loop.plan.failures, *loop.failures]), loop)
    places = loop.places(domains)
    heads = head_table(domains, sites, request)
    layers = layer_table(domains, sites, heads, request)
    positions = position_table(domains, sites, places)
    sinks = sink_table(domains, sites, places)
    sink_tokens = token_table(domains, sites, sinks, places)
    domains_compared = contrast_table(domains, sites)
    findings = Findings(domains, sites, heads, layers, loop.reading, request)
    measured: dict[str, pd.DataFrame] = {}
    for measurement in loop.measurements:
        own = measurement.tables(findings)
        measured |= own
        manifest = with_warnings(manifest, measurement.left_out(own))
    summary = _summary(loop, manifest, complete, domains, heads, layers, places)
    summary.domains_compared = [] if domains_compared is None else contrast_summary(domains_compared)
    add_sinks(summary, domains, sites, sinks, sink_tokens, places)
    tables = measured | {"heads": heads, "layers": layers}
    for measurement in loop.measurements:
        measurement.summarise(summary.streams, tables)
        for name, domain in summary.domains.items():
            measurement.summarise(domain.streams, {key: of_domain(table, name) for key, table in tables.items()})
    _add_kind(summary, loop.reading.kind, domains, sites, positions)
    return Run(
        heads=heads,
        layers=layers,
        positions=positions,
        stretches=stretch_table(domains, sites),
        length_curve=curve_table(domains, sites),
        sequences=sequence_table(domains, sites),
        domains=domains_compared,
        summary=summary,
        shards=loop.shards.folder if loop.shards is not None else None,
        sinks=sinks,
        tokens=sink_tokens,
        measured=measured,
        manifest=manifest.model_copy(
            update=_facts(loop, domains, started, complete) | {"attention": with_hidden(manifest.attention, domains)}
        ),
    )


def _facts(loop: Measured, domains: list[Domain], started: float, complete: bool) -> dict[str, Any]:
    """What the scan adds to its manifest."""
    return {
        "spectra_measured": spectra_measured(domains),
        "complete": complete,
        "batch_size": loop.smallest_batch,
        "sequences_done": loop.done,
        "timing": timing(loop.done, loop.seconds, time.perf_counter() - started),
    }


def _summary(
    loop: Measured, manifest: Manifest, complete: bool, domains: list[Domain], heads: pd.DataFrame,
    layers: pd.DataFrame, places: PlacesOf,
) -> Summary:  # fmt: skip
    sites, request = loop.sites, manifest.request
    return Summary(
        model=manifest.model.shown,
        complete=complete,
        data=[domain.name for domain in domains],
        sequences=loop.done,
        epsilon=request.epsilon,
        first_token=FirstToken(**loop.reading.first_token(len(domains))),
        streams=stream_summaries(domains, sites, heads, layers, places, request),
        domains=domain_summaries(domains, sites, heads, layers, places, request),
        dormant_in_some_domains=dormant_in_some(heads) if len(domains) > 1 else [],
        published=[] if manifest.model.adapter else published_for(manifest.model.id),
        not_softmax=not_softmax(loop.checkpoint.model, sites),
        joined_sequences=sum(corpus.joined for corpus in loop.reading.corpora),
        warnings=manifest.warnings,
    )


def of_domain(table: pd.DataFrame, domain: str) -> pd.DataFrame:
    """The rows of one domain; all rows of a table that does not tell domains apart."""
    return table[table["domain"] == domain] if "domain" in table else table


def _add_kind(
    summary: Summary, kind: InputKind, domains: list[Domain], sites: list[Site], positions: pd.DataFrame
) -> None:
    """Adds what the kind of input tells of itself; entries that no field is for stand under `more`."""
    with blaming(type(kind)):
        entries = kind.summary(domains, sites, positions)
    for name, value in entries.items():
        if name in Summary.model_fields:
            setattr(summary, name, value)
        else:
            summary.more[name] = plain(value)
