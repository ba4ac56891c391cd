"""`sinkscope plot`: draws figures for papers."""

from __future__ import annotations

import io
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sinkscope.cli.common import check_writable, put, say
from sinkscope.cli.options import TrustRemoteCode
from sinkscope.errors import SinkscopeError, did_you_mean
from sinkscope.present.figures import SINGLE as TABLES_OF_ONE
from sinkscope.present.text import wrapped
from sinkscope.runs.folder import write_file
from sinkscope.runs.questions import QUESTIONS

if TYPE_CHECKING:
    import pandas as pd

    from sinkscope.experiments.attention_map import HeadMap
    from sinkscope.present.figures.maps import Pick
    from sinkscope.runs.run import Run

TRUST = "--trust-remote-code"
OPTIONS: dict[str, tuple[str, ...]] = {
    "--domain": TABLES_OF_ONE,
    "--metric": ("heatmap",),
    "--layer": ("attention",),
    "--head": ("attention",),
    "--length": ("attention",),
    "--text": ("attention", "gallery"),
    "--pick": ("gallery",),
    "--seed": ("gallery",),
    TRUST: ("attention", "gallery"),
}
"""The figures that take each option."""
SINGLE = (*TABLES_OF_ONE, "attention")
"""Figures of one run."""
SEVERAL = (*(name for question in QUESTIONS.values() for name in question.figures), "gallery", "trajectory")
"""Figures over several runs."""
PROFILE = "profile"
"""The figure that takes one run or several."""
TEXT = (
    "The ferry bell rang twice before the rope was loose, and the old man on the pier lifted his hat to nobody we "
    "could see."
)
"""What the gallery's models read where no text is given."""


