"""Runs for the model hub: a model card's Markdown block, YAML head and badge, and a dataset folder with its card."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import pandas as pd

from sinkscope.errors import SinkscopeError
from sinkscope.present.numbers import estimate, fixed, is_missing
from sinkscope.present.text import answers, markdown_cell, printable, run_id
from sinkscope.runs.atlas import RATES, Entry, atlas, atlas_table, run_names
from sinkscope.runs.catalogue import IN_TABLES, refuse_mixed
from sinkscope.runs.folder import parquet_bytes
from sinkscope.runs.per_sequence import counted, domains, spread
from sinkscope.runs.questions import tables_of_questions
from sinkscope.runs.run import TABLES
from sinkscope.runs.schema.manifest import with_adapter
from sinkscope.runs.schema.other_tables import ATLAS_TABLE
from sinkscope.runs.schema.tables import TABLES as DESCRIBED

if TYPE_CHECKING:
    from sinkscope.runs.run import Run


METRICS = {
    "sink_rate": "Sink rate (alpha_0 > 0.3), %",
    "sink_rate_64": "Sink rate over the first 64 tokens (alpha_0 > 0.3), %",
    "bos_mass": "first-token attention (BOS mass)",
    "alpha_0": "alpha_0 (Gu et al. 2410.10781)",
    "inf_norm_peak": "Largest mean infinity norm of the residual stream, of the layers after the first",
    "dormant": "Dormant heads",
}
"""The columns of the atlas that stand in the model-index, with their names there."""
HEADS = (
    "text",
    "T",
    "sequences",
    "sink rate (alpha_0 > 0.3), %",
    "first 64 (alpha_0 > 0.3), %",
    "mean alpha_0",
    "first-token attention",
    "dormant heads",
)
HASH = 12
"""Digits of the weights' SHA-256 that are shown."""


def render_card(run: Run) -> str:
    """The YAML head and the Markdown block, as a model card of their own."""
    return f"---\n{model_index(run)}---\n\n{markdown_block(run)}"


def markdown_block(run: Run) -> str:
    """Answer, table, published numbers that were measured alike, and how it was measured. Raises SinkscopeError for an
    interrupted run."""
    entries = _whole(run)
    manifest = run.manifest
    parts = ["## Attention sinks", *_answers(run), _table(entries)]
    parts += [f"Warning: {markdown_cell(warning)}" for warning in run.summary.warnings]
    published = [_published(entry) for entry in entries if entry.published]
    weights = (manifest.model.weights_sha256 or "")[:HASH]
    facts = f"sinkscope {manifest.sinkscope}, {manifest.model.dtype} on {manifest.model.device}, run {run_id(run)}"
    facts += f", weights {weights}" if weights else ""
    facts += f"; self-check {manifest.self_check.status}"
    return "\n\n".join([*parts, *published, f"Measured by {markdown_cell(facts)}."]) + "\n"


def _whole(run: Run) -> list[Entry]:
    if not run.manifest.complete:
        raise SinkscopeError(f"the run of {run.manifest.model.shown} was interrupted: scan it to the end")
    return atlas([run])


def _answers(run: Run) -> Iterator[str]:
    entries = answers(run)
    for name, words in entries:
        head = f"**{markdown_cell(name)}**: " if len(entries) > 1 else ""
        first, *others = map(markdown_cell, words)
        yield head + first
        if others:
            yield "\n".join(f"- {other}" for other in others)


