"""A run at the terminal: the answer first, then the map of all heads, the strongest heads, the files written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from sinkscope.present.numbers import MISSING, estimate, fixed, is_missing, parameters
from sinkscope.present.terminal.run_parts import (
    contrast_rows,
    domain_answers,
    domain_rows,
    dormant_rows,
    published_rows,
    render_task,
    token_rows,
)
from sinkscope.present.terminal.table import (
    FEW,
    ROWS,
    Cells,
    MapRow,
    as_text,
    dormant_heads,
    fitted,
    head_map,
    plain,
    shades,
    table,
)
from sinkscope.present.text import first_token, next_command, printable, sentences, token_text
from sinkscope.runs.per_sequence import counted, not_shares, queries_of, sequences_of, spread, tells_sinks
from sinkscope.runs.statistics import CONFIDENCE, t_half_width
from sinkscope.runs.words import computed_in, dormant_count, first_mass, says_nothing

if TYPE_CHECKING:
    from sinkscope.runs.run import Run
    from sinkscope.runs.schema.stream import PrefixValues, StreamSummary


STRONGEST = 8
COLUMNS = (
    "bos_mass: mean attention of queries 1 on to the first token; alpha_0 (column sink_score): of all queries; margin "
    "(sink_margin): its log odds; entropy: mean over queries; honor: output norm / mean of the layer; pattern: sink "
    "where bos_mass >= 0.5; `sinkscope metrics NAME` has each formula"
)
"""What the columns of the strongest heads mean."""
OPEN = 0.1
"""Share of heads from which the screen says that the errors leave their sinks open."""


def render_run(run: Run, written: Iterable[Path] = (), width: int = 80, color: str | None = None) -> str:
    """The whole screen of one run as a string, with ANSI codes only if `color` names a colour system."""
    parts: list[RenderableType] = [_title(run)]
    mass, only = first_mass(run.summary.first_token), run.manifest.data[0].domain
    for stream, summary in run.summary.streams.items():
        heads = run.heads[run.heads["stream"] == stream]
        if len(run.summary.streams) > 1:
            parts.append(Text(f"\nstream {printable(stream)}", style="bold"))
        if run.summary.domains:
            parts += [*domain_answers(run, stream), *domain_rows(run, stream), *contrast_rows(run, stream)]
        else:
            parts += [
                _answers(summary),
                _rates(run, stream, spread(queries_of(run, only, summary.tokens_per_sequence))),
                *_unsaid(run, stream),
                *([] if _threshold(run, stream) is None else undecided(run, heads)),
            ]
        parts += _across_domains(summary)
        maps = _domains(heads)
        for place, (domain, rows) in enumerate(maps if len(maps) <= FEW else []):
            parts += [_heat_map(rows, domain, mass, width, color is not None)]
            parts += [
                _strongest(rows, mass, _threshold(run, stream, domain)),
                *([Text(COLUMNS)] if place == 0 else []),
            ]
            parts += token_rows(run, stream, domain)
        if len(maps) > FEW:
            parts.append(Text(f"\nno maps of so many datasets ({len(maps)}): heads.csv has every head", style="bold"))
        parts.append(dormant_rows(run, stream) if run.summary.domains else _dormant(summary))
    if run.summary.task is not None:
        parts.append(Text(render_task(run.summary.task, width), style="not bold"))
    parts += published_rows(run)
    parts += _files(written)
    return as_text(parts, width, color).rstrip("\n") + "\n"


def _title(run: Run) -> Text:
    model, first = run.manifest.model, run.summary.first_token
    text = Text(printable(model.shown), style="bold")
    kind = "" if model.shown == model.class_ else f"{model.class_}, "
    numbers = computed_in(model.dtype, model.device, model.quantization)
    text.append(
        printable(f"  {kind}{parameters(model.parameters or 0)} parameters, {numbers}"),
        style="not bold",
    )
    text.append("\n")
    for data in run.manifest.data[:ROWS]:
        text.append(f"{printable(data.domain)}: {counted(run, data)}", style="not bold")
        text.append(f", {data.joined} joined\n" if data.joined else "\n", style="not bold")
    if len(run.manifest.data) > ROWS:
        text.append(f"and {len(run.manifest.data) - ROWS} more datasets (manifest.json)\n", style="not bold")
    if not run.manifest.complete:
        text.append("interrupted: scan --resume measures the rest\n", style="bold")
    if run.manifest.decoder_input is not None:
        text.append(f"decoder reads {printable(run.manifest.decoder_input)}\n", style="not bold")
    shown = printable(first_token(run))
    if first.is_bos is None and run.manifest.model.tokenizer_sha256 is not None:
        shown += "; the tokenizer has no BOS"
    whose = "task" if run.summary.task is not None else "tokenizer"
    called = "CLS, which stands for its BOS" if "CLS" in str(first.text) else "BOS"
    kind = {True: f", the {whose}'s {called}", False: f", not the {whose}'s BOS", None: ""}[first.is_bos]
    text.append(f"first token: {shown}{kind if first.id is not None else ''}\n", style="not bold")
    return text


def _answers(summary: StreamSummary) -> Text:
    text = Text()
    for place, sentence in enumerate(sentences(summary)):
        text.append(f"{sentence}\n", style="bold" if place == 0 else "")
    return text


def _across_domains(summary: StreamSummary) -> list[Text]:
    """What measurements say about all domains together: each domain's own answer cannot."""
    told = [str(measured["in_words"]) for measured in summary.measured.values() if "in_words" in measured]
    return [Text(("" if place else "\n") + token_text(sentence), style="bold") for place, sentence in enumerate(told)]


