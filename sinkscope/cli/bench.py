"""`sinkscope bench`: measures what a scan costs on this machine."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from sinkscope.cli.early import check_early
from sinkscope.cli.options import AllowPickle, Device, DeviceMap, Dtype, Revision, TrustRemoteCode, parse_batch_size


def bench(
    model: Annotated[str, typer.Argument(help="Hub id, folder, .gguf file, or example:NAME.", metavar="MODEL")],
    seq_len: Annotated[int | None, typer.Option(help="Tokens per sequence, at least 32. [default: 1024]")] = None,
    batch_size: Annotated[
        str, typer.Option(metavar="N", help="Sequences per forward pass; auto takes as many as a scan.")
    ] = "auto",
    rounds: Annotated[int, typer.Option(help="Timed rounds; each times all contenders.")] = 5,
    device: Device = "auto",
    device_map: DeviceMap = None,
    dtype: Dtype = "auto",
    revision: Revision = None,
    trust_remote_code: TrustRemoteCode = False,
    allow_pickle: AllowPickle = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON to stdout.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print no progress.")] = False,
) -> None:
    """Time a scan against a plain forward pass, the backbone alone and eager attention maps.

    Also prints peak memory, and the longest sequence that would fit.

    Example: sinkscope bench example:gemma-3-270m --seq-len 2048
    """
    size = parse_batch_size(batch_size)
    check_early([model], dtype=dtype, revision=revision, allow_pickle=allow_pickle)
    from sinkscope.checkpoints import LoadOptions
    from sinkscope.experiments.bench import bench as measure
    from sinkscope.present.terminal.bench import render_bench
    from sinkscope.present.terminal.progress import progress_bar
    from sinkscope.runs.schema.base import to_json

    options = LoadOptions(revision, device, device_map, dtype, trust_remote_code, allow_pickle)
    with progress_bar(quiet) as progress:
        speed = measure(
            model, seq_len=seq_len, batch_size=size, rounds=rounds, options=options, progress=progress
        )  # fmt: skip
    sys.stdout.write(to_json(speed.as_dict()) if as_json else render_bench(speed))
