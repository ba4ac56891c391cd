"""`sinkscope figures`: all figures of a paper with one command."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sinkscope.cli.common import guarded, say
from sinkscope.cli.help import Command, Group
from sinkscope.cli.options import TrustRemoteCode
from sinkscope.cli.plot import TEXT, Style
from sinkscope.errors import SinkscopeError
from sinkscope.runs.folder import check_place, write_files

if TYPE_CHECKING:
    from sinkscope.runs.run import Run
    from sinkscope.trigger.evaluation import TriggerMaps

app = typer.Typer(cls=Group, no_args_is_help=True, rich_markup_mode=None)

Out = Annotated[Path, typer.Option("--out", "-o", metavar="FOLDER", help="Folder for the figures and captions.md.")]
Form = Annotated[str, typer.Option("--format", help="pdf, svg or png.")]
Size = Annotated[str, typer.Option(help="column (3.35 in wide) or page (6.75 in).")]
Title = Annotated[str, typer.Option(help="none: draw no titles; own: give each figure its own title.")]


@app.callback()
def figures() -> None:
    """Draw all figures of a paper from runs of your own, each with its caption.

    Example: sinkscope figures lampert runs/gemma -o figures
    """


def lampert(
    run: Annotated[list[Path], typer.Argument(help="Run folders, scanned with --measure.", metavar="RUN")],
    out: Out,
    form: Form = "pdf",
    size: Size = "page",
    title: Title = "none",
    text: Annotated[str, typer.Option(help="What the models of figures 13 and E.3 read.")] = TEXT,
    maps: Annotated[
        bool, typer.Option("--maps/--no-maps", help="Draw figures 13 and E.3: loads each run's model.")
    ] = True,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Draw figures 1 to 13 and E.3 of Lampert et al. (2605.08453) from runs; captions.md says what each shows.

    A figure whose table a run lacks is left out, and named. docs/figures.md says what could not be read of the paper.

    Example: sinkscope figures lampert runs/gemma runs/minilm -o figures --size page
    """
    from sinkscope.cli.plot import of_tables
    from sinkscope.present.figures.lampert import PLAN, captions
    from sinkscope.runs.run import load_run

    check_folder(out)
    style = style_of(form, size, title)
    runs: list[Run] = [load_run(folder) for folder in run]
    drawn: dict[str, tuple[bytes, str]] = {}
    refused: dict[str, str] = {}
    for planned in PLAN:
        if planned.figure == "gallery":
            continue
        try:
            drawn[f"{planned.stem}.{form}"] = of_tables(runs, planned.figure, None, style)
        except SinkscopeError as error:
            refused[planned.stem] = str(error)
    if maps:
        drawn |= _galleries(runs, text, trust_remote_code, style, refused)
    if not drawn:
        raise SinkscopeError(f"no figure can be drawn: {next(iter(refused.values()))}")
    for reason in dict.fromkeys(refused.values()):
        figures = ", ".join(figure for figure, why in refused.items() if why == reason)
        say(f"not drawn: {figures}: {reason}")
    save(out, drawn, lambda told: captions(told, refused))


def _galleries(
    runs: list[Run], text: str, trust: bool, style: Style, refused: dict[str, str]
) -> dict[str, tuple[bytes, str]]:
    """Every gallery of the paper that the runs have heads for, by file name; why others are not drawn, in `refused`."""
    from sinkscope.cli.plot import galleries
    from sinkscope.present.figures.lampert import PLAN
    from sinkscope.present.figures.maps import Pick, gallery_heads

    picks = {}
    for planned in PLAN:
        if planned.figure == "gallery":
            pick = Pick(planned.pick)
            try:
                for run in runs:
                    gallery_heads(run, pick=pick)
                picks[planned.stem] = pick
            except SinkscopeError as error:
                refused[planned.stem] = str(error)
    try:
        made = galleries(runs, [*picks.values()], text, trust, style)
    except SinkscopeError as error:
        refused |= dict.fromkeys(picks, str(error))
        return {}
    return {f"{stem}.{style.form}": content for stem, content in zip(picks, made, strict=True)}


