"""`sinkscope card`: writes a run for a model card."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from sinkscope.cli.common import check_writable, say
from sinkscope.errors import SinkscopeError, did_you_mean
from sinkscope.runs.folder import write_files

PARTS = ("all", "markdown", "yaml")


def card(
    run: Annotated[Path, typer.Argument(help="Run folder.", metavar="RUN")],
    part: Annotated[
        str, typer.Option(help="all, markdown (only the block) or yaml (only the model-index).", metavar="PART")
    ] = "all",
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FILE", help="Write to FILE instead of stdout.")
    ] = None,
    badge: Annotated[Path | None, typer.Option(metavar="FILE.svg", help="Write a badge for a README, too.")] = None,
) -> None:
    """Print what a model card says of a run: the model-index for its YAML head, then a Markdown block.

    Example: sinkscope card runs/gemma -o card.md
    """
    from sinkscope.present.card import markdown_block, model_index, render_badge, render_card
    from sinkscope.runs.run import load_run

    if part not in PARTS:
        raise SinkscopeError(f"--part {part!r}: choose one of {', '.join(PARTS)}{did_you_mean(part, PARTS)}")
    if badge is not None and badge.suffix.lower() not in ("", ".svg"):
        raise SinkscopeError(f"--badge {badge}: a badge is an SVG image; name it FILE.svg")
    check_writable(out, badge)
    loaded = load_run(run)
    text = {"all": render_card, "markdown": markdown_block, "yaml": model_index}[part](loaded)
    files: dict[Path, str | bytes] = {} if badge is None else {badge: render_badge(loaded)}
    write_files(files if out is None else {**files, out: text})
    for path in (badge, out):
        if path is not None:
            say(f"wrote {path}")
    if out is None:
        sys.stdout.write(text)
