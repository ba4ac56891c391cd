"""What goes wrong around a scan: unusable data and options, occupied folders, full disks, Ctrl-C, too little memory."""

from __future__ import annotations

import errno
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import make_dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import TABLES, VOCABULARY, Refused, Scan
from desk import scanned
from tiers import slow_but

import sinkscope
from sinkscope import SinkscopeError, load_run, scan
from sinkscope.cli import main
from sinkscope.cli.options import with_options
from sinkscope.engine.requested import requested

Patch = Callable[[Callable[[torch.Tensor], None]], None]


def listing(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# Data


ENOUGH = "some words of text " * 40
BAD_FILES: dict[str, tuple[str, str | bytes, str]] = {
    "empty text": ("x.txt", "", "is empty"),
    "blank text": ("x.txt", " \n\n ", "is empty"),
    "binary text": ("x.txt", bytes(range(256)), "not UTF-8"),
    "text with zero bytes": ("x.txt", "abc\0def" * 200, "holds a NUL character (at 3)"),
    "UTF-16 without a mark": ("x.txt", "plain words".encode("utf-16-le"), "convert it to UTF-8"),
    "short text": ("x.txt", "few words", "too short"),
    "empty lines": ("x.jsonl", "", "is empty"),
    "binary lines": ("x.jsonl", bytes(range(256)), "not UTF-8"),
    "short lines": ("x.jsonl", '{"text": "few words"}\n', "too short"),
    "short ids": ("x.jsonl", '{"input_ids": [3, 4, 5]}\n', "the longest has 3"),
    "malformed line": ("x.jsonl", json.dumps({"text": ENOUGH}) + '\n{"text": "brok\n', "line 2"),
    "list line": ("x.jsonl", "[3, 4, 5]\n", "x.jsonl:1"),
    "number": ("x.jsonl", '{"text": 7}\n', "'text'"),
    "fractions": ("x.jsonl", '{"input_ids": [3.5, 4.5]}\n', "'input_ids'"),
    "truths": ("x.jsonl", '{"input_ids": [true, false]}\n', "'input_ids'"),
    "no column": ("x.jsonl", '{"body": "words"}\n', "body"),
    "id too large": ("x.jsonl", json.dumps({"input_ids": [3] * 31 + [VOCABULARY]}), f"token id {VOCABULARY}"),
    "id negative": ("x.jsonl", json.dumps({"input_ids": [3] * 31 + [-1]}), "token id -1"),
    "id enormous": ("x.jsonl", json.dumps({"input_ids": [3] * 31 + [10**30]}), "token id 1000"),
    "mixed": ("x.jsonl", json.dumps({"input_ids": [3] * 40}) + "\n" + json.dumps({"text": ENOUGH}), "mixed"),
    "empty Parquet": ("x.parquet", b"", "is empty"),
    "CSV": ("x.csv", "text\nwords\n", "x.csv', a file with another ending: give one of"),
    "binary Parquet": ("x.parquet", bytes(range(256)) * 9, "as Parquet"),
}


@pytest.mark.parametrize("kind", BAD_FILES)
def test_unusable_file(kind: str, tiny_folder: Path, refused: Refused, tmp_path: Path) -> None:
    name, content, said = BAD_FILES[kind]
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    message = refused(tiny_folder, "--data", path)
    assert said in message
    assert name in message


def test_a_folder_as_data_is_called_so(refused: Refused, tmp_path: Path) -> None:
    assert "unknown data '': give one of" in refused(tmp_path / "no-model", "--data", "")
    assert "give one of them" in refused(tmp_path / "no-model", "--resume", "--force")
    assert f"unknown data '{tmp_path}', a folder: give one of" in refused(tmp_path / "no-model", "--data", tmp_path)


def test_an_empty_file_is_refused_before_a_model_is_looked_for(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "x.txt").touch()
    assert "x.txt is empty: give a file with text" in refused(tmp_path / "no-model", "--data", tmp_path / "x.txt")


def test_blank_texts_are_called_so(tiny_folder: Path, refused: Refused, tmp_path: Path) -> None:
    """Rows there are, but no text in them."""
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": ""}\n{"text": "  "}\n', "utf-8")
    assert refused(tiny_folder, "--data", path) == f"{path} holds neither text nor token ids"


def test_unusable_parquet(tiny_folder: Path, refused: Refused, tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    pd.DataFrame({"body": [ENOUGH] * 3, "number": [1, 2, 3]}).to_parquet(path)
    assert "body, number" in refused(tiny_folder, "--data", path)
    assert "'nonesuch'" in refused(tiny_folder, "--data", f"{path}#nonesuch")
    assert "'number'" in refused(tiny_folder, "--data", f"{path}#number")
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    assert "as Parquet" in refused(tiny_folder, "--data", path)
    pd.DataFrame({"text": pd.Series([], dtype="string")}).to_parquet(path)
    assert "neither text" in refused(tiny_folder, "--data", path)


def test_rows_without_a_value_are_passed_over(tiny_folder: Path, scan_cli: Scan, tmp_path: Path) -> None:
    """Missing values are usual in Parquet; an empty text is passed over too."""
    path = tmp_path / "x.parquet"
    pd.DataFrame({"text": [ENOUGH, None, "more " + ENOUGH]}).to_parquet(path)
    outcome = scan_cli(tiny_folder, "--data", path)
    assert outcome.code == 0, outcome.stderr
    assert outcome.json("manifest")["data"][0]["documents"] == ["x.parquet:1", "x.parquet:3"]


@pytest.mark.parametrize("spec", ["wikipedia", "", "prose#text", "notes.pdf", "prose,code"])
def test_unknown_data(spec: str, tiny_folder: Path, refused: Refused) -> None:
    message = refused(tiny_folder, "--data", spec)
    assert repr(spec) in message
    assert "prose, code, multilingual, random, repeated" in message


@pytest.mark.parametrize("name", ["absent.txt", "absent.jsonl", "absent.parquet#text"])
def test_absent_file(name: str, tiny_folder: Path, refused: Refused) -> None:
    assert refused(tiny_folder, "--data", name) == f"no such data file: {name.partition('#')[0]}"


def test_a_folder_is_no_data_file(tmp_path: Path, tiny_folder: Path, refused: Refused) -> None:
    (tmp_path / "texts.txt").mkdir()
    assert refused(tiny_folder, "--data", tmp_path / "texts.txt") == f"{tmp_path / 'texts.txt'} is not a file"


def test_same_data_twice(tiny_folder: Path, refused: Refused) -> None:
    assert "twice" in refused(tiny_folder, "--data", "prose", "--data", "prose")


def test_a_file_under_two_names_is_one_source(
    tiny_folder: Path, refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.jsonl").write_text('{"text": "one", "more": "two"}\n', encoding="utf-8")
    Path("link.jsonl").symlink_to("a.jsonl")
    for second in ("./a.jsonl", tmp_path / "a.jsonl", "link.jsonl"):
        message = refused(tiny_folder, "--data", "a.jsonl", "--data", second)
        assert message == f"--data a.jsonl and --data {second} are the same source: give it once"
    assert requested("m", ["a.jsonl", "./a.jsonl#more"], {}).data == ("a.jsonl", "./a.jsonl#more")


@pytest.mark.skipif(find_spec("datasets") is not None, reason="the datasets package is installed")
def test_hub_data_need_the_datasets_package(tiny_folder: Path, refused: Refused) -> None:
    assert "sinkscope[datasets]" in refused(tiny_folder, "--data", "hf:allenai/c4:en/train#text")


@pytest.mark.parametrize("spec", ["hf:", "hf:c4", "hf:/train", "hf:c4/"])
def test_malformed_hub_data(spec: str, tiny_folder: Path, refused: Refused) -> None:
    assert "hf:NAME[:CONFIG]/SPLIT#FIELD" in refused(tiny_folder, "--data", spec)


# Surroundings


def ended(*words: str) -> int | str | None:
    """The exit code of the `sinkscope` command, run in this process."""
    sys.argv = ["sinkscope", *words]
    with pytest.raises(SystemExit) as end:
        main()
    return end.value.code


@pytest.fixture
def as_command(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int | str | None]:
    monkeypatch.setattr(sys, "argv", sys.argv)
    return ended


@pytest.mark.slow
def test_stdout_that_lacks_letters_gets_escapes(
    as_command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """After all the work a ± must not be what fails; and JSON stays JSON."""
    run = scanned()
    run.manifest.model.id = "naïve \U0001f600"
    run.save(tmp_path / "a")
    run.sequences["bos_mass"] += 0.01
    run.save(tmp_path / "b")
    said = {}
    for more in ((), ("--json",)):
        written = io.BytesIO()
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, "ascii"))
        assert as_command("check", str(tmp_path / "b"), "--baseline", str(tmp_path / "a"), *more) == 1
        said[more] = written.getvalue().decode("ascii")
    assert "allowed \\u00b1" in said[()]
    assert json.loads(said["--json",])["model"] == "naïve \U0001f600"


@pytest.mark.parametrize("words", [["--version"], ["scan", "--help"], ["metrics", "bos_mass"]])
def test_a_reader_that_has_gone_is_no_failed_check(
    words: list[str], as_command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`sinkscope --help | true`: typer would end with 1."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        assert as_command(*words) == 0


@pytest.mark.parametrize("processes", ["x", "0", "-1", ""])
def test_leftovers_of_a_launcher_are_one_line(
    processes: str, as_command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit 1 would mean a failed check."""
    for name, value in {"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": processes}.items():
        monkeypatch.setenv(name, value)
    assert as_command("check", "run", "--baseline", "run") == 2
    told = capsys.readouterr().err
    assert told.startswith(f"sinkscope: error: WORLD_SIZE={processes} is not a number of processes")
    assert len(told.splitlines()) == 1


@pytest.mark.parametrize("words", [("check", "run", "--baseline", "run"), ("scan", "none")])
def test_a_launch_that_there_is_not_is_one_line(
    words: tuple[str, ...], as_command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def unreachable(**_: Any) -> None:
        raise ValueError("environment variable MASTER_ADDR expected, but not set")

    monkeypatch.setattr("accelerate.PartialState", unreachable)
    monkeypatch.setattr("sinkscope.engine.launch._in_vain", False)
    for name, value in {"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert as_command(*words) == 2
    told = capsys.readouterr().err
    assert ("evict and quant run in several processes" if words[0] == "check" else "or unset LOCAL_RANK") in told
    assert "LOCAL_RANK=0, RANK=0, WORLD_SIZE=2" in told
    assert len(told.splitlines()) == 1


@pytest.mark.slow
@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_launch_whose_other_processes_never_appear_is_told_soon(rank: str) -> None:
    """What is left of another launch names an address, at which nobody else calls."""
    port = str(20_000 + 2 * (os.getpid() % 5_000) + int(rank))
    left = {"LOCAL_RANK": rank, "RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    code = (
        "import sys; from datetime import timedelta; from sinkscope.engine import launch; "
        "from sinkscope.cli import main; launch.START = timedelta(seconds=1)"
        "; launch.Launched.__init__.__defaults__ = ('auto', False, launch.START)"
        "; sys.argv = ['sinkscope', 'scan', 'example:trigger-softmax']; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | left, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith(f"sinkscope: error: the environment tells of a launch (LOCAL_RANK={rank}, ")
    assert "did not appear within 1 s" in done.stderr
    assert len(done.stderr.splitlines()) == 1


# Options


BAD_OPTIONS: dict[str, tuple[str, str]] = {
    "--seq-len 513": ("512", "positions"),
    "--seq-len 1": ("--seq-len 1", "at least 2"),
    "--seq-len 0": ("--seq-len 0", "at least 2"),
    "--num-sequences 0": ("--num-sequences 0", "at least 1"),
    "--batch-size 0": ("--batch-size", "at least 1"),
    "--batch-size two": ("--batch-size", "'two'"),
    "--batch-size 1.5": ("--batch-size", "'1.5'"),
    "--epsilon 0": ("--epsilon", "between 0 and 1"),
    "--epsilon 1": ("--epsilon", "between 0 and 1"),
    "--epsilon nan": ("--epsilon", "between 0 and 1"),
    "--spectra -1": ("--spectra", "0 for none"),
    "--dormant-rule honor": ("--dormant-rule", "NAME<x"),
    "--dormant-rule honor<x": ("--dormant-rule", "NAME<x"),
    "--dormant-rule honor<nan": ("--dormant-rule", "NAME<x"),
    "--dormant-rule nonesuch<1": ("--dormant-rule", "'nonesuch'"),
    "--format xlsx": ("--format", "csv, parquet"),
    "--bos maybe": ("--bos", "auto, always, never"),
    "--seed -1": ("--seed", "-1"),
    f"--seed {10**26}": ("--seed", "at most"),
    f"--num-sequences {10**26}": ("--num-sequences", "at most 1,000,000"),
    f"--seq-len {10**26} --data random": ("--seq-len", "at most"),
    f"--batch-size {10**26}": ("--batch-size", "at most"),
    f"--spectra {10**26}": ("--spectra", "at most"),
}


@pytest.mark.parametrize("option", BAD_OPTIONS)
def test_unusable_option(option: str, tiny_folder: Path, refused: Refused) -> None:
    message = refused(tiny_folder, *option.split(" "))
    for said in BAD_OPTIONS[option]:
        assert said in message


@pytest.mark.parametrize("options", ["--seq-len many", "--epsilon x", "--nonesuch"])
def test_option_that_cannot_be_parsed(options: str, tiny_folder: Path, scan_cli: Scan) -> None:
    outcome = scan_cli(tiny_folder, *options.split(" "))
    assert outcome.code == 2
    assert outcome.stdout == ""
    assert options.split(" ")[0] in outcome.stderr
    assert "Traceback" not in outcome.stderr


@pytest.mark.parametrize("option", ["--bos maybe", "--data wikipedia", "--data absent.txt"])
def test_options_are_checked_before_the_model_is_loaded(
    option: str, tiny_folder: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loading may take minutes; what needs no model is refused without it."""
    from transformers import AutoModel

    load, loaded = AutoModel.from_pretrained, []
    monkeypatch.setattr(AutoModel, "from_pretrained", lambda *args, **kw: loaded.append(args) or load(*args, **kw))
    refused(tiny_folder, *option.split(" "))
    assert loaded == []


def test_dormant_rule_on_a_column_of_the_run_as_a_whole(tiny_folder: Path, refused: Refused) -> None:
    """`peak_score` is a column of heads.csv, so the message does not call it unknown."""
    assert refused(tiny_folder, "--dormant-rule", "peak_score<0.1") == (
        "--dormant-rule: 'peak_score' is no per-sequence column of heads.csv; `sinkscope metrics` lists them; did you "
        "mean sink_score?"
    )


# The output folder


def test_finished_run_is_replaced_only_with_force(tiny_folder: Path, scan_cli: Scan, refused: Refused) -> None:
    first = scan_cli(tiny_folder)
    heads = (first.folder / "heads.csv").read_bytes()
    assert "--force" in refused(tiny_folder, "--seed", 1)
    assert (first.folder / "heads.csv").read_bytes() == heads
    assert scan_cli(tiny_folder, "--seed", 1, "--force").code == 0
    assert (first.folder / "heads.csv").read_bytes() != heads
    assert listing(first.folder.parent) == ["run"]


def test_finished_run_is_refused_before_the_model_is_looked_at(
    tiny_folder: Path, scan_cli: Scan, refused: Refused
) -> None:
    scan_cli(tiny_folder)
    assert "--force" in refused("./no-such-model")


FOREIGN: dict[str, dict[str, str]] = {
    "some file": {"thesis.tex": "mine"},
    "a manifest of another program's": {"manifest.json": '{"name": "my app"}', "index.html": "mine"},
    "an unfinished manifest of another program's": {"manifest.json": '{"complete": false}', "thesis.tex": "mine"},
    "a manifest that is a list": {"manifest.json": "[]"},
    "a manifest that is no JSON": {"manifest.json": "%", "index.html": "mine"},
}


@pytest.mark.parametrize("force", [(), ("--force",)], ids=["", "force"])
@pytest.mark.parametrize("kind", FOREIGN)
def test_folder_with_foreign_files_is_never_touched(
    kind: str, force: tuple[str, ...], tiny_folder: Path, refused: Refused, tmp_path: Path
) -> None:
    folder = tmp_path / "results" / "run"
    folder.mkdir(parents=True)
    for name, text in FOREIGN[kind].items():
        (folder / name).write_text(text, "utf-8")
    assert str(folder) in refused(tiny_folder, *force)
    assert {path.name: path.read_text("utf-8") for path in folder.iterdir()} == FOREIGN[kind]


@pytest.mark.parametrize("complete", [True, False])
def test_files_a_user_put_into_a_run_survive(
    complete: bool, tiny_folder: Path, scan_cli: Scan, refused: Refused
) -> None:
    folder = scan_cli(tiny_folder).folder
    manifest = json.loads((folder / "manifest.json").read_text("utf-8")) | {"complete": complete}
    (folder / "manifest.json").write_text(json.dumps(manifest), "utf-8")
    (folder / "notes.txt").write_text("mine", "utf-8")
    assert "notes.txt" in refused(tiny_folder, "--force")
    assert (folder / "notes.txt").read_text("utf-8") == "mine"


def test_out_that_is_a_file(tiny_folder: Path, refused: Refused, tmp_path: Path) -> None:
    path = tmp_path / "results" / "run"
    path.parent.mkdir()
    path.write_text("mine", "utf-8")
    for force in ((), ("--force",)):
        assert "is a file" in refused(tiny_folder, *force)
    assert path.read_text("utf-8") == "mine"


@pytest.mark.parametrize(("out", "nearest"), [("/dev/null/run", "/dev/null"), ("/proc/nonesuch/run", "/proc")])
def test_unwritable_place_is_seen_before_the_model_is_loaded(out: str, nearest: str, refused: Refused) -> None:
    message = refused("./no-such-model", out=out)
    assert f"cannot write to {nearest}: " in message
    assert "--out" in message
    assert "exists" not in message


@pytest.mark.parametrize("model", ["./no-such-model", "tiny"])
def test_refused_scan_leaves_no_parent_folders(model: str, tiny_folder: Path, refused: Refused, tmp_path: Path) -> None:
    refused(tiny_folder if model == "tiny" else model, "--seq-len", 1, out=tmp_path / "deep" / "er" / "run")
    assert not (tmp_path / "deep").exists()


def test_refused_scan_leaves_no_runs_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.testing import CliRunner

    from sinkscope.cli import app

    monkeypatch.chdir(tmp_path)
    assert CliRunner().invoke(app, ["scan", "./no-such-model"]).exit_code == 2
    assert listing(tmp_path) == []


def test_parent_folders_are_made(tiny_folder: Path, scan_cli: Scan, tmp_path: Path) -> None:
    outcome = scan_cli(tiny_folder, out=tmp_path / "deep" / "er" / "run")
    assert outcome.code == 0
    assert (tmp_path / "deep" / "er" / "run" / "heads.csv").is_file()


@pytest.mark.parametrize("out", slow_but([".", "../here", "here/"], "."))
def test_out_may_be_an_empty_folder_that_exists(
    out: str, tiny_folder: Path, scan_cli: Scan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "work" / "here"
    here.mkdir(parents=True)
    monkeypatch.chdir(here.parent if out == "here/" else here)
    outcome = scan_cli(tiny_folder, out=out)
    assert outcome.code == 0, outcome.stderr
    assert {*TABLES, "summary.json", "manifest.json"} == set(listing(here))
    assert listing(here.parent) == ["here"]


def test_out_may_be_a_link_to_a_folder(tiny_folder: Path, scan_cli: Scan, tmp_path: Path) -> None:
    """A link to a larger disk stays a link, and the results go there."""
    (tmp_path / "large").mkdir()
    (tmp_path / "link").symlink_to("large")
    assert scan_cli(tiny_folder, out=tmp_path / "link").code == 0
    assert (tmp_path / "link").is_symlink()
    assert "heads.csv" in listing(tmp_path / "large")


def full_disk(*args: Any, **kwargs: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("writer", ["to_parquet", "to_csv"])
def test_full_disk(writer: str, tiny_folder: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pd.DataFrame, writer, full_disk)
    message = refused(tiny_folder, shards=True)
    assert "No space left" in message
    assert "run" in message


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "shards"}


@pytest.mark.slow
def test_full_disk_leaves_no_file_of_a_run_and_resumes(
    tiny_folder: Path, scan_cli: Scan, refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pd.DataFrame, "to_csv", full_disk)
    refused(tiny_folder, shards=True)
    assert listing(tmp_path / "results" / "run") == ["shards"]
    monkeypatch.undo()
    assert scan_cli(tiny_folder, "--resume").code == 0


@pytest.mark.slow
def test_full_disk_keeps_the_run_that_was_to_be_replaced(
    tiny_folder: Path, scan_cli: Scan, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = scan_cli(tiny_folder).folder
    before = contents(folder)
    monkeypatch.setattr(pd.DataFrame, "to_parquet", full_disk)
    refused(tiny_folder, "--force", "--seed", 1, shards=True)
    assert contents(folder) == before


@pytest.mark.slow
@pytest.mark.parametrize("step", slow_but(["exchange", "sync_tree"], "exchange"))
def test_a_failing_disk_keeps_the_run_that_was_to_be_replaced(
    step: str, tiny_folder: Path, scan_cli: Scan, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = scan_cli(tiny_folder).folder
    before = contents(folder)

    def broken(*paths: Path) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(f"sinkscope.runs.whole.{step}", broken)
    assert "Input/output error" in refused(tiny_folder, "--force", "--seed", 1, shards=True)
    assert contents(folder) == before
    assert listing(folder.parent) == ["run"]


def test_save_refuses_like_the_command(tiny_model: Any, tmp_path: Path) -> None:
    run = scan(tiny_model, data=[[3, 4, 5, 6]], self_check=False)
    (tmp_path / "notes.txt").write_text("mine", "utf-8")
    with pytest.raises(SinkscopeError, match="not a run's"):
        run.save(tmp_path, force=True)
    run.save(tmp_path / "run")
    with pytest.raises(SinkscopeError, match="finished run"):
        run.save(tmp_path / "run")
    run.save(tmp_path / "run", force=True)
    assert listing(tmp_path) == ["notes.txt", "run"]


# Ctrl-C


def interrupt_at(call: int) -> Callable[[torch.Tensor], None]:
    """Ctrl-C in the forward pass number `call`. The dry run and the self-check make the first four."""
    calls = iter(range(1, 1000))

    def before(ids: torch.Tensor) -> None:
        if next(calls) == call:
            raise KeyboardInterrupt

    return before


SIX = ("--num-sequences", 6, "--batch-size", 2)


def test_interrupted_scan_keeps_what_it_has(
    tiny_folder: Path, scan_cli: Scan, patch_forward: Patch, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context():
        patch_forward(interrupt_at(7))
        outcome = scan_cli(tiny_folder, *SIX)
    assert outcome.json("manifest")["complete"] is False
    assert outcome.json("manifest")["sequences_done"] == 4
    assert outcome.json("summary")["complete"] is False
    assert outcome.json("summary")["sequences"] == 4
    assert listing(outcome.folder.parent) == ["run"]
    run = load_run(outcome.folder)
    assert run.sequences["sequence"].nunique() == 4
    assert "interrupted" in outcome.stderr


def test_interrupted_scan_exits_130(tiny_folder: Path, scan_cli: Scan, patch_forward: Patch) -> None:
    patch_forward(interrupt_at(7))
    outcome = scan_cli(tiny_folder, *SIX)
    assert outcome.code == 130, outcome.stderr
    assert len(outcome.stderr.splitlines()) == 1
    assert "error" not in outcome.stderr


@pytest.mark.parametrize("call", slow_but([1, 2, 3, 4, 5], 1, 5))
def test_interruption_before_the_first_batch_leaves_nothing(
    call: int, tiny_folder: Path, scan_cli: Scan, patch_forward: Patch
) -> None:
    patch_forward(interrupt_at(call))
    outcome = scan_cli(tiny_folder, *SIX)
    assert outcome.code == 130
    assert outcome.stderr.splitlines() == ["sinkscope: interrupted"]
    assert listing(outcome.folder.parent) == []


@pytest.mark.parametrize("option", slow_but(["--resume", "--force"], "--resume"))
def test_incomplete_run_may_be_replaced(option: str, tiny_folder: Path, scan_cli: Scan, patch_forward: Patch) -> None:
    patch_forward(interrupt_at(7))
    assert scan_cli(tiny_folder, *SIX).json("manifest")["complete"] is False
    assert "unfinished run" in scan_cli(tiny_folder, *SIX).stderr
    outcome = scan_cli(tiny_folder, *SIX, option)  # the calls go on counting: no second interruption
    assert outcome.code == 0, outcome.stderr
    assert outcome.json("manifest")["complete"] is True
    assert outcome.json("manifest")["sequences_done"] == 6
    assert listing(outcome.folder.parent) == ["run"]


@pytest.mark.slow
def test_part_of_a_run_equals_the_run(tiny_folder: Path, scan_cli: Scan, patch_forward: Patch) -> None:
    whole = load_run(scan_cli(tiny_folder, *SIX, name="whole").folder).sequences
    patch_forward(interrupt_at(7))
    part = load_run(scan_cli(tiny_folder, *SIX, name="part").folder).sequences
    same = whole[whole["sequence"] < 4].reset_index(drop=True)
    pd.testing.assert_frame_equal(part, same)


@pytest.mark.slow
def test_interruption_in_the_second_domain(tiny_folder: Path, scan_cli: Scan, patch_forward: Patch) -> None:
    patch_forward(interrupt_at(9))
    outcome = scan_cli(tiny_folder, *SIX, "--data", "prose", "--data", "code", "--data", "random")
    assert outcome.json("manifest")["sequences_done"] == 8
    run = load_run(outcome.folder)
    assert run.sequences.groupby("domain")["sequence"].nunique().to_dict() == {"code": 2, "prose": 6}
    assert run.summary.data == ["prose", "code"]


@pytest.mark.parametrize("part", slow_but([1, 2, 3, 4, 5], 2, 5))
def test_interruption_while_a_batch_is_kept(
    part: int, tiny_model: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole batches or nothing: on a GPU the wait for the results, and so most interruptions, fall here."""
    from sinkscope.engine import collector as measured

    keep, calls = measured._to_cpu, iter(range(1, 1000))

    def interrupted(*given: Any) -> Any:
        if next(calls) == part:
            raise KeyboardInterrupt
        return keep(*given)

    monkeypatch.setattr(measured, "_to_cpu", interrupted)
    with pytest.raises(KeyboardInterrupt) as caught:
        scan(tiny_model, tokenizer=tokenizer, num_sequences=6, seq_len=32, batch_size=2, self_check=False)
    run = getattr(caught.value, "run", None)
    assert (run is None) == (part <= 2)
    if run is not None:
        counts = run.sequences.groupby("layer")["sequence"].nunique()
        assert counts.nunique() == 1
        assert run.manifest.sequences_done == counts.iloc[0]


def hooks(model: torch.nn.Module) -> list[int]:
    """How many hooks each module has. transformers leaves some of its own where an earlier test asked for maps."""
    return [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]


def test_interrupted_scan_hands_over_the_run(tiny_model: Any, tokenizer: Any) -> None:
    before, hooked = interrupt_at(3), hooks(tiny_model)
    handle = tiny_model.base_model.register_forward_pre_hook(
        lambda module, args, kwargs: before(kwargs["input_ids"]), with_kwargs=True
    )
    try:
        with pytest.raises(sinkscope.Interrupted) as caught:
            scan(tiny_model, tokenizer=tokenizer, num_sequences=6, seq_len=32, batch_size=2, self_check=False)
    finally:
        handle.remove()
    assert caught.value.run is not None
    assert caught.value.run.manifest.complete is False
    assert caught.value.run.manifest.sequences_done == 2
    assert hooks(tiny_model) == hooked


# Too little memory


def too_large(sequences: int, tokens: int = 0, sizes: list[int] | None = None) -> Callable[[torch.Tensor], None]:
    """Memory runs out in batches of more than `sequences` sequences of more than `tokens` tokens."""

    def before(ids: torch.Tensor) -> None:
        if sizes is not None:
            sizes.append(len(ids))
        if len(ids) > sequences and ids.shape[1] > tokens:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    return before


def values(folder: Path) -> np.ndarray:
    return load_run(folder).sequences.select_dtypes("number").drop(columns=["sequence"]).to_numpy(float, na_value=-7.0)


@pytest.mark.slow
def test_batch_is_halved_when_memory_runs_out(tiny_folder: Path, scan_cli: Scan, patch_forward: Patch) -> None:
    eight = ("--num-sequences", 8, "--no-self-check", "--data", "prose", "--data", "code")
    single = scan_cli(tiny_folder, *eight, "--batch-size", 1, name="single")
    sizes: list[int] = []
    patch_forward(too_large(2, sizes=sizes))
    outcome = scan_cli(tiny_folder, *eight, "--batch-size", 8, name="halved")
    assert outcome.code == 0, outcome.stderr
    assert outcome.stderr == ""
    assert outcome.json("manifest")["batch_size"] == 2
    np.testing.assert_allclose(values(outcome.folder), values(single.folder), rtol=1e-5, atol=1e-5)
    pd.testing.assert_frame_equal(load_run(outcome.folder).heads, load_run(single.folder).heads, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_batch_is_halved_not_nibbled_at(tiny_folder: Path, scan_cli: Scan, patch_forward: Patch) -> None:
    """Each failure costs a forward pass: 8, 4, 2, and the second domain starts at 2."""
    sizes: list[int] = []
    patch_forward(too_large(2, sizes=sizes))
    scan_cli(
        tiny_folder, "--num-sequences", 8, "--no-self-check", "--batch-size", 8, "--data", "prose", "--data", "code"
    )
    assert sizes == [1, 8, 4, 2, 2, 2, 2, 2, 2, 2, 2]


@pytest.mark.slow
def test_memory_that_runs_out_half_way_keeps_what_was_measured(
    tiny_folder: Path, scan_cli: Scan, patch_forward: Patch
) -> None:
    done: list[int] = []

    def before(ids: torch.Tensor) -> None:
        if len(done) >= 2 and len(ids) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        done.append(len(ids))

    whole = scan_cli(tiny_folder, "--num-sequences", 6, "--no-self-check", "--batch-size", 2, name="whole")
    patch_forward(before)
    outcome = scan_cli(tiny_folder, "--num-sequences", 6, "--no-self-check", "--batch-size", 2, name="part")
    assert done == [1, 2, 1, 1, 1, 1]
    np.testing.assert_allclose(values(outcome.folder), values(whole.folder), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_one_sequence_too_large_says_what_would_fit(tiny_folder: Path, refused: Refused, patch_forward: Patch) -> None:
    patch_forward(too_large(0, tokens=150))
    message = refused(tiny_folder, "--seq-len", 200)
    assert "out of memory" in message
    assert "--seq-len 100" in message
    assert "--dtype bfloat16" in message


@pytest.mark.parametrize("tokens", [0, 20])
def test_memory_too_small_for_the_first_passes(
    tokens: int, tiny_folder: Path, refused: Refused, patch_forward: Patch
) -> None:
    """The dry run (16 tokens) and the self-check run out as well."""
    patch_forward(too_large(0, tokens=tokens))
    message = refused(tiny_folder)
    assert "memory" in message
    assert "--dtype" in message


@pytest.mark.slow
def test_memory_error_of_the_host(tiny_folder: Path, scan_cli: Scan, patch_forward: Patch) -> None:
    def before(ids: torch.Tensor) -> None:
        if len(ids) > 1:
            raise MemoryError

    patch_forward(before)
    outcome = scan_cli(tiny_folder, "--batch-size", 2)
    assert outcome.code == 0, outcome.stderr
    assert outcome.json("manifest")["batch_size"] == 1


@pytest.mark.slow
def test_a_small_domain_does_not_shrink_the_batches_of_the_next(
    tiny_folder: Path, scan_cli: Scan, patch_forward: Patch, tmp_path: Path
) -> None:
    """With --batch-size auto, one sequence in the first domain says nothing of the memory."""
    path, sizes = tmp_path / "x.jsonl", list[int]()
    path.write_text(json.dumps({"text": ENOUGH}) + "\n", "utf-8")
    patch_forward(too_large(8, sizes=sizes))
    scan_cli(tiny_folder, "--data", path, "--data", "prose", "--num-sequences", 8, "--no-self-check")
    assert sizes == [1, 1, 8]


def test_an_option_that_a_command_has_twice_is_named() -> None:
    """A question of another package may declare one that `scan` has, such as --out."""
    asked = make_dataclass("asked", [("out", int, 1)])

    def command(asked: Any, out: str = "") -> None:
        """Does nothing."""

    command.__annotations__ = {"asked": asked, "out": str}
    with pytest.raises(SinkscopeError, match=r"^the option out of a question \(--measure\) is one of every scan"):
        with_options(command)
