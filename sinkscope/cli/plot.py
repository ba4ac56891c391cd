"""`sinkscope plot`: draws figures for papers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sinkscope.cli.common import check_writable, say
from sinkscope.cli.options import TrustRemoteCode
from sinkscope.errors import SinkscopeError
from sinkscope.runs.folder import write_file

if TYPE_CHECKING:
    from sinkscope.runs.run import Run

TRUST = "--trust-remote-code"
FIGURE_OF = {"--metric": "heatmap"} | dict.fromkeys(("--layer", "--head", "--text", TRUST), "attention")
"""The one figure that takes each option."""


def plot(
    run: Annotated[Path, typer.Argument(help="Run folder.", metavar="RUN")],
    figure: Annotated[str, typer.Option(help="heatmap, profile, length, scatter or attention.")],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="File to write: .png, .svg or .pdf.")],
    size: Annotated[str, typer.Option(help="column (3.35 in wide) or page (6.75 in).")] = "column",
    metric: Annotated[
        str | None, typer.Option(help="Heatmap: the column of heads.csv to show. [default: bos_mass]")
    ] = None,
    domain: Annotated[
        str | None, typer.Option(help="Text to draw where the run has several. [default: the first]")
    ] = None,
    layer: Annotated[int | None, typer.Option(help="Attention: the layer.")] = None,
    head: Annotated[int | None, typer.Option(help="Attention: the head.")] = None,
    text: Annotated[str | None, typer.Option(help="Attention: a short text, which the run's model reads.")] = None,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Draw a figure of a run as PNG, SVG or PDF. The same run always gives the same bytes.

    Example: sinkscope plot runs/gemma --figure heatmap -o heatmap.pdf --size page
    """
    from sinkscope.present.figures.run import draw, draw_attention
    from sinkscope.runs.run import load_run

    given = {"--metric": metric, "--layer": layer, "--head": head, "--text": text, TRUST: trust_remote_code or None}
    refuse_foreign(figure, [name for name, value in given.items() if value is not None])
    check_writable(out)
    loaded = load_run(run)
    form = out.suffix.lower().lstrip(".")
    if figure != "attention":
        write_file(out, draw(loaded, figure, form, size, metric, domain))
        say(f"wrote {out}{of_which(loaded, domain)}")
        return
    if layer is None or head is None or text is None:
        raise SinkscopeError("--figure attention needs --layer, --head and --text")
    from sinkscope.experiments.attention_map import attention_map

    model = loaded.manifest.model
    layers = [site.layer for site in loaded.manifest.attention]
    weights, tokens = attention_map(
        model.id, text, layers, layer, head, dtype=model.dtype or "auto", revision=model.revision,
        trust_remote_code=trust_remote_code, adapter=None if model.adapter is None else model.adapter.path,
    )  # fmt: skip
    write_file(out, draw_attention(loaded, weights, tokens, layer, head, form, size))
    say(f"wrote {out}")


def of_which(run: Run, domain: str | None) -> str:
    """Says which text is drawn where a run has several and none was named; empty otherwise."""
    from sinkscope.runs.per_sequence import domains

    first, *others = [each.domain for each in domains(run)]
    return f" of {first} alone; --domain draws {', '.join(others)}" if others and domain is None else ""


def refuse_foreign(figure: str, given: list[str]) -> None:
    """Raises SinkscopeError for an option of another figure: ignoring it would draw what nobody asked for."""
    for name in given:
        if FIGURE_OF[name] != figure:
            raise SinkscopeError(f"{name} belongs to --figure {FIGURE_OF[name]}, not to {figure}")
