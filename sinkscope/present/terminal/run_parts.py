"""Parts of a run's screen: several domains side by side, published numbers, tokens that are sinks, the model's task."""

from __future__ import annotations

import csv
import io
from collections import Counter
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from sinkscope.present.numbers import MISSING, fixed, interval, is_missing, probability
from sinkscope.present.terminal.table import FEW, ROWS, dormant_heads, fitted, more, table
from sinkscope.present.text import WIDTH, printable, sentences, shortened, span, token_cell, token_text, wrapped
from sinkscope.runs.per_sequence import tells_sinks
from sinkscope.runs.words import beyond_words, first_mass, says_nothing

if TYPE_CHECKING:
    from sinkscope.runs.run import Run
    from sinkscope.runs.schema.stream import StreamSummary
    from sinkscope.runs.schema.summary import DomainContrast, HeadContrast


SHOWN, PAIRS = 6, 6
"""Most heads of a pair, and most pairs, that are shown."""


def domain_answers(run: Run, stream: str) -> list[RenderableType]:
    """The answer for each domain by itself, because a mean over different kinds of text answers nothing.

    Where there are many domains, the table of `domain_rows` answers alone.
    """
    if len(run.summary.domains) > FEW:
        return []
    text = Text()
    for domain, entry in run.summary.domains.items():
        if stream in entry.streams:
            text.append(f"{printable(domain)}: ", style="bold")
            text.append(f"{_answer(entry.streams[stream], run.summary.epsilon)}\n", style="not bold")
    return [text]


def _answer(summary: StreamSummary, epsilon: float) -> str:
    """The first sentence, and the one on sinks beyond the first token where there are any: `No sink at the first token`
    alone would read as if there were none at all."""
    beyond = summary.sinks_beyond_first
    first = sentences(summary)[0]
    if beyond is None or not beyond.tokens or says_nothing(summary.uniform_alpha_0.T, epsilon):
        return first
    return f"{first} {token_text(beyond_words(beyond, epsilon))}"


def domain_rows(run: Run, stream: str) -> list[RenderableType]:
    """One row per domain: sink rate at T and over the first 64 queries, alpha_0, the largest massive activation."""
    name = f"{run.summary.epsilon:g}"
    headers = ("", "rate", "first 64", "alpha_0", "uniform", "max |x|", "layer.token.channel")
    rows = []
    for domain, entry in run.summary.domains.items():
        summary = entry.streams.get(stream)
        if summary is None:
            continue
        rates, massive = summary.sink_rate_percent[name], summary.massive_activations
        place = MISSING
        if massive.present:
            place = f"{massive.layer}.{massive.position}.{massive.channel}"
        base = summary.uniform_alpha_0
        shown = [
            fixed(rate, 1) if tells_sinks(run, stream, uniform, run.summary.epsilon) else MISSING
            for rate, uniform in ((rates.T, base.T), (rates.t64, base.t64))
        ]
        rows.append((
            printable(domain), *shown, fixed(summary.sink_score.mean, 3),
            fixed(summary.uniform_alpha_0.T, 3), fixed(massive.max_abs if massive.present else None, 1), place,
        ))  # fmt: skip
    title = f"by dataset: sink rate in % at eps {name}, largest massive activation and its place"
    return [table(title, headers, rows[:ROWS], left=[""]), *more(len(rows) - ROWS, "dataset", "summary.json")]


def dormant_rows(run: Run, stream: str) -> Text:
    """The dormant heads of each domain: a head may be dormant in one and active in another."""
    rule = printable(run.summary.streams[stream].dormant.rule)
    text = Text(f"\ndormant heads ({rule}), by dataset\n", style="bold")
    entries = {domain: entry.streams for domain, entry in run.summary.domains.items() if stream in entry.streams}
    by_domain = {domain: streams[stream].dormant for domain, streams in entries.items()}
    none = [domain for domain, dormant in by_domain.items() if not dormant.count and not dormant.unknown]
    some = [domain for domain in by_domain if domain not in none]
    for domain in some[:ROWS]:
        text.append(f"{printable(domain)}: ", style="bold")
        text.append(f"{dormant_heads(by_domain[domain], entries[domain][stream].heads)}\n", style="not bold")
    if len(some) > ROWS:
        text.append(f"and in {len(some) - ROWS} more datasets (heads.csv)\n", style="not bold")
    if none:
        shown = ", ".join(map(printable, none)) if len(none) <= FEW else f"{len(none)} datasets"
        text.append(f"{shown}: ", style="bold")
        text.append("none\n", style="not bold")
    return text


