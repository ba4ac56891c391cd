"""The SHA-256 of a checkpoint's files: of the small ones, and of weights, which a thread computes while they load and,
where nobody needs it sooner, while the model runs."""

from __future__ import annotations

import hashlib
import re
import threading
import time
from collections.abc import Iterable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

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
        found = sha256_of_file(file, self._left)
        self._spent[file] = time.perf_counter() - began
        return found


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
    found = [folder / name for name in SETTINGS if (folder / name).is_file()]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in found}
