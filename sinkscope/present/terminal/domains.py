"""Several domains side by side, and published numbers beside the run's own, as tables for the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from sinkscope.present.text import number, printable

if TYPE_CHECKING:
    from sinkscope.runs.run import Run


SHOWN = 6


def domain_answers(run: Run, stream: str) -> list[RenderableType]:
    """The answer in a sentence or two for each domain: a mean over unlike texts answers nothing."""
    text = Text()
    for domain, entry in run.summary["domains"].items():
        if stream in entry["streams"]:
            text.append(f"{printable(domain)}: ", style="bold")
            text.append(f"{printable(entry['streams'][stream]['in_words'][0])}\n", style="not bold")
    return [text]


def domain_rows(run: Run, stream: str) -> list[RenderableType]:
    """One row a domain: sink rate at T and over the first 64 queries, mean alpha_0, the largest activation."""
    name = f"{run.summary['epsilon']:g}"
    table = _table(f"\nby domain: sink rate in % at eps {name}, largest activation and its place")
    for column in ("", "T", "first 64", "alpha_0", "uniform", "max |x|", "layer.token.channel"):
        table.add_column(column, justify="left" if column == "" else "right")
    for domain, entry in run.summary["domains"].items():
        own = entry["streams"].get(stream)
        if own is None:
            continue
        rates, massive = own["sink_rate_percent"][name], own["massive_activations"]
        place = "-"
        if massive["max_abs"] is not None:
            place = f"{massive['layer']}.{massive['position']}.{massive['channel']}"
        table.add_row(
            printable(domain), number(rates["T"], 1), number(rates["t64"], 1), number(own["sink_score"]["mean"], 3),
            number(own["uniform_alpha_0"]["T"], 3), number(massive["max_abs"], 1), place,
        )  # fmt: skip
    return [table]


def contrast_rows(run: Run, stream: str) -> list[RenderableType]:
    """For each pair of domains: how many heads differ in BOS mass, and those that differ most."""
    parts: list[RenderableType] = []
    for entry in run.summary.get("domains_compared", []):
        a, b = printable(entry["a"]), printable(entry["b"])
        kind = "paired" if entry["paired"] else "Welch"
        parts.append(Text(f"\nBOS mass, {a} against {b} ({kind} t-test)", style="bold"))
        found = [head for head in entry["heads"] if head["stream"] == stream]
        rate = f"{entry['false_discovery_rate']:g}"
        parts.append(Text(
            f"{len(found)} of {_tested(run, entry, stream)} heads differ: q < {rate} (Benjamini-Hochberg) and a 95 % "
            "bootstrap interval without 0" + (" (domains.csv has all)" if len(found) > SHOWN else ""), style="not bold",
        ))  # fmt: skip
        if found:
            parts.append(_largest(found[:SHOWN]))
    return parts


def published_rows(run: Run) -> list[RenderableType]:
    """The model's own published numbers, one line each, with the text and setting they were measured on."""
    rows = run.summary.get("published", [])
    if not rows:
        return []
    table = _table("\npublished for this model")
    for column in ("metric", "value", "text", "setting", "source"):
        table.add_column(column, justify="right" if column == "value" else "left", overflow="fold")
    for row in rows:
        table.add_row(row["metric"], f"{row['value']:g} {row['unit']}", row["text"], row["setting"], row["source"])
    return [table]


def _tested(run: Run, entry: dict[str, Any], stream: str) -> int:
    table = run.domains
    if table is None:
        return int(entry["heads_tested"])
    own = (table["domain_a"] == entry["a"]) & (table["domain_b"] == entry["b"]) & (table["stream"] == stream)
    return int(table.loc[own, "q"].notna().sum())


def _largest(heads: list[dict[str, Any]]) -> Table:
    table = _table("")
    for column in ("layer.head", "difference", "95 % interval", "q"):
        table.add_column(column, justify="left" if column == "layer.head" else "right")
    for head in heads:
        table.add_row(
            f"{head['layer']}.{head['head']}", f"{head['difference']:+.3f}",
            f"[{head['low']:+.3f}, {head['high']:+.3f}]", f"{head['q']:.1e}",
        )  # fmt: skip
    return table


def _table(title: str) -> Table:
    return Table(box=None, pad_edge=False, title=title or None, title_justify="left", title_style="bold")
