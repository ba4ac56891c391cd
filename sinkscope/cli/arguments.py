"""Runs as arguments: a run folder is loaded, a model is scanned on the spot."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sinkscope.cli.options import SpotScan
    from sinkscope.runs.request import Request
    from sinkscope.runs.run import Run


def is_run(name: str) -> bool:
    """Whether a folder holds a run, also one whose files a killed process has not yet moved into place."""
    from sinkscope.runs.whole import COMMITTED

    return (Path(name) / "manifest.json").is_file() or (Path(name) / COMMITTED).is_dir()


def check_nothing_to_scan(run: str, spot: SpotScan) -> None:
    """Raises SinkscopeError where options of a scan were given beside a run alone: they could change nothing."""
    names = [field.name for field in fields(spot) if (getattr(spot, field.name) or None) != (field.default or None)]
    options = [f"--{name.replace('_', '-')}" for name in names if name != "quiet"]
    if options:
        from sinkscope.errors import SinkscopeError

        raise SinkscopeError(f"{options[0]} goes with a model that is scanned on the spot, and {run} is a run folder")


def _check_is_either(name: str) -> None:
    """Raises SinkscopeError for a folder that holds neither a run nor a model, with what is told of it as a run."""
    folder = Path(name)
    if not name or not folder.is_dir() or (folder / "config.json").exists() or any(folder.glob("*.gguf")):
        return
    from sinkscope.errors import SinkscopeError
    from sinkscope.runs.run import load_run

    try:
        load_run(name)
    except SinkscopeError as error:
        raise SinkscopeError(f"{name} is not a model folder (it holds no config.json), and {error}") from None


def open_run(name: str, spot: SpotScan, like: Request | None = None) -> Run:
    """Loads the run in a folder; any other name is a model, which is scanned for the text and columns of `like`.

    Raises SinkscopeError where options say how to scan a run, which is measured already, and for a folder that holds
    neither a run nor a model.
    """
    if is_run(name):
        from sinkscope.runs.run import load_run

        check_nothing_to_scan(name, spot)
        return load_run(name)
    _check_is_either(name)
    from sinkscope.cli.common import say
    from sinkscope.cli.early import check_early
    from sinkscope.cli.libraries import import_libraries

    check_early([name], device=spot.device, dtype=spot.dtype, trust_remote_code=spot.trust_remote_code)
    import_libraries()
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
