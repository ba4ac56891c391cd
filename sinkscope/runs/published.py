"""Published numbers to compare a run with: data/published.csv, one row per number, each with its source.

A row says which column of the atlas it may stand beside, and on what length, kind of text, first token and dtype it was
measured. It is comparable with a run that was measured alike. A row without such a column says why no run is.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from sinkscope.runs.schema.summary import Published

NATURAL, ANY = "natural", "any"
KINDS = {"random": "random", "repeated": "repeated", "code": "code"}
"""The kind of text of a SPEC; every other SPEC is natural language."""
PLAIN = "auto"
"""How the first token is chosen where nobody asks for another: as the tokenizer does by itself."""
PREFIX = 64
"""Tokens of the prefix that is measured beside the whole sequence."""


@dataclass(frozen=True)
class Setting:
    """What decides whether a run's numbers may be held against published ones.

    `tokens`: of a sequence. `kind`: natural, random, repeated or code. `bos`: whether BOS is the first token.
    `opening`: how the first token was chosen, as the manifest says it.
    """

    tokens: int
    kind: str
    bos: bool
    opening: str
    dtype: str | None


@dataclass(frozen=True)
class PublishedNumber:
    """A row of data/published.csv.

    Attributes:
        ids: hub ids of the model.
        number: the number as a summary shows it.
        beside: the column of the atlas that it may stand beside; empty where no column is measured alike.
        tokens, kind, bos, dtype: the setting; None or empty where the source does not state it, and for `kind` "any"
            where the number does not depend on the text.
        why: why no column is measured alike; empty where one is.
    """

    ids: tuple[str, ...]
    number: Published
    beside: str
    tokens: int | None
    kind: str
    bos: bool | None
    dtype: str
    why: str

    def difference(self, run: Setting) -> str:
        """Why the number cannot be held against a run of this setting; empty where it can."""
        if not self.beside:
            return self.why
        if self.kind == ANY:
            return ""
        prefixed = self.tokens == PREFIX and self.beside.endswith(f"_{PREFIX}")
        if self.tokens != run.tokens and not (prefixed and run.tokens >= PREFIX):
            return f"measured at T = {self.tokens}, the run at T = {run.tokens}"
        if self.kind != run.kind:
            return f"measured on {self.kind} text, the run on {run.kind} text"
        if self.bos is not None and self.bos != run.bos:
            return f"measured {_with(self.bos)} BOS, the run {_with(run.bos)} it"
        if self.bos is None and run.opening != PLAIN:
            return f"measured on plain text, the run with another first token ({run.opening})"
        if self.dtype and self.dtype != run.dtype:
            return f"measured in {self.dtype}, the run in {run.dtype}"
        return ""


def _with(bos: bool) -> str:
    return "with" if bos else "without"


def kind_of_text(spec: str) -> str:
    """The kind of text that a SPEC reads."""
    return KINDS.get(spec, NATURAL)


@cache
def published_numbers() -> tuple[PublishedNumber, ...]:
    """Every row of the file."""
    text = (files("sinkscope") / "data" / "published.csv").read_text("utf-8")
    return tuple(_read(row) for row in csv.DictReader(text.splitlines()))


def _read(row: dict[str, str]) -> PublishedNumber:
    number = {name: row[name] for name in ("model", "metric", "value", "unit", "text", "setting", "source")}
    return PublishedNumber(
        ids=tuple(row["ids"].split("|")),
        number=Published.model_validate(number | {"not_comparable": row["why"] or None}),
        beside=row["beside"],
        tokens=int(row["tokens"]) if row["tokens"] else None,
        kind=row["kind"],
        bos={"yes": True, "no": False}.get(row["bos"]),
        dtype=row["dtype"],
        why=row["why"],
    )


def numbers_of(model_id: str) -> list[PublishedNumber]:
    """The rows of a model, by its hub id in any case; empty where none is known."""
    return [each for each in published_numbers() if model_id.lower() in (name.lower() for name in each.ids)]


def published_for(model_id: str) -> list[Published]:
    """The numbers of a model as a summary holds them."""
    return [each.number for each in numbers_of(model_id)]
