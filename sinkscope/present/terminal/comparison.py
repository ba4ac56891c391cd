"""A comparison at the terminal: what moved overall, the map of differences, the heads that moved most."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from sinkscope.comparison.compare_runs import Comparison
from sinkscope.comparison.levels import CHANGED
from sinkscope.present.colors import DIVERGING
from sinkscope.present.differences import equivalences, largest, no_difference, partings, states
from sinkscope.present.numbers import change, interval, probability, signed, significant
from sinkscope.present.terminal.table import Cells, MapRow, as_text, head_map, plain, shades, table
from sinkscope.present.text import printable, within_noise
from sinkscope.runs.catalogue import whose
from sinkscope.runs.words import computed_in

STRONGEST, LISTED, ROWS, MAPS = 8, 12, 12, 4
"""Most heads, changes, rows of means and maps that are shown; --csv and --json have all."""
WIDE, NARROW, TINY = 96, 76, 62
"""Widths in characters. Below WIDE, tables of several domains leave out the interval; below NARROW, all tables leave
out interval, p and q; below TINY, standard errors too.
--csv and --json always have them."""
DATA_SHOWN = 4
"""Most domains that a run's title names."""
PLACES = {"layer": 6, "value": 4}


def render_comparison(result: Comparison, width: int = 80, color: str | None = None) -> str:
    """The screen of one comparison as a string, with ANSI codes only if `color` names a colour system."""
    parts: list[RenderableType] = [_title(result), *_summary(result.summary, width)]
    if len(result.heads):
        metric = result.metrics[0] if result.metrics[0] in set(result.heads["metric"]) else result.heads["metric"][0]
        rows = result.heads[result.heads["metric"] == metric]
        if largest(rows) > 0:
            parts += _maps(rows, metric, width, color is not None)
        else:
            parts.append(Text(f"\n{printable(metric)}: {no_difference(rows)}", style="bold"))
        if (result.heads["difference"].abs() > 0).any():
            parts += [Text(), _strongest(result.heads, width), *_key(width, with_q=True)]
    elif len(result.summary):
        parts += _key(width, with_q=False)
    if result.same_shape:
        parts.append(_changes(result))
    said = [Text(line) for line in (*states(result), *equivalences(result))]
    parts += [*_depths(result), *([Text()] if said else []), *said]
    return as_text(parts, width, color)


def _title(result: Comparison) -> Text:
    text = Text()
    for name, facts in (("A", result.a), ("B", result.b)):
        text.append(f"{name}  {printable(str(facts['model']))}", style="bold")
        numbers = computed_in(facts["dtype"], facts["device"], facts["quantization"])
        about = f"{facts['shape']}, {numbers}, {facts['sequences']} sequences"
        about += f" of {' and '.join(facts['data'][:DATA_SHOWN])}"
        place = f"; {facts['run']}" if facts["run"] else ""
        text.append(f"  {printable(about + place)}\n")
    how = (
        "paired: the same token sequences in both"
        if result.paired
        else "unpaired: separate samples of sequences, Welch's test"
    )
    text.append(f"{how}; difference = B - A\n")
    for note in result.notes:
        text.append(f"note: {printable(note)}\n")
    return text


def _summary(rows: pd.DataFrame, width: int) -> list[RenderableType]:
    """The means over all heads, or layers; where there are many, those least likely by chance."""
    if rows.empty:
        return []
    several = rows["domain"].nunique() > 1 or rows["stream"].nunique() > 1
    left_out = len(rows) - ROWS
    if left_out > 0:
        rows = rows.sort_values("p", kind="stable").head(ROWS)
    cells = []
    for row in rows.to_dict("records"):
        place = {"data": printable(f"{row['domain']} {row['stream']}")} if several else {}
        ends = {"95 % interval": interval(row["low"], row["high"])}
        rest = (ends if not several or width >= WIDE else {}) | {"p": probability(row["p"])}
        cells.append(
            place
            | {"metric": printable(row["metric"]), "A": significant(row["a"]), "B": significant(row["b"])}
            | {"difference": _change(row, width)}
            | (rest if width >= NARROW else {})
        )
    title = f"mean over all {whose(rows['metric'])}" + (f", the {ROWS} smallest p" if left_out > 0 else "")
    return [_table(title, cells), *_more(left_out, "mean")]


def _more(left_out: int, noun: str) -> list[RenderableType]:
    """A line that says how many more there are, and where; nothing where there are none."""
    if left_out <= 0:
        return []
    return [Text(f"and {left_out} more {noun}{'s' if left_out > 1 else ''} (--csv and --json have all)")]


def _table(title: str, rows: list[dict[str, str]]) -> Table:
    """A table of rows that all have the same keys, which are its headers."""
    return table(title, list(rows[0]), [list(row.values()) for row in rows], left=("data", "head", "metric"))


def _change(row: dict[Any, Any], width: int) -> str:
    """The difference, with its standard error where there is room."""
    return change(row["difference"], row["sem"]) if width >= TINY else signed(row["difference"])


