"""The list of columns, the list of examples, and the schema of every file, as text."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from sinkscope.errors import SinkscopeError, did_you_mean
from sinkscope.present.text import wrapped
from sinkscope.runs.catalogue import ON_SCREENS, catalogue, near_column, own_columns, table_columns
from sinkscope.runs.questions import QUESTIONS, tables_of_questions
from sinkscope.runs.request import Request
from sinkscope.runs.schema.base import Record, json_schema
from sinkscope.runs.schema.baseline import BaselineFile
from sinkscope.runs.schema.manifest import Manifest, MetricFacts
from sinkscope.runs.schema.other_tables import ARMS_TABLES, ATLAS_TABLE, TRAINING_TABLES
from sinkscope.runs.schema.summary import Summary
from sinkscope.runs.schema.table import Column, TableSchema
from sinkscope.runs.schema.tables import TABLES

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from sinkscope.checkpoints import Example

_OF_QUESTIONS = {
    table.name: f"{table.file} (scan --measure {name}): one row per {table.row.removeprefix('one ').partition(';')[0]}"
    for name, question in QUESTIONS.items()
    for table in question.tables
}
TITLES = {
    "heads": "heads.csv: one row per (stream, layer, head)",
    "layers": "layers.csv: one row per (stream, layer), with mean_NAME for each NAME of heads.csv",
    **_OF_QUESTIONS,
    "positions": "positions.parquet: one row per (stream, layer, head, position)",
    "length_curve": "length_curve.csv: one row per (stream, layer, head, length), all lengths from the same pass",
    "sinks": "sinks.parquet: one row for every sink of every sequence. First the kinds of sinks, then the columns",
    "tokens": "tokens.csv: one row per (stream, kind of sink, token, first or not)",
}
NOTATION = {
    table.name: question.notation for question in QUESTIONS.values() for table in question.tables if question.notation
}
"""What the formulas of a table's columns have in common."""
MEANS = (
    "A column is computed for each sequence. The table shows its mean over sequences, with the standard error in "
    "NAME_sem. The exceptions are marked.",
    "(run): one value for the whole run; the definition says how it is made.",
    "(position): a mean over the sequences that reach the position, without an error.",
    "(sink), (token): a value of one row of sinks.parquet or tokens.csv.",
    "(kind): no column, but a value of the column `kind` of sinks.parquet.",
)
SYMBOLS = {
    "T": "number of tokens of the sequence. Positions are 0 to T-1; position 0 is the first token, BOS or not",
    "D": "width of the residual stream: the number of its channels",
    "H": "number of query heads of the layer",
    "i, j, k": "i is the position of a query, j and k are those of keys",
    "A[i,j]": (
        "attention weight of query i on key j, after mask, soft-cap, window and learned sink. In causal attention j <= "
        "i. A layer's attention is causal in a sequence if no query of any of its heads may see a later key. "
        "Otherwise, as under a prefix or an image block, it is bidirectional. Where attention is no softmax, A is the "
        "score that multiplies the value"
    ),
    "s_ij": "logit of query i and key j, after scaling, soft-cap and bias",
    "n_k": (
        "number of queries that may see key k. In causal attention it is T-k, query k included. It is T where every "
        "query sees every key, and smaller where the mask hides more (a window, chunks, a prefix). Padding does not "
        "count as a query"
    ),
    "n_max": "the largest n_k of the sequence in the head. It is T, or W under a causal window of W < T keys",
    "epsilon": "threshold of a sink, 0.3 by default (`--epsilon`)",
    "alpha_k": (
        "sum_i A[i,k] / n_k: the mean of A[i,k] over the queries i that may see key k. Gu et al. 2410.10781 consider "
        "no windows and divide by T-k, which is n_k in causal attention without a window. Under a window of W keys, a "
        "sum divided by T-k could never exceed epsilon where T-k > W/epsilon"
    ),
    "alpha_0": (
        "1/T sum_i A[i,0], as Gu et al. define it: a query that may not see key 0 counts as 0. It is the column "
        "sink_score. Where n_0 = T, it equals alpha_k at k = 0. Under a window, alpha_k at k = 0 is T/n_0 times as "
        "large as alpha_0"
    ),
    "q_i, k_j, v_j": "query, key and value as the softmax sees them, after position encoding and norms",
    "o_i": "sum over j of A[i,j] v_j: what the attention call returns, less what a learned key's value adds",
    "w_i": (
        "what the output projection reads of the head at query i: o_i, unless a gate or a norm lies between, or a "
        "learned key adds its value"
    ),
    "W_O^h": "slice of the output projection that reads head h. W_Q^h, W_K^h and W_V^h are the projections of head h",
    "x_i": "residual stream that enters the block",
    "z_i": "what the projections of queries, keys and values read: x_i after the norm of the block's input, if any",
    "e_i": (
        "residual stream that leaves the block. Where the model never calls its blocks, since they are mere lists of "
        "modules, x_i is what the first module of the block to run is given, and e_i what enters the next one. The "
        "last has no e_i then"
    ),
    "norm": "Euclidean norm of a vector, also written |v|. |M|_F is the Frobenius norm of a matrix, |M|_2 its largest "
    "singular value",
    "cos": "cosine of the angle between two vectors; 0 where one of them is 0",
    "log": "natural logarithm",
    "median": "the middle value; for an even number of values, the mean of the two middle ones",
}
"""What the letters of the formulas stand for."""
FACTS = ("name", "table", "unit", "range", "formula", "source", "per", "measure")


