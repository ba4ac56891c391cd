"""The files of a checkpoint's weights: which ones transformers loads, whether one changes, and their SHA-256."""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path, PureWindowsPath
from typing import Any

from sinkscope.errors import SinkscopeError, first_line

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
            rest += [(str(key), inner, depth + 1) for key, inner in value.items()]
        elif isinstance(value, list):
            rest += [(name, inner, depth + 1) for inner in value]
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
    except (ValueError, RecursionError) as error:
        raise damaged(file, error) from None


POINTER = b"version https://git-lfs"
"""How a file begins that stands for another in a clone made without Git LFS."""


def damaged(file: Path | str, error: Exception) -> SinkscopeError:
    """What a user reads of a file that cannot be opened as what its name says, with what mends it."""
    try:
        with Path(file).open("rb") as opened:
            pointer = opened.read(len(POINTER)) == POINTER
    except OSError:
        pointer = False
    if pointer:
        return SinkscopeError(f"{file} is a Git LFS pointer, not the file itself: run `git lfs pull` in its folder")
    if isinstance(error, RecursionError):
        return SinkscopeError(f"{file} is damaged: its values are nested too deeply")
    return SinkscopeError(f"{file} is damaged or truncated ({first_line(error)}): download it again")


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


# The SHA-256 of a checkpoint's files: of the small ones, and of weights, which a thread computes while they load and,
# where nobody needs it sooner, while the model runs.


SHA256 = re.compile("[0-9a-f]{64}")
PIECE = 2**20
"""Bytes read at a time: hashing lets other threads run only for as long as one piece takes."""


class Hashing:
    """One thread that hashes files, until `stop`.

    Attributes:
        waited: seconds that `joined` had to wait for the thread.
    """

    def __init__(self, files: Iterable[Path]) -> None:
        self.waited = 0.0
        self._spent: dict[Path, float] = {}
        self._left = threading.Event()
        self._pool = ThreadPoolExecutor(1, "sinkscope-hash")
        self._jobs: dict[Path, Future[str]] = {file: self._pool.submit(self._hash, file) for file in files}

    def stop(self) -> None:
        """Ends the thread, also in the middle of a file."""
        self._left.set()
        self._pool.shutdown(cancel_futures=True)

    @property
    def seconds(self) -> float:
        """Seconds that hashing took so far, beside other work or not."""
        return sum(self._spent.values())

    def joined(self, files: list[Path]) -> str | None:
        """SHA-256 over the names and SHA-256 of the weight files; None where there are none. Files that the thread was
        not given are hashed now."""
        if not files:
            return None
        began = time.perf_counter()
        digest = hashlib.sha256()
        for file in files:
            job = self._jobs.get(file)
            digest.update(f"{file.name}:{self._hash(file) if job is None else job.result()}\n".encode())
        self.waited += time.perf_counter() - began
        return digest.hexdigest()

    def _hash(self, file: Path) -> str:
        began = time.perf_counter()
        digest = sha256_of_file(file, self._left)
        self._spent[file] = time.perf_counter() - began
        return digest


def sha256_of_file(file: Path, stopped: threading.Event | None = None) -> str:
    """SHA-256 of a file; the hub's cache tells it in the name of the file that a link leads to.

    Raises CancelledError once `stopped` is set.
    """
    content = file.resolve()
    # The hub's cache holds snapshots/COMMIT/FILE, a link to blobs/SHA-256.
    if content.parent == file.parent.parent.parent.resolve() / "blobs" and SHA256.fullmatch(content.name):
        return content.name
    digest, piece = hashlib.sha256(), memoryview(bytearray(PIECE))
    with file.open("rb", buffering=0) as stream:
        while size := stream.readinto(piece):
            if stopped is not None and stopped.is_set():
                raise CancelledError
            digest.update(piece[:size])
    return digest.hexdigest()


SETTINGS = (
    "generation_config.json", "processor_config.json", "preprocessor_config.json", "image_processor_config.json",
    "video_preprocessor_config.json", "feature_extractor_config.json", "tokenizer_config.json",
    "special_tokens_map.json", "added_tokens.json", "chat_template.json", "chat_template.jinja",
)  # fmt: skip


def settings_sha256(origin: dict[str, Any]) -> dict[str, str]:
    """SHA-256 of each settings file of a checkpoint in a folder, by name; empty for others.

    A hub model's revision names all its files already, and a model object has none. `origin`: see `Checkpoint.origin`.
    """
    folder = Path(str(origin.get("pretrained_model_name_or_path", "")))
    if not origin or not folder.is_dir():
        return {}
    paths = [folder / name for name in SETTINGS if (folder / name).is_file()]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}