def contrast_rows(run: Run, stream: str) -> list[RenderableType]:
    """For each pair of domains: how many heads differ in BOS mass, and which differ most.

    Where there are many pairs, one row for each of those that differ most.
    """
    if len(run.summary.domains_compared) > PAIRS:
        return _strongest_pairs(run, stream)
    parts: list[RenderableType] = []
    mass = first_mass(run.summary.first_token)
    for entry in run.summary.domains_compared:
        a, b = printable(entry.a), printable(entry.b)
        kind = "paired" if entry.paired else "Welch"
        parts.append(Text(f"\n{mass}, {a} against {b} ({kind} t-test; difference = {b} - {a})", style="bold"))
        heads = [head for head in entry.heads if head.stream == stream]
        rate = f"{entry.false_discovery_rate:g}"
        parts.append(Text(
            f"{len(heads)} of {_tested(run, entry, stream)} heads differ: q < {rate} (Benjamini-Hochberg)"
            + (" (domains.csv has all)" if len(heads) > SHOWN else ""), style="not bold",
        ))  # fmt: skip
        if heads:
            parts.append(_largest(heads[:SHOWN]))
    return parts


def _strongest_pairs(run: Run, stream: str) -> list[RenderableType]:
    """The pairs with the largest difference that holds, one row each, and how many pairs more there are."""
    compared = run.summary.domains_compared
    pairs = [(entry, [head for head in entry.heads if head.stream == stream]) for entry in compared]
    differing = sorted((pair for pair in pairs if pair[1]), key=lambda pair: -abs(pair[1][0].difference or 0))
    rate = f"{compared[0].false_discovery_rate:g}"
    by_chance = compared[0].false_discovery_rate * len(compared)
    text = Text(
        f"\n{first_mass(run.summary.first_token)}, {len(compared)} pairs of datasets (t-tests; difference = b - a)\n",
        style="bold",
    )
    text.append(
        f"heads differ in {len(differing)} pairs: q < {rate} (Benjamini-Hochberg within a pair; chance alone gives up "
        f"to {fixed(by_chance, 1 if by_chance < 10 else 0)} such pairs). These differ most:",
        style="not bold",
    )
    headers = ("a", "b", "test", "heads that differ", "largest", "difference", "q")
    rows = [
        (printable(entry.a), printable(entry.b), "paired" if entry.paired else "Welch",
         f"{len(heads)} of {_tested(run, entry, stream)}", f"{heads[0].layer}.{heads[0].head}",
         fixed(heads[0].difference, 3, sign=True), probability(heads[0].q))
        for entry, heads in differing[:PAIRS]
    ]  # fmt: skip
    left_out = len(compared) - len(rows)
    return [text, table("", headers, rows, left=("a", "b", "test")), *more(left_out, "pair", "domains.csv")]


def published_rows(run: Run) -> list[RenderableType]:
    """The model's own published numbers, one line each, with the text and setting they were measured on; below them the
    number of those that no scan measures alike."""
    rows = [row for row in run.summary.published if not row.not_comparable]
    others = Counter(row.metric for row in run.summary.published if row.not_comparable)
    headers = ("metric", "value", "text", "setting", "source")
    cells = [(row.metric, f"{row.value:g} {row.unit}", row.text, row.setting, row.source) for row in rows]
    left = [header for header in headers if header != "value"]
    shown: list[RenderableType] = []
    if rows:
        shown.append(table("\npublished for this model", headers, cells, left=left, fold=True))
    if others:
        named = ", ".join(f"{count} x {metric}" for metric, count in others.items())
        shown.append(Text(f"\npublished, but not comparable with a scan: {named} (summary.json says why)", style=""))
    return shown