def _maps(rows: pd.DataFrame, metric: str, width: int, color: bool) -> list[RenderableType]:
    """A map for each domain and stream; where there are many, those with the largest differences."""
    groups = list(rows.groupby(["domain", "stream"], sort=False))
    left_out = len(groups) - MAPS
    if left_out > 0:
        groups.sort(key=lambda group: -group[1]["difference"].abs().fillna(0).max())
    drawn: list[RenderableType] = [_map(part, metric, keys, rows, width, color) for keys, part in groups[:MAPS]]
    return drawn + _more(left_out, "map")


def _map(rows: pd.DataFrame, metric: str, keys: Any, all_rows: pd.DataFrame, width: int, color: bool) -> Text:
    """Two-digit signed differences, in a unit that fits the largest.

    Where they do not fit, one character per head: + - from a tenth of the largest difference on, ▲ ▼ from half of it.
    """
    layers = [MapRow(layer, part["difference"].tolist()) for layer, part in rows.groupby("layer", sort=False)]
    heads = max(len(layer.values) for layer in layers)
    wide = PLACES["layer"] + PLACES["value"] * heads <= width
    most = largest(all_rows)
    unit = 10.0 ** math.ceil(math.log10(most / 99))
    scale = f"in units of {unit:g}" if wide else f"+ - from {0.1 * most:.2g}, ▲ ▼ from {0.5 * most:.2g}"
    where = f" on {printable(str(keys[0]))}" if all_rows["domain"].nunique() > 1 else ""
    stream = f", {printable(str(keys[1]))}" if all_rows["stream"].nunique() > 1 else ""
    style = shades(-most, most, DIVERGING) if color else plain
    cells = (
        Cells(PLACES["value"], heads, lambda value: _in_units(value, unit), style)
        if wide
        else Cells(1, max(1, width - PLACES["layer"]), lambda value: _mark(value, most), style)
    )
    drawn = head_map(f"difference of {printable(metric)}{where}{stream}, {scale}", layers, cells, width)
    drawn.rstrip()  # what follows brings its own blank line
    return drawn


def _in_units(value: float, unit: float) -> str:
    if math.isnan(value):
        return "   -"
    if math.isinf(value):
        return "+inf" if value > 0 else "-inf"
    return "   ." if round(value / unit) == 0 else f"{round(value / unit):>+4d}"


def _mark(value: float, most: float) -> str:
    if math.isnan(value):
        return "?"
    if abs(value) < 0.1 * most:
        return "."
    if abs(value) < 0.5 * most:
        return "+" if value > 0 else "-"
    return "▲" if value > 0 else "▼"


def _strongest(rows: pd.DataFrame, width: int) -> Table:
    """The heads with the largest differences, a few for each metric."""
    metrics, several = rows["metric"].unique(), rows["domain"].nunique() > 1
    shown = max(2, STRONGEST // len(metrics))
    cells = []
    for metric in metrics[:STRONGEST]:
        moved = rows[(rows["metric"] == metric) & (rows["difference"].abs() > 0)]
        order = moved["difference"].abs().sort_values(ascending=False, kind="stable").index[:shown]
        cells += [
            ({"data": printable(str(row["domain"]))} if several else {})
            | {"head": f"{row['layer']}.{row['head']}", "metric": printable(str(metric))}
            | ({"A": significant(row["a"])} if width >= TINY else {})
            | {"B": significant(row["b"]), "difference": _change(row, width)}
            | ({"q": probability(row["q"])} if width >= NARROW else {})
            for row in moved.loc[order].to_dict("records")
        ]
    return _table("heads that moved most", cells)


def _key(width: int, with_q: bool) -> list[RenderableType]:
    """What the columns of the tables mean that are shown at this width. `with_q`: heads are shown, with their q."""
    said = "±: standard error of the difference"
    if width >= NARROW:
        said += "; p: of its t-test"
        said += "; q: p adjusted over all heads of a metric and dataset (Benjamini-Hochberg)" if with_q else ""
    return [Text(said)] if width >= TINY else []


def _changes(result: Comparison) -> Text:
    """The heads whose state changed, and how many crossed a threshold by no difference that holds."""
    text = Text("\n")
    for name, label in CHANGED.items():
        heads = result.changes[name]
        text.append(f"{label}: ", style="bold")
        listed = ", ".join(_changed(row) for row in heads[:LISTED])
        more = f" and {len(heads) - LISTED} more" if len(heads) > LISTED else ""
        noise = within_noise(len(result.within_noise[name]), bool(heads))
        text.append(f"{listed or 'none'}{more}{noise}\n", style="not bold")
    text.rstrip()
    return text


def _depths(result: Comparison) -> list[RenderableType]:
    """Where the profiles part, for models whose layers cannot be matched."""
    said = partings(result)
    if not said:
        return []
    title = Text("\nby relative depth (0: the first layer, 1: the last)", style="bold")
    return [title, *(Text(line) for line in said)]


def _changed(row: dict[str, Any]) -> str:
    where = f" on {printable(str(row['domain']))}" if "domain" in row else ""
    values = f"{significant(row['a'])} to {significant(row['b'])}, q {probability(row['q'])}"
    return f"{row['layer']}.{row['head']}{where} ({values})"
