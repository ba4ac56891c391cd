"""`sinkscope export`: tables for papers, lists for tools."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sinkscope.cli.common import say
from sinkscope.runs.folder import check_writable, write_file

if TYPE_CHECKING:
    from sinkscope.runs.paper_table import PaperTable


FORMATS = ("latex", "markdown", "csv", "parquet", "bibtex")


def export(
    runs: Annotated[list[Path], typer.Argument(help="Run folders; several make a table of models.", metavar="RUN...")],
    form: Annotated[str, typer.Option("--format", help=f"{', '.join(FORMATS)}.")] = "markdown",
    level: Annotated[
        str | None, typer.Option(help="Rows: head, layer, model. [default: layer for one run, model for several]")
    ] = None,
    metric: Annotated[list[str] | None, typer.Option(help="Column; repeat it. [default: a few for each level]")] = None,
    heads: Annotated[
        str | None, typer.Option(help="dormant or sink: JSON of layer -> heads instead of a table.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", metavar="FILE", help="Write here, not to stdout.")] = None,
) -> None:
    """Print a run, or several, as a paper's table; or the sources of its metrics; or the list of dormant heads.

    Example: sinkscope export runs/gemma --format latex --metric bos_mass --metric entropy -o table.tex
    """
    from sinkscope.errors import SinkscopeError
    from sinkscope.runs.run import load_run

    if form not in FORMATS:
        raise SinkscopeError(f"--format {form!r}: one of {', '.join(FORMATS)}")
    if form == "parquet" and out is None and heads is None:
        raise SinkscopeError("--format parquet is binary: name a file with -o")
    check_writable(out)
    loaded = [load_run(path) for path in runs]
    if heads is not None:
        from sinkscope.runs.paper_table import selected_heads
        from sinkscope.runs.strict_json import to_json

        if len(loaded) > 1:
            raise SinkscopeError("--heads takes one run")
        content: str | bytes = to_json(selected_heads(loaded[0], heads))
    else:
        from sinkscope.runs.paper_table import paper_table

        content = render(paper_table(loaded, level, metric), form)
    if out is not None:
        write_file(out, content)
        say(f"wrote {out}")
    else:
        sys.stdout.write(content if isinstance(content, str) else content.decode())


def render(table: PaperTable, form: str) -> str | bytes:
    """The table in one of FORMATS."""
    from sinkscope import __version__

    if form == "csv":
        return table.frame.to_csv(index=False, float_format="%.9g", lineterminator="\n")
    if form == "parquet":
        buffer = io.BytesIO()
        table.frame.to_parquet(buffer, index=False)
        return buffer.getvalue()
    if form == "latex":
        from sinkscope.present.paper.latex import latex_table

        return latex_table(table)
    from sinkscope.present.paper.markdown import bibtex, markdown_table

    return markdown_table(table) if form == "markdown" else bibtex(table, __version__)
