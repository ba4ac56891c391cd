"""Published numbers to compare a run with: data/published.csv, one row per number, each with its source."""

from __future__ import annotations

import csv
from functools import cache
from importlib.resources import files

from sinkscope.runs.schema.summary import Published


@cache
def rows() -> tuple[dict[str, str], ...]:
    """Every row: model (as the paper names it), ids (hub ids separated by `|`), metric, value, unit, text, setting,
    source."""
    text = (files("sinkscope") / "data" / "published.csv").read_text("utf-8")
    return tuple(csv.DictReader(text.splitlines()))


def published_for(model_id: str) -> list[Published]:
    """The rows of a model, by its hub id in any case; empty where none is known."""
    known = [row for row in rows() if row["ids"] and model_id.lower() in row["ids"].lower().split("|")]
    return [Published.model_validate({name: row[name] for name in row if name != "ids"}) for row in known]
