"""The definition of every column, read without importing torch: data/columns.json, the columns.json of each question,
and the metrics of a run's user.

`python -m sinkscope.tables.write_catalogue` writes these files from the declarations, whose modules import torch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING

from sinkscope.errors import SinkscopeError, did_you_mean
from sinkscope.runs.questions import QUESTIONS
from sinkscope.runs.schema.table import Column, ColumnSchema, TableSchema, error_of, number

if TYPE_CHECKING:
    from sinkscope.runs.schema.manifest import Manifest, MetricFacts


PER = ("sequence", "run")
ON_SCREENS = {"alpha_0": "sink_score", "alpha_k": "alpha", "margin": "sink_margin"}
"""The column behind a name of the screens."""


@cache
def catalogue() -> tuple[Column, ...]:
    """Every column that a scan measures, in the order of the tables, then those of every question."""
    text = (files("sinkscope") / "data" / "columns.json").read_text("utf-8")
    always = tuple(Column(**entry) for entry in json.loads(text))
    return always + tuple(column for question in QUESTIONS.values() for column in question.columns)


def columns_of(manifest: Manifest | None) -> Iterator[Column]:
    """The columns that come with sinkscope, then those of the metrics that the run's user added and that did not
    fail."""
    yield from catalogue()
    yield from own_columns({} if manifest is None else manifest.metrics)


def whose(metrics: Iterable[str]) -> str:
    """What means of these metrics are over: heads, layers, or either, as where a metric is no column of sinkscope's."""
    tables = {name: {column.table for column in catalogue() if column.name == name} for name in set(metrics)}
    units = {"heads" if "heads" in found else "layers" if "layers" in found else "" for found in tables.values()}
    return units.pop() if len(units) == 1 and "" not in units else "heads or layers"


def near_column(name: str, known: Iterable[str]) -> str:
    """`; did you mean X?` for a name that is no column: the column behind a name of the screens, else near names."""
    column = ON_SCREENS.get(str(name).casefold())
    return f"; did you mean {column}?" if column in (known := set(known)) else did_you_mean(name, known)


def own_columns(metrics: Mapping[str, MetricFacts]) -> Iterator[Column]:
    """The columns of metrics that are not sinkscope's own and did not fail."""
    known = {(column.name, column.table) for column in catalogue()}
    for name, facts in metrics.items():
        if (name, facts.table) not in known and facts.failed is None:  # known: the question's package is installed here
            yield Column(name, **facts.model_dump(exclude={"code_sha256", "failed"}))


def find_column(manifest: Manifest, name: str, *tables: str) -> Column | None:
    """The column of this name in the first of the tables that has it; None where none has."""
    by_table = {column.table: column for column in columns_of(manifest) if column.name == name}
    return next((by_table[table] for table in tables if table in by_table), None)


def map_scores(*tables: str) -> list[str]:
    """The columns of these tables that the report's map of heads offers, in the order of their places."""
    offered = [
        (column.map_place, column.name)
        for column in catalogue()
        if column.table in tables and column.map_place is not None
    ]
    return [name for _, name in sorted(offered, key=lambda placed: placed[0])]


def elsewhere(manifest: Manifest, name: str) -> str:
    """` (it is a column of smoothing)`, for a name that a table other than the one at hand has; empty for any other."""
    tables = dict.fromkeys(column.table for column in columns_of(manifest) if column.name == name and column.shown)
    return f" (it is a column of {' and '.join(tables)})" if tables else ""


def per_sequence(table: str) -> frozenset[str]:
    """Names of a table's columns that are means over sequences; a position such as max_abs_token is not."""
    names = {per: {column.name for column in catalogue() if (column.table, column.per) == (table, per)} for per in PER}
    return frozenset(names["sequence"] - names["run"])


def table_columns(table: TableSchema) -> Iterator[ColumnSchema]:
    """Every column of a table, in the order of the file."""
    yield from table.keys
    for name in _kept_per_sequence() if table.name == "sequences" else ():
        yield from _of_sequences(name)
    for name in table.measured:
        yield from _measured(name)
    if table.name == "layers":
        yield from _means_over_heads()
    yield from table.own


