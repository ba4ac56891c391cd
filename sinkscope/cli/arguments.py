"""Runs as arguments: a run folder is loaded, a model is scanned on the spot."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sinkscope.cli.spot_scan import SpotScan
    from sinkscope.runs.request import Request
    from sinkscope.runs.run import Run


def is_run(name: str) -> bool:
    """Whether a folder holds a run, also one whose files a killed process has not yet moved into place."""
    from sinkscope.runs.whole import COMMITTED

    return (Path(name) / "manifest.json").is_file() or (Path(name) / COMMITTED).is_dir()


def open_run(name: str, spot: SpotScan, like: Request | None = None) -> Run:
    """Loads the run in a folder; any other name is a model, which is scanned for the text and columns of `like`.

    Raises SinkscopeError where an adapter is to be put into the model of a run, which is measured already.
    """
    if is_run(name):
        from sinkscope.errors import SinkscopeError
        from sinkscope.runs.run import load_run

        if spot.adapter is not None:
            raise SinkscopeError(f"--adapter goes with a model that is scanned on the spot, and {name} is a run folder")
        return load_run(name)
    from sinkscope.cli.common import say
    from sinkscope.cli.early import check_early

    check_early([name], device=spot.device, dtype=spot.dtype, trust_remote_code=spot.trust_remote_code)
    from sinkscope.engine.scan import scan_request
    from sinkscope.present.terminal.progress import progress_bar
    from sinkscope.runs.request import make_request

    loading: dict[str, Any] = {
        "device": spot.device, "dtype": spot.dtype, "trust_remote_code": spot.trust_remote_code,
        "adapter": None if spot.adapter is None else str(spot.adapter),
    }  # fmt: skip
    request = make_request(model=name, **loading) if like is None else like.of_model(name, **loading)
    with progress_bar(spot.quiet, name) as progress:
        run = scan_request(request, metrics=spot.metrics or [], progress=progress)
    for warning in [] if spot.quiet else run.manifest.warnings:
        say(f"warning: {run.manifest.model.shown}: {warning}")
    return run
