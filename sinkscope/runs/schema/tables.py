"""The tables of a run folder: what one row stands for, and the type, unit and meaning of every column."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple, dataclass

from sinkscope.runs.catalogue import catalogue
from sinkscope.runs.schema.sink_tables import SINK_COLUMNS, TOKEN_COLUMNS


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

    def columns(self) -> Iterator[ColumnSchema]:
        """Every column, in the order of the file."""
        yield from self.keys
        for table in _kept_per_sequence() if self.name == "sequences" else ():
            yield from _of_sequences(table)
        for table in self.measured:
            yield from _measured(table)
        if self.name == "layers":
            yield from _means_over_heads()
        yield from self.own


def key(name: str, type: str, what: str) -> ColumnSchema:
    """A column without unit and range."""
    return ColumnSchema(name, type, "", "", what)


DOMAIN = key("domain", "string", "The domain: a SPEC, or a SPEC with a BOS mode. Only where a run has several.")
STREAM = key("stream", "string", "text, vision, audio, encoder, decoder or cross.")
LAYER = key("layer", "integer", "Number of the layer in its stream.")
HEAD = key("head", "integer", "Number of the query head in its layer.")
MODULE = key("module", "string", "Path of the attention module; path[n] for its n-th call.")
KIND = key("kind", "string", "full, sliding:W, chunked:C or cross.")
SEQUENCE = key("sequence", "integer", "Number of the sequence in its domain.")
DOCUMENT = key("document", "string", "What the sequence was read from.")


def number(name: str, unit: str, range: str, what: str) -> ColumnSchema:
    """A column of numbers."""
    return ColumnSchema(name, "number", unit, range, what)


def with_sem(*columns: ColumnSchema) -> tuple[ColumnSchema, ...]:
    """The columns, each followed by its standard error."""
    return tuple(each for column in columns for each in (column, _error_of(column)))


def _error_of(column: ColumnSchema) -> ColumnSchema:
    return number(f"{column.name}_sem", column.unit, "[0, inf)", f"Standard error of {column.name} over sequences.")


def _of_stretch(name: str, unit: str, what: str) -> tuple[ColumnSchema, ...]:
    """The columns that a stretch has for a column of positions.parquet."""
    return (
        number(name, unit, "[0, 1]", f"Mean {what} in the stretch, over positions and sequences."),
        number(f"{name}_max", unit, "[0, 1]", f"Largest {what} in the stretch, of any one sequence."),
        key(f"{name}_max_position", "integer", f"The position that has {name}_max."),
    )


BOS_MASS = number("bos_mass", "probability", "[0, 1]", "Mean attention of queries 1.. on the first token.")
SINK_SCORE = number("sink_score", "probability", "[0, 1]", "alpha_0 of the prefix, query 0 included.")
SINK_RATE = number("sink_rate", "share", "[0, 1]", "Share of sequences whose alpha_0 exceeds epsilon.")

TABLES = {
    table.name: table
    for table in (
        TableSchema(
            "heads", "heads.csv", "one (stream, layer, head) of a domain",
            (DOMAIN, STREAM, LAYER, HEAD, key("kv_group", "integer", "Key/value group of the head."), MODULE, KIND),
            measured=("heads",),
        ),
        TableSchema(
            "layers", "layers.csv", "one (stream, layer) of a domain",
            (DOMAIN, STREAM, LAYER, MODULE, KIND, key("heads", "integer", "Query heads of the layer.")),
            measured=("layers",),
        ),
        TableSchema(
            "length_curve", "length_curve.csv", "one (stream, layer, head, prefix length)",
            (DOMAIN, STREAM, LAYER, HEAD, key("length", "integer", "Queries of the prefix: 64, 128, ... and T.")),
            own=with_sem(BOS_MASS, SINK_SCORE, SINK_RATE),
        ),
        TableSchema(
            "positions", "positions.parquet", "one (stream, layer, head, position < 4,096)",
            (DOMAIN, STREAM, LAYER, HEAD, key("position", "integer", "The position, as a key and as a query.")),
            own=(
                number("alpha", "probability", "[0, 1]", "Mean alpha_k of the key at the position."),
                number("alpha_t64", "probability", "[0, 1]", "Mean alpha_k over the first 64 queries."),
                number("bos_mass", "probability", "[0, 1]", "Mean A[i,0] of the query at the position."),
                number("bos_share", "share", "[0, 1]", "Mean |A[i,0]| / sum_j |A[i,j]| of the query there."),
                key("token", "string", "The token that all sequences of the domain have at the position."),
            ),
        ),
        TableSchema(
            "stretches", "stretches.parquet", "one (layer, head, stretch) from 4,096 on",
            (
                DOMAIN, STREAM, LAYER, HEAD,
                key("first", "integer", "First position. There are 64 stretches of equal length from a power of two to "
                    "the next."),
                key("last", "integer", "Last position."),
            ),
            own=(
                *_of_stretch("alpha", "probability", "alpha_k of the keys k"),
                *_of_stretch("bos_mass", "probability", "A[i,0] of the queries i"),
                *_of_stretch("bos_share", "share", "|A[i,0]| / sum_j |A[i,j]| of the queries i"),
            ),
        ),
        TableSchema(
            "sequences", "sequences.parquet",
            "one (stream, layer, head or none, sequence)",
            (key("domain", "string", "The domain."), STREAM, LAYER, MODULE, SEQUENCE, DOCUMENT, HEAD),
        ),
        TableSchema(
            "sinks", "sinks.parquet", "a sink: (sequence, layer, head or none, position)",
            tuple(ColumnSchema(*astuple(each)) for each in SINK_COLUMNS),
        ),
        TableSchema(
            "tokens", "tokens.csv", "one (stream, kind, token, first or not)",
            (DOMAIN, *(ColumnSchema(*astuple(each)) for each in TOKEN_COLUMNS)),
        ),
        TableSchema(
            "domains", "domains.csv", "one (pair of domains, stream, layer, head)",
            (
                key("domain_a", "string", "The first domain."), key("domain_b", "string", "The second domain."),
                key("paired", "boolean", "Whether both read the same documents, one by one."),
                STREAM, LAYER, HEAD, MODULE,
            ),
            own=(
                number("bos_mass_a", "probability", "[0, 1]", "Mean bos_mass in the first domain."),
                number("bos_mass_b", "probability", "[0, 1]", "Mean bos_mass in the second domain."),
                number("difference", "probability", "[-1, 1]", "bos_mass_b - bos_mass_a."),
                number("sem", "probability", "[0, inf)", "Standard error of the difference."),
                number("low", "probability", "(-inf, inf)", "Lower end of the 95 % interval (Student's t)."),
                number("high", "probability", "(-inf, inf)", "Upper end of the 95 % interval (Student's t)."),
                number("p", "probability", "[0, 1]", "Two-sided t-test of no difference."),
                number("q", "probability", "[0, 1]", "Benjamini-Hochberg over all heads of the pair."),
                key("differs", "boolean", "q < 0.05; empty where there is no p."),
            ),
        ),
    )
}  # fmt: skip
"""The tables of every run folder, by name; `schema.measures` has those that a scan writes on request."""


def _kept_per_sequence() -> list[str]:
    """Tables of the catalogue whose metrics sequences.parquet holds: heads, those of measurements, layers."""
    tables = dict.fromkeys(column.table for column in catalogue() if column.per == "sequence")
    return [*(table for table in tables if table not in ("layers", "length_curve")), "layers"]


def _measured(table: str) -> Iterator[ColumnSchema]:
    """The columns that the catalogue declares for a table; each mean over sequences is followed by its error."""
    for column in catalogue():
        if column.table != table or not column.shown:
            continue
        kind = {"name": "string", "bool": "boolean"}.get(column.unit, "number")
        when = "" if column.measure is None else f" Only with --measure {column.measure}."
        schema = ColumnSchema(column.name, kind, column.unit, column.range, column.formula + when)
        yield schema
        if column.per == "sequence":
            yield _error_of(schema)


def _of_sequences(table: str) -> Iterator[ColumnSchema]:
    """The per-sequence columns of a table, without errors; includes positions that the table itself leaves out."""
    for column in catalogue():
        if column.table == table and column.per == "sequence":
            yield number(column.name, column.unit, column.range, column.formula)


def _means_over_heads() -> Iterator[ColumnSchema]:
    for column in catalogue():
        if column.table == "heads" and column.per == "sequence":
            mean = number(f"mean_{column.name}", column.unit, column.range, f"Mean of {column.name} over the heads.")
            yield mean
            yield _error_of(mean)