def _tested(run: Run, entry: DomainContrast, stream: str) -> int:
    tests = run.domains
    if tests is None:
        return int(entry.heads_tested)
    chosen = (tests["domain_a"] == entry.a) & (tests["domain_b"] == entry.b) & (tests["stream"] == stream)
    return int(tests.loc[chosen, "q"].notna().sum())


def _largest(heads: list[HeadContrast]) -> Table:
    rows = [
        (f"{head.layer}.{head.head}", fixed(head.difference, 3, sign=True),
         interval(head.low, head.high, places=3), probability(head.q))
        for head in heads
    ]  # fmt: skip
    return table("", ("layer.head", "difference", "95 % interval", "q"), rows, left=["layer.head"])


# The tokens that are attention sinks, as a table for the terminal.


TOKENS_SHOWN, WIDEST = 6, 20
"""Most tokens that are shown, and most characters of each."""
MEANS = (
    "sinks: occurrences that are sinks; of: all occurrences; heads: in which any is a sink; share: part of the "
    "attention on all sinks"
)


def token_rows(run: Run, stream: str, domain: str | None = None) -> list[RenderableType]:
    """The tokens with the most attention on them as sinks; nothing where there are none, or in an older run."""
    if run.tokens is None:
        return []
    tokens = run.tokens[(run.tokens["stream"] == stream) & (run.tokens["kind"] == "attention")]
    if domain is not None:
        tokens = tokens[tokens["domain"] == domain]
    if tokens.empty:
        return []
    headers = ("token", "region", "place", "sinks", "of", "rate", "heads", "layers", "alpha_k", "share")
    rows = [
        (shortened("-" if is_missing(row["token"]) else token_cell(str(row["token"])), WIDEST),
         printable(row["region"]), "first" if row["first"] else "later", str(row["sinks"]), str(row["occurrences"]),
         fixed(row["rate"], 3), str(row["heads"]), span(row["first_layer"], row["last_layer"], "-"),
         fixed(row["mean_alpha"], 3), fixed(row["sink_share"], 3))
        for row in tokens.head(TOKENS_SHOWN).to_dict("records")
    ]  # fmt: skip
    where = f" on {printable(domain)}" if domain else ""
    title = f"\ntokens that are sinks{where}: alpha_k > {run.summary.epsilon:g} in some head"
    return [
        table(title, headers, rows, left=headers[:3]),
        *more(len(tokens) - TOKENS_SHOWN, "token", "tokens.csv"),
        Text(MEANS),
    ]


# What a scan says of a model's own task: the answer in words and a table of its heads.


def render_task(task: dict[str, Any], width: int = WIDTH) -> str:
    """What summary.json says of a task: the answer in words, one row per head, and what the columns mean."""
    names = ["layer", "head", *task["columns"]]
    rows = [[_cell(row[name]) for name in names] for row in task["heads"]]
    title = f"{task['name']} task, {printable(task['attention'])} attention, trigger at {task['trigger_position']}"
    lines = [
        *(line for sentence in (title, *task["in_words"]) for line in wrapped(sentence, width)),
        "",
        *task_table([names, *rows]),
        "",
        *(line for name, text in task["columns"].items() for line in wrapped(f"{name}: {text}", width, "  ", "    ")),
    ]
    return "\n".join(lines) + "\n"


def task_csv(task: dict[str, Any]) -> str:
    """The rows of a task's heads as CSV, with every digit."""
    text = io.StringIO()
    writer = csv.DictWriter(text, ["layer", "head", *task["columns"]], lineterminator="\n")
    writer.writeheader()
    writer.writerows(task["heads"])
    return text.getvalue()


def _cell(value: Any) -> str:
    return fixed(value, 4) if isinstance(value, float) else str(value)


def task_table(rows: list[list[str]]) -> list[str]:
    """Right-aligned columns, one blank apart, so that a task's columns fit into 80 characters."""
    return fitted(rows, left=0, gap=" ", keys=2)
