"""Options that several commands share."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N, mps.")]
DeviceMap = Annotated[str | None, typer.Option(help="auto: spread the model over GPUs, CPU and disk.")]
Dtype = Annotated[str, typer.Option(help="auto (the checkpoint's), float32, bfloat16, float16.")]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub model.")]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run Python code that comes with the model.")
]
Metrics = Annotated[
    list[Path] | None,
    typer.Option(metavar="FILE.py", help="Run a Python file and measure the metrics it defines, too; may be repeated."),
]
AllowPickle = Annotated[bool, typer.Option("--allow-pickle", help="Load pickled weights where a model has no others.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


def slug(model: str) -> str:
    """The MODEL-SLUG of runs/MODEL-SLUG: a hub id with `--` for its slash, the last part of a path, `example-NAME`."""
    if Path(model).exists():
        model = Path(model).resolve().name
    return re.sub(r"[^\w.-]+", "-", model.replace("/", "--")).strip("-.") or "model"


def single(values: list[str] | None) -> str | list[str] | None:
    """The one value of an option that may be repeated, or all of them."""
    return values[0] if values is not None and len(values) == 1 else values or None


def parse_batch_size(text: str) -> int | None:
    from sinkscope.errors import SinkscopeError

    if text == "auto":
        return None
    try:
        return int(text)
    except ValueError:
        raise SinkscopeError(f"--batch-size {text!r}: write a number or auto") from None
