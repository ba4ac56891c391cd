"""The weights' hash, which a thread computes while they are loaded."""

from __future__ import annotations

import hashlib
import json
import shutil
import threading
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from families import tiny_model

import sinkscope
from sinkscope.checkpoints import LoadOptions, loading, open_checkpoint, weight_files
from sinkscope.checkpoints.weight_files import PIECE, Hashing, sha256_of_file
from sinkscope.runs.folder import KEY, UNFINISHED


def test_a_file_of_several_pieces(tmp_path: Path) -> None:
    content = bytes(range(256)) * (PIECE // 128 + 3)
    (tmp_path / "a").write_bytes(content)
    (tmp_path / "b").write_bytes(b"")
    digest = hashlib.sha256(content).hexdigest()
    assert sha256_of_file(tmp_path / "a") == digest
    lines = f"a:{digest}\nb:{hashlib.sha256().hexdigest()}\n"
    beside = Hashing([tmp_path / "a"])
    assert beside.joined([tmp_path / "a", tmp_path / "b"]) == hashlib.sha256(lines.encode()).hexdigest()
    assert beside.joined([]) is None
    beside.stop()
    assert beside.seconds > 0
    assert beside.waited > 0


def test_a_hash_that_nobody_needs_any_more_stops(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"weights")
    stopped = threading.Event()
    stopped.set()
    with pytest.raises(CancelledError):
        sha256_of_file(tmp_path / "a", stopped)


def test_the_weights_are_hashed_beside_the_loading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By another thread than the one that loads; and its hash is that of the file."""
    tiny_model(transformers.AutoModel, "gpt2").save_pretrained(tmp_path)
    threads = set()

    def told(file: Path, stopped: threading.Event | None = None) -> str:
        threads.add(threading.current_thread())
        return sha256_of_file(file, stopped)

    monkeypatch.setattr(weight_files, "sha256_of_file", told)
    checkpoint = open_checkpoint(str(tmp_path))
    file = tmp_path / "model.safetensors"
    line = f"{file.name}:{hashlib.sha256(file.read_bytes()).hexdigest()}\n"
    assert checkpoint.facts["weights_sha256"] == hashlib.sha256(line.encode()).hexdigest()
    assert threads
    assert threading.main_thread() not in threads
    assert checkpoint.seconds["hash"] > 0


def test_a_checkpoint_that_does_not_load_leaves_no_thread(tmp_path: Path) -> None:
    tiny_model(transformers.AutoModel, "gpt2").save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(sinkscope.SinkscopeError):
        open_checkpoint(str(tmp_path))
    assert not [each for each in threading.enumerate() if each.name.startswith("sinkscope-hash")]


@pytest.mark.parametrize("large", [True, False])
def test_loops_are_loaded_beside_large_weights(large: bool, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By another thread; a small model may never want them."""
    asked = []
    monkeypatch.setattr(loading, "preload", lambda: asked.append(threading.current_thread()))
    monkeypatch.setattr(loading, "LARGE", 1 if large else 2**40)
    open_checkpoint(str(tiny_folder))
    assert len(asked) == large
    assert threading.main_thread() not in asked


@pytest.fixture
def slow_hash(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Weights are hashed only once the event is set."""
    go_on = threading.Event()

    def read(file: Path, stopped: threading.Event | None = None) -> str:
        for _ in range(6000):
            if go_on.wait(0.01):
                break
            if stopped is not None and stopped.is_set():
                raise CancelledError
        return sha256_of_file(file)

    monkeypatch.setattr(weight_files, "sha256_of_file", read)
    return go_on


def hash_threads() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name.startswith("sinkscope-hash")]


def scanned(folder: Path, shards: Path, **asked: Any) -> sinkscope.Run:
    ids = torch.arange(4, 36).view(2, 16) % 60
    return sinkscope.scan(str(folder), data=ids, batch_size=1, self_check=False, shards=shards, **asked)


def test_batches_do_not_wait_for_the_hash(tiny_folder: Path, tmp_path: Path, slow_hash: threading.Event) -> None:
    """The first batch is measured before the weights are hashed; what is kept on disk names the hash all the same."""
    ran = []

    def report(stage: str, done: int, total: int) -> None:
        if stage == "scanning" and not slow_hash.is_set():
            ran.append(done)
            slow_hash.set()
            assert not (tmp_path / "run" / UNFINISHED / KEY).exists()

    run = scanned(tiny_folder, tmp_path / "run", progress=report)
    assert ran == [0]
    assert run.manifest.model.weights_sha256 == open_checkpoint(str(tiny_folder)).facts["weights_sha256"]
    kept = json.loads((tmp_path / "run" / UNFINISHED / KEY).read_text())
    assert kept["model"]["weights_sha256"] == run.manifest.model.weights_sha256
    assert not hash_threads()


def test_a_scan_that_fails_stops_its_hash(tiny_folder: Path, tmp_path: Path, slow_hash: threading.Event) -> None:
    def report(stage: str, done: int, total: int) -> None:
        if stage == "scanning":
            assert hash_threads()
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        scanned(tiny_folder, tmp_path / "run", progress=report)
    assert not hash_threads()
    assert not (tmp_path / "run").exists()


def test_weights_that_change_while_they_are_hashed_are_refused(
    tiny_folder: Path, tmp_path: Path, slow_hash: threading.Event
) -> None:
    """Their hash would name another model than the one that was loaded."""
    copied = shutil.copytree(tiny_folder, tmp_path / "model")
    checkpoint = open_checkpoint(str(copied), LoadOptions(hash_later=True))
    assert checkpoint.facts["weights_sha256"] is None
    (copied / "model.safetensors").write_bytes(b"others")
    slow_hash.set()
    with pytest.raises(sinkscope.SinkscopeError, match="was changed during the scan"):
        checkpoint.settle()
    assert not hash_threads()


def test_a_scan_that_resumes_waits_for_the_hash(tiny_folder: Path, tmp_path: Path, slow_hash: threading.Event) -> None:
    """Before its first batch: whether it may go on depends on the weights."""
    told = []

    def report(stage: str, done: int, total: int) -> None:
        told.append((stage, slow_hash.is_set()))
        if stage == "loading":
            threading.Timer(0.3, slow_hash.set).start()

    scanned(tiny_folder, tmp_path / "run", resume=True, progress=report)
    assert ("scanning", True) in told
    assert ("scanning", False) not in told
