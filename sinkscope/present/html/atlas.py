"""Many runs as one HTML page that needs no network: a row a run, domain and stream, to be sorted and searched."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from sinkscope.present.colors import color_at
from sinkscope.present.html.page import render_page
from sinkscope.present.html.svg import legend
from sinkscope.present.numbers import MISSING, estimate, fixed, is_missing, parameters, significant
from sinkscope.present.text import cut_in_the_middle
from sinkscope.runs.atlas import Entry, reasons
from sinkscope.runs.catalogue import table_columns
from sinkscope.runs.schema.other_tables import ATLAS_TABLE

if TYPE_CHECKING:
    from sinkscope.runs.papers import PublishedNumber

STRIP, TALL, BAR = 260, 24, 64
"""Width and height of a row's strip of layers, and width of the bar below a share, in pixels."""
NAME = 40
"""Longest name that is shown whole; a longer one is cut in its middle, and whole on hover."""


@dataclass(frozen=True)
class Shown:
    """A column of the page. `form`: how its cells are written. `full`: the value of a full bar; 0 for no bar."""

    name: str
    label: str
    form: str = "words"
    full: float = 0.0


COLUMNS = (
    Shown("model", "model"), Shown("dtype", "dtype"), Shown("text", "text"), Shown("stream", "stream"),
    Shown("tokens", "T", "lengths"), Shown("first_token", "first token"),
    Shown("sink_rate", "sink rate, %", "rate", 100.0), Shown("sink_rate_64", "first 64, %", "rate", 100.0),
    Shown("sink_rate_0.8", "eps 0.8, %", "rate", 100.0),
    Shown("bos_mass", "first-token attention", "estimate", 1.0), Shown("alpha_0", "alpha_0", "estimate", 1.0),
    Shown("heads_over_half", "heads > 0.5", "share", 1.0), Shown("position_or_token", "position or token"),
    Shown("spike_layer", "spike layer", "count"), Shown("norm_ratio", "norm ratio", "number"),
    Shown("inf_norm_peak", "inf norm peak", "number"), Shown("massive_channels", "massive channels"),
    Shown("super_weights", "super weights"), Shown("dormant", "dormant", "count"),
    Shown("switch_phi", "switch phi", "share"), Shown("attention", "attention"),
    Shown("sequences", "sequences", "count"), Shown("heads", "heads", "count"),
    Shown("parameters", "parameters", "parameters"), Shown("self_check", "self-check"),
    Shown("warnings", "warnings", "count"),
)  # fmt: skip
ALWAYS = frozenset({"model", "text", "tokens", "sink_rate", "bos_mass", "self_check"})
"""Columns that are shown although no run has a value; others are left out then."""
MEANING = {column.name: column.what for column in table_columns(ATLAS_TABLE)}


def render_atlas(entries: list[Entry]) -> str:
    """The whole page. Names, tokens and texts are escaped as text."""
    columns = [column for column in COLUMNS if _is_shown(column, entries)]
    heads = [{"label": column.label, "meaning": MEANING[column.name], "words": column.form == "words"}
             for column in columns]  # fmt: skip
    rows = [
        {"run": entry.values["run"], "name": cut_in_the_middle(entry.values["run"], NAME), "strip": _strip(entry),
         "cells": [_cell(entry, column) for column in columns],
         "reasons": reasons(entry)}
        for entry in entries
    ]  # fmt: skip
    return render_page(
        "atlas.html", ("page.css", "atlas.css"), ("atlas.js",),
        runs=len({id(entry.run) for entry in entries}), heads=heads, rows=rows,
        legend=legend((0, 1), "first-token attention of a layer"),
        published=any(entry.published for entry in entries),
    )  # fmt: skip


def _is_shown(column: Shown, entries: list[Entry]) -> bool:
    values = [entry.values.get(column.name) for entry in entries]
    if column.name == "stream":
        return len(set(values)) > 1
    if column.name == "attention":
        return set(values) != {"softmax"}
    return column.name in ALWAYS or not all(is_missing(value) for value in values)


def _cell(entry: Entry, column: Shown) -> dict[str, Any]:
    value, text = entry.values.get(column.name), _written(entry, column)
    return {
        "text": cut_in_the_middle(text, NAME), "whole": text if len(text) > NAME else "",
        "sort": "" if is_missing(value) else value, "bar": _bar(value, column.full), "words": column.form == "words",
        "published": [_published(number) for number in entry.published.get(column.name, [])],
        "state": value if column.name == "self_check" else "",
    }  # fmt: skip


def _written(entry: Entry, column: Shown) -> str:
    value = entry.values.get(column.name)
    if value is None or is_missing(value):
        return "differs" if column.name == "first_token" and _first_differs(entry) else MISSING
    forms = {
        "rate": lambda: fixed(value, 1), "share": lambda: fixed(value, 2), "number": lambda: significant(value),
        "estimate": lambda: estimate(value, entry.values[f"{column.name}_sem"], 3),
        "parameters": lambda: parameters(value), "count": lambda: str(value), "words": lambda: str(value),
        "lengths": lambda: entry.lengths,
    }  # fmt: skip
    return forms[column.form]()


def _first_differs(entry: Entry) -> bool:
    """Whether the sequences begin with different tokens, so that the table has none to name."""
    data = next((facts for facts in entry.run.manifest.data if facts.domain == entry.domain), None)
    first = (data.first_token if data is not None else None) or entry.run.summary.first_token
    return first.distinct > 1


def _published(each: PublishedNumber) -> dict[str, str]:
    number = each.number
    return {
        "value": f"{number.value:g}",
        "title": f"published: {number.value:g} {number.unit} ({number.metric}) on {number.text}; {number.setting}; "
        f"{number.source}",
    }  # fmt: skip


def _bar(value: float | None, full: float) -> Markup:
    """A bar as long as the share that `value` is of `full`; nothing where there is none."""
    if value is None or is_missing(value) or not full:
        return Markup("")
    width = BAR * min(1.0, max(0.0, value / full))
    return Markup(
        f'<svg class="bar" viewBox="0 0 {BAR} 4" width="{BAR}" height="4" aria-hidden="true">'
        f'<rect class="whole" width="{BAR}" height="4"/><rect class="part" width="{width:.1f}" height="4"/></svg>'
    )


def _strip(entry: Entry) -> Markup:
    """The layers from left to right, each in the colour of its mean first-token attention.

    Nothing for attention without softmax.
    """
    layers = entry.rows_of("layers")
    if entry.values["attention"] != "softmax" or layers.empty:
        return Markup("")
    width = STRIP / len(layers)
    box = f'viewBox="0 0 {STRIP} {TALL}" width="{STRIP}" height="{TALL}"'
    parts = [f'<svg class="strip" {box} role="img" aria-label="layers">']
    for place, row in enumerate(layers.to_dict("records")):
        mass = row["mean_bos_mass"]
        parts.append(
            f'<rect x="{width * place:.2f}" width="{width:.2f}" height="{TALL}" '
            f'fill="{color_at(mass, 0, 1) or "none"}">'
            f"<title>layer {row['layer']}: {significant(mass, missing='missing')}</title></rect>"
        )
    return Markup("".join([*parts, "</svg>"]))
