"""A killed scan resumes where it stopped and ends with the same result; shards of another scan are refused."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import TABLES, Scan
from tiers import slow_but
from typer.testing import CliRunner, Result

import sinkscope
from sinkscope.cli import app
from sinkscope.cli.options import slugs
from sinkscope.engine import shards as shards_module
from sinkscope.engine.shards import Shards, first_difference
from sinkscope.runs.folder import UNFINISHED as SHARDS
from sinkscope.runs.run import Run, finished, load_run

ARGS = ("--data", "prose", "--data", "random", "--num-sequences", "5", "--seq-len", "70", "--batch-size", "2")
BATCHES = 6


class Killed(BaseException):
    """Stands in for kill -9: nothing of ours catches it."""


def same_tables(a: Path, b: Path) -> None:
    for name in (*TABLES, "domains.csv", "summary.json"):
        assert (a / name).read_bytes() == (b / name).read_bytes(), name


@pytest.fixture(scope="module")
def unbroken(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("unbroken") / "run"
    _measure(tiny_folder, out).save(out)
    return out


def _measure(model: Path, out: Path, resume: bool = False, **changed: Any) -> Run:
    options = {"data": ["prose", "random"], "num_sequences": 5, "seq_len": 70, "batch_size": 2}
    return sinkscope.scan(str(model), shards=out, resume=resume, **{**options, **changed})


@pytest.fixture
def kill_after(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """kill_after(n): the n-th shard is written, then the process dies."""
    write = Shards.write

    def arm(last: int) -> None:
        written = 0

        def dying(self: Shards, *args: Any) -> None:
            nonlocal written
            write(self, *args)
            written += 1
            if written == last:
                raise Killed

        monkeypatch.setattr(Shards, "write", dying)

    yield arm
    monkeypatch.setattr(Shards, "write", write)


BreakOff = Callable[[Path, Path, int], None]


@pytest.fixture
def break_off(kill_after: Any, monkeypatch: pytest.MonkeyPatch) -> BreakOff:
    """break_off(model, out, n): a scan that dies once its n-th shard is written."""

    def scan(model: Path, out: Path, last: int) -> None:
        kill_after(last)
        with pytest.raises(Killed):
            _measure(model, out)
        monkeypatch.undo()

    return scan


@pytest.mark.parametrize("last", slow_but(range(1, BATCHES + 1), 4))
def test_a_scan_killed_after_any_batch_ends_byte_identical(
    last: int, tiny_folder: Path, unbroken: Path, tmp_path: Path, break_off: BreakOff
) -> None:
    out = tmp_path / "run"
    break_off(tiny_folder, out, last)
    assert len(list((out / SHARDS).glob("*.safetensors"))) == last
    run = _measure(tiny_folder, out, resume=True)
    run.save(out)
    same_tables(out, unbroken)
    assert run.manifest.complete
    assert not (out / SHARDS).exists()


def test_a_kill_while_a_shard_is_written_loses_that_batch_only(
    tiny_folder: Path, unbroken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    save = shards_module.save_file
    calls = []

    def dying(tensors: Any, path: Path, metadata: Any) -> None:
        calls.append(path)
        if len(calls) == 3:
            path.write_bytes(b"half")
            raise Killed
        save(tensors, path, metadata=metadata)

    monkeypatch.setattr(shards_module, "save_file", dying)
    with pytest.raises(Killed):
        _measure(tiny_folder, out)
    monkeypatch.undo()
    assert len(list((out / SHARDS).glob("*.safetensors"))) == 2
    _measure(tiny_folder, out, resume=True).save(out)
    same_tables(out, unbroken)


@pytest.mark.parametrize("last", slow_but([1, 4, 8], 4))
def test_a_kill_while_the_run_is_saved_loses_nothing(
    last: int, tiny_folder: Path, unbroken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, left = tmp_path / "run", tmp_path / "left"
    run = _measure(tiny_folder, out)
    rename, moved = Path.rename, []

    def copying(self: Path, target: Path) -> Path:
        moved.append(self)
        if len(moved) == last:
            shutil.copytree(out, left)  # what a kill at this moment would leave
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", copying)
    run.save(out)
    monkeypatch.undo()
    _measure(tiny_folder, left, resume=True).save(left)
    same_tables(left, unbroken)
    assert not list(left.glob(".sinkscope-*"))


def test_a_shard_damaged_by_a_power_cut_is_measured_again(
    tiny_folder: Path, unbroken: Path, tmp_path: Path, break_off: BreakOff
) -> None:
    out = tmp_path / "run"
    break_off(tiny_folder, out, 4)
    second = sorted((out / SHARDS).glob("*.safetensors"))[1]
    second.write_bytes(second.read_bytes()[:100])
    _measure(tiny_folder, out, resume=True).save(out)
    same_tables(out, unbroken)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"seq_len": 64}, "seq_len"),
        ({"seed": 1}, "seed"),
        ({"data": ["prose", "code"]}, "data"),
        ({"epsilon": 0.5}, "epsilon"),
        ({"dtype": "bfloat16"}, "dtype"),
        ({"batch_size": 1}, "batch_size"),
        ({"dormant_rule": "awft>0.5"}, "dormant_rule"),
        ({"spectra": 1}, "spectra"),
    ],
)
def test_another_scan_is_refused(
    changed: dict[str, Any], named: str, tiny_folder: Path, tmp_path: Path, break_off: BreakOff,
) -> None:  # fmt: skip
    out = tmp_path / "run"
    break_off(tiny_folder, out, 1)
    with pytest.raises(sinkscope.SinkscopeError, match=f"unfinished scan with another {named}"):
        _measure(tiny_folder, out, resume=True, **changed)
    assert (out / SHARDS / "key.json").exists()


def test_another_rule_of_what_is_cheap_is_refused(
    tiny_folder: Path, tmp_path: Path, break_off: BreakOff, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As between two versions: the rest would be measured on other sequences."""
    out = tmp_path / "run"
    break_off(tiny_folder, out, 1)
    monkeypatch.setattr("sinkscope.engine.manifest.SPECTRA_CUBES", 1)
    with pytest.raises(sinkscope.SinkscopeError, match="unfinished scan with another spectra"):
        _measure(tiny_folder, out, resume=True)


