"""Runs as arguments: a run folder is loaded, a model is scanned on the spot."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from sinkscope.cli.options import Metrics, TrustRemoteCode

if TYPE_CHECKING:
    from sinkscope.runs.request import Request
    from sinkscope.runs.run import Run


Device = Annotated[str, typer.Option(help="For a model scanned on the spot: auto, cpu, cuda, cuda:N, mps.")]
Dtype = Annotated[str, typer.Option(help="For a model scanned on the spot: auto, float32, bfloat16, float16.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Print no progress and no warnings.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


@dataclass(frozen=True)
class SpotScan:
    """How a model that is named in place of a run is scanned. Each field is an option of those commands."""

    device: Device = "auto"
    dtype: Dtype = "auto"
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


def is_run(name: str) -> bool:
    return (Path(name) / "manifest.json").is_file()


def open_run(name: str, spot: SpotScan, like: Request | None = None) -> Run:
    """Loads the run in a folder; any other name is a model, which is scanned for the text and columns of `like`."""
    if is_run(name):
        from sinkscope.runs.run import load_run

        return load_run(name)
    from sinkscope.cli.common import say
    from sinkscope.engine.scan import scan_request
    from sinkscope.present.terminal.progress import progress_bar
    from sinkscope.runs.request import make_request

    loading: dict[str, Any] = {
        "device": spot.device, "dtype": spot.dtype, "trust_remote_code": spot.trust_remote_code,
    }  # fmt: skip
    request = make_request(model=name, **loading) if like is None else like.of_model(name, **loading)
    with progress_bar(spot.quiet) as progress:
        run = scan_request(request, metrics=spot.metrics or [], progress=progress)
    for warning in [] if spot.quiet else run.manifest.warnings:
        say(f"warning: {name}: {warning}")
    return run