def _rates(run: Run, stream: str, tokens: str) -> Table:
    """Sink rates at every threshold that tells sinks, and the alpha_0 of uniform attention; its rates too, where they
    are above 0.

    `tokens`: how many queries the sequences have.
    """
    summary, epsilon = run.summary.streams[stream], run.summary.epsilon
    rates, base = summary.sink_rate_percent, summary.uniform_alpha_0

    def row(label: str, values: Callable[[PrefixValues], float | None], mean: str) -> list[str]:
        shown = [
            fixed(values(rate), 1) if tells_sinks(run, stream, values(base), float(name)) else MISSING
            for name, rate in rates.items()
        ]
        return [label, *shown, mean, fixed(values(base), 3)]

    mean = fixed(summary.sink_score.mean, 3)
    rows = [row(f"T = {tokens}", lambda prefix: prefix.T, mean)]
    if base.t64 is not None:
        rows.append(row("first 64", lambda prefix: prefix.t64, ""))
    uniform = {name: rate.T for name, rate in summary.uniform_rate_percent.items()}
    shown = {
        name: fixed(uniform.get(name), 1) if rows[0][1 + at] != MISSING else MISSING for at, name in enumerate(rates)
    }
    if any(uniform.get(name) for name, rate in shown.items() if rate != MISSING):  # some sequences are short
        rows.append(["uniform", *shown.values(), "", ""])
    return table(
        "sink rate, % of (sequence, head) with alpha_0 > eps",
        ["", *(f"eps {name}" for name in rates), "mean alpha_0", "uniform alpha_0"],
        rows,
        left=[""],
        bold=[f"eps {name}" for name in rates if float(name) == epsilon],
        title_style="",
    )


def _unsaid(run: Run, stream: str) -> list[Text]:
    """What a missing rate means, where one is missing."""
    if scores := not_shares(run).get(stream):
        return [Text(f"-: attention is {' and '.join(scores)}, no softmax, so that no rate says anything")]
    summary = run.summary.streams[stream]
    base = summary.uniform_alpha_0
    passed = any(
        says_nothing(value, float(name)) for value in (base.T, base.t64) if value is not None
        for name in summary.sink_rate_percent
    )  # fmt: skip
    return [Text("-: uniform attention has a larger alpha_0, so that no rate says anything")] if passed else []


def _threshold(run: Run, stream: str, domain: str | None = None) -> float | None:
    """The sink threshold; None where passing it is no sign of a sink in the stream, as at few tokens."""
    entry = run.summary.domains.get(domain or "", run.summary)
    uniform = (entry.streams.get(stream) or run.summary.streams[stream]).uniform_alpha_0.T
    return run.summary.epsilon if tells_sinks(run, stream, uniform, run.summary.epsilon) else None


def undecided(run: Run, heads: pd.DataFrame) -> list[Text]:
    """A line on the errors where they leave open of many heads whether they have a sink; none where they do not."""
    count, epsilon = sequences_of(run, run.manifest.data[0]), run.summary.epsilon
    if count < 2 or "sink_score_sem" not in heads:
        return []
    half = t_half_width(CONFIDENCE, count - 1) * heads["sink_score_sem"]
    still = int(((heads["sink_score"] - epsilon).abs() <= half).sum())
    if still < OPEN * len(heads):
        return []
    return [
        Text(
            f"In {still} of {len(heads)} heads the 95 % interval of alpha_0 contains {epsilon:g}, so it is open "
            f"whether they have a sink. {4 * count} sequences, 4 times as many, would halve the errors."
        )
    ]


def _domains(heads: pd.DataFrame) -> list[tuple[str | None, pd.DataFrame]]:
    if "domain" not in heads:
        return [(None, heads)]
    return [(str(name), rows) for name, rows in heads.groupby("domain", sort=False)]


