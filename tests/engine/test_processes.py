"""Scans in several processes, started as a user starts them: gloo on the CPU, tiny models, real launchers."""

from __future__ import annotations

import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import TABLES
from launches import ACCELERATE, LIMIT, kill_all, launch, start_launch
from models import tiny
from tiers import nightly

import sinkscope
from sinkscope.engine.launch import ALONE, Processes, leave, start_processes
from sinkscope.engine.launcher import size
from sinkscope.runs.folder import UNFINISHED
from sinkscope.runs.run import Run, load_run

GUESTS = """
import os

from sinkscope import head_metric

SECOND = os.environ.get("RANK") == "1"

@head_metric(unit="ratio", range="[0, 1]", normalised=True)
def own(view):
    "What is given to key 0."
    return view.attention.first.mean(-1)

@head_metric(unit="ratio", range="[0, 1]")
def alone(view):
    "The mean over the heads; it fails in one process, while the other waits for it."
    if SECOND:
        raise ValueError("on the second process")
    return view.layer_mean(view.attention.first.mean(-1)).expand(-1, view.heads)

@head_metric(unit="ratio", range="[0, 1]")
def asks_once_more(view):
    "The mean over the heads; one process asks for it alone."
    if not SECOND:
        return view.layer_mean(view.attention.first.mean(-1)).expand(-1, view.heads)
    return view.attention.first.mean(-1)
"""
FAULTY = str(Path(__file__).parents[1] / "support" / "launched.py")
WORDS = ("--data", "random", "--data", "repeated", "--num-sequences", "5", "--seq-len", "70", "--batch-size", "2")


def said(stderr: str) -> list[str]:
    """The lines that are sinkscope's own, not the launcher's."""
    return [line for line in stderr.splitlines() if line.startswith("sinkscope: ")]


