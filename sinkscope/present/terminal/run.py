"""A run as a person at a terminal wants it: the answer first, then the map of all heads, the strongest, the files."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from sinkscope.present.terminal.console import as_text
from sinkscope.present.terminal.domains import contrast_rows, domain_answers, domain_rows, published_rows
from sinkscope.present.terminal.trigger import render_task
from sinkscope.present.text import number, printable

if TYPE_CHECKING:
    from sinkscope.runs.run import Run


SCALE = ("#0d0887", "#7e03a8", "#cc4778", "#f89540", "#f0f921")
"""Plasma's five anchors: even steps of lightness, safe for colour-blind readers."""

STRONGEST, LISTED = 8, 12


def terminal_style() -> dict[str, Any]:
    """Width and colour for the user's stdout: 80 columns when piped; NO_COLOR and FORCE_COLOR honoured."""
    console = Console()
    width = shutil.get_terminal_size((80, 24)).columns if sys.stdout.isatty() or "COLUMNS" in os.environ else 80
    return {"width": max(40, width), "color": console.color_system if not console.no_color else None}


def render_run(run: Run, written: Iterable[Path] = (), width: int = 80, color: str | None = None) -> str:
    """The whole screen of one run as a string, with ANSI codes only if `color` names a colour system."""
    parts: list[RenderableType] = [_title(run)]
    for stream, summary in run.summary["streams"].items():
        heads = run.heads[run.heads["stream"] == stream]
        if len(run.summary["streams"]) > 1:
            parts.append(Text(f"\nstream {stream}", style="bold"))
        if "domains" in run.summary:
            parts += [*domain_answers(run, stream), *domain_rows(run, stream), *contrast_rows(run, stream)]
        else:
            parts += [_answers(summary), _rates(summary, run.summary["epsilon"])]
        for domain, rows in _domains(heads):
            parts += [_heat_map(rows, domain, width, color is not None), _strongest(rows)]
        parts.append(_dormant(summary))
    if "task" in run.summary:
        parts.append(Text(render_task(run.summary["task"], width, meanings=False), style="not bold"))
    parts += published_rows(run)
    parts.append(_files(written))
    return as_text(parts, width, color)


def _title(run: Run) -> Text:
    model, first = run.manifest["model"], run.summary["first_token"]
    text = Text(printable(str(model["id"])), style="bold")
    text.append(
        f"  {model['class']}, {_size(model['parameters'])} parameters, {model['dtype']} on {model['device']}\n",
        style="not bold",
    )
    for data in run.manifest["data"]:
        text.append(
            f"{printable(data['spec'])}: {data['sequences']} sequences of {data['seq_len']} tokens", style="not bold"
        )
        text.append(f", {data['joined']} joined\n" if data["joined"] else "\n", style="not bold")
    shown = (
        "differs between sequences" if first["id"] is None else f"'{printable(str(first['text']))}' (id {first['id']})"
    )
    kind = {True: ", the tokenizer's BOS", False: ", not the tokenizer's BOS", None: ""}[first["is_bos"]]
    text.append(f"first token: {shown}{kind if first['id'] is not None else ''}\n", style="not bold")
    return text


def _size(parameters: int) -> str:
    return f"{parameters / 1e6:,.0f} M" if parameters >= 1e6 else f"{parameters:,}"


def _answers(summary: dict[str, Any]) -> Text:
    text = Text()
    for place, sentence in enumerate(summary["in_words"]):
        text.append(f"{printable(sentence)}\n", style="bold" if place == 0 else "")
    return text


def _rates(summary: dict[str, Any], epsilon: float) -> Table:
    """Sink rates at every threshold, with the alpha_0 that uniform attention has."""
    rates, base = summary["sink_rate_percent"], summary["uniform_alpha_0"]
    table = Table(
        box=None,
        pad_edge=False,
        title="sink rate, % of (sequence, head) with alpha_0 > eps",
        title_justify="left",
        title_style="",
    )
    table.add_column("")
    for name in rates:
        table.add_column(f"eps {name}", justify="right", style="bold" if float(name) == epsilon else "")
    table.add_column("mean alpha_0", justify="right")
    table.add_column("uniform alpha_0", justify="right")
    for key, label in (("T", f"T = {summary['tokens_per_sequence']}"), ("t64", "first 64")):
        if base[key] is None:
            continue
        mean = f"{summary['sink_score']['mean']:.3f}" if key == "T" else ""
        table.add_row(label, *(number(rate[key], 1) for rate in rates.values()), mean, f"{base[key]:.3f}")
    return table


