"""Keeps the batches that are done on disk, so that a killed measurement of arms goes on where it stopped.

A batch is one file, written whole, with a SHA-256 over its numbers and over the key of the measurement: one that is
damaged, or belongs to another measurement, is measured again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from sinkscope.errors import SinkscopeError
from sinkscope.runs.folder import UNFINISHED, write_file
from sinkscope.runs.strict_json import plain, to_json

KEY = "key.json"


class Finished:
    """The batches of one measurement, in `folder`/shards. The folder goes when the result is written there."""

    def __init__(self, folder: Path, key: dict[str, Any], resume: bool) -> None:
        """`key`: all that decides the numbers. Keeps what is there with `resume`, else empties it.

        Raises SinkscopeError where what is there has another key, or the folder cannot be written.
        """
        self._folder = folder / UNFINISHED
        own = plain(key)
        self._key = json.dumps(own, sort_keys=True)
        if resume and (self._folder / KEY).exists():
            self._check(own)
            return
        try:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder.mkdir(parents=True)
        except OSError as error:
            raise SinkscopeError(f"cannot write {self._folder}: {error.strerror or error}") from None
        write_file(self._folder / KEY, to_json(own))

    def _check(self, own: dict[str, Any]) -> None:
        try:
            theirs = json.loads((self._folder / KEY).read_text("utf-8"))
        except (OSError, ValueError):
            theirs = {}
        different = [name for name in own if not isinstance(theirs, dict) or theirs.get(name) != own[name]]
        if different:
            raise SinkscopeError(
                f"{self._folder.parent} holds an unfinished measurement with another {different[0]}: give another "
                "--out, or --force to start anew"
            )

    def discard_if_empty(self) -> None:
        """Removes the folder where no batch is done."""
        if not any(path.name != KEY for path in self._folder.glob("*.json")):
            shutil.rmtree(self._folder, ignore_errors=True)
            with contextlib.suppress(OSError):  # the result's own folder, where nothing else is in it
                self._folder.parent.rmdir()

    def write(self, start: int, values: np.ndarray) -> None:
        """Keeps the numbers of the batch that begins with sequence `start`, [sequence, job, measure] float64."""
        content = {"values": values.tolist(), "sha256": self._digest(start, values)}
        write_file(self._folder / f"{start:08}.json", json.dumps(content))

    def read(self, start: int, shape: tuple[int, ...]) -> np.ndarray | None:
        """The numbers of a batch; None where there is none that is whole and of this shape."""
        try:
            content = json.loads((self._folder / f"{start:08}.json").read_text("utf-8"))
            values = np.array(content["values"], dtype=float)
            sound = values.shape == shape and content["sha256"] == self._digest(start, values)
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return values if sound else None

    def _digest(self, start: int, values: np.ndarray) -> str:
        about = f"{start} {values.shape} {self._key}".encode()
        return hashlib.sha256(about + np.ascontiguousarray(values, "<f8").tobytes()).hexdigest()
