"""`sinkscope atlas`: shows many runs side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sinkscope.cli.common import check_writable, say
from sinkscope.runs.folder import write_files


def atlas(
    runs: Annotated[list[Path], typer.Argument(help="Run folders.", metavar="RUN")],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="The HTML file to write.")] = Path(
        "atlas.html"
    ),
    csv: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the same rows as CSV.")] = None,
) -> None:
    """Show many runs in one table that can be sorted and searched: an HTML page that needs no network.

    Published numbers of a model stand beside its own where T, text and first token are the same.

    Example: sinkscope atlas runs/base runs/finetuned runs/minilm -o atlas.html --csv atlas.csv
    """
    from sinkscope.present.html.atlas import render_atlas
    from sinkscope.present.paper.formats.csv import without_formulas
    from sinkscope.runs.atlas import atlas as compiled
    from sinkscope.runs.atlas import atlas_table, left_out
    from sinkscope.runs.run import load_run

    check_writable(out, csv)
    loaded = [load_run(path) for path in runs]
    entries = compiled(loaded)
    for line in left_out(loaded):
        say(f"warning: {line}")
    page = render_atlas(entries)
    files: dict[Path, str | bytes] = {}
    if csv is not None:
        table = without_formulas(atlas_table(entries))
        files[csv] = table.to_csv(index=False, float_format="%.9g", lineterminator="\n")
    write_files({**files, out: page})
    if csv is not None:
        say(f"wrote {csv}")
    say(f"wrote {out} ({len(page.encode()) / 1e6:.2f} MB)")
