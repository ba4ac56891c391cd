"""Every command on every kind of terminal, pipe and closed stream: what is done is printed, as far as it can be."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from conftest import make_model, make_tokenizer
from desk import scanned

pytestmark = pytest.mark.slow

COMMANDS = {
    "version": "--version",
    "metrics": "metrics",
    "export": "export {runs}/a {runs}/b",
    "compare": "compare {runs}/a {runs}/b",
    "failed check": "check {runs}/c --baseline {runs}/a",
    "report": "report {runs}/a -o {out}/r.html",
    "scan": "scan {runs}/naïve --seq-len 16 --num-sequences 2 --out {out}/run --force",
    "bad input": "scan {runs}/none",
}
CODES = {"failed check": 1, "bad input": 2}

STREAMS = ("ascii", "latin-1", "no stdout", "no stderr", "closed pipe", "20 columns", "coloured", "full stderr")

HARNESS = """
import io, json, os, sys, torch, pandas, transformers, pyarrow.parquet
import sinkscope.engine.scan, sinkscope.present.html.report, transformers.models.llama.modeling_llama
from sinkscope.cli import main

commands, streams, folder = json.loads(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3]


def opened(number, name):
    os.dup2(os.open(f"{folder}/{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)


def become(stream):
    opened(1, "out"), opened(2, "err")
    encoding = stream if stream in ("ascii", "latin-1") else "utf-8"
    if stream == "20 columns":
        os.environ["COLUMNS"] = "20"
    if stream == "coloured":
        os.environ["FORCE_COLOR"] = "1"
    if stream == "full stderr":
        os.dup2(os.open("/dev/full", os.O_WRONLY), 2)
    if stream == "closed pipe":
        reader, writer = os.pipe()
        os.close(reader)
        os.dup2(writer, 1)
    sys.stdout = open(1, "w", encoding=encoding, closefd=False)
    sys.stderr = open(2, "w", encoding=encoding, errors="backslashreplace", closefd=False, buffering=1)
    for number, name in ((1, "stdout"), (2, "stderr")):
        if stream in ("no " + name):
            os.close(number)
            setattr(sys, name, None)


for stream in streams:
    for name, words in commands.items():
        child = os.fork()
        if not child:
            become(stream)
            sys.argv = ["sinkscope", *words.split()]
            try:
                main()
            except SystemExit as end:
                os._exit(end.code or 0)
            except BaseException as error:
                os._exit(99)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        said = [open(f"{folder}/{each}", encoding="utf-8", errors="replace").read() for each in ("out", "err")]
        print(json.dumps([stream, name, code, *said]), flush=True)
"""

Said = dict[tuple[str, str], tuple[int, str, str]]


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Said:
    """Exit code, stdout and stderr of every command on every stream, all forked from one process."""
    folder = tmp_path_factory.mktemp("streams")
    run = scanned()
    run.manifest.model.id = "naïve \u4e2d \U0001f600"
    run.save(folder / "a")
    run.save(folder / "b")
    run.sequences["bos_mass"] += 0.1
    run.save(folder / "c")
    make_model().save_pretrained(folder / "naïve")
    make_tokenizer().save_pretrained(folder / "naïve")
    commands = {name: words.format(runs=folder, out=folder) for name, words in COMMANDS.items()}
    done = subprocess.run(
        [sys.executable, "-c", HARNESS, json.dumps(commands), json.dumps(STREAMS), str(folder)],
        capture_output=True, text=True, check=True, env=os.environ | {"PYTHONUTF8": "1"}, cwd=folder,
    )  # fmt: skip
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    return {(stream, name): (code, out, err) for stream, name, code, out, err in rows}


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_ends_as_it_does_on_a_terminal(command: str, stream: str, said: Said) -> None:
    code, out, err = said[stream, command]
    assert code == CODES.get(command, 0), err
    assert "unexpected" not in err
    assert "Traceback" not in err
    if stream not in ("no stdout", "closed pipe") and command not in ("report", "bad input"):
        assert len(out) > 3
    if stream != "coloured":
        assert "\x1b" not in out
    assert "\x1b" not in err
    if stream in ("no stderr", "full stderr"):
        assert err == ""
    if stream == "no stderr":
        assert "sinkscope: " not in out


def test_lines_on_stderr_are_of_bounded_length(capsys: pytest.CaptureFixture[str]) -> None:
    from sinkscope.cli.common import LONGEST_LINE, say

    say("error: " + "x" * 70_000 + ": do this")
    line = capsys.readouterr().err
    assert len(line) <= LONGEST_LINE + len("sinkscope: \n")
    assert line.endswith("x: do this\n")
    say("\x1b" * 5_000)
    assert len(capsys.readouterr().err) <= LONGEST_LINE + len("sinkscope: \n")
