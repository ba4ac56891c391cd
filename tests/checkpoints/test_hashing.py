"""The weights' hash, which a thread computes while they are loaded."""

from __future__ import annotations

import hashlib
import threading
from concurrent.futures import CancelledError
from pathlib import Path

import pytest
import transformers
from families import tiny_model

import sinkscope
from sinkscope.checkpoints import hashing, loading, open_checkpoint
from sinkscope.checkpoints.hashing import PIECE, Hashing, sha256_of_file


def test_a_file_of_several_pieces(tmp_path: Path) -> None:
    content = bytes(range(256)) * (PIECE // 128 + 3)
    (tmp_path / "a").write_bytes(content)
    (tmp_path / "b").write_bytes(b"")
    digest = hashlib.sha256(content).hexdigest()
    assert sha256_of_file(tmp_path / "a") == digest
    lines = f"a:{digest}\nb:{hashlib.sha256().hexdigest()}\n"
    with Hashing([tmp_path / "a"]) as beside:
        assert beside.joined([tmp_path / "a", tmp_path / "b"]) == hashlib.sha256(lines.encode()).hexdigest()
        assert beside.joined([]) is None
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

    monkeypatch.setattr(hashing, "sha256_of_file", told)
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


@pytest.mark.parametrize("slow", [True, False])
def test_loops_are_loaded_while_weights_are_hashed(
    slow: bool, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small model's hash is there already, and the loops may never be wanted."""
    asked, hashed = [], threading.Event()

    def preload() -> None:
        asked.append(True)
        hashed.set()

    def read(file: Path, stopped: threading.Event | None = None) -> str:
        return "0" * 64 if not slow or hashed.wait(60) else "too late"

    monkeypatch.setattr(hashing, "sha256_of_file", read)
    monkeypatch.setattr(loading, "preload", preload)
    open_checkpoint(str(tiny_folder))
    assert asked == [True] * slow
