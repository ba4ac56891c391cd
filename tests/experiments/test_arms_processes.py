"""Arms in several processes: how the work is cut, and launches over gloo as a user starts them."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from by_hand import causal, setting_of
from launches import LIMIT, kill_all, launch, start_launch
from models import random_ids
from tiers import nightly

import sinkscope
from sinkscope.engine.launch import Processes
from sinkscope.experiments.arms import engine
from sinkscope.experiments.arms.engine import measure, pieces
from sinkscope.experiments.arms.finished import Finished
from sinkscope.experiments.arms.grammar import read_arm
from sinkscope.runs.folder import UNFINISHED
from sinkscope.runs.schema.base import to_json

FAULTY = str(Path(__file__).parents[1] / "support" / "launched.py")
ARMS = ["keys:first1", "kv:2+first1"]
WORDS = ("--arm", ARMS[0], "--arm", ARMS[1], "--num-sequences", "5", "--seq-len", "24", "--draws", "2")


# The cutting


@pytest.mark.parametrize(
    ("batches", "trials", "processes", "parts"),
    [
        (4, 20, 1, 1), (4, 20, 2, 1), (4, 20, 4, 1), (16, 20, 8, 1), (1, 20, 2, 2), (2, 20, 4, 2), (4, 20, 8, 2),
        (1, 20, 3, 3), (5, 28, 2, 2), (4, 2, 8, 1), (3, 1, 8, 1), (1, 4, 64, 3),
    ],
)  # fmt: skip
def test_a_batch_is_cut_where_processes_would_be_idle(batches: int, trials: int, processes: int, parts: int) -> None:
    found = pieces([(3 * number, 3) for number in range(batches)], trials, processes)
    assert len(found) == batches * parts
    for start in range(0, 3 * batches, 3):
        own = [piece for piece in found if piece.start == start]
        assert all(piece.trials[0] == 0 for piece in own)
        assert sorted(trial for piece in own for trial in piece.trials[1:]) == list(range(1, trials))
        assert [piece.last for piece in own] == [False] * (parts - 1) + [True]
    assert [piece.start for piece in found] == sorted(piece.start for piece in found)


class Several(Processes):
    """Several processes played by one, which takes every step once for each."""

    def __init__(self, count: int) -> None:
        self.count = count

    def share(self, work: Any) -> list[Any]:
        return list(work[self.index :: self.count])

    def together(self, step: Callable[[], Any]) -> list[Any]:
        return [self._as(index, step) for index in range(self.count)]

    def _as(self, index: int, step: Callable[[], Any]) -> Any:
        self.index = index
        try:
            return step()
        finally:
            self.index = 0


@pytest.mark.slow
def test_any_number_of_processes_finds_the_same(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(engine, "batch_size", lambda model, length: 2)
    setting = setting_of(causal("llama").float(), random_ids(3, 20))
    arms = [read_arm(name).ready(setting) for name in ("keys:first1", "keys:random1", "kv:2", "heads:2.0")]
    alone = measure(setting, arms, 2, lambda *_: None, cosines=True)
    for count in (2, 3, 8):
        told: list[tuple[str, int, int]] = []
        kept = Finished(tmp_path / str(count), {}, resume=False)
        shared = measure(
            setting, arms, 2, lambda *progress, told=told: told.append(progress), kept, Several(count), True
        )
        for one, other in zip(alone, shared, strict=True):
            assert (one.name, one.draw) == (other.name, other.draw)
            assert all((one.values[name] == other.values[name]).all() for name in one.values), (count, one.name)
            assert all((one.cosines[layer] == other.cosines[layer]).all() for layer in (0, 1, 2)), (count, one.name)
        assert told[-1] == max(told) == ("ablating", 18, 18)
        written = sorted(path.name for path in (tmp_path / str(count) / UNFINISHED).iterdir())
        assert written == ["00000000.json", "00000002.json", "key.json"]


def test_triton_s_failure_in_another_process_is_told() -> None:
    class Second(Several):
        def together(self, step: Callable[[], Any]) -> list[Any]:
            found = super().together(step)
            return [own and (own[0], ["Triton failed there"]) for own in found]

    setting = setting_of(causal("llama").float(), random_ids(2, 20))
    measure(setting, [read_arm("kv:2")], 2, lambda *_: None, None, Second(2))
    assert setting.plan.failures == ["Triton failed there"]


def test_heads_that_are_spread_are_refused(tiny_model: Any, tokenizer: Any) -> None:
    spread = Several(1)
    spread.tensor = True
    with pytest.raises(
        sinkscope.SinkscopeError, match="--tp spreads the heads of a scan; arms are shared by processes"
    ):
        sinkscope.arms(tiny_model, ["kv:4"], tokenizer=tokenizer, processes=spread)


# Launches


@pytest.fixture
def as_launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One thread and batches of one sequence, as the processes of the launches here."""
    monkeypatch.setattr(engine, "batch_size", lambda model, length: 1)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def expected(tiny_folder: Path, tmp_path: Path, as_launched: None) -> Path:
    """What one process writes."""
    sinkscope.arms(str(tiny_folder), ARMS, num_sequences=5, seq_len=24, draws=2).save(tmp_path / "alone")
    return tmp_path / "alone"


