"""Finds the files that transformers loads a checkpoint's weights from, and notices when one of them changes; says where
converted ones are kept."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Callable, Collection, Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path, PureWindowsPath
from typing import Any

from sinkscope.errors import SinkscopeError

SAFE, PICKLE, INDEX = "model.safetensors", "pytorch_model.bin", ".index.json"
DISTRIBUTED = re.compile(r"shard-[0-9]{5}-model-[0-9]{5}-of-[0-9]{5}\.safetensors")
"""A file of torch's distributed format: where a folder holds one, transformers loads all its *.safetensors."""

COUNT = re.compile("layer|block|depth|label|expert|stage|codebook", re.IGNORECASE)
MOST_COUNTED, DEEPEST = 100_000, 100
"""The largest number of a configuration under a name with COUNT in it: transformers makes a list of so many entries,
before it looks at any weights. And how deeply its values may be nested."""

Stamp = tuple[int, int, int]
"""Size in bytes, time of the last change in ns, inode."""


def weight_names(place: str, files: Collection[str], path_of: Callable[[str], Path]) -> tuple[str, ...]:
    """Returns the names of the weight files, sorted; none where transformers finds no weights.

    transformers loads the file that config.json names, else model.safetensors, else what its index names, else the
    pickled pytorch_model.bin or what the index of that names.

    Args:
        place: the checkpoint, for error messages.
        files: the names of its files.
        path_of: gives the path of the configuration or of an index, and downloads it if need be.

    Raises SinkscopeError: a configuration or an index that cannot be read; a configuration of too many layers; one that
    names a file outside the checkpoint's folder, or a pickle among safetensors; an adapter that peft would load on top.
    """
    if "adapter_config.json" in files and find_spec("peft") is not None:
        raise SinkscopeError(
            f"{place} holds an adapter beside its weights (adapter_config.json): merge it into the model and save "
            "that, or move the file away to measure the model without it"
        )
    config = read_json(path_of("config.json"))
    check_counts(place, config)
    first = _first_file(place, files, config)
    if first is None or not first.endswith(INDEX):
        return () if first is None else (first,)
    index = read_json(path_of(first))
    shards = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(shards, dict) or not all(isinstance(name, str) for name in shards.values()):
        raise SinkscopeError(f"{place}: {first} is damaged, it holds no weight_map: download it again")
    names = sorted(set(shards.values()))
    for name in names:
        _check_name(place, first, name, (".bin",) if first == PICKLE + INDEX else (".safetensors",))
    return tuple(names)


def check_counts(place: str, config: Any) -> None:
    """Raises SinkscopeError for a configuration that is nested too deeply, or counts more than MOST_COUNTED."""
    rest: list[tuple[str, Any, int]] = [("", config, 0)]
    while rest:
        name, value, depth = rest.pop()
        if depth > DEEPEST:
            raise SinkscopeError(f"{place}: config.json is damaged: its values are nested too deeply")
        if isinstance(value, dict):
            rest += [(str(key), each, depth + 1) for key, each in value.items()]
        elif isinstance(value, list):
            rest += [(name, each, depth + 1) for each in value]
        elif isinstance(value, int) and value > MOST_COUNTED and COUNT.search(name):
            raise SinkscopeError(
                f"{place}: config.json says {name} {value}, and at most {MOST_COUNTED:,} is possible: it is damaged, "
                "download it again"
            )


def _first_file(place: str, files: Collection[str], config: Any) -> str | None:
    named = config.get("transformers_weights") if isinstance(config, dict) else None
    if named is not None:
        _check_name(place, "config.json", named, (".safetensors", ".safetensors" + INDEX))
        return str(named)
    return next((name for name in (SAFE, SAFE + INDEX, PICKLE, PICKLE + INDEX) if name in files), None)


def _check_name(place: str, teller: str, name: Any, endings: tuple[str, ...]) -> None:
    # A Windows path takes both slashes and a drive for parts of a path.
    if not isinstance(name, str) or not name.endswith(endings) or PureWindowsPath(name).name != name:
        raise SinkscopeError(
            f"{place}: {teller} names the weights {name!r:.100}, which is no {endings[0]} file of the same folder: "
            "save the model again with save_pretrained"
        )


def read_json(file: Path) -> Any:
    """Reads a JSON file. Raises SinkscopeError where it cannot be opened or is damaged."""
    check_file(file)
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise SinkscopeError(f"{file} is damaged: {error}") from None
    except RecursionError:
        raise SinkscopeError(f"{file} is damaged: its values are nested too deeply") from None


def check_file(file: Path) -> None:
    """Raises SinkscopeError for a file that is missing, unreadable, or not regular: a pipe would block for ever."""
    try:
        regular = stat.S_ISREG(file.stat().st_mode)
        if regular:
            file.open("rb").close()
    except FileNotFoundError:
        raise SinkscopeError(f"{file} is missing: download it again") from None
    except (OSError, ValueError) as error:  # ValueError: a name with a null character
        raise SinkscopeError(f"cannot read {file}: {getattr(error, 'strerror', error)}") from None
    if not regular:
        raise SinkscopeError(f"{file} is not a regular file: weights cannot be read from it")


def stamps(files: Iterable[Path]) -> dict[Path, Stamp]:
    """Notes the state of each file. Raises SinkscopeError for a missing one."""
    files = list(files)
    for file in files:
        check_file(file)
    return {file: _stamp(file) for file in files}


def check_unchanged(noted: Mapping[Path, Stamp]) -> None:
    """Raises SinkscopeError where a file is no longer what `stamps` noted."""
    for file, stamp in noted.items():
        try:
            same = _stamp(file) == stamp
        except OSError:
            continue  # the file was removed: the pages that a model has mapped keep their content
        if not same:
            raise SinkscopeError(
                f"{file} was changed during the scan, whose numbers could mix two models: scan again when nothing "
                "writes to it"
            )


def _stamp(file: Path) -> Stamp:
    status = file.stat()
    return status.st_size, status.st_mtime_ns, status.st_ino


def cache_folder() -> Path:
    """The user's cache: SINKSCOPE_CACHE, else XDG_CACHE_HOME/sinkscope, else ~/.cache/sinkscope."""
    chosen = os.environ.get("SINKSCOPE_CACHE")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sinkscope"
