"""Keeps the batches that are done on disk, so that a killed measurement of arms goes on where it stopped.

A batch is one file, written whole, with a SHA-256 over its numbers and over the key of the measurement: one that is
damaged, or belongs to another measurement, is measured again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sinkscope.engine.manifest import declared_keywords
from sinkscope.engine.shards import Unfinished, measuring_code
from sinkscope.experiments.arms.arm import Arm, Setting
from sinkscope.metrics.extension import code_sha256
from sinkscope.runs.defaults import VERSION
from sinkscope.runs.folder import KEY, kept_json, write_file
from sinkscope.runs.schema.base import plain


class ArmsInterrupted(KeyboardInterrupt):
    """Ctrl-C, after `sequences` sequences were measured under every arm and kept in `folder`."""

    def __init__(self, sequences: int, folder: Path) -> None:
        counted = "1 sequence is" if sequences == 1 else f"{sequences} sequences are"
        super().__init__(f"{counted} measured and kept in {folder}")
        self.sequences, self.folder = sequences, folder


class Finished(Unfinished):
    """The batches of one measurement. The folder goes when the result is written there."""

    def __init__(self, folder: Path, key: dict[str, Any], resume: bool) -> None:
        """`key`: all that decides the numbers. Keeps what is there with `resume`, else empties it.

        Raises SinkscopeError where what is there has another key, or the folder cannot be written.
        """
        super().__init__(folder)
        plain_key = plain(key)
        self._key = json.dumps(plain_key, sort_keys=True)
        if resume and self.has_key():
            self.check_key(plain_key)
        else:
            self.empty()
            self.write_key(plain_key)

    @contextlib.contextmanager
    def kept(self, main: bool = True) -> Iterator[None]:
        """Around the measurement. Where it ends early, no empty folder stays, and Ctrl-C becomes ArmsInterrupted where
        batches are done. `main`: whether this is the main process of the launch, which alone removes the folder."""
        with self.held() if main else contextlib.nullcontext():
            try:
                yield
            except BaseException as error:
                done = self._sequences()
                if not done and main:
                    self._discard()
                elif done and isinstance(error, KeyboardInterrupt):
                    raise ArmsInterrupted(done, self.folder) from None
                raise

    def _sequences(self) -> int:
        """How many sequences the batches hold that are done."""
        kept = [kept_json(path).get("values") for path in self._folder.glob("*.json") if path.name != KEY]
        return sum(len(values) for values in kept if isinstance(values, list))

    def _discard(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # the result's own folder, where nothing else is in it
            self.folder.rmdir()

    def write(self, start: int, values: np.ndarray) -> None:
        """Keeps the numbers of the batch that begins with sequence `start`, [sequence, trial, measure] float64."""
        content = {"values": values.tolist(), "sha256": self._digest(start, values)}
        write_file(self._folder / f"{start:08}.json", json.dumps(content))

    def read(self, start: int, shape: tuple[int, ...]) -> np.ndarray | None:
        """The numbers of a batch; None where there is none that is whole and of this shape."""
        content = kept_json(self._folder / f"{start:08}.json")
        try:
            values = np.array(content["values"], dtype=float)
            sound = values.shape == shape and content["sha256"] == self._digest(start, values)
        except (ValueError, KeyError, TypeError, OverflowError):  # the last for a whole number past every float
            return None
        return values if sound else None

    def _digest(self, start: int, values: np.ndarray) -> str:
        about = f"{start} {values.shape} {self._key}".encode()
        return hashlib.sha256(about + np.ascontiguousarray(values, "<f8").tobytes()).hexdigest()


def key_of(facts: dict[str, Any], setting: Setting, arms: Sequence[Arm] = ()) -> dict[str, Any]:
    """All that decides the numbers. The device and its libraries round in their own ways: these count too.

    `arms`: those that are measured. One of another package, or of the user's own, counts by its name and its code.
    """
    run = setting.run
    return {
        "sinkscope": VERSION,
        "model": facts["model"],
        "run": None if run is None else {"data": facts["run"]["data"], "files": run.manifest.files},
        "data": facts["data"],
        "arms": facts["arms"],
        "draws": facts["draws"],
        "seed": facts["seed"],
        "cosines": facts["cosines"],
        "epsilon": setting.epsilon,
        "keywords": declared_keywords(setting.plan),
        "measuring_code": measuring_code("experiments"),
        "arms_code": _codes_of(arms),
    }


def _codes_of(arms: Sequence[Arm]) -> dict[str, str]:
    """The SHA-256 of the file of each class of arms that is not sinkscope's, by the name of the class."""
    kinds = {kind for arm in arms for kind in type(arm).__mro__ if "applied" in vars(kind)}
    outside = {f"{kind.__module__}.{kind.__qualname__}": kind for kind in kinds if not _is_ours(kind)}
    return {name: _code_of(outside[name]) for name in sorted(outside)}


def _is_ours(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "sinkscope"


def _code_of(kind: Any) -> str:
    try:
        return code_sha256(kind.applied)
    except (TypeError, AttributeError):  # `applied` is no Python function: its name alone counts
        return ""
