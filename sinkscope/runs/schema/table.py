"""What a table and a column are: the definition of a measured column, and the schema of a table of a run folder."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Column:
    """The definition of one column.

    Attributes:
        table: `heads`, `layers`, `positions`, `length_curve`, `sinks`, `tokens`, or a table of a measurement such as
            `smoothing`.
        per: `sequence` (the table shows a mean over sequences and its standard error), `position` (a mean over the
            sequences that reach the position, without an error), `run` (one value for the whole run), `sink` and
            `token` (one value a row of sinks.parquet, of tokens.csv) or `kind` (a kind of row of sinks.parquet, no
            column).
        shown: whether the table has the column, and not only the per-sequence values.
        sampled: whether it is measured on the first sequences of each dataset only.
        measure: the measurement that adds the column to a table of every scan; None for all other columns.
        dormant: the end of its values, `low` or `high`, at which a head is dormant; None where neither says so.
        map_place: its place among the scores that the report's map of heads offers; None = not offered.
    """

    name: str
    table: str
    unit: str
    range: str
    formula: str
    source: str
    per: str = "sequence"
    shown: bool = True
    sampled: bool = False
    measure: str | None = None
    dormant: str | None = None
    map_place: int | None = None


@dataclass(frozen=True)
class ColumnSchema:
    """One column. `type`: string, integer, number or boolean; a missing value is empty in CSV and null in Parquet.
    `what`: its meaning."""

    name: str
    type: str
    unit: str
    range: str
    what: str


@dataclass(frozen=True)
class TableSchema:
    """A table of a run folder.

    Attributes:
        file: name of its file.
        row: what one row stands for.
        keys: the columns that identify a row.
        own: columns of this table that are not in the catalogue.
        measured: tables of the catalogue whose columns this table has.
    """

    name: str
    file: str
    row: str
    keys: tuple[ColumnSchema, ...]
    own: tuple[ColumnSchema, ...] = ()
    measured: tuple[str, ...] = ()


def key(name: str, type: str, what: str) -> ColumnSchema:
    """A column without unit and range."""
    return ColumnSchema(name, type, "", "", what)


DOMAIN = key("domain", "string", "The dataset: a SPEC, with its setting. Only in runs with several datasets.")
STREAM = key("stream", "string", "Part of the model: text, vision, audio, encoder, decoder or cross.")
LAYER = key("layer", "integer", "Number of the layer in its stream.")
HEAD = key("head", "integer", "Number of the query head in its layer.")
MODULE = key("module", "string", "Path of the attention module in the model; path[n] for its n-th call.")
KIND = key("kind", "string", "Which keys a query may see: full, sliding:W (those from i-W+1 on), chunked:C or cross.")
SEQUENCE = key("sequence", "integer", "Number of the sequence in its dataset.")
DOCUMENT = key("document", "string", "What the sequence was read from.")


def number(name: str, unit: str, range: str, what: str) -> ColumnSchema:
    """A column of numbers."""
    return ColumnSchema(name, "number", unit, range, what)


def with_sem(*columns: ColumnSchema) -> tuple[ColumnSchema, ...]:
    """The columns, each followed by its standard error."""
    return tuple(schema for column in columns for schema in (column, error_of(column)))


def error_of(column: ColumnSchema) -> ColumnSchema:
    """The column of a mean's standard error over sequences."""
    return number(f"{column.name}_sem", column.unit, "[0, inf)", f"Standard error of {column.name} over sequences.")