def _table(entries: list[Entry]) -> str:
    marks = ["---"] + ["---:"] * (len(HEADS) - 1)
    rows = [[markdown_cell(head) for head in HEADS], marks, *map(_cells, entries)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _cells(entry: Entry) -> list[str]:
    values = entry.values
    shown = [fixed(values.get(name), 1) for name in ("sink_rate", "sink_rate_64")]
    shown += [estimate(values.get(name), values.get(f"{name}_sem"), 3) for name in ("alpha_0", "bos_mass")]
    counts = "unknown" if values["dormant"] is None else f"{values['dormant']} of {values['judged']}"
    return [
        markdown_cell(_place(entry)),
        entry.lengths,
        str(values["sequences"]),
        *shown,
        markdown_cell(f"{counts} ({values['dormant_rule']})"),
    ]


def _place(entry: Entry) -> str:
    return entry.domain if len(entry.run.summary.streams) == 1 else f"{entry.domain}, {entry.stream}"


def _published(entry: Entry) -> str:
    lines = [
        f"- {markdown_cell(METRICS.get(column, column))}: {row.number.value:g} {markdown_cell(row.number.unit)} on "
        f"{markdown_cell(row.number.text)}, {markdown_cell(row.number.setting)} ({markdown_cell(row.number.source)})"
        for column, numbers in entry.published.items()
        for row in numbers
    ]
    return "\n".join([f"Published numbers, measured alike ({markdown_cell(_place(entry))}):", "", *lines])


def model_index(run: Run) -> str:
    """The `model-index` of a model card's YAML head; missing numbers are left out. Raises SinkscopeError for an
    interrupted run."""
    lines = ["model-index:", f"- name: {_scalar(_shown_name(run))}", "  results:"]
    for entry in _whole(run):
        lines += _result(run, entry)
    return "\n".join([*lines, ""])


def _shown_name(run: Run) -> str:
    """The model's name, and the adapter's, without the folders above them, which nobody else has. A hub id and what was
    given as a name stay whole."""
    model = run.manifest.model
    hashed = model.weights_sha256 is not None and model.revision is None  # the weights are those of a folder or a file
    folder = hashed or model.id.startswith(("/", ".", "~")) or "\\" in model.id
    name = model.name or (PurePath(model.id).name if folder else model.id)
    return with_adapter(name, None if model.adapter is None else PurePath(model.adapter.path).name)


def _result(run: Run, entry: Entry) -> list[str]:
    stream = run.summary.streams[entry.stream]
    task = "text-generation" if stream.causal and entry.stream == "text" else "feature-extraction"
    lines = [
        "  - task:", f"      type: {task}", "    dataset:", f"      name: {_scalar(_place(entry))}",
        f"      type: {_scalar(entry.domain)}", "    metrics:",
    ]  # fmt: skip
    for column, name in METRICS.items():
        value = entry.values.get(column)
        if is_missing(value):
            continue
        arguments = {"seq_len": entry.values["tokens"], "num_sequences": entry.values["sequences"]}
        if entry.values["shortest"] != entry.values["tokens"]:
            arguments["shortest"] = entry.values["shortest"]
        lines += [
            f"    - type: {column}", f"      name: {_scalar(name)}", f"      value: {_scalar(_rounded(value))}",
            f"      args: {_scalar(arguments)}",
        ]  # fmt: skip
    return lines


def _rounded(value: Any) -> Any:
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _scalar(value: Any) -> str:
    """A value as JSON, which YAML reads as the same value; control characters are visible in text."""
    return json.dumps(printable(value) if isinstance(value, str) else value)


# The badge

CHARACTER, PAD = 6.6, 10
"""Width of a character and of the margins beside a word, in pixels."""


def render_badge(run: Run) -> str:
    """A badge as SVG: `attention sinks`, and how many heads have one. It needs no service and no script.

    Raises SinkscopeError for an interrupted run.
    """
    from markupsafe import escape

    entries = _whole(run)
    words = ["attention sinks", _badge_words(entries)]
    left, right = (round(CHARACTER * len(word)) + 2 * PAD for word in words)
    title = escape(": ".join(words))
    texts = "".join(
        f'<text x="{x:g}" y="14">{escape(word)}</text>'
        for x, word in zip((left / 2, left + right / 2), words, strict=True)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + right}" height="20" role="img" '
        f'aria-label="{title}"><title>{title}</title><rect width="{left}" height="20" fill="#3d4148"/>'
        f'<rect x="{left}" width="{right}" height="20" fill="#0067a5"/>'
        '<g fill="#fff" text-anchor="middle" font-family="Verdana,Geneva,sans-serif" font-size="11">'
        f"{texts}</g></svg>\n"
    )