def test_another_model_is_refused(tiny_folder: Path, copied: Path, tmp_path: Path, break_off: BreakOff) -> None:
    from safetensors.torch import load_file, save_file

    out = tmp_path / "run"
    break_off(copied, out, 1)
    weights = load_file(copied / "model.safetensors")
    name = next(iter(weights))
    weights[name] = weights[name] * 1.001
    save_file(weights, copied / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(sinkscope.SinkscopeError, match=r"unfinished scan with another model\.weights_sha256"):
        _measure(copied, out, resume=True)


def test_another_configuration_is_refused(tiny_folder: Path, copied: Path, tmp_path: Path, break_off: BreakOff) -> None:
    """The weights are the same, the numbers are not: config.json says how the weights are used."""
    out = tmp_path / "run"
    break_off(copied, out, 1)
    config = json.loads((copied / "config.json").read_text("utf-8"))
    (copied / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.1}), "utf-8")
    with pytest.raises(sinkscope.SinkscopeError, match=r"unfinished scan with another model\.config_sha256"):
        _measure(copied, out, resume=True)


def test_the_command_tells_how_to_go_on(scan_cli: Scan, tiny_folder: Path, tmp_path: Path, break_off: BreakOff) -> None:
    out = tmp_path / "run"
    break_off(tiny_folder, out, 2)
    refused = scan_cli(tiny_folder, *ARGS, out=out)
    assert refused.code == 2
    assert "--resume goes on with it, --force starts anew" in refused.stderr
    assert scan_cli(tiny_folder, *ARGS, "--resume", out=out).code == 0
    again = scan_cli(tiny_folder, *ARGS, "--resume", out=out)
    assert again.code == 0, "a loop that goes on until the scan is done must end"
    assert again.stderr == f"sinkscope: {tiny_folder}: already finished, in {out}\n"
    assert again.stdout.startswith(str(tiny_folder))
    assert scan_cli(tiny_folder, *ARGS, "--force", out=out).code == 0


