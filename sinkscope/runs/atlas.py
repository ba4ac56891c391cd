"""Many runs side by side: one row for each run, domain and stream, and the published numbers that were measured alike.

A number that was not measured, or that means nothing for the run, is missing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pandas as pd

from sinkscope.errors import SinkscopeError
from sinkscope.runs.catalogue import by_old_alpha, mixed, table_columns
from sinkscope.runs.papers import PublishedNumber, Setting, kind_of_text, numbers_of
from sinkscope.runs.per_sequence import not_shares, queries_of, spread, tells_sinks
from sinkscope.runs.schema.other_tables import ATLAS_TABLE
from sinkscope.runs.words import dormant_count

if TYPE_CHECKING:
    from sinkscope.runs.run import Run
    from sinkscope.runs.schema.manifest import DomainFacts
    from sinkscope.runs.schema.stream import PrefixValues, StreamSummary

TEXT = "text"
"""The stream that published numbers are of."""
RATES = {"sink_rate": ("0.3", "T"), "sink_rate_64": ("0.3", "t64"), "sink_rate_0.8": ("0.8", "T")}
"""Threshold and prefix of each rate."""
HALF = 0.5
TOP_CHANNELS = 8
KINDS = {"integer": "Int64", "number": "float64", "string": "string"}


@dataclass(frozen=True)
class Entry:
    """One row of the atlas.

    Attributes:
        run: the run. domain, stream: the part of it that the row shows.
        values: the row's numbers and words by column, errors of means, and in how many heads (`judged`) the dormant
            rule has a value.
        published: the published numbers that were measured alike, by the column they stand beside.
        not_comparable: the model's other published numbers, each with the reason.
    """

    run: Run
    domain: str
    stream: str
    values: dict[str, Any]
    published: dict[str, list[PublishedNumber]]
    not_comparable: list[tuple[PublishedNumber, str]]

    @property
    def lengths(self) -> str:
        """How many queries the sequences have: `256`, or `100 to 256` where they differ, or `? to 256`."""
        return spread([self.values["shortest"], self.values["tokens"]])

    def rows_of(self, name: str) -> pd.DataFrame:
        """The rows of a table of the run that belong to this entry; empty where the run has no such table."""
        table = self.run.tables().get(name)
        if table is None:
            return pd.DataFrame()
        chosen = table["stream"] == self.stream
        return table[chosen & (table["domain"] == self.domain)] if "domain" in table else table[chosen]


def atlas(runs: list[Run]) -> list[Entry]:
    """One entry for each (run, domain, stream), in the order of the runs. Raises SinkscopeError without runs."""
    if not runs:
        raise SinkscopeError("an atlas needs at least one run")
    entries = [entry for name, run in zip(run_names(runs), runs, strict=True) for entry in _entries(run, name)]
    if mixed([run.manifest for run in runs]):
        for entry in entries:
            if by_old_alpha(entry.run.manifest):
                entry.values["position_or_token"] = None
    return entries


def left_out(runs: list[Run]) -> list[str]:
    """What the atlas leaves out because some of the runs measured it otherwise, a line for each such run."""
    if not mixed([run.manifest for run in runs]):
        return []
    return [
        f"position_or_token of {name} is left out: alpha_k was another one in schema version 2; scan its model again"
        for name, run in zip(run_names(runs), runs, strict=True)
        if by_old_alpha(run.manifest) and any(stream.measured.get("first") for stream in run.summary.streams.values())
    ]


def atlas_table(entries: list[Entry]) -> pd.DataFrame:
    """The entries as a table; `sinkscope schema atlas` describes its columns."""
    columns = list(table_columns(ATLAS_TABLE))
    rows = [entry.values | _published_words(entry) for entry in entries]
    table = pd.DataFrame(rows, columns=[column.name for column in columns])
    return table.astype({column.name: KINDS[column.type] for column in columns})


def run_names(runs: list[Run]) -> list[str]:
    """The folder of each run, with as many of the folders above it as tell it apart; a number for a run without."""
    parts = [run.path.resolve().parts if run.path else (f"run {place}",) for place, run in enumerate(runs, 1)]
    return [_name(folders, parts) for folders in parts]


def _name(own: tuple[str, ...], every: list[tuple[str, ...]]) -> str:
    for count in range(1, len(own) + 1):
        if [folders[-count:] for folders in every].count(own[-count:]) == 1:
            return "/".join(own[-count:])
    return "/".join(own[-1:])


def _entries(run: Run, name: str) -> Iterator[Entry]:
    facts = {data.domain: data for data in run.manifest.data}
    alone = {run.manifest.data[0].domain: run.summary.streams}
    answers = {domain: entry.streams for domain, entry in run.summary.domains.items()} or alone
    for domain, streams in answers.items():
        for stream, summary in streams.items():
            yield _entry(run, name, facts[domain], stream, summary)


def _entry(run: Run, name: str, data: DomainFacts, stream: str, summary: StreamSummary) -> Entry:
    alike, others = _compared(run, data, summary) if stream == TEXT else ({}, [])
    entry = Entry(run, data.domain, stream, {}, alike, others)
    entry.values.update(
        _identity(run, name, data) | _sinks(entry, summary) | _states(entry, summary) | _on_request(entry)
    )
    entry.values["stream"] = stream
    return entry


def _identity(run: Run, name: str, data: DomainFacts) -> dict[str, Any]:
    model, check = run.manifest.model, run.manifest.self_check
    first = data.first_token or run.summary.first_token
    return {
        "run": name, "model": model.shown, "text": data.domain, "parameters": model.parameters, "dtype": model.dtype,
        "first_token": first.text, "self_check": check.status, "warnings": len(run.summary.warnings),
        "created": run.manifest.created, "dormant_rule": run.manifest.request.dormant_rule,
    }  # fmt: skip


def _sinks(entry: Entry, summary: StreamSummary) -> dict[str, Any]:
    """How much attention the first token gets. Unnormalised weights in a softmax's place are no shares: missing."""
    scores = not_shares(entry.run).get(entry.stream, ["softmax"])
    shortest, longest = queries_of(entry.run, entry.domain, summary.tokens_per_sequence)
    values = {
        "tokens": longest, "shortest": shortest, "sequences": summary.sequences, "layers": summary.layers,
        "heads": summary.heads, "attention": ", ".join(scores) or None,
        "dormant": dormant_count(summary.dormant, summary.heads), "judged": summary.heads - summary.dormant.unknown,
    }  # fmt: skip
    if scores != ["softmax"]:
        return values
    mass = entry.rows_of("heads")["bos_mass"].dropna()
    return values | {
        **{name: _rate(entry, summary, threshold, prefix) for name, (threshold, prefix) in RATES.items()},
        "uniform_alpha_0": summary.uniform_alpha_0.T,
        "alpha_0": summary.sink_score.mean, "alpha_0_sem": summary.sink_score.sem,
        "bos_mass": summary.bos_mass.mean, "bos_mass_sem": summary.bos_mass.sem,
        "heads_over_half": float((mass > HALF).mean()) if len(mass) else None,
    }  # fmt: skip