def exit_codes(stderr: str) -> set[int]:
    """Of the processes, as torchrun reports them; those it had to end itself left out."""
    return {int(code) for code in re.findall(r"^ +exitcode +: (-?\d+)", stderr, re.M)} - {-signal.SIGTERM}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny checkpoints without a tokenizer: llama, qwen3 (norms on q and k), gemma3, and what cannot be spread."""
    folder = tmp_path_factory.mktemp("models")
    for family in ("llama", "qwen3", "gemma3", "gpt2"):
        tiny(family).save_pretrained(folder / family)
    tiny("llama", num_key_value_heads=1).save_pretrained(folder / "one-group")
    return folder


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Sums in the order in which the processes of a launch take them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def alone(model: Path, **changed: Any) -> Run:
    options = {"data": ["random", "repeated"], "num_sequences": 5, "seq_len": 70, "batch_size": 2}
    return sinkscope.scan(str(model), **{**options, **changed})


@pytest.fixture
def expected(folder: Path, tmp_path: Path, one_thread: None) -> Path:
    alone(folder / "llama").save(tmp_path / "alone")
    return tmp_path / "alone"


def same_bytes(one: Path, other: Path) -> None:
    for name in (*TABLES, "domains.csv"):
        assert (one / name).read_bytes() == (other / name).read_bytes(), name


def near(one: Run, other: Run, bound: float) -> None:
    """Every number of every table within `bound`, relative where it is above 1; the same places missing."""
    for name, table in one.tables().items():
        found = other.tables()[name]
        assert list(table.columns) == list(found.columns)
        for column in table:
            expected, measured = table[column].reset_index(drop=True), found[column]
            if not pd.api.types.is_float_dtype(expected):
                assert expected.equals(measured), (name, column)
                continue
            np.testing.assert_allclose(measured, expected, rtol=bound, atol=bound, err_msg=f"{name} {column}")


@pytest.mark.slow
def test_two_processes_write_what_one_writes(folder: Path, expected: Path, tmp_path: Path) -> None:
    code, out, err = launch("-m", "sinkscope", "scan", folder / "llama", *WORDS, "--json", "--out", tmp_path / "run")
    assert code == 0, err
    assert said(err) == []
    same_bytes(tmp_path / "run", expected)
    assert out == (tmp_path / "run" / "summary.json").read_text("utf-8"), "printed once"
    assert out == (expected / "summary.json").read_text("utf-8")
    manifest, before = load_run(tmp_path / "run").manifest, load_run(expected).manifest
    assert (manifest.processes, before.processes) == (2, 1)
    varying = {"processes", "command", "created", "timing", "tables"}
    assert manifest.model_dump(exclude=varying) == before.model_dump(exclude=varying)
    assert not (tmp_path / "run" / UNFINISHED).exists()


@pytest.mark.slow
def test_several_models_and_fewer_sequences_than_processes(folder: Path, tmp_path: Path, one_thread: None) -> None:
    models = (folder / "llama", folder / "absent", folder / "gemma3")
    words = ("--data", "random", "--num-sequences", "1", "--seq-len", "40", "--quiet", "--out", tmp_path)
    code, out, err = launch("-m", "sinkscope", "scan", *models, *words, launcher=ACCELERATE)
    assert code == 1, "the launcher's own code for any failure"
    assert exit_codes(err) == {2}
    assert out == ""
    lines = said(err)
    assert len(lines) == 2
    assert "absent" in lines[0]
    assert "1 of 3 models failed" in lines[1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gemma3", "llama"], "nothing of the one that failed"
    for name in ("llama", "gemma3"):
        near(alone(folder / name, data="random", num_sequences=1, seq_len=40), load_run(tmp_path / name), 1e-6)


@pytest.mark.slow
def test_a_failure_of_one_process_ends_all(folder: Path, expected: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    code, out, err = launch(FAULTY, "error", "scan", folder / "llama", *WORDS, "--out", run)
    assert code == 1
    assert exit_codes(err) == {2}
    assert out == ""
    assert said(err) == ["sinkscope: error: process 1: a layer overflowed"]
    assert [path.name for path in run.iterdir()] == [UNFINISHED]
    assert len(list((run / UNFINISHED).glob("*.safetensors"))) == 2, "the first batch of each process"
    alone(folder / "llama", shards=run, resume=True).save(run)
    same_bytes(run, expected)


@pytest.mark.slow
def test_memory_that_ends_in_one_process_changes_no_table(folder: Path, tmp_path: Path, one_thread: None) -> None:
    code, _, err = launch(FAULTY, "memory", "scan", folder / "llama", *WORDS, "--quiet", "--out", tmp_path / "run")
    assert code == 0, err
    run = load_run(tmp_path / "run")
    assert run.manifest.batch_size == 1
    near(alone(folder / "llama"), run, 1e-6)


def _wait_for_shards(run: Path, count: int, process: subprocess.Popen[str]) -> None:
    limit = time.monotonic() + LIMIT
    while len(list((run / UNFINISHED).glob("*.safetensors"))) < count:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < limit
        time.sleep(0.05)


@pytest.mark.slow
def test_a_killed_launch_goes_on(folder: Path, expected: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = start_launch(FAULTY, "slow", "scan", folder / "llama", *WORDS, "--out", run)
    try:
        _wait_for_shards(run, 2, process)
    finally:
        kill_all(process)
        process.communicate()
    assert len(list((run / UNFINISHED).glob("*.safetensors"))) < 6
    words = ("-m", "sinkscope", "scan", folder / "llama", *WORDS, "--resume", "--quiet", "--out", run)
    assert launch(*words) == (0, "", "")
    same_bytes(run, expected)


@pytest.mark.slow
def test_ctrl_c_saves_what_all_processes_have_done(folder: Path, expected: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = start_launch(FAULTY, "slow", "scan", folder / "llama", *WORDS, "--out", run)
    try:
        _wait_for_shards(run, 3, process)  # the second round: the first is more than on disk, all have it in memory
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    finally:
        kill_all(process)
    assert len(said(err)) == 1
    assert "are measured and saved in" in said(err)[0]
    part = load_run(run)
    assert part.manifest.complete is False
    assert 4 <= part.manifest.sequences_done < 10
    alone(folder / "llama", shards=run, resume=True).save(run)
    same_bytes(run, expected)


@pytest.mark.slow
def test_heads_spread_over_processes_give_the_same_tables(folder: Path, tmp_path: Path) -> None:
    models = [folder / name for name in ("llama", "qwen3", "gemma3")]
    words = ("--data", "random", "--num-sequences", "3", "--seq-len", "70", "--tp", "--quiet", "--out", tmp_path)
    code, _, err = launch("-m", "sinkscope", "scan", *models, *words)
    assert code == 0, err
    for model in models:
        run = load_run(tmp_path / model.name)
        near(alone(model, data="random", num_sequences=3, batch_size=None), run, 1e-5)
        assert run.manifest.tensor_parallel == 2
        assert run.manifest.self_check.status == "passed"
        assert run.manifest.attention[0].heads == 4


@pytest.mark.slow
@nightly
def test_eight_processes_spread_the_shapes_of_70b_and_405b(tmp_path: Path) -> None:
    """Llama-3.1's heads, key/value heads and ratio of inner to outer channels; channels and layers are fewer. Each
    process holds one key/value head, which is the most that can be spread. In float32 other orders of the sums move the
    logarithms of small outputs by 2e-5."""
    for name, heads, ratio in (("70b", 64, 3.5), ("405b", 128, 3.25)):
        channels = 4 * heads
        shape = {"num_attention_heads": heads, "num_key_value_heads": 8, "intermediate_size": int(ratio * channels)}
        tiny("llama", hidden_size=channels, **shape).save_pretrained(tmp_path / name)
    words = ("--data", "random", "--num-sequences", "2", "--seq-len", "70", "--dtype", "float64", "--tp", "--quiet")
    models = (tmp_path / "70b", tmp_path / "405b", "--out", tmp_path / "runs")
    code, _, err = launch("-m", "sinkscope", "scan", *models, *words, count=8, limit=400)
    assert code == 0, err
    for name, heads in (("70b", 64), ("405b", 128)):
        run = load_run(tmp_path / "runs" / name)
        near(alone(tmp_path / name, data="random", num_sequences=2, batch_size=None, dtype="float64"), run, 1e-5)
        assert (run.manifest.tensor_parallel, run.manifest.attention[0].heads) == (8, heads)
        assert run.manifest.self_check.status == "passed"


@pytest.mark.slow
@pytest.mark.parametrize("spread", [pytest.param(False, marks=nightly), True])
def test_a_guest_that_fails_in_one_process_is_left_out_in_all(spread: bool, folder: Path, tmp_path: Path) -> None:
    """With --tp the processes wait for each other within a layer: none may wait for one whose guest has failed."""
    path, out = tmp_path / "own.py", tmp_path / "run"
    path.write_text(GUESTS, encoding="utf-8")
    words = (folder / "llama", "--data", "random", "--num-sequences", "3", "--seq-len", "70", "--metrics", path)
    code, _, err = launch("-m", "sinkscope", "scan", *words, "--out", out, *(("--tp",) if spread else ()))
    assert code == 0, err
    run, plain = load_run(out), alone(folder / "llama", data="random", num_sequences=3, batch_size=None)
    warned = [line for line in said(err) if "left out" in line]
    reason = "ValueError: on the second process (line 17 of own.py)"
    assert warned[0] == f"sinkscope: warning: metric alone is left out: {reason}"
    wanted = ["it failed in another process of the launch"] * spread
    assert [line.partition("asks_once_more is left out: ")[2] for line in warned[1:]] == wanted
    more = [name for name in run.heads if name not in plain.heads]
    assert more == ["own", "own_sem", "own_ln", "own_ln_sem"] + ["asks_once_more", "asks_once_more_sem"] * (not spread)
    np.testing.assert_allclose(run.heads["own"], plain.heads["sink_score"], rtol=1e-5)
    for name in plain.heads.select_dtypes("float"):
        np.testing.assert_allclose(run.heads[name], plain.heads[name], rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_heads_that_cannot_be_spread_are_refused(folder: Path, tmp_path: Path) -> None:
    models = (folder / "one-group", folder / "gpt2")
    code, _, err = launch("-m", "sinkscope", "scan", *models, "--data", "random", "--tp", "--out", tmp_path / "run")
    assert code == 1
    assert exit_codes(err) == {2}
    lines = said(err)
    assert len(lines) == 3
    assert "has 1 key/value heads in a layer, which 2 processes cannot share evenly" in lines[0]
    assert "transformers has no plan to spread this kind of model" in lines[1]
    assert not (tmp_path / "run").exists()


class Second(Processes):
    """Beside this process another, which gives the same, but in which Triton has failed."""

    def together(self, step: Callable[[], Any]) -> list[Any]:
        own = step()
        if getattr(own, "failures", None) != []:
            return [own, own]
        return [own, replace(own, batch=None, failures=["Triton failed there"], failed={"own": "no"})]


@pytest.mark.slow
def test_triton_s_failure_in_another_process_is_told(folder: Path) -> None:
    run = alone(folder / "llama", processes=Second())
    assert run.manifest.warnings.count("Triton failed there") == 1


@pytest.mark.slow
def test_a_guest_that_fails_in_another_process_is_left_out(folder: Path, tmp_path: Path) -> None:
    """With the values of the batches that this process measured; a run that is resumed too."""
    path = tmp_path / "own.py"
    path.write_text(GUESTS, encoding="utf-8")
    run = alone(folder / "llama", metrics=[path], processes=Second())
    assert [line for line in run.manifest.warnings if "own" in line] == ["metric own (with own_ln) is left out: no"]
    assert not {"own", "own_ln"} & {*run.heads}
    assert {"alone", "asks_once_more"} <= {*run.heads}


def test_without_a_launcher_there_is_one_process() -> None:
    assert (size(), start_processes("cuda"), leave(3)) == (1, ALONE, 3)
    assert ALONE.share([1, 2, 3]) == [1, 2, 3]


def test_a_launcher_is_needed_for_tp(scan_cli: Any, folder: Path) -> None:
    outcome = scan_cli(folder / "llama", "--tp")
    assert outcome.code == 2
    assert outcome.stderr == (
        "sinkscope: error: --tp needs several processes: torchrun --nproc-per-node N -m sinkscope scan ... --tp\n"
    )
