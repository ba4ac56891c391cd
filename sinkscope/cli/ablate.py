"""`sinkscope ablate`: zeroes the heads that a score calls dormant and measures what the model loses."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from sinkscope.cli.arms_job import resumable
from sinkscope.cli.common import say
from sinkscope.cli.early import check_early
from sinkscope.cli.options import AllowPickle, Device, DeviceMap, Dtype, Revision, TrustRemoteCode, slug
from sinkscope.cli.places import free_folder, unfinished_folder


def ablate(
    model: Annotated[str, typer.Argument(help="Hub id, folder, .gguf file, or example:NAME.", metavar="MODEL")],
    run: Annotated[Path, typer.Option(help="Run folder of this model, whose scores choose the heads.", metavar="RUN")],
    score: Annotated[
        list[str] | None,
        typer.Option(
            help="Column of heads.csv that chooses the heads, and its dormant end: NAME, NAME:low or NAME:high; "
            "may be repeated. [default: honor]"
        ),
    ] = None,
    fraction: Annotated[str, typer.Option(help="Shares of all heads to zero.")] = "0.05,0.1,0.2",
    tokens: Annotated[str | None, typer.Option(help="first: also hide the first token from all later queries.")] = None,
    data: Annotated[
        str, typer.Option(metavar="SPEC", help="Text to measure the loss on, without what the run read.")
    ] = ("prose"),
    seq_len: Annotated[int | None, typer.Option(help="Tokens per sequence. [default: the run's]")] = None,
    num_sequences: Annotated[int, typer.Option(help="Sequences; the loss is always measured on the same ones.")] = 16,
    draws: Annotated[int, typer.Option(help="Random choices of equally many heads, as the control.")] = 5,
    seed: Annotated[int, typer.Option(help="Seed that draws the documents and the random heads.")] = 0,
    device: Device = "auto",
    device_map: DeviceMap = None,
    dtype: Dtype = "auto",
    revision: Revision = None,
    trust_remote_code: TrustRemoteCode = False,
    allow_pickle: AllowPickle = False,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the results. [default: runs/MODEL-SLUG-ablation, with a number where that is there]"
        ),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with an interrupted ablation.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace a finished ablation.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print ablation.json alone to stdout.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print errors only: no progress, warnings or table.")] = False,
) -> None:
    """Zero the heads that a score calls dormant and measure the loss on text the run did not read.

    The control zeroes equally many random heads.

    Example: sinkscope ablate example:gemma-3-270m --run runs/gemma --score honor --score bos_mass --fraction 0.05,0.1
    """
    from sinkscope.experiments.ablation.result import ABLATION_FOLDER
    from sinkscope.experiments.arms.head_choice import read_fractions

    fractions = read_fractions(fraction)
    place = Path("runs") / f"{slug(model)}-ablation"
    target = out or (place if force else unfinished_folder(place) if resume else free_folder(place))
    ABLATION_FOLDER.check(target, force, resume)
    check_early(
        [model], data=[data], seq_len=seq_len, num_sequences=num_sequences, seed=seed, dtype=dtype, revision=revision,
        allow_pickle=allow_pickle,
    )  # fmt: skip
    from sinkscope.experiments.ablation.experiment import ablate as measure
    from sinkscope.present.figures.ablation import draw_ablation
    from sinkscope.present.figures.canvas import available
    from sinkscope.present.terminal.ablation import render_ablation
    from sinkscope.present.terminal.progress import progress_bar

    with progress_bar(quiet) as progress, resumable():
        result = measure(
            model, run, scores=score or ["honor"], fractions=fractions, tokens=tokens, data=data, seq_len=seq_len,
            num_sequences=num_sequences, draws=draws, seed=seed, device=device, device_map=device_map, dtype=dtype,
            revision=revision, trust_remote_code=trust_remote_code, allow_pickle=allow_pickle, shards=target,
            resume=resume, progress=progress,
        )  # fmt: skip
    if not available():
        say("no figure: it needs matplotlib (pip install 'sinkscope[figures]')")
    written = result.save(target, force, draw_ablation if available() else None, resume=True)
    if not quiet:
        for warning in result.warnings:
            say(f"warning: {warning}")
    if as_json:
        from sinkscope.runs.strict_json import to_json

        sys.stdout.write(to_json(result.as_dict()))
    elif not quiet:
        sys.stdout.write(render_ablation(result, written))
