"""Options of every command that loads a model by name."""

from __future__ import annotations

from typing import Annotated

import typer

Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N, mps.")]
DeviceMap = Annotated[str | None, typer.Option(help="auto: spread the model over GPUs, CPU and disk.")]
Dtype = Annotated[str, typer.Option(help="auto (the checkpoint's), float32, bfloat16, float16.")]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub model.")]
TrustRemoteCode = Annotated[bool, typer.Option("--trust-remote-code", help="Run Python code of the model's.")]
AllowPickle = Annotated[bool, typer.Option("--allow-pickle", help="Load pickled weights where there are no others.")]