def _heat_map(heads: pd.DataFrame, domain: str | None, mass: str, width: int, color: bool) -> Text:
    """First-token attention of every head, which is called `mass`: percent where two digits fit, else tenths; `.` below
    one unit, `-` missing."""
    sites = [rows for _, rows in heads.groupby("module", sort=False)]
    most = max(map(len, sites))
    wide = 8 + 3 * most <= width
    per_line = most if wide else max(1, min(most, width - 20))
    cells = Cells(3 if wide else 1, per_line, _percent if wide else _tenth, shades(0, 1) if color else plain)
    title = f"{mass}{f' on {printable(domain)}' if domain else ''}, {'percent' if wide else 'tenths'}"
    return head_map(title, [_layer(site) for site in sites], cells, width)


def _layer(heads: pd.DataFrame) -> MapRow:
    """The heads of one attention layer. Its kind is the note, except for full attention, which sees all tokens."""
    first = heads.iloc[0]
    return MapRow(
        first["layer"], heads["bos_mass"].tolist(), "" if first["kind"] == "full" else printable(first["kind"])
    )


def _percent(value: float) -> str:
    """Three characters. Values from 0.995 on are shown as 99, so that two digits are enough."""
    if is_missing(value):
        return "  -"
    return f"{round(100 * min(0.99, value)):>3d}" if value >= 0.005 else "  ."


def _tenth(value: float) -> str:
    """One character. Values from 0.9 on are shown as 9."""
    if is_missing(value):
        return "-"
    return str(min(9, int(10 * value))) if value >= 0.1 else "."


def _strongest(heads: pd.DataFrame, mass: str, epsilon: float | None) -> Table:
    """The heads with the most attention on the first token. `epsilon`: None where no threshold tells a sink."""
    headers = ("layer.head", "bos_mass", "alpha_0", "margin, nats", "entropy, nats", "honor", "pattern")
    order = heads.sort_values("bos_mass", ascending=False, kind="stable").head(STRONGEST)
    cells = ["layer", "head", "bos_mass", "bos_mass_sem", "sink_score", "sink_margin", "entropy", "honor", "pattern"]
    rows = [
        (f"{row['layer']}.{row['head']}", estimate(row["bos_mass"], row["bos_mass_sem"], 3),
         fixed(row["sink_score"], 3), fixed(row["sink_margin"], 2), fixed(row["entropy"], 2), fixed(row["honor"], 2),
         MISSING if is_missing(row["pattern"]) else printable(row["pattern"]))
        for row in order[cells].to_dict("records")
    ]  # fmt: skip
    sinks = 0 if epsilon is None else int((order["sink_score"] > epsilon).sum())
    what = "strongest sinks" if sinks == len(order) else f"most {mass}"
    if epsilon is not None and sinks < len(order):
        what += f", {f'{sinks} with a sink' if sinks else 'no sink'}"
    return table(f"{what} (mean ± standard error over sequences)", headers, rows, left=("layer.head", "pattern"))


def _dormant(summary: StreamSummary) -> Text:
    dormant = summary.dormant
    text = Text(f"\ndormant heads ({printable(dormant.rule)}): ", style="bold")
    return text.append(f"{dormant_heads(dormant, summary.heads)}\n", style="not bold")


def _files(written: Iterable[Path]) -> list[Text]:
    paths = list(written)
    if not paths:
        return []
    names = ", ".join(path.name for path in paths)
    text = Text("written to ", style="bold")
    folder = printable(str(paths[0].parent))
    text.append(f"{folder}: {names}\n", style="not bold")
    text.append("next: ", style="bold")
    text.append(next_command("report", paths[0].parent, "-o", f"{paths[0].parent.name}.html"), style="not bold")
    return [text]


def render_models(runs: Sequence[Run]) -> str:
    """Several runs below each other, one line for each stream and domain: what their sinks and dormant heads are."""
    rows = [("model", "text", "T", "heads", "sinks", "sink rate, %", "mean alpha_0", "dormant")]
    for run in runs:
        answers = {name: entry.streams for name, entry in run.summary.domains.items()}
        for domain, streams in (answers or {run.manifest.data[0].domain: run.summary.streams}).items():
            for stream, summary in streams.items():
                text = domain if len(streams) == 1 else f"{domain}, {stream}"
                told = tells_sinks(run, stream, summary.uniform_alpha_0.T, run.summary.epsilon)
                rate = summary.sink_rate_percent[f"{run.summary.epsilon:g}"].T if told else None
                rows.append((
                    printable(run.manifest.model.shown), printable(text),
                    spread(queries_of(run, domain, summary.tokens_per_sequence)), str(summary.heads),
                    str(summary.sink_heads) if told else MISSING, fixed(rate, 1), fixed(summary.sink_score.mean, 3),
                    fixed(dormant_count(summary.dormant, summary.heads), 0),
                ))  # fmt: skip
    return "\n".join(["", "all models", *fitted(rows, left=2, keys=2), ""])