def plot(
    run: Annotated[list[Path], typer.Argument(help="Run folder; some figures take several.", metavar="RUN")],
    figure: Annotated[
        str,
        typer.Option(help=f"Of one run: {', '.join(SINGLE)}. Over several: {', '.join((*SEVERAL, PROFILE))}."),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="File to write: .png, .svg or .pdf.")],
    size: Annotated[str, typer.Option(help="column (3.35 in wide) or page (6.75 in).")] = "column",
    title: Annotated[
        str | None, typer.Option(help="The figure's title; none draws no title. [default: model and text]")
    ] = None,
    metric: Annotated[
        str | None, typer.Option(help="With --figure heatmap: the column of heads.csv to show. [default: bos_mass]")
    ] = None,
    domain: Annotated[
        str | None,
        typer.Option(help="Dataset to draw if the run has several: a name of the column domain. [default: the first]"),
    ] = None,
    layer: Annotated[int | None, typer.Option(help="With --figure attention: the layer.")] = None,
    head: Annotated[int | None, typer.Option(help="With --figure attention: the head.")] = None,
    text: Annotated[
        str | None,
        typer.Option(
            help="With --figure attention or gallery: the text that the run's model, which is loaded again, reads."
        ),
    ] = None,
    pick: Annotated[
        str | None,
        typer.Option(
            help="With --figure gallery: heads to draw: clearest, random, sink+copy or diagonal+copy, the last "
            "two of a run with --measure switch. [default: clearest]"
        ),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="With --pick random: draws the heads. [default: 0]")] = None,
    length: Annotated[
        list[int] | None,
        typer.Option(help="With --figure attention: draw the first N tokens only; repeat for maps side by side."),
    ] = None,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Draw a figure as PNG, SVG or PDF, and print its caption. The same runs always give the same bytes.

    Example: sinkscope plot runs/gemma --figure heatmap -o heatmap.pdf --size page
    """
    options = {
        "--metric": metric, "--domain": domain, "--layer": layer, "--head": head, "--text": text,
        "--length": length or None, "--pick": pick, "--seed": seed, TRUST: trust_remote_code or None,
    }  # fmt: skip
    if figure not in (*SINGLE, *SEVERAL):
        names = (*SINGLE, *SEVERAL)
        raise SinkscopeError(f"--figure {figure!r}: choose one of {', '.join(names)}{did_you_mean(figure, names)}")
    refuse_foreign(figure, [name for name, value in options.items() if value is not None])
    many = len(run) > 1
    if figure in SINGLE and many and figure != PROFILE:
        names = (*SEVERAL, PROFILE)
        raise SinkscopeError(f"--figure {figure} shows one run: name one. Over several: {', '.join(names)}")
    if figure == PROFILE and many and domain is not None:
        raise SinkscopeError("--domain belongs to figures of one run: a profile of several runs draws all their texts")
    if text is not None and not text.strip():
        raise SinkscopeError(f"--text {text!r}: a text that the model can read is needed")
    check_writable(out)
    which, style = "", style_of(out, size, title)
    if figure == "trajectory":
        content, caption = trajectory(run, style)
    elif figure == "attention":
        if layer is None or head is None or text is None:
            raise SinkscopeError("--figure attention needs --layer, --head and --text")
        content, caption = attention(_loaded(run)[0], [(layer, head)], text, length or [], trust_remote_code, style)
    elif figure == "gallery":
        chosen = picked(pick, seed)
        [(content, caption)] = galleries(_loaded(run), [chosen], text or TEXT, trust_remote_code, style)
    else:
        loaded = _loaded(run)
        content, caption = of_tables(loaded, figure, metric, style, domain)
        which = of_which(loaded[0], domain) if figure in SINGLE and not many else ""
    write_file(out, content)
    say(f"wrote {out}{which}")
    put(as_read(caption, sys.stdout.isatty()))


def as_read(caption: str, on_terminal: bool) -> str:
    """The caption in lines of a terminal, or in one line for a file: a terminal itself would cut words."""
    return "\n".join(wrapped(caption) if on_terminal else [caption]) + "\n"


@dataclass(frozen=True)
class Style:
    """How a figure is written: its format, size and title."""

    form: str
    size: str
    title: str | None


def style_of(out: Path, size: str, title: str | None) -> Style:
    """How a figure is written to a file. Raises SinkscopeError, before a model is loaded, for an extension or a size of
    no figure."""
    from sinkscope.present.figures.canvas import FORMATS, check_style

    form = out.suffix.lower().lstrip(".")
    if not form:
        raise SinkscopeError(f"--out {out}: the extension says how the figure is written; give .{', .'.join(FORMATS)}")
    check_style(form, size)
    return Style(form, size, title)


def of_which(run: Run, domain: str | None) -> str:
    """Says which text is drawn where a run has several and none was named; empty otherwise."""
    from sinkscope.runs.per_sequence import domains

    first, *others = [data.domain for data in domains(run)]
    return f" of {first} alone; --domain draws {', '.join(others)}" if others and domain is None else ""


def refuse_foreign(figure: str, given: list[str]) -> None:
    """Raises SinkscopeError for an option of another figure: ignoring it would draw what nobody asked for."""
    for name in given:
        if figure not in OPTIONS[name]:
            raise SinkscopeError(f"{name} belongs to --figure {' and '.join(OPTIONS[name])}, not to {figure}")


def of_tables(
    runs: list[Run], figure: str, metric: str | None, style: Style, domain: str | None = None
) -> tuple[bytes, str]:
    """A figure that needs the runs' tables alone, and its caption."""
    from sinkscope.present.figures.run import draw
    from sinkscope.present.figures.several import caption, draw_several

    if figure == PROFILE and len(runs) > 1:
        from sinkscope.present.figures.profiles import draw_profiles

        return draw_profiles(runs, style.form, style.size, style.title)
    if figure in SEVERAL:
        return draw_several(runs, figure, style.form, style.size, style.title)
    content = draw(runs[0], figure, style.form, style.size, metric, style.title, domain)
    return content, caption(runs[0], figure, metric, domain)