def metric_list(names: list[str], own: Mapping[str, MetricFacts] | None = None) -> list[dict[str, Any]]:
    """The columns called `names`, or all: sinkscope's, then those of a user's `own` metrics. A name may also be that of
    a screen, such as alpha_0.

    Raises SinkscopeError for a name that is no column.
    """
    columns = [column for column in (*catalogue(), *own_columns(own or {})) if column.shown]
    known = {column.name for column in columns}
    names = [name if name in known else ON_SCREENS.get(name, name) for name in names]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise SinkscopeError(
            f"no column {unknown[0]!r}: `sinkscope metrics` lists them all, --run RUN also those of a run's own "
            f"metrics{near_column(unknown[0], known)}"
        )
    return [{key: getattr(column, key) for key in FACTS} for column in columns if not names or column.name in names]


def render_metrics(columns: list[dict[str, Any]]) -> str:
    """One entry per column: name, unit and range, formula, source."""
    lines = []
    for table in dict.fromkeys([*TITLES, *(str(column["table"]) for column in columns)]):
        in_table = [column for column in columns if column["table"] == table]
        if not in_table:
            continue
        lines += [*wrapped(TITLES.get(table, table), rest="  "), ""]
        if table in NOTATION:
            lines += [*wrapped(NOTATION[table], first="  "), ""]
        for column in in_table:
            mark = "" if column["per"] == "sequence" else f" ({column['per']})"
            mark += "" if column["measure"] is None else f" (--measure {column['measure']})"
            lines += wrapped(f"{column['name']}{mark}: {column['unit']}, {column['range']}", first="  ", rest=" " * 6)
            for text in (column["formula"], f"Source: {column['source']}", *_address(column)):
                lines += wrapped(text, first=" " * 6)
        lines.append("")
    means = [line for sentence in MEANS for line in wrapped(sentence)]
    return "\n".join([*lines, *_symbols(columns), *means, ""])


def _symbols(columns: list[dict[str, Any]]) -> list[str]:
    """What the letters in the formulas of these columns stand for."""
    notes = {NOTATION.get(str(column["table"]), "") for column in columns}
    facts = (str(column[fact]) for column in columns for fact in ("range", "formula"))
    formulas = " ".join([*facts, *notes])
    lines = ["Symbols", ""]
    for symbol, what in SYMBOLS.items():
        if _stands_in(symbol, formulas):
            lines += wrapped(f"{symbol}: {what}", first="  ", rest=" " * 6)
    return [*lines, ""] if len(lines) > 2 else []