def _domains(heads: pd.DataFrame) -> list[tuple[str | None, pd.DataFrame]]:
    if "domain" not in heads:
        return [(None, heads)]
    return [(str(name), rows) for name, rows in heads.groupby("domain", sort=False)]


def _heat_map(heads: pd.DataFrame, domain: str | None, width: int, color: bool) -> Text:
    """BOS mass of every head: percent where two digits fit, else tenths; `.` below one unit, `-` missing."""
    most = int(heads.groupby("module", sort=False).size().max())
    cell = 3 if 8 + 3 * most <= width else 1
    per_line = most if cell == 3 else max(1, min(most, width - 20))
    unit = "percent" if cell == 3 else "tenths"
    text = Text(
        f"\nBOS mass{f' on {printable(domain)}' if domain else ''}, {unit}: layers down, heads across\n", style="bold"
    )
    if cell == 3:
        text.append(" " * 6 + "".join(f"{head:>3}" for head in range(most)) + "\n", style="not bold dim")
    for _, rows in heads.groupby("module", sort=False):
        values = rows["bos_mass"].tolist()
        kind = rows["kind"].iloc[0]
        for start in range(0, len(values), per_line):
            label = f"{rows['layer'].iloc[0]:>5} " if start == 0 else " " * 6
            text.append(label, style="not bold dim")
            for value in values[start : start + per_line]:
                text.append(_cell(value, cell), style=_style(value) if color else "not bold")
            if (
                start == 0
                and kind != "full"
                and len(label) + cell * min(per_line, len(values)) + len(kind) + 2 <= width
            ):
                text.append(f"  {kind}", style="not bold dim")
            text.append("\n")
    return text


def _cell(value: float, size: int) -> str:
    if pd.isna(value):
        return "-".rjust(size)
    if size == 3:
        return f"{min(99, round(100 * value)) if value < 0.995 else 99:>3d}" if value >= 0.005 else "  ."
    return str(min(9, int(10 * value))) if value >= 0.1 else "."


def _style(value: float) -> str:
    """Black or white digits on plasma, whichever is legible."""
    if pd.isna(value):
        return "not bold dim"
    place = min(max(value, 0.0), 1.0) * (len(SCALE) - 1)
    low = min(int(place), len(SCALE) - 2)
    ends = [[int(color[i : i + 2], 16) for i in (1, 3, 5)] for color in SCALE[low : low + 2]]
    mixed = [round(a + (b - a) * (place - low)) for a, b in zip(*ends, strict=True)]
    light = 0.299 * mixed[0] + 0.587 * mixed[1] + 0.114 * mixed[2] > 140
    return f"not bold {'black' if light else 'white'} on #{mixed[0]:02x}{mixed[1]:02x}{mixed[2]:02x}"


def _strongest(heads: pd.DataFrame) -> Table:
    table = Table(
        box=None,
        pad_edge=False,
        title="strongest sinks (mean ± standard error over sequences)",
        title_justify="left",
        title_style="bold",
    )
    for name, justify in (
        ("layer.head", "left"), ("bos_mass", "right"), ("alpha_0", "right"), ("margin, nats", "right"),
        ("entropy, nats", "right"), ("honor", "right"), ("pattern", "left"),
    ):  # fmt: skip
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    for row in heads.sort_values("bos_mass", ascending=False, kind="stable").head(STRONGEST).to_dict("records"):
        error = "" if pd.isna(row["bos_mass_sem"]) else f" ± {row['bos_mass_sem']:.3f}"
        table.add_row(
            f"{row['layer']}.{row['head']}", f"{number(row['bos_mass'], 3)}{error}", number(row["sink_score"], 3),
            number(row["sink_margin"], 2), number(row["entropy"], 2), number(row["honor"], 2), row["pattern"],
        )  # fmt: skip
    return table


def _dormant(summary: dict[str, Any]) -> Text:
    dormant = summary["dormant"]
    text = Text(f"\ndormant heads ({dormant['rule']}): ", style="bold")
    named = ", ".join(f"{layer}.{head}" for layer, head in dormant["heads"][:LISTED])
    more = dormant["count"] - LISTED
    text.append((named or "none") + (f" and {more} more (heads.csv)" if more > 0 else "") + "\n", style="not bold")
    return text


def _files(written: Iterable[Path]) -> Text:
    paths = list(written)
    if not paths:
        return Text()
    names = ", ".join(path.name for path in paths)
    text = Text("written to ", style="bold")
    text.append(f"{printable(str(paths[0].parent))}: {names}", style="not bold")
    return text
