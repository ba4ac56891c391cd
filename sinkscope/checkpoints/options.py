"""What a model's name and its loading options may be: checked without torch, so that a slip is refused at once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sinkscope.checkpoints.examples import find_example
from sinkscope.checkpoints.sources import find_source, path_of
from sinkscope.errors import SinkscopeError, did_you_mean

DTYPES = ("float32", "bfloat16", "float16", "float64")
"""The dtypes that a model may be loaded in, as torch calls them."""


@dataclass(frozen=True)
class LoadOptions:
    """How to load; the names and defaults are the command line's.

    Attributes:
        device_map: `auto`, or accelerate's map of module paths to devices (`cpu`, `disk`, a GPU's number).
        head: load the language-model head too.
        tensor_parallel: processes that the heads are spread over.
        adapter: folder of a PEFT adapter that is put into the model.
        hash_later: leave the weights' hash to a thread, until `Checkpoint.settle` waits for it. With an adapter it is
            made at once.
    """

    revision: str | None = None
    device: str = "auto"
    device_map: str | dict[str, Any] | None = None
    dtype: str = "auto"
    trust_remote_code: bool = False
    allow_pickle: bool = False
    head: bool = False
    tensor_parallel: int = 1
    adapter: str | None = None
    hash_later: bool = False


def _refuse_slip(name: str) -> None:
    """Raises SinkscopeError for a name that is nearly that of a folder beside it, or of a run if the name has a slash:
    the hub would be asked for long before it said no."""
    path = Path(name)
    try:
        beside = [each.name for each in path.parent.iterdir() if each.is_dir() and not each.name.startswith(".")]
    except OSError:
        return
    if "/" in name:  # as in OWNER/NAME of the hub, unless runs stand there
        beside = [f"{path.parent}/{each}" for each in beside if (path.parent / each / "manifest.json").is_file()]
    near = did_you_mean(str(path), beside) if path.name else ""
    if near:
        raise SinkscopeError(f"no folder {name!r}{near} A model of the hub is named with its owner, OWNER/NAME")


def check_dtype(name: str) -> None:
    """Raises SinkscopeError for a dtype that no model is loaded in."""
    if name != "auto" and name not in DTYPES:
        raise SinkscopeError(f"unknown dtype {name!r}: use auto, {', '.join(DTYPES)}{did_you_mean(name, DTYPES)}")


def check_model(name: str, revision: str | None = None, allow_pickle: bool = False) -> None:
    """Raises SinkscopeError for a model that cannot be found: an unknown example, an absent folder, no such hub id.

    Opens no file of the model: that is for loading. A hub id is asked for at the hub, or looked up in its cache.
    """
    if name.startswith("example:"):
        find_example(name.removeprefix("example:"))
        return
    if not name.strip() or not path_of(name).exists():
        _refuse_slip(name)
        find_source(name, revision, allow_pickle)
