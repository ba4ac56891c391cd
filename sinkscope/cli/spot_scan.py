"""The options of commands that take a model in place of a run folder, and scan it on the spot."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from sinkscope.cli.help import SPOT, WRITTEN
from sinkscope.cli.options import ADAPTER, DEVICES, DTYPES, METRICS, TRUST


@dataclass(frozen=True)
class SpotScan:
    """How a model that is named in place of a run is scanned. Each field is an option of those commands."""

    device: Annotated[str, typer.Option(metavar="DEVICE", help=DEVICES, rich_help_panel=SPOT)] = "auto"
    dtype: Annotated[str, typer.Option(metavar="DTYPE", help=DTYPES, rich_help_panel=SPOT)] = "auto"
    adapter: Annotated[Path | None, typer.Option(metavar="DIR", help=ADAPTER, rich_help_panel=SPOT)] = None
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code", help=TRUST, rich_help_panel=SPOT)] = False
    metrics: Annotated[list[Path] | None, typer.Option(metavar="FILE.py", help=METRICS, rich_help_panel=SPOT)] = None
    quiet: Annotated[
        bool, typer.Option("--quiet", help="Print no progress and no warnings.", rich_help_panel=WRITTEN)
    ] = False
