"""The options of commands that take a model in place of a run folder, and scan it on the spot."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Annotated, Any, get_type_hints

import typer

from sinkscope.cli.options import Adapter, Metrics, TrustRemoteCode

Device = Annotated[str, typer.Option(help="For a model scanned on the spot: auto, cpu, cuda, cuda:N, mps.")]
Dtype = Annotated[str, typer.Option(help="For a model scanned on the spot: auto, float32, bfloat16, float16.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Print no progress and no warnings.")]


@dataclass(frozen=True)
class SpotScan:
    """How a model that is named in place of a run is scanned. Each field is an option of those commands."""

    device: Device = "auto"
    dtype: Dtype = "auto"
    adapter: Adapter = None
    trust_remote_code: TrustRemoteCode = False
    metrics: Metrics = None
    quiet: Quiet = False


def with_spot_scan(command: Callable[..., None]) -> Callable[..., None]:
    """Replaces a command's parameter `spot: SpotScan` by one command-line option for each field of SpotScan."""
    hints = get_type_hints(SpotScan, include_extras=True)

    @functools.wraps(command)
    def run(**given: Any) -> None:
        command(spot=SpotScan(**{name: given.pop(name) for name in hints}), **given)

    signature = inspect.signature(command, eval_str=True)
    named = inspect.Parameter.KEYWORD_ONLY
    kept = [each.replace(kind=named) for name, each in signature.parameters.items() if name != "spot"]
    options = [
        inspect.Parameter(field.name, named, default=field.default, annotation=hints[field.name])
        for field in fields(SpotScan)
    ]
    run.__signature__ = signature.replace(parameters=[*kept, *options])  # type: ignore[attr-defined]
    return run
