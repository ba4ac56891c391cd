"""A comparison at the terminal: what moved on the whole, the map of differences, the heads that moved most."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from sinkscope.comparison.compare_runs import Comparison
from sinkscope.present.terminal.console import as_text
from sinkscope.present.text import printable

STRONGEST, LISTED = 8, 12
CHANGED = {
    "gained_sink": "gained a sink",
    "lost_sink": "lost its sink",
    "woke": "woke (dormant no more)",
    "fell_dormant": "fell dormant",
}
RISE, FALL = (178, 24, 43), (33, 102, 172)
"""Red and blue of ColorBrewer's RdBu: safe for colour-blind readers."""
NARROW, TINY = 76, 62
"""Below the first width tables leave out interval, p and q, below the second errors too: --csv and --json have them."""
PLACES = {"layer": 6, "value": 4}


def render_comparison(result: Comparison, width: int = 80, color: str | None = None) -> str:
    """The screen of one comparison as a string, with ANSI codes only if `color` names a colour system."""
    parts: list[RenderableType] = [_title(result), _summary(result.summary, width)]
    if len(result.heads):
        metric = result.metrics[0] if result.metrics[0] in set(result.heads["metric"]) else result.heads["metric"][0]
        rows = result.heads[result.heads["metric"] == metric]
        if (rows["difference"].abs() > 0).any():
            for keys, own in rows.groupby(["domain", "stream"], sort=False):
                parts.append(_map(own, metric, keys, rows, width, color is not None))
        else:
            parts.append(Text(f"\n{metric}: no difference in any head\n", style="bold"))
        if (result.heads["difference"].abs() > 0).any():
            parts.append(_strongest(result.heads, width))
    if result.same_shape:
        parts.append(_changes(result.changes))
    return as_text(parts, width, color)


def _title(result: Comparison) -> Text:
    text = Text()
    for name, facts in (("A", result.a), ("B", result.b)):
        text.append(f"{name}  {printable(str(facts['model']))}", style="bold")
        text.append(f"  {facts['shape']}, {facts['dtype']} on {facts['device']}, {facts['sequences']} sequences\n")
    how = (
        "paired: the same token sequences in both"
        if result.paired
        else "unpaired: separate samples of sequences, Welch's test"
    )
    text.append(f"{how}; difference = B - A\n")
    for note in result.notes:
        text.append(f"note: {printable(note)}\n")
    return text


def _summary(rows: pd.DataFrame, width: int) -> Table:
    table = _table("mean over all heads")
    several = rows["domain"].nunique() > 1 or rows["stream"].nunique() > 1
    rest = ["95 % interval", "p"] if width >= NARROW else []
    for name in (*(["data"] if several else []), "metric", "A", "B", "difference", *rest):
        table.add_column(name, justify="left" if name in ("data", "metric") else "right")
    for row in rows.to_dict("records"):
        place = [printable(f"{row['domain']} {row['stream']}")] if several else []
        table.add_row(
            *place, row["metric"], figure(row["a"]), figure(row["b"]),
            _change(row, width),
            *([interval(row["low"], row["high"]), probability(row["p"])] if width >= NARROW else []),
        )  # fmt: skip
    return table


def _change(row: dict[Any, Any], width: int) -> str:
    """The difference, with its standard error where there is room."""
    return signed(row["difference"]) + (f" ± {error(row['sem'])}" if width >= TINY else "")


def _map(rows: pd.DataFrame, metric: str, keys: Any, all_rows: pd.DataFrame, width: int, color: bool) -> Text:
    """Two-digit signed differences in a unit that fits the largest; narrow: + - for a tenth of it, ▲ ▼ for half."""
    sizes = rows.groupby("layer", sort=False).size()
    wide = PLACES["layer"] + PLACES["value"] * int(sizes.max()) <= width
    most = float(all_rows["difference"].abs().max())
    unit = 10.0 ** math.ceil(math.log10(most / 99)) if most > 0 else 1.0
    scale = f"in units of {unit:g}" if wide else f"+ - from {0.1 * most:.2g}, ▲ ▼ from {0.5 * most:.2g}"
    where = f" on {printable(str(keys[0]))}" if all_rows["domain"].nunique() > 1 else ""
    stream = f", {keys[1]}" if all_rows["stream"].nunique() > 1 else ""
    text = Text(f"\ndifference of {metric}{where}{stream}, {scale}: layers down, heads across\n", style="bold")
    if wide:
        text.append(" " * 6 + "".join(f"{head:>4}" for head in range(int(sizes.max()))) + "\n", style="not bold dim")
    per_line = int(sizes.max()) if wide else max(1, width - 6)
    for layer, own in rows.groupby("layer", sort=False):
        values = own["difference"].tolist()
        for start in range(0, len(values), per_line):
            text.append(f"{layer:>5} " if start == 0 else " " * 6, style="not bold dim")
            for value in values[start : start + per_line]:
                cell = _cell(value, unit) if wide else _mark(value, most)
                text.append(cell, style=_style(value, most) if color else "not bold")
            text.append("\n")
    return text


