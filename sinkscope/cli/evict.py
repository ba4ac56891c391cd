"""`sinkscope evict`: what a cache may forget, as a grid of windows and sinks."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from sinkscope.cli.arms_job import (
    ArmsJob,
    AsJson,
    Data,
    Draws,
    Force,
    Model,
    NumSequences,
    Quiet,
    Resume,
    RunFolder,
    Seed,
    SeqLen,
    numbers,
)
from sinkscope.cli.options import AllowPickle, Device, DeviceMap, Dtype, Revision, TrustRemoteCode, slug
from sinkscope.errors import SinkscopeError

LAYERS = {"full": "/full", "all": ""}


def evict(
    model: Model,
    run: RunFolder = None,
    window: Annotated[str, typer.Option(metavar="W,W,...", help="Last keys that every query sees.")] = "64,256",
    sinks: Annotated[str, typer.Option(metavar="S,S,...", help="First keys that stay visible.")] = "0,1,2,4,8",
    layers: Annotated[str, typer.Option(help="full: layers without a window of their own; or all.")] = "full",
    data: Data = "prose",
    seq_len: SeqLen = None,
    num_sequences: NumSequences = 16,
    draws: Draws = 2,
    seed: Seed = 0,
    device: Device = "auto",
    device_map: DeviceMap = None,
    dtype: Dtype = "auto",
    revision: Revision = None,
    trust_remote_code: TrustRemoteCode = False,
    allow_pickle: AllowPickle = False,
    out: Annotated[Path | None, typer.Option(help="Folder of the results. [default: runs/MODEL-SLUG-evict]")] = None,
    resume: Resume = False,
    force: Force = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Measure what a model loses where its cache keeps only a window and a few first tokens (StreamingLLM).

    The control keeps as many random tokens. Masks stand for the cache, so that one pass measures every position.

    Example: sinkscope evict example:gemma-3-270m --window 256 --sinks 0,1,4 --seq-len 1024
    """
    from sinkscope.present.figures.arms import draw_grid
    from sinkscope.present.terminal.arms import render_grid

    if layers not in LAYERS:
        raise SinkscopeError(f"--layers {layers!r}: one of {', '.join(LAYERS)}")
    options = {
        "run": run, "data": data, "seq_len": seq_len, "num_sequences": num_sequences, "draws": draws, "seed": seed,
        "device": device, "device_map": device_map, "dtype": dtype, "revision": revision,
        "trust_remote_code": trust_remote_code, "allow_pickle": allow_pickle,
    }  # fmt: skip
    grid = [
        f"window:{size}+{count}{LAYERS[layers]}"
        for size in numbers(window, "window", 1)
        for count in numbers(sinks, "sinks")
    ]
    job = ArmsJob(out or Path("runs") / f"{slug(model)}-evict", resume, force, as_json, quiet)
    job.measure(
        model, grid, options, partial(draw_grid, kept="first tokens kept"),
        lambda result, written: render_grid(result, "sinks", written),
    )  # fmt: skip
