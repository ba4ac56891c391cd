"""`sinkscope quant`: what rounding costs, as a grid of bits and tokens kept in 16 bits."""

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


def quant(
    model: Model,
    run: RunFolder = None,
    bits: Annotated[str, typer.Option(metavar="B,B,...", help="Bits of keys and values.")] = "2,3,4,8",
    kept: Annotated[str, typer.Option(metavar="N,N,...", help="First tokens whose keys and values stay.")] = "0,1,4",
    acts: Annotated[
        str | None,
        typer.Option(metavar="B,B,...", help="Also round activations to these bits, by tensor and token."),
    ] = None,
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
    out: Annotated[Path | None, typer.Option(help="Folder of the results. [default: runs/MODEL-SLUG-quant]")] = None,
    resume: Resume = False,
    force: Force = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Measure what a model loses where its KV cache, or its activations, are rounded to few bits.

    Some first tokens stay in 16 bits; the control keeps as many random ones.

    Example: sinkscope quant example:gemma-3-270m --bits 3,4 --kept 0,1,4 --acts 8
    """
    from sinkscope.present.figures.arms import draw_grid
    from sinkscope.present.terminal.arms import render_grid

    options = {
        "run": run, "data": data, "seq_len": seq_len, "num_sequences": num_sequences, "draws": draws, "seed": seed,
        "device": device, "device_map": device_map, "dtype": dtype, "revision": revision,
        "trust_remote_code": trust_remote_code, "allow_pickle": allow_pickle,
    }  # fmt: skip
    grid = [
        f"kv:{width}" + (f"+first{count}" if count else "")
        for width in numbers(bits, "bits", 1)
        for count in numbers(kept, "kept")
    ]
    if acts is not None:
        grid += [f"acts:{width}/{step}" for width in numbers(acts, "acts", 2) for step in ("tensor", "token")]
    job = ArmsJob(out or Path("runs") / f"{slug(model)}-quant", resume, force, as_json, quiet)
    job.measure(
        model, grid, options, partial(draw_grid, kept="first tokens kept in 16 bits"),
        lambda result, written: render_grid(result, "kept", written),
    )  # fmt: skip