def _cell(value: float, unit: float) -> str:
    if math.isnan(value):
        return "   -"
    return "   ." if round(value / unit) == 0 else f"{round(value / unit):>+4d}"


def _mark(value: float, most: float) -> str:
    if math.isnan(value):
        return "?"
    if most == 0 or abs(value) < 0.1 * most:
        return "."
    if abs(value) < 0.5 * most:
        return "+" if value > 0 else "-"
    return "▲" if value > 0 else "▼"


def _style(value: float, most: float) -> str:
    if math.isnan(value) or most == 0:
        return "not bold dim"
    share = min(1.0, abs(value) / most)
    mixed = [round(247 + (end - 247) * share) for end in (RISE if value > 0 else FALL)]
    return f"not bold {'white' if share > 0.6 else 'black'} on #{mixed[0]:02x}{mixed[1]:02x}{mixed[2]:02x}"


def _strongest(rows: pd.DataFrame, width: int) -> Table:
    """The heads whose difference is largest, some of each metric."""
    table = _table("heads that moved most")
    for name in (
        "head",
        "metric",
        *(["A"] if width >= TINY else []),
        "B",
        "difference",
        *(["q"] if width >= NARROW else []),
    ):
        table.add_column(name, justify="left" if name in ("head", "metric") else "right")
    metrics = rows["metric"].unique()
    each = max(2, STRONGEST // len(metrics))
    for metric in metrics[:STRONGEST]:
        own = rows[(rows["metric"] == metric) & (rows["difference"].abs() > 0)]
        order = own["difference"].abs().sort_values(ascending=False, kind="stable").index[:each]
        for row in own.loc[order].to_dict("records"):
            table.add_row(
                f"{row['layer']}.{row['head']}", metric,
                *([figure(row["a"])] if width >= TINY else []), figure(row["b"]),
                _change(row, width), *([probability(row["q"])] if width >= NARROW else []),
            )  # fmt: skip
    return table


def _changes(changes: dict[str, list[dict[str, Any]]]) -> Text:
    text = Text("\n")
    for name, label in CHANGED.items():
        heads = changes[name]
        text.append(f"{label}: ", style="bold")
        listed = ", ".join(
            f"{row['layer']}.{row['head']} ({figure(row['a'])} to {figure(row['b'])})" for row in heads[:LISTED]
        )
        more = f" and {len(heads) - LISTED} more" if len(heads) > LISTED else ""
        text.append(f"{listed or 'none'}{more}\n", style="not bold")
    return text


def _table(title: str) -> Table:
    return Table(box=None, pad_edge=False, title=title, title_justify="left", title_style="bold")


def figure(value: float | None) -> str:
    """Four significant digits, shortest form; a dash where missing."""
    return "-" if value is None or pd.isna(value) else f"{value:.4g}"


def signed(value: float | None, digits: int = 3) -> str:
    return "-" if value is None or pd.isna(value) else f"{value:+.{digits}g}"


def interval(low: float, high: float) -> str:
    """`low to high` with as many digits as tell the two apart, two at least and six at most; a dash where missing."""
    if pd.isna(low) or pd.isna(high):
        return "-"
    largest, width = max(abs(low), abs(high)), high - low
    digits = 2 if width == 0 else min(6, max(2, 1 + math.ceil(math.log10(largest / width))))
    return f"{signed(low, digits)} to {signed(high, digits)}"


def error(value: float | None) -> str:
    return "-" if value is None or pd.isna(value) else f"{value:.2g}"


def probability(value: float | None) -> str:
    if value is None or pd.isna(value):
        return "-"
    return "<1e-9" if value < 1e-9 else f"{value:.2g}"
