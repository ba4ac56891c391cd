"""Several domains side by side, and published numbers beside the run's own, as tables for the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from sinkscope.present.numbers import MISSING, fixed, interval, probability
from sinkscope.present.terminal.table import table
from sinkscope.present.text import printable
from sinkscope.runs.words import says_nothing

if TYPE_CHECKING:
    from sinkscope.runs.run import Run
    from sinkscope.runs.schema.summary import DomainContrast, HeadContrast


SHOWN = 6


def domain_answers(run: Run, stream: str) -> list[RenderableType]:
    """The answer for each domain by itself, because a mean over different kinds of text answers nothing."""
    text = Text()
    for domain, entry in run.summary.domains.items():
        if stream in entry.streams:
            text.append(f"{printable(domain)}: ", style="bold")
            text.append(f"{printable(entry.streams[stream].in_words[0])}\n", style="not bold")
    return [text]


def domain_rows(run: Run, stream: str) -> list[RenderableType]:
    """One row per domain: sink rate at T and over the first 64 queries, mean alpha_0, the largest activation."""
    name = f"{run.summary.epsilon:g}"
    headers = ("", "T", "first 64", "alpha_0", "uniform", "max |x|", "layer.token.channel")
    rows = []
    for domain, entry in run.summary.domains.items():
        summary = entry.streams.get(stream)
        if summary is None:
            continue
        rates, massive = summary.sink_rate_percent[name], summary.massive_activations
        place = MISSING
        if massive.max_abs is not None:
            place = f"{massive.layer}.{massive.position}.{massive.channel}"
        rate = MISSING if says_nothing(summary.uniform_alpha_0.T, run.summary.epsilon) else fixed(rates.T, 1)
        rows.append((
            printable(domain), rate, fixed(rates.t64, 1), fixed(summary.sink_score.mean, 3),
            fixed(summary.uniform_alpha_0.T, 3), fixed(massive.max_abs, 1), place,
        ))  # fmt: skip
    title = f"\nby domain: sink rate in % at eps {name}, largest activation and its place"
    return [table(title, headers, rows, left=[""])]


def contrast_rows(run: Run, stream: str) -> list[RenderableType]:
    """For each pair of domains: how many heads differ in BOS mass, and which differ most."""
    parts: list[RenderableType] = []
    for entry in run.summary.domains_compared:
        a, b = printable(entry.a), printable(entry.b)
        kind = "paired" if entry.paired else "Welch"
        parts.append(Text(f"\nBOS mass, {a} against {b} ({kind} t-test)", style="bold"))
        found = [head for head in entry.heads if head.stream == stream]
        rate = f"{entry.false_discovery_rate:g}"
        parts.append(Text(
            f"{len(found)} of {_tested(run, entry, stream)} heads differ: q < {rate} (Benjamini-Hochberg) and a 95 % "
            "bootstrap interval without 0" + (" (domains.csv has all)" if len(found) > SHOWN else ""), style="not bold",
        ))  # fmt: skip
        if found:
            parts.append(_largest(found[:SHOWN]))
    return parts


def published_rows(run: Run) -> list[RenderableType]:
    """The model's own published numbers, one line each, with the text and setting they were measured on."""
    rows = run.summary.published
    if not rows:
        return []
    headers = ("metric", "value", "text", "setting", "source")
    cells = [(row.metric, f"{row.value:g} {row.unit}", row.text, row.setting, row.source) for row in rows]
    left = [header for header in headers if header != "value"]
    return [table("\npublished for this model", headers, cells, left=left, fold=True)]


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