def attention(
    run: Run, heads: list[tuple[int, int]], text: str, lengths: list[int], trust: bool, style: Style
) -> tuple[bytes, str]:
    """One head's maps at each length, and the caption."""
    from sinkscope.present.figures.maps import draw_attention

    maps = maps_of(run, text, heads, lengths, trust)
    return draw_attention(run, maps, text, style.form, style.size, style.title)


def picked(how: str | None, seed: int | None) -> Pick:
    """How heads are picked. Raises SinkscopeError for a word that is none, and for a seed that draws nothing."""
    from sinkscope.present.figures.maps import Pick

    if seed is not None and how != "random":
        raise SinkscopeError("--seed goes with --pick random")
    if seed is not None and seed < 0:
        raise SinkscopeError(f"--seed {seed}: a seed is 0 or more")
    return Pick(how or "clearest", seed or 0)


def galleries(runs: list[Run], picks: list[Pick], text: str, trust: bool, style: Style) -> list[tuple[bytes, str]]:
    """The maps of the heads that each of `picks` chooses of each run, and the caption. A model is loaded once."""
    from sinkscope.present.figures.maps import draw_gallery, gallery_heads

    chosen = [[[(layer, head) for layer, head, _ in gallery_heads(run, pick=pick)] for pick in picks] for run in runs]
    maps = []
    for run, by_pick in zip(runs, chosen, strict=True):
        heads = list(dict.fromkeys(head for wanted in by_pick for head in wanted))
        maps.append(dict(zip(heads, maps_of(run, text, heads, [], trust), strict=True)))
    rows = [
        [(run, [of[head] for head in by_pick[number]]) for run, of, by_pick in zip(runs, maps, chosen, strict=True)]
        for number in range(len(picks))
    ]
    return [
        draw_gallery(row, text, style.form, style.size, style.title, pick)
        for row, pick in zip(rows, picks, strict=True)
    ]


def maps_of(run: Run, text: str, heads: list[tuple[int, int]], lengths: list[int], trust: bool) -> list[HeadMap]:
    """The maps of the run's own model. Raises SinkscopeError as `attention_maps` does."""
    from sinkscope.experiments.attention_map import attention_maps

    model = run.manifest.model
    layers = [site.layer for site in run.manifest.attention]
    return attention_maps(
        model.id, text, layers, heads, lengths, dtype=model.dtype or "auto", revision=model.revision,
        trust_remote_code=trust, adapter=None if model.adapter is None else model.adapter.path,
        weights=model.weights_sha256,
    )  # fmt: skip


def trajectory(folders: list[Path], style: Style) -> tuple[bytes, str]:
    """Sinks over one or several trainings, from the folders that `track` wrote, and the caption."""
    from sinkscope.present.figures.trajectory import draw_trajectories

    named = {folder.resolve().name: _trajectory(folder) for folder in folders}
    if len(named) < len(folders):
        raise SinkscopeError("two folders have the same name: rename one, for the panels are named after them")
    return draw_trajectories(named, style.form, style.size, style.title)


def _trajectory(folder: Path) -> pd.DataFrame:
    import pandas as pd

    path = folder / "trajectory.csv"
    kinds = {"step": "Int64", "layer": "Int64", "head": "Int64", "value": "float64", "sem": "float64"}
    try:
        text = path.read_bytes()
        table = pd.read_csv(io.BytesIO(text), dtype=kinds)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "no table, or a damaged one"
        raise SinkscopeError(f"cannot read {path}: {reason}; `sinkscope track` writes it into its --out") from None
    if not text.endswith(b"\n"):
        raise SinkscopeError(f"{path} is cut off: run `sinkscope track` again")
    missing = {"step", "domain", "stream", "level", "layer", "head", "metric", "value", "sem"} - set(table)
    if missing or table.empty:
        raise SinkscopeError(f"{path} is no trajectory of `sinkscope track`: name its --out folder")
    return table


def _loaded(folders: list[Path]) -> list[Run]:
    from sinkscope.runs.run import load_run

    return [load_run(folder) for folder in folders]