def _kept_per_sequence() -> list[str]:
    """Tables of the catalogue whose metrics sequences.parquet holds: heads, those of measurements, layers."""
    tables = dict.fromkeys(column.table for column in catalogue() if column.per == "sequence")
    return [*(table for table in tables if table not in ("layers", "length_curve")), "layers"]


def _measured(table: str) -> Iterator[ColumnSchema]:
    """The columns that the catalogue declares for a table; each mean over sequences is followed by its error."""
    columns = [column for column in catalogue() if column.table == table and column.shown]
    for column in sorted(columns, key=lambda column: column.per == "run"):
        kind = {"name": "string", "bool": "boolean"}.get(column.unit, "number")
        when = "" if column.measure is None else f" Only with --measure {column.measure}."
        schema = ColumnSchema(column.name, kind, column.unit, column.range, column.formula + when)
        yield schema
        if column.per == "sequence":
            yield error_of(schema)


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
            yield error_of(mean)


# Columns that other versions of sinkscope measured otherwise: two runs are never held against each other there.
#
# Up to schema version 2 alpha_k was divided by T-k (T both ways) also where the mask hides the key from some of these
# queries. From version 3 on only queries that may see the key count. Without windows, chunks and prefixes both are the
# same.


ALPHA_OF_SEEING = 3
"""The schema version from which on alpha_k is a mean over the queries that may see key k."""
BY_ALPHA = ("sinks_per_sequence", "sink_elsewhere", "cos_peak_residual", "cos_peak_input")
"""The columns with a value for each sequence that read alpha_k."""

IN_TABLES = (*BY_ALPHA, "peak_position", "peak_score")
"""All columns of heads.csv and layers.csv that read alpha_k."""

Measured = tuple[int, bool | None]
"""The schema version of a run or baseline, and whether its model's masks hide keys; None where that is not known."""


def hides_keys(manifest: Manifest) -> bool:
    """Whether some attention call hides a key from a query that the order of positions lets see it.

    Runs of schema version 2 and older did not record it. They are judged by their windows and chunks.
    """
    longest = max((data.seq_len for data in manifest.data), default=0)
    for site in manifest.attention:
        reach = site.kind.size if site.causal else (site.kind.size or 0) // 2 or None
        if site.hides or (site.hides is None and reach is not None and reach < longest):
            return True
    return False


def by_old_alpha(manifest: Manifest) -> bool:
    """Whether the run holds an alpha_k that is not what it is now."""
    return manifest.schema_version < ALPHA_OF_SEEING and hides_keys(manifest)


def mixed(manifests: Sequence[Manifest]) -> bool:
    """Whether alpha_k is one thing in some of the runs, and another in others."""
    return any(map(by_old_alpha, manifests)) and any(
        manifest.schema_version >= ALPHA_OF_SEEING for manifest in manifests
    )


def refuse_mixed(names: Iterable[str], manifests: Sequence[Manifest]) -> None:
    """Raises SinkscopeError where these columns of several runs cannot stand in one table."""
    refused = [name for name in names if name in IN_TABLES] if mixed(manifests) else []
    if refused:
        raise SinkscopeError(_otherwise(refused, "scan the older runs' models again, or leave these runs out"))


def moved(one: Measured, other: Measured) -> tuple[str, ...]:
    """The columns that the two measured otherwise than each other."""
    (one_version, one_hides), (other_version, other_hides) = one, other
    same = (one_version < ALPHA_OF_SEEING) == (other_version < ALPHA_OF_SEEING)
    return () if same or not (one_hides or other_hides) else BY_ALPHA


def refuse_moved(names: list[str], one: Measured, other: Measured, remedy: str) -> None:
    """Raises SinkscopeError where the two measured one of these columns otherwise. `remedy`: what to do then."""
    refused = [name for name in names if name in moved(one, other)]
    if refused:
        raise SinkscopeError(_otherwise(refused, remedy))


def _otherwise(names: list[str], remedy: str) -> str:
    return (
        f"{', '.join(names)}: measured otherwise where the schema version is 2 or older: alpha_k counted queries, too, "
        f"from which a window hides key k; {remedy}"
    )