def _stands_in(symbol: str, formulas: str) -> bool:
    """Whether a symbol, or one of several, is written somewhere: `A[i,j]` as A[..., `k_j` as k_... or k alone."""
    stems = (re.split(r"(?<!W)[_[]", part)[0] for part in symbol.split(", "))
    return any(re.search(rf"(?<![\w'])(?<!W_){re.escape(stem)}(?:[_[]|(?!\w))", formulas) for stem in stems)


def anchor(column: Column) -> str:
    """The anchor of a column's definition on docs/metrics.md; its name, or with its table where another has it."""
    first = next((entry for entry in catalogue() if entry.name == column.name and entry.shown), column)
    return column.name if column.table == first.table else f"{column.name}-{column.table}"


def _address(column: dict[str, Any]) -> list[str]:
    """The line that says where a column that comes with sinkscope is defined; none for one of the user's own or of
    another package."""
    key = (column["name"], column["table"])
    brought = [entry for name in QUESTIONS if not QUESTIONS.ships(name) for entry in QUESTIONS[name].columns]
    entries = [entry for entry in catalogue() if (entry.name, entry.table) == key and entry not in brought]
    return [f"Address: docs/metrics.md#{anchor(entries[0])}"] if entries else []


def render_examples(examples: Iterable[Example]) -> str:
    """Each example's name, description and licence, and how to install it where it is absent."""
    lines = []
    for example in examples:
        state = "installed" if example.installed else f"not installed: {example.install}"
        lines += [
            f"example:{example.name}",
            *wrapped(example.what, first="    "),
            *wrapped(f"licence: {example.licence}", first="    "),
            *wrapped(state, first="    "),
            "",
        ]
    return "\n".join(lines)


RECORDS: dict[str, tuple[type[Record], str]] = {
    "manifest": (Manifest, "manifest.json: how a run was measured"),
    "summary": (Summary, "summary.json: the answer"),
    "request": (Request, "what a scan is asked for: part of manifest.json and of a baseline"),
    "baseline": (BaselineFile, "the file of `sinkscope baseline`"),
}

SHOWN = TABLES | tables_of_questions() | TRAINING_TABLES | ARMS_TABLES | {ATLAS_TABLE.name: ATLAS_TABLE}


def render_schema(name: str | None) -> str:
    """The JSON schema of a record, or the columns of a table as JSON; without a name, the list of all names.

    Raises SinkscopeError for a name that is neither a record nor a table.
    """
    if name is None:
        return _names()
    if name in RECORDS:
        return _json(json_schema(RECORDS[name][0]))
    if name in SHOWN:
        return _json(table_schema(SHOWN[name]))
    choices = [*RECORDS, *SHOWN]
    raise SinkscopeError(f"no file or table {name!r}: choose one of {', '.join(choices)}{did_you_mean(name, choices)}")


def table_schema(table: TableSchema) -> dict[str, Any]:
    """A table's name, its file, what a row stands for, and its columns in order."""
    columns = [vars(column) for column in table_columns(table)]
    return {"table": table.name, "file": table.file, "row": table.row, "columns": columns}


def _names() -> str:
    descriptions = {name: what for name, (_, what) in RECORDS.items()}
    descriptions |= {name: f"{table.file}: {table.row}" for name, table in SHOWN.items()}
    width = max(map(len, descriptions)) + 2
    lines = [line for name, what in descriptions.items() for line in wrapped(f"{name:{width}}{what}", rest=" " * width)]
    return "\n".join([*lines, ""])


def _json(data: Any) -> str:
    return json.dumps(data, indent=2, ensure_ascii=False) + "\n"