def _badge_words(entries: list[Entry]) -> str:
    rates = [entry.values.get("sink_rate") for entry in entries]
    measured = sorted(float(rate) for rate in rates if rate is not None and not is_missing(rate))
    if not measured:
        return "sink rate unknown"
    ends = dict.fromkeys(fixed(rate, 1) for rate in (measured[0], measured[-1]))
    lengths = [entry.values[name] for entry in entries for name in ("shortest", "tokens")]
    return f"sink rate {' to '.join(ends)} % (alpha_0 > {RATES['sink_rate'][0]}) at T = {spread(lengths)}"


# Runs as a dataset folder of the model hub: a Parquet file for each table, all runs in it, and the dataset's card.


CARD, ATLAS = "README.md", ATLAS_TABLE.name
FILES = frozenset({CARD, *(f"{name}.parquet" for name in (ATLAS, *TABLES))})
"""All files that such a folder may hold."""
KEYS = {name: {key.name for key in table.keys} for name, table in (DESCRIBED | tables_of_questions()).items()}
"""The columns that identify a row of each table."""
ROWS = {name: table.row for name, table in (DESCRIBED | tables_of_questions()).items()} | {ATLAS: ATLAS_TABLE.row}
"""What one row of each table stands for."""


def dataset_files(runs: list[Run]) -> dict[str, bytes]:
    """Every file of the folder by its name. The columns `run` and `model` come first in each table; `domain` is filled
    in where a run has one text.

    Raises SinkscopeError where a column would hold what some of the runs measured otherwise.
    """
    refuse_mixed(IN_TABLES, [run.manifest for run in runs])
    tables = {ATLAS: atlas_table(atlas(runs)), **_joined(runs)}
    files = {f"{name}.parquet": parquet_bytes(table) for name, table in tables.items()}
    return {CARD: dataset_card(runs, tables).encode(), **files}


def _joined(runs: list[Run]) -> dict[str, pd.DataFrame]:
    """Each table with the rows of every run that has it."""
    parts: dict[str, list[pd.DataFrame]] = {}
    for name, run in zip(run_names(runs), runs, strict=True):
        for table, rows in run.tables().items():
            parts.setdefault(table, []).append(_named(run, name, table, rows))
    return {table: pd.concat(parts[table], ignore_index=True) for table in TABLES if table in parts}


def _named(run: Run, name: str, table: str, rows: pd.DataFrame) -> pd.DataFrame:
    """The rows with the columns that lead every table, text as text."""
    leading = {"run": name, "model": run.manifest.model.shown}
    if "domain" in KEYS[table] and "domain" not in rows:
        leading["domain"] = domains(run)[0].domain
    text = dict.fromkeys(rows.select_dtypes(include=["object", "string"]), "string")
    return pd.concat([pd.DataFrame(leading, rows.index, dtype="string"), rows.astype(text)], axis=1)


def dataset_card(runs: list[Run], tables: dict[str, pd.DataFrame]) -> str:
    """The card: a YAML head with one configuration for each table, the runs, and what the tables hold."""
    head = ["---", "pretty_name: Attention sinks", "tags:", "- attention-sinks", "- interpretability", "configs:"]
    for name in tables:
        head += [f"- config_name: {name}", "  data_files:", "  - split: train", f"    path: {name}.parquet"]
    lines = ["# Attention sinks", "", "Measured by sinkscope; each row names its run and its model.", "", "## Runs", ""]
    for name, run in zip(run_names(runs), runs, strict=True):
        model = run.manifest.model
        read = "; ".join(f"{data.domain}: {counted(run, data)}" for data in domains(run))
        complete = "" if run.manifest.complete else ", interrupted"
        facts = f"{name}: {model.shown}, revision {model.revision or '-'}, {model.dtype}, {read}"
        facts += f"; weights {(model.weights_sha256 or '-')[:12]}; sinkscope {run.manifest.sinkscope}{complete}"
        lines.append(f"- {markdown_cell(facts)}")
    lines += [
        "",
        "## Tables",
        "",
        "`sinkscope schema NAME` describes the columns. A missing value is null.",
        "",
    ]
    lines += [f"- `{name}`: a row is {ROWS[name]}; {len(table)} rows." for name, table in tables.items()]
    return "\n".join([*head, "---", "", *lines, ""])