def test_interrupted_scans_go_on(
    scan_cli: Scan, tiny_folder: Path, unbroken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, write, written = tmp_path / "run", Shards.write, []

    def interrupting(self: Shards, *args: Any) -> None:
        write(self, *args)
        written.append(args)
        if len(written) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(Shards, "write", interrupting)
    stopped = scan_cli(tiny_folder, *ARGS, out=out)
    monkeypatch.undo()
    assert stopped.code == 130
    assert "--resume goes on" in stopped.stderr
    assert not load_run(out).manifest.complete
    assert scan_cli(tiny_folder, *ARGS, "--resume", out=out).code == 0
    same_tables(out, unbroken)


@pytest.mark.slow
def test_batches_halved_by_memory_stay_halved(
    tiny_folder: Path, tmp_path: Path, kill_after: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sinkscope.engine.loop import Loop

    one_batch = Loop._one_batch

    def scarce(self: Loop, capture: Any, collector: Any, batch: Any) -> Any:
        if len(batch) > 1:
            raise MemoryError
        return one_batch(self, capture, collector, batch)

    monkeypatch.setattr(Loop, "_one_batch", scarce)
    whole = _measure(tiny_folder, tmp_path / "whole")
    whole.save(tmp_path / "whole")
    kill_after(3)
    with pytest.raises(Killed):
        _measure(tiny_folder, tmp_path / "run")
    monkeypatch.undo()
    again = _measure(tiny_folder, tmp_path / "run", resume=True)
    again.save(tmp_path / "run")
    assert again.manifest.batch_size == whole.manifest.batch_size == 1
    same_tables(tmp_path / "run", tmp_path / "whole")


def test_a_failed_first_batch_leaves_nothing(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sinkscope.engine.loop import Loop

    def failing(self: Loop, *args: Any) -> Any:
        raise sinkscope.SinkscopeError("a layer overflowed")

    monkeypatch.setattr(Loop, "_one_batch", failing)
    with pytest.raises(sinkscope.SinkscopeError, match="overflowed"):
        _measure(tiny_folder, tmp_path / "deep" / "run")
    assert not (tmp_path / "deep").exists()


def test_several_models_each_have_their_folder(scan_cli: Scan, tiny_folder: Path, tmp_path: Path) -> None:
    names = tmp_path / "models.txt"
    names.write_text(
        f"# two that work, one that does not\n{tiny_folder}\nexample:trigger-softmax\n\n{tmp_path}/absent\n"
    )
    words = ["scan", "--models", str(names), "--num-sequences", "2", "--out", str(tmp_path / "runs"), "--quiet"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2
    assert "1 of 3 models failed" in result.stderr
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {tiny_folder.name, "example-trigger-softmax"}
    again = CliRunner().invoke(app, [*words, "--resume", "--json"])
    assert again.exit_code == 2
    assert again.stderr.count("already finished") == 2


def test_another_seed_is_named_though_the_data_were_left_to_the_default(tiny_folder: Path, tmp_path: Path) -> None:
    """No --data and `--data prose` ask for the same text; the seed alone decides which documents are read."""
    words = (tiny_folder, "--out", tmp_path / "run")
    assert scan_several(*words).exit_code == 0
    again = scan_several(*words, "--data", "prose", "--seed", 1, "--resume")
    assert again.exit_code == 2
    assert "holds a finished run with another seed (0 there, 1 now)" in again.stderr


def test_long_values_that_differ_are_told_apart() -> None:
    folder = "a-long-name-of-a-folder/" * 3
    told = first_difference({"data": [f"{folder}b.jsonl"]}, {"data": [f"{folder}a.jsonl"]}, ["data"])
    assert told == "data (['a-long-name-of-a...a-folder/a.jsonl'] there, ['a-long-name-of-a...a-folder/b.jsonl'] now)"


def scan_several(*words: object) -> Result:
    few = ("--seq-len", "16", "--num-sequences", "2", "--no-self-check")
    return CliRunner().invoke(app, ["scan", *map(str, words), *few])


def test_a_finished_run_is_kept_for_the_scan_that_made_it_only(tiny_folder: Path, copied: Path, tmp_path: Path) -> None:
    """Other text, other settings, another model: each is refused by name, with one model and with several."""
    words = (tiny_folder, copied, "--out", tmp_path / "runs", "--data", "random")
    assert scan_several(*words).exit_code == 0
    kept = (tmp_path / "runs" / "copied" / "manifest.json").read_bytes()
    assert scan_several(*words, "--resume", "--quiet").exit_code == 0
    other = scan_several(*words[:-1], "repeated", "--resume")
    assert other.exit_code == 2
    assert other.stderr.count("holds a finished run with another data (['random'] there, ['repeated'] now)") == 2
    one = (copied, "--out", tmp_path / "runs" / "copied", "--data", "random", "--resume")
    assert "another epsilon (0.3 there, 0.5 now)" in scan_several(*one, "--epsilon", 0.5).stderr
    assert "another seed (0 there, 1 now)" in scan_several(*one, "--seed", 1).stderr
    config = json.loads((copied / "config.json").read_text("utf-8"))
    (copied / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.1}), "utf-8")
    several = scan_several(*words, "--resume")
    assert several.exit_code == 2
    assert "finished run with another model.config_sha256" in several.stderr
    assert "1 of 2 models failed" in several.stderr
    assert (tmp_path / "runs" / "copied" / "manifest.json").read_bytes() == kept


def test_models_of_one_name_have_folders_of_their_own(tmp_path: Path) -> None:
    """Checkpoints are called final, or checkpoint-1000, whatever was trained."""
    names = [str(tmp_path / parent / name) for parent in "ab" for name in ("final", "start")]
    for name in [*names, str(tmp_path / "only")]:
        Path(name).mkdir(parents=True)
    assert list(slugs(names[::2]).values()) == ["a--final", "b--final"]
    assert list(slugs([*names, str(tmp_path / "only")]).values())[-1] == "only"
    refused = scan_several(names[0], tmp_path / "b" / ".." / "a" / "final", "--out", tmp_path / "runs")
    assert refused.exit_code == 2
    assert "would both be written to the folder" in refused.stderr
    assert len(refused.stderr.splitlines()) == 1
    assert not (tmp_path / "runs").exists()


def test_no_model_and_no_list_is_one_line(tmp_path: Path) -> None:
    for words, told in ((["scan"], "no model"), (["scan", "--models", str(tmp_path / "none")], "cannot read")):
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 2
        assert told in result.stderr
        assert len(result.stderr.splitlines()) == 1


def _killed_at_random(model: Path, out: Path, after: float) -> int:
    words = [sys.executable, "-m", "sinkscope", "scan", str(model), *ARGS, "--resume", "--quiet", "--out", str(out)]
    process = subprocess.Popen(words, stderr=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": "1"})
    try:
        return process.wait(after)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
        process.wait()
        return -signal.SIGKILL


@pytest.mark.slow
def test_twenty_kills_at_random_moments_lose_nothing(tiny_folder: Path, unbroken: Path, tmp_path: Path) -> None:
    out, draw = tmp_path / "run", random.Random(0)
    began = time.monotonic()
    assert _killed_at_random(tiny_folder, tmp_path / "timed", 600) == 0
    whole = time.monotonic() - began
    killed = 0
    while killed < 20:
        code = _killed_at_random(tiny_folder, out, whole * draw.uniform(0.3, 1.0))
        assert code in (0, -signal.SIGKILL)
        killed += code != 0
        if finished(out) and not (out / SHARDS).exists():  # done, before or after the kill: start the next one
            same_tables(out, unbroken)
            shutil.rmtree(out)
    assert _killed_at_random(tiny_folder, out, 600) == 0
    same_tables(out, unbroken)