def _rate(entry: Entry, summary: StreamSummary, threshold: str, prefix: str) -> float | None:
    """A sink rate; None where it says nothing about sinks."""

    def at(values: PrefixValues) -> float | None:
        return values.T if prefix == "T" else values.t64

    known = threshold in summary.sink_rate_percent
    told = known and tells_sinks(entry.run, entry.stream, at(summary.uniform_alpha_0), float(threshold))
    return at(summary.sink_rate_percent[threshold]) if told else None


def _states(entry: Entry, summary: StreamSummary) -> dict[str, Any]:
    """The first token's norm and the massive activations."""
    layers = entry.rows_of("layers")
    norms = layers.loc[layers["layer"] > layers["layer"].min(), "inf_norm"].dropna() if len(layers) else layers
    channels = summary.massive_activations.channels[:TOP_CHANNELS]
    return {
        "spike_layer": summary.first_token_norm.spike_layer, "norm_ratio": summary.first_token_norm.max_ratio,
        "massive_channels": " ".join(str(channel.channel) for channel in channels) or None,
        "inf_norm_peak": float(norms.max()) if len(norms) else None,
    }  # fmt: skip


def _on_request(entry: Entry) -> dict[str, Any]:
    """What only some runs measured."""
    switch, spikes = entry.rows_of("switch"), entry.rows_of("spikes")
    phi = switch["switch_phi"].mean() if len(switch) else None
    weights = spikes[spikes["super_weight"].fillna(False).astype(bool)] if len(spikes) else spikes
    named = [f"{row['layer']}.{row['channel']}.{row['neuron']}" for row in weights.to_dict("records")]
    return {
        "position_or_token": _verdict(entry.run.summary.streams[entry.stream]),
        "switch_phi": phi, "super_weights": " ".join(dict.fromkeys(named)) or None,
    }  # fmt: skip


def _verdict(summary: StreamSummary) -> str | None:
    """The commonest answer among the heads with a sink on BOS: `token (41 of 43)`; None where it was not measured."""
    answers = summary.measured.get("first")
    if not answers or not answers["sinks_on_bos"] or answers["missing"] == answers["heads"]:
        return None
    counts = answers["of_sinks_on_bos"]
    most = max(counts, key=lambda name: counts[name])
    return f"{most} ({counts[most]} of {answers['sinks_on_bos']})"


def _compared(
    run: Run, data: DomainFacts, summary: StreamSummary
) -> tuple[dict[str, list[PublishedNumber]], list[tuple[PublishedNumber, str]]]:
    """The model's published numbers: those measured alike, by column, and the others, each with the reason."""
    first = data.first_token or run.summary.first_token
    shortest, longest = queries_of(run, data.domain, summary.tokens_per_sequence)
    kind, dtype = kind_of_text(data.spec), run.manifest.model.dtype
    setting = Setting(longest, shortest, kind, bool(first.is_bos), data.bos, dtype)
    alike: dict[str, list[PublishedNumber]] = {}
    others = []
    for row in [] if run.manifest.model.adapter else numbers_of(run.manifest.model.id):
        why = row.difference(setting)
        if why:
            others.append((row, why))
        else:
            alike.setdefault(row.beside, []).append(row)
    return alike, others


def _published_words(entry: Entry) -> dict[str, str | None]:
    alike = [
        f"{column} {row.number.value:g} {row.number.unit} ({row.number.text}; {row.number.source})"
        for column, numbers in entry.published.items()
        for row in numbers
    ]
    return {"published": "; ".join(alike) or None, "not_comparable": "; ".join(reasons(entry)) or None}


def reasons(entry: Entry) -> list[str]:
    """The published numbers that were not measured alike, counted by metric and by reason."""
    counts = Counter((row.number.metric, why) for row, why in entry.not_comparable)
    return [f"{count} x {metric}: {why}" for (metric, why), count in counts.items()]