def trigger(
    model: Annotated[
        list[str], typer.Argument(help="Folders of trigger models, or example:trigger-softmax.", metavar="MODEL")
    ],
    out: Out,
    length: Annotated[
        list[int] | None, typer.Option(help="Positions of a sequence; may be repeated. [default: the models']")
    ] = None,
    inputs: Annotated[int, typer.Option(help="Single sequences to draw.")] = 2,
    num_sequences: Annotated[int, typer.Option(help="Evaluation sequences for mean and deviation.")] = 1000,
    seed: Annotated[int, typer.Option(help="Seed that draws the sequences.")] = 0,
    form: Form = "pdf",
    size: Size = "column",
    title: Title = "none",
) -> None:
    """Draw the attention maps of trigger models (2603.11487, figs. 3 to 8): mean, standard deviation, single inputs.

    Models with the same number of layers stand side by side: softmax beside ReLU.

    Example: sinkscope figures trigger example:trigger-relu -o maps
    """
    from sinkscope.trigger.figure import SHOWN, captions, draw_trigger_maps

    for option, number in (("--inputs", inputs), ("--num-sequences", num_sequences)):
        if number < 1:
            raise SinkscopeError(f"{option} {number}: at least 1 is needed")
    if inputs > num_sequences:
        raise SinkscopeError(f"--inputs {inputs}: at most the {num_sequences:,} of --num-sequences can be drawn")
    check_folder(out)
    style = style_of(form, size, title)
    drawn = {}
    for layers, networks in by_layers(model).items():
        for positions in length or (None,):
            maps = [maps_of(network, positions, seed, num_sequences, inputs) for network in networks]
            for figure in SHOWN:
                name = f"trigger-{layers}-layer-T{maps[0].mean.shape[-1]}-{figure}.{form}"
                drawn[name] = draw_trigger_maps(maps, figure, form, style.size, style.title)
    save(out, drawn, captions)


def by_layers(models: list[str]) -> dict[int, list[Any]]:
    """The models of the task, by their number of layers. Raises SinkscopeError for any other model."""
    from sinkscope.checkpoints import LoadOptions, open_checkpoint
    from sinkscope.trigger.as_input import need_task

    networks: dict[int, list[Any]] = {}
    for name in models:
        network: Any = open_checkpoint(name, LoadOptions(device="cpu")).model
        networks.setdefault(need_task(network, name).config.num_hidden_layers, []).append(network)
    return networks


def maps_of(network: Any, length: int | None, seed: int, count: int, singles: int) -> TriggerMaps:
    """Maps of one model. Raises SinkscopeError as `trigger_maps` does."""
    from sinkscope.trigger.evaluation import trigger_maps

    return trigger_maps(network, length, seed, count, singles)


def style_of(form: str, size: str, title: str) -> Style:
    """How the figures are written. Raises SinkscopeError, before a model is loaded, for a format or a size of no
    figure, and for another title than own or none."""
    from sinkscope.present.figures.canvas import check_style

    check_style(form, size)
    if title not in ("own", "none"):
        raise SinkscopeError(f"--title {title!r}: own or none, for one title cannot fit all figures")
    return Style(form, size, None if title == "own" else title)


def check_folder(out: Path) -> None:
    """Raises SinkscopeError, before anything is drawn, where the figures cannot be written."""
    if out.exists() and not out.is_dir():
        raise SinkscopeError(f"{out} is a file: give another --out")
    check_place(out)


def save(out: Path, drawn: dict[str, tuple[bytes, str]], page: Callable[[dict[str, str]], str]) -> None:
    """Writes the figures and captions.md, all or none, and names them.

    Raises SinkscopeError where the folder cannot be written.
    """
    there = out.exists()
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SinkscopeError(f"cannot write into {out}: {error.strerror}") from None
    told = {name: caption for name, (_, caption) in drawn.items()}
    figures = {out / name: content for name, (content, _) in drawn.items()}
    try:
        write_files({**figures, out / "captions.md": page(told)})
    except SinkscopeError:
        if not there:
            out.rmdir()
        raise
    sys.stdout.write("".join(f"{out / name}\n" for name in (*drawn, "captions.md")))


app.command("lampert", cls=Command)(guarded(lampert))
app.command("trigger", cls=Command)(guarded(trigger))
