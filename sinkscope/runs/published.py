"""Published numbers to stand beside a run: data/published.csv, one row a number, each with its source."""

from __future__ import annotations

import csv
from functools import cache
from importlib.resources import files

from sinkscope.runs.schema.summary import Published


@cache
def rows() -> tuple[dict[str, str], ...]:
    """Every row: model (its paper's name), ids (hub ids, `|` between), metric, value, unit, text, setting, source."""
    text = (files("sinkscope") / "data" / "published.csv").read_text("utf-8")
    return tuple(csv.DictReader(text.splitlines()))


def published_for(model_id: str) -> list[Published]:
    """The rows of a model, by its hub id (upper and lower case alike); empty where none is known."""
    own = [row for row in rows() if row["ids"] and model_id.lower() in row["ids"].lower().split("|")]
    return [Published.model_validate({name: row[name] for name in row if name != "ids"}) for row in own]
