"""Run `python docs/write_pages.py` after a column, a field, a kind of arm or the list of families was changed.

It rewrites docs/columns.md, docs/metrics.md and docs/schemas.md, the first part of docs/models.md, the table of
docs/commands/arms.md, what docs/claims.md makes of docs/claims.csv, and docs/clients.md of docs/clients.json.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from sinkscope.experiments.arms.grammar import BUILT_IN
from sinkscope.present.terminal.metrics import NOTATION, RECORDS, SHOWN, SYMBOLS, TITLES, anchor
from sinkscope.runs.catalogue import catalogue, table_columns
from sinkscope.runs.papers import NUMBER, cited_papers
from sinkscope.runs.schema.base import json_schema
from sinkscope.runs.schema.table import Column, ColumnSchema, TableSchema

HERE = Path(__file__).parent
WIDTH = 120

COLUMNS = """\
# Columns

[All pages](index.md)

This page lists the columns of every table; `sinkscope schema NAME` prints those of one table. Columns that identify a
row come first. A missing value is an empty cell in CSV and null in Parquet, never 0. Where a column NAME is a mean over
sequences, the next column is its standard error, `NAME_sem`; these are not listed here. The name of a measured column
links to its [formula and source](metrics.md#symbols), which explains the symbols. `python docs/write_pages.py` writes
this page.
"""
METRICS = """\
# Metrics

[All pages](index.md)

This page has the definition of every column. `sinkscope metrics NAME` prints the same. The address of a definition is
this page with `#NAME`, such as [metrics.md#bos_mass](#bos_mass). "ours" marks what this project defined. `python
docs/write_pages.py` writes the page from the docstrings of the functions that compute the columns.

"Per" says how many values a column has:

- sequence: the column is computed for each sequence, without padding. The table shows the mean over the n sequences
  that have a value. `NAME_sem` has the standard error of this mean: the standard deviation, with n - 1, divided by
  sqrt(n). It is empty where n is 1.
- position: the value is a mean over the sequences that reach the position, without a standard error.
- run: there is one value for the whole run. The definition says how it comes from the sequences.
- sink, token: the value belongs to one row of sinks.parquet or tokens.csv.
- kind: this is no column, but a value of the column `kind` of sinks.parquet.

Unless a definition says otherwise, a ratio whose denominator is 0 is infinite, and empty where the numerator is 0 too.
A mean over a sequence with an infinite value is infinite and has no standard error. CSV and Parquet files hold `inf`;
JSON files, which have no such number, hold null.

Standard errors fall with the square root of the number of sequences: four times as many sequences halve them. A scan
recommends this if at least a tenth of the heads have a 95 % interval of alpha_0 that contains epsilon (Student's t, n -
1 degrees of freedom). If an intervention cannot be told from its random control, `arms` and `ablate` say how many
sequences and draws could show the difference: both numbers are multiplied by (2.8 SE / d)^2, where d is the difference
and SE its standard error. If the true difference is d, such a sample shows it at the 5 % level with a probability of
80 %. The number 2.8 is 1.96 + 0.84, the normal quantiles of this level (two-sided) and this probability.

Standard errors, p values and intervals take every sequence for a sample of its own. Sequences that are windows of one
.txt file are parts of one text, so their errors say how far parts of this text differ, not how far other texts would. A
warning says so. To compare texts, give one document a row (`.jsonl` or `.parquet`).

## Windows

The column `kind` of a layer says which keys query i may see: all (`full`), those of another sequence (`cross`), those
of its own chunk of C (`chunked:C`), or those from i-W+1 on (`sliding:W`). In causal attention the latter are the last W
keys up to i. Where attention goes both ways, as many are ahead, up to i+W-1; in T5Gemma 2 it is one more where its own
window is an even number. Models count windows both ways in other ways: the configurations of ModernBERT and T5Gemma
name W-1, and that of T5Gemma 2 names all the keys that a query sees. Where a model chooses keys for each query
(DeepSeek V3.2), `kind` does not say which.

## Learned keys

A model may put learned keys and values beside those of its tokens: memory, null or bias keys, or one of zeros. Such a
key belongs to no token, so that no column counts it among the keys j. What it takes of a query's attention is what a
learned sink takes: it is in [learned_sink_mass](#learned_sink_mass), and where a definition names a learned sink, a
learned key is meant, too. A key of zeros whose value is 0 is a learned sink with logit 0. The logit of another one
depends on the query: sink_margin holds it against key 0, and the columns of logits and norms leave it out.

Where the value of a learned key is not 0, it adds a part to the output that comes from no token:

- Columns of w_i tell what the head writes, and this part is in it: ahon, lthon, honor and what follows from them,
  residual_write, compensation, rank_output. A head that attends to its learned key alone is not dormant by them if the
  value is as large as other heads' outputs.
- Columns of o_i tell what comes from the tokens, without this part: gate_open, and those of `--measure switch`.
- Columns that take the output for a sum over tokens are empty: avgcos_attention and what follows from it, and
  distant_write.

## Symbols

"""


SCHEMAS = """\
# JSON files

[All pages](index.md)

`python docs/write_pages.py` writes this page from the records that sinkscope writes and reads the files with;
`sinkscope schema manifest` and so on print the same as JSON schema, for programs. A missing value is null, never 0.
"""
MODELS = """\
`pytest -m '' tests/engine/test_families.py` scans a tiny random model of every type that transformers {version} lists.
If the model distinguishes padding, the batch is padded. The attention masses must agree within 1e-5 with the model's
own eager attention. Where eager attention returns no maps, or other maps than its softmax gave, they must agree with
float64 attention. A model that is not read must be refused with a one-line error. The tests write this list;
`pytest -m ''` prints its counts.

| transformers' list | types | read |
|---|---:|---:|
"""
CLIENTS = """\
# Other people's programs

[All pages](index.md)

This page shows what [`watch`](watch.md) reads in programs that run other libraries: the line that a user types, what it
prints first, the screen of the run, and one head's columns beside those of the library's own attention maps, averaged
in float64. The head is the one with the most attention on the first token. Every program also ran without a watch: what
each linear layer of the model returned, call by call, was compared bit for bit. And it ran with an error in the middle,
after which what could have been left behind was compared with what was there before: every hook, and the functions of
torch, torch.nn, Tensor, transformers and the library.

The programs are in the folder examples/clients. `GEMMA=$(sinkscope examples gemma-3-270m)` and
`MINILM=$(sinkscope examples minilm)` find the two checkpoints; the other models have random weights. `.ci/clients`
installs the libraries and checks all of this every night. `python tests/support/client_evidence.py --write` makes the
figures, and `python docs/write_pages.py` writes this page.

"""
FROM, TO = "docs/families.json. -->\n", "<!-- Written by hand"
"""What stands before and after the written part of docs/models.md."""


def pages() -> dict[Path, str]:
    """The text of every page that is written from the source, by its path."""
    return {
        HERE / "columns.md": columns_page(), HERE / "metrics.md": metrics_page(), HERE / "schemas.md": schemas_page(),
        HERE / "models.md": models_page(), HERE / "commands" / "arms.md": arms_page(),
        HERE / "claims.md": claims_page(), HERE / "clients.md": clients_page(),
    }  # fmt: skip


def models_page() -> str:
    """The page of the families, with its first part as docs/families.json says."""
    found = json.loads((HERE / "families.json").read_text("utf-8"))
    before, _, rest = (HERE / "models.md").read_text("utf-8").partition(FROM)
    lines = [MODELS.format(version=found["transformers"]).rstrip("\n")]
    for name, fates in found["lists"].items():
        lines.append(f"| {name} | {sum(map(len, fates.values()))} | {len(fates.get('read', []))} |")
    lines += ["", "## What is not read", ""]
    for name, fates in found["lists"].items():
        absent = [
            f"{fate}: {_families(families, found['notes'])}" for fate, families in fates.items() if fate != "read"
        ]
        if absent:
            lines.append(_wrapped(f"- {name}: {'; '.join(absent)}", "  "))
    lines += ["", "## Every type that is read", ""]
    for name, fates in found["lists"].items():
        if "read" in fates:
            lines.append(_wrapped(f"- {name}: {', '.join(fates['read'])}", "  "))
    return "\n".join([before + FROM, *lines, "", TO]) + rest.partition(TO)[2]


FROM_ARMS, TO_ARMS = "experiments/arms/grammar.py. -->\n", "\n<!-- Written by hand"
"""What stands before and after the table of docs/commands/arms.md."""
FORM = re.compile(r"[^\s,]*[:/+][^\s,]*")
"""A word of a grammar that is typed as it stands."""


def arms_page() -> str:
    """The page of arms, with its table as the grammar says."""
    before, _, rest = (HERE / "commands" / "arms.md").read_text("utf-8").partition(FROM_ARMS)
    lines = ["", "| arm | what it does | source |", "|---|---|---|"]
    for kind in BUILT_IN:
        written = FORM.sub(lambda form: f"`{form[0]}`", kind.grammar)
        lines.append(f"| {written} | {_escaped(kind.what)} | {_linked(kind.source)} |")
    return before + FROM_ARMS + "\n".join([*lines, ""]) + TO_ARMS + rest.partition(TO_ARMS)[2]


FROM_CLAIMS, TO_CLAIMS = "docs/claims.csv. -->\n", "\n<!-- Written by hand"
"""What stands before and after the findings of docs/claims.md."""
DRAWN = {
    "switch": "Sink rows against off rows, and what heads move between tokens",
    "alignment": "Cosine of the first token with every other, by layer",
    "costs": "Bounds on costs, in queries and keys alone",
    "smoothing": "What each head's mixing does to the mean cosine of tokens",
}


def claims_page() -> str:
    """The page of claims, with its findings as docs/claims.csv says."""
    from sinkscope.claims.claim import chosen_claims
    from sinkscope.claims.findings import read_csv
    from sinkscope.claims.page import in_markdown, make_page

    before, _, rest = (HERE / "claims.md").read_text("utf-8").partition(FROM_CLAIMS)
    found = read_csv(HERE / "claims.csv")
    claims = chosen_claims(list(dict.fromkeys(found["claim"])))
    figures = {name: (f"claims-{name}.png", words) for name, words in DRAWN.items()}
    text = in_markdown(make_page(found, claims, figures), title="")
    return f"{before}{FROM_CLAIMS}\n{text}{TO_CLAIMS}{rest.partition(TO_CLAIMS)[2]}"


def clients_page() -> str:
    """The page of other people's programs, as docs/clients.json says."""
    found = json.loads((HERE / "clients.json").read_text("utf-8"))
    lines = ["| program | heads | largest difference of bos_mass | of entropy |", "|---|---:|---:|---:|"]
    for each in found.values():
        name = f"[{each['name']}](#{_anchor(each['name'])})"
        apart = " | ".join(f"{check['largest']:.1e}" for check in each["checks"])
        lines.append(f"| {name}, {_library(each)} | {each['heads']} | {apart} |")
    return CLIENTS + "\n".join(lines) + "\n" + "".join(_client(key, each) for key, each in found.items())


def _anchor(title: str) -> str:
    return re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-")


def _library(client: dict[str, Any]) -> str:
    return f"{client['library']} {client['version'].partition('+')[0]}"


def _client(key: str, client: dict[str, Any]) -> str:
    """What a client's command prints, the screen of its run, and one head beside the library's own maps."""
    lines = [f"| {client['head']} | sinkscope | own maps | difference |", "|---|---:|---:|---:|"]
    lines += [
        f"| `{each['column']}` | {each['sinkscope']:.8f} | {each['own']:.8f} | {each['difference']:.1e} |"
        for each in client["checks"]
    ]
    mark = f"  # needs {client['library']}"
    typed = textwrap.wrap(client["command"], WIDTH - len(mark), break_on_hyphens=False)
    command = " \\\n  ".join(typed) + mark
    return f"\n## {client['name']}\n\n{_fence([command])}\nprints\n\n{_fence(client['printed'])}\n" + (
        f"{_shown(key, client)} begins with\n\n{_fence(client['screen'])}\n"
        + _wrapped(f"Own maps: {client['maps']}.")
        + "\n\n" + "\n".join(lines) + "\n\n"
        + _wrapped(_same(client)) + "\n"
    )  # fmt: skip


def _shown(key: str, client: dict[str, Any]) -> str:
    """What shows the run's screen. A program that calls `watch` itself may save no run."""
    show, program = f"`sinkscope show runs/{key}`", re.search(r"\S+\.py", client["command"])
    if client["prints_the_same"] is None and program and ".save(" not in (HERE.parent / program[0]).read_text("utf-8"):
        return f'With `run.save("runs/{key}")` at its end, {show}'
    return show


def _same(client: dict[str, Any]) -> str:
    """Whether a watch changed something, in words."""
    words = {True: "the same", False: "not the same"}
    printed = words.get(client["prints_the_same"])  # null where the program calls `watch` itself
    return (
        f"Outputs of {client['calls']} calls of linear layers: {words[client['the_same']]}, bit for bit. "
        + (f"What the program prints: {printed}. " if printed else "")
        + f"Left behind by an error in call {client['calls'] // 2}: {', '.join(client['left']) or 'nothing'}."
    )


def _fence(lines: list[str]) -> str:
    return "\n".join(["```", *lines, "```", ""])


def _families(names: list[str], notes: dict[str, str]) -> str:
    """The families, with what is said of them; those of which the same is said stand together."""
    said: dict[str, list[str]] = {}
    for name in names:
        said.setdefault(notes.get(name, ""), []).append(name)
    return ", ".join(
        f"{' and '.join(filter(None, [', '.join(some[:-1]), some[-1]]))} ({note})" if note else ", ".join(some)
        for note, some in said.items()
    )


def schemas_page() -> str:
    """Every JSON record with its fields, then the records within it."""
    text, written = SCHEMAS, {"Request"}
    for name, (record, what) in RECORDS.items():
        schema = json_schema(record)
        text += f"\n## {name}\n\n{_wrapped(_escaped(what) + '.')}\n" + _fields(schema, schema)
        for inner, own in schema.get("$defs", {}).items():
            if inner not in written:
                written.add(inner)
                text += (
                    f"\n### {inner}\n\n{_wrapped(_escaped(_first(own)))}\n".rstrip("\n") + "\n" + _fields(own, schema)
                )
    return text


def _fields(record: dict[str, Any], schema: dict[str, Any]) -> str:
    if "properties" not in record:
        return f"\nIt is written as {_kind(record)}.\n"
    lines = ["", "| field | type | meaning |", "|---|---|---|"]
    for name, field in record["properties"].items():
        what = field.get("description") or _first(schema["$defs"][field["$ref"].rpartition("/")[2]])
        lines.append(f"| `{name}` | {_kind(field)} | {_escaped(' '.join(what.split()))} |")
    return "\n".join(lines) + "\n"


def _said(record: dict[str, Any]) -> list[str]:
    """A record's first sentence as a paragraph; nothing where it has none."""
    return ["", _wrapped(_escaped(_first(record)))] if _first(record) else []


def _first(record: dict[str, Any]) -> str:
    """The first paragraph of a record's docstring."""
    return " ".join(str(record.get("description", "")).partition("\n\n")[0].split())


def _kind(field: dict[str, Any]) -> str:
    """A field's type in words; a record's name leads to its fields."""
    if "$ref" in field:
        name = field["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in field:
        return " or ".join(map(_kind, field["anyOf"]))
    if "enum" in field or "const" in field:
        return " or ".join(f"`{value}`" for value in field.get("enum", [field.get("const")]))
    if "prefixItems" in field:
        return f"({', '.join(map(_kind, field['prefixItems']))})"
    if field.get("type") == "array":
        return f"list of {_kind(field['items'])}" if field.get("items") else "list"
    if field.get("type") == "object":
        inner = field.get("additionalProperties")
        return f"object, each {_kind(inner)}" if isinstance(inner, dict) and inner else "object"
    return str(field.get("type", "any"))


def columns_page() -> str:
    """Every table with every column: type, unit, range, meaning."""
    return COLUMNS + "".join(_table(table) for table in SHOWN.values())


def _table(table: TableSchema) -> str:
    lines = ["", f"## {table.name}", "", f"`{table.file}`: a row is {table.row}.", ""]
    lines += [_wrapped(_escaped(NOTATION[table.name])), ""] if table.name in NOTATION else []
    lines += ["| column | type, unit, range | meaning |", "|---|---|---|"]
    every = list(table_columns(table))
    names = {column.name for column in every}
    shown = [each for each in every if each.name.removesuffix("_sem") not in names - {each.name}]
    return "\n".join([*lines, *(_row(table, column) for column in _without_means(table, shown))]) + "\n"


def _without_means(table: TableSchema, columns: Iterable[ColumnSchema]) -> Iterator[ColumnSchema]:
    """In layers.csv the means over heads are one row: each has the unit and range of the column of heads.csv."""
    heads = {f"mean_{each.name}" for each in catalogue() if each.table == "heads"} if table.name == "layers" else set()
    yield from (column for column in columns if column.name not in heads)
    if heads:
        what = "Mean of the column NAME of heads.csv over the heads of the layer, for every column that has an error."
        yield ColumnSchema("mean_NAME", "number", "that of NAME", "that of NAME", what)


def _row(table: TableSchema, column: ColumnSchema) -> str:
    origin = next((each for each in _defined(table) if each.name == column.name), None)
    name = f"`{column.name}`" if origin is None else f"[`{column.name}`](metrics.md#{anchor(origin)})"
    facts = ", ".join(filter(None, (column.type, column.unit, column.range)))
    return f"| {name} | {_escaped(facts)} | {_escaped(column.what)} |"


def _defined(table: TableSchema) -> Iterator[Column]:
    """The columns of a table that docs/metrics.md defines; sequences.parquet holds those of heads and layers."""
    tables = (*TITLES,) if table.name == "sequences" else (*table.measured, table.name)
    yield from (each for each in catalogue() if each.shown and each.table in tables)


def _escaped(text: str) -> str:
    """Text that Markdown shows as it is, within a table too."""
    return "".join(f"\\{letter}" if letter in r"\|*_[]<>`" else letter for letter in text)


def metrics_page() -> str:
    """Every measured column with its own heading, table by table."""
    symbols = "\n".join(_wrapped(f"- `{symbol}`: {what}.", "  ") for symbol, what in SYMBOLS.items())
    return METRICS + symbols + "\n" + "".join(_section(table, title) for table, title in TITLES.items())


def _section(table: str, title: str) -> str:
    columns = [column for column in catalogue() if column.table == table and column.shown]
    lines = ["", f"## {table}", "", _wrapped(_escaped(title) + ".")]
    if table in NOTATION:
        lines += ["", _wrapped(_escaped(NOTATION[table]))]
    return "\n".join([*lines, *map(_entry, columns)]) + "\n" if columns else ""


def _entry(column: Column) -> str:
    own = anchor(column) == column.name
    heading = column.name if own else f"{column.name} ({column.table})"
    facts = f"Unit: {column.unit}. Range: {column.range}. Per: {column.per}."
    source = f"Source: {_linked(column.source)}."
    return "\n".join(["", f"### {heading}", "", _wrapped(_escaped(column.formula)), "", _escaped(facts), "", source])


def _linked(source: str) -> str:
    """A source in which each arXiv number leads to the paper."""
    addresses = {paper.arxiv: paper.url for paper in cited_papers(source)}
    return NUMBER.sub(lambda found: f"[{found[0]}]({addresses[found[0]]})", source)


def _wrapped(text: str, indent: str = "") -> str:
    return textwrap.fill(text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