def same_result(one: Path, other: Path) -> None:
    """The same tables to the byte, the same JSON but for the time, and no batches left."""
    for name in ("arms.csv", "arm_sequences.csv"):
        assert (one / name).read_bytes() == (other / name).read_bytes(), name
    found, expected = (json.loads((folder / "arms.json").read_text("utf-8")) for folder in (one, other))
    assert {**found, "created": "", "files": ""} == {**expected, "created": "", "files": ""}
    assert not (one / UNFINISHED).exists()


def said(stderr: str) -> list[str]:
    """The lines that are sinkscope's own, not the launcher's."""
    return [line for line in stderr.splitlines() if line.startswith("sinkscope: ")]


def wait_for_batches(run: Path, count: int, process: subprocess.Popen[str]) -> None:
    limit = time.monotonic() + LIMIT
    while len(list((run / UNFINISHED).glob("0*.json"))) < count:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < limit
        time.sleep(0.05)


@pytest.mark.slow
@nightly
def test_a_killed_launch_goes_on(tiny_folder: Path, expected: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = start_launch(FAULTY, "slow", "arms", tiny_folder, *WORDS, "--out", run)
    try:
        wait_for_batches(run, 1, process)
    finally:
        kill_all(process)
        process.communicate()
    assert 0 < len(list((run / UNFINISHED).glob("0*.json"))) < 5
    assert launch(FAULTY, "none", "arms", tiny_folder, *WORDS, "--resume", "--quiet", "--out", run) == (0, "", "")
    same_result(run, expected)


@pytest.mark.slow
@nightly
def test_ctrl_c_keeps_what_all_processes_have_done(tiny_folder: Path, expected: Path, tmp_path: Path) -> None:
    """One process then goes on where two stopped."""
    run = tmp_path / "run"
    process = start_launch(FAULTY, "slow", "arms", tiny_folder, *WORDS, "--out", run)
    try:
        wait_for_batches(run, 2, process)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    finally:
        kill_all(process)
    assert len(said(err)) == 2
    assert f"measured and kept in {run}; --resume goes on" in said(err)[-1]
    options: dict[str, Any] = {"num_sequences": 5, "seq_len": 24, "draws": 2}
    sinkscope.arms(str(tiny_folder), ARMS, shards=run, resume=True, **options).save(run, resume=True)
    same_result(run, expected)


@pytest.mark.slow
def test_a_failure_of_one_process_ends_all(tiny_folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    code, out, err = launch(FAULTY, "error", "evict", tiny_folder, *WORDS[4:], "--window", "4", "--out", run)
    assert (code, out) == (1, "")
    assert said(err)[-1] == "sinkscope: error: process 1: a layer overflowed"
    assert [path.name for path in run.iterdir()] == [UNFINISHED]


@pytest.mark.slow
def test_two_processes_write_what_one_writes(tiny_folder: Path, tmp_path: Path, as_launched: None) -> None:
    sinkscope.scan(str(tiny_folder), seq_len=24, num_sequences=4, self_check=False).save(tmp_path / "scanned")
    words = ("--run", tmp_path / "scanned", "--num-sequences", "3", "--draws", "2", "--fraction", "0.25", "--json")
    # Without `--`, torchrun's own parser takes --run for the beginning of one of its options.
    code, out, err = launch("--", FAULTY, "none", "ablate", tiny_folder, *words, "--out", tmp_path / "two")
    assert code == 0, err
    assert said(err) == ["sinkscope: ablate: 12 forward passes of one sequence each"]
    options: dict[str, Any] = {"num_sequences": 3, "draws": 2, "fractions": [0.25]}
    alone = sinkscope.ablate(str(tiny_folder), tmp_path / "scanned", **options)
    alone.save(tmp_path / "one")
    for name in ("ablation.csv", "losses.csv", "arms.csv"):
        assert (tmp_path / "two" / name).read_bytes() == (tmp_path / "one" / name).read_bytes(), name
    assert {**json.loads(out), "created": ""} == {**json.loads(to_json(alone.as_dict())), "created": ""}, "printed once"
    assert not (tmp_path / "two" / UNFINISHED).exists()
