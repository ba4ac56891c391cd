"""The cache of converted examples: what is damaged says what to remove, what a kill left is removed."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from sinkscope import SinkscopeError
from sinkscope.checkpoints.examples import A_WHILE, WORK, check_converted, remove_left_over


def leave_out_bos(file: Path) -> None:
    """Lets the tokenizer add nothing to a text, as that which a transformers before 5.23 converts."""
    settings = json.loads(file.read_text("utf-8"))
    settings["post_processor"]["single"] = [{"Sequence": {"id": "A", "type_id": 0}}]
    del settings["post_processor"]["pair"]
    file.write_text(json.dumps(settings, indent=2), "utf-8")


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "config.json").unlink(),
        lambda folder: (folder / "config.json").write_text("{"),
        lambda folder: (folder / "tokenizer.json").write_bytes(b""),
        lambda folder: os.truncate(folder / "tokenizer.json", 1000),
        lambda folder: leave_out_bos(folder / "tokenizer.json"),
        lambda folder: (folder / "model.safetensors").unlink(),
        lambda folder: os.truncate(folder / "model.safetensors", 1000),
    ],
    ids=[
        "no configuration",
        "configuration",
        "empty tokenizer",
        "cut tokenizer",
        "no BOS first",
        "no weights",
        "weights",
    ],
)
def test_a_damaged_cache_is_to_be_removed(damage: Callable[[Path], object], copied: Path) -> None:
    check_converted(copied)
    damage(copied)
    with pytest.raises(SinkscopeError) as caught:
        check_converted(copied)
    assert f"remove {copied}" in str(caught.value)
    shutil.rmtree(copied)


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="processes are looked up in /proc")
def test_what_a_kill_left_is_removed(tmp_path: Path) -> None:
    """A process of that number may never be: numbers end at 2^22."""
    ages = {f"{WORK}9999999-a": 2 * A_WHILE, f"{WORK}9999998-b": 0, f"{WORK}{os.getpid()}-c": 2 * A_WHILE}
    for name, age in ages.items():
        (tmp_path / name / "gguf").mkdir(parents=True)
        now = (tmp_path / name).stat().st_mtime
        os.utime(tmp_path / name, (now - age, now - age))
    (tmp_path / f"{WORK}old").mkdir()
    os.utime(tmp_path / f"{WORK}old", (0, 0))
    remove_left_over(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([f"{WORK}9999998-b", f"{WORK}{os.getpid()}-c"])
