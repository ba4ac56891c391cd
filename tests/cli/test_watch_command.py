"""`sinkscope watch -- PROGRAM`: the program runs as without it, and every model that attended has a run folder."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import sinkscope

ROOT = Path(__file__).parents[2]
PATHS = f"{ROOT}:{ROOT / 'tests' / 'support'}"
ENVIRONMENT = {"PYTHONPATH": PATHS, "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
PROGRAM = """
import sys
import torch
import warnings
from models import tiny
from plain_models import plain, tokens

print("given", sys.argv[1:], __name__)
plain_model, llama = plain(), tiny("llama")
torch.nn.CrossEntropyLoss()(torch.randn(2, 3), torch.tensor([0, 1]))
with torch.no_grad():
    for seed in range(4):
        plain_model(tokens(seed=seed))
    if "two" in sys.argv:
        llama(input_ids=tokens(), use_cache=False)
if "fail" in sys.argv:
    raise RuntimeError("its own error")
if "wait" in sys.argv:
    import signal
    signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts in the background ignores it
    print("waiting", flush=True)
    import time
    time.sleep(60)
warnings.warn("its own warning")
sys.exit(int(sys.argv[1]))
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


def command(*words: str | Path) -> list[str]:
    return [sys.executable, "-m", "sinkscope", "watch", *map(str, words)]


def watched(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*words), env=ENVIRONMENT, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_output_and_exit_code_are_the_programs_own(program: Path, tmp_path: Path) -> None:
    done = watched("--out", tmp_path / "run", "--limit", "6", "--", program, "7", "--flag")
    assert done.stdout == "given ['7', '--flag'] __main__\n"
    assert done.returncode == 7
    assert "program.py:24: UserWarning: its own warning" in done.stderr
    run = sinkscope.load_run(tmp_path / "run")
    assert run.summary.sequences == 6
    assert run.manifest.model.id == "Plain"
    assert run.manifest.command is not None
    assert run.manifest.command.endswith("program.py 7 --flag")
    again = watched("--out", tmp_path / "run", "--", program, "0")
    assert again.returncode == 2
    assert again.stdout == ""


@pytest.mark.slow
def test_each_model_has_a_folder_and_an_error_is_the_programs_own(program: Path, tmp_path: Path) -> None:
    done = watched("--out", tmp_path / "runs", "--every", "2", "--", program, "two", "fail")
    assert done.returncode == 1
    first, *_ = done.stderr.splitlines()
    assert first == "Traceback (most recent call last):"
    assert "RuntimeError: its own error" in done.stderr
    assert "sinkscope/engine" not in done.stderr
    names = sorted(path.name for path in (tmp_path / "runs").iterdir())
    assert names == ["1-Plain", "2-LlamaModel"]
    assert sinkscope.load_run(tmp_path / "runs" / "1-Plain").summary.sequences == 4


@pytest.mark.slow
def test_an_interrupted_program_leaves_its_runs(program: Path, tmp_path: Path) -> None:
    with subprocess.Popen(
        command("--out", tmp_path / "run", "--", program, "wait"), env=ENVIRONMENT, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    ) as running:  # fmt: skip
        assert running.stdout is not None
        while running.stdout.readline() != "waiting\n":
            time.sleep(0.1)
        running.send_signal(signal.SIGINT)
        _, errors = running.communicate(timeout=120)
    assert running.returncode == 130
    assert "KeyboardInterrupt" in errors
    assert sinkscope.load_run(tmp_path / "run").summary.sequences == 8


@pytest.mark.slow
@pytest.mark.parametrize("handled", [True, False])
def test_a_terminated_program_ends_as_it_would_alone(handled: bool, program: Path, tmp_path: Path) -> None:
    """Its own handler decides; without one the signal ends it at once, and there is no run."""
    if handled:
        handler = "import signal, sys\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(5))\n"
        program.write_text(handler + program.read_text())
    words = command("--out", tmp_path / "run", "--", program, "0", "wait")
    pipe = subprocess.PIPE
    with subprocess.Popen(words, env=ENVIRONMENT, stdout=pipe, stderr=pipe, text=True) as started:
        assert started.stdout is not None
        while "waiting" not in started.stdout.readline():
            time.sleep(0.05)
        started.send_signal(signal.SIGTERM)
        _, err = started.communicate()
    assert started.returncode == (5 if handled else -signal.SIGTERM)
    assert (tmp_path / "run" / "heads.csv").is_file() == handled
    assert ("measured 8 sequences of Plain" in err) == handled


@pytest.mark.slow
def test_a_module_runs_too_and_a_program_without_attention_is_told(tmp_path: Path) -> None:
    done = watched("--out", tmp_path / "run", "--", "-m", "json.tool", "--help")
    assert done.stdout.startswith("usage: ")
    assert done.returncode == 0
    assert "nothing was written: this program ran no model in its main thread" in done.stderr
    assert "other threads" not in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("option", "least"), [("--every", 1), ("--limit", 1), ("--until", 2)])
def test_less_than_the_least_is_refused(
    option: str, least: int, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from sinkscope.cli import application

    with pytest.raises(SystemExit) as stop:
        application(["watch"])(["watch", "--out", str(tmp_path / "x"), option, str(least - 1), "--", "missing.py"])
    assert stop.value.code == 2
    assert capsys.readouterr().err == f"sinkscope: error: {option} {least - 1}: at least {least} is needed\n"


@pytest.mark.parametrize(("out", "said"), [("file", "is a file: give another --out"), ("file/run", "cannot write to ")])
def test_a_place_that_takes_no_run_is_refused_before_the_program_runs(
    out: str, said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """All that was measured was lost, after hours of a long program."""
    from sinkscope.cli import application

    (tmp_path / "file").touch()
    (tmp_path / "program.py").write_text("print('began')")
    with pytest.raises(SystemExit) as stop:
        application(["watch"])(["watch", "--out", str(tmp_path / out), "--", str(tmp_path / "program.py")])
    assert stop.value.code == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert said in told.err
    assert told.err.count("\n") == 1


def a_run(place: Path) -> Path:
    """What the command takes for a finished run."""
    place.mkdir(parents=True)
    (place / "manifest.json").write_text('{"schema_version": 3, "sinkscope": "0", "tables": {}}')
    return place


@pytest.mark.parametrize(
    ("holds", "said"),
    [
        ("notes.txt", "holds files that are not a run's (notes.txt): give another --out"),
        ("shards/00000000.safetensors", "holds an unfinished run: give another --out, or --force"),
        ("1-Plain/manifest.json", "holds runs of models: give another --out, or --force"),
        ("manifest.json", "holds a finished run: give another --out, or --force"),
    ],
)
def test_a_folder_that_takes_no_run_is_refused_before_the_program_runs(
    holds: str, said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """It was refused when the program had ended, and what was measured was lost."""
    from sinkscope.cli import application

    out, program = tmp_path / "out", tmp_path / "program.py"
    program.write_text("print('began')")
    file = out / holds
    if file.name == "manifest.json":
        a_run(file.parent)
    else:
        file.parent.mkdir(parents=True)
        file.touch()
    with pytest.raises(SystemExit) as stop:
        application(["watch"])(["watch", "--out", str(out), "--", str(program)])
    assert stop.value.code == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith(f"sinkscope: error: {out} {said}")
    assert told.err.count("\n") == 1


@pytest.mark.parametrize(
    ("named", "stands", "places"),
    [
        (["1-A"], [], ["out"]),
        (["1-A"], ["out/notes.txt"], ["out-2"]),
        (["1-A"], ["out"], ["out-2"]),
        (["1-A", "2-B"], ["out/notes.txt"], ["out/1-A", "out/2-B"]),
        (["1-A", "2-B"], ["out/1-A/notes.txt", "out/2-B-2/x", "out/2-B/x"], ["out/1-A-2", "out/2-B-3"]),
        (["1-A", "2-B"], ["out"], ["out-2/1-A", "out-2/2-B"]),
    ],
)
def test_a_run_goes_beside_what_the_program_has_written(
    named: list[str], stands: list[str], places: list[str], tmp_path: Path
) -> None:
    from sinkscope.cli.watch import _places

    for name in stands:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert _places(tmp_path / "out", named, False) == [tmp_path / place for place in places]


def test_a_run_that_cannot_be_made_takes_no_other_with_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from sinkscope.cli.watch import _write

    saved = list[Path]()
    run = SimpleNamespace(
        save=lambda place, force: saved.append(place),
        summary=SimpleNamespace(sequences=2), manifest=SimpleNamespace(model=SimpleNamespace(shown="B"), command=None),
    )  # fmt: skip

    def broken() -> Any:
        raise StopIteration

    watches = [SimpleNamespace(name=name, left_out=[], run=made) for name, made in (("A", broken), ("B", lambda: run))]
    everywhere: Any = SimpleNamespace(refused={}, watches=watches, measured=watches, threads=False, elsewhere=False)
    _write(everywhere, tmp_path, Path("out"), False, False)
    assert saved == [tmp_path / "out" / "2-B"]
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("sinkscope: error: unexpected StopIteration")
    assert lines[1] == "sinkscope: measured 2 sequences of B; see: sinkscope show out/2-B"


@pytest.mark.parametrize("old", [["out"], ["out/1-A", "out/2-B", "out/3-C"]])
@pytest.mark.parametrize("new", [["A"], ["A", "B"]])
def test_force_replaces_the_runs_that_stand_there(
    old: list[str], new: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One run and those of several models, each by the other."""
    from sinkscope.cli.watch import _check_out, _write

    monkeypatch.chdir(tmp_path)
    for name in old:
        a_run(tmp_path / name)

    def save(place: Path, force: bool) -> None:
        assert force
        place.mkdir(parents=True, exist_ok=True)
        (place / "manifest.json").write_text("new")

    manifest = SimpleNamespace(model=SimpleNamespace(shown="B"), command=None)
    run = SimpleNamespace(save=save, summary=SimpleNamespace(sequences=2), manifest=manifest)
    watches = [SimpleNamespace(name=name, left_out=[], run=lambda: run) for name in new]
    everywhere: Any = SimpleNamespace(refused={}, watches=watches, measured=watches, threads=False, elsewhere=False)
    stands = [path.absolute() for path in _check_out(Path("out"), force=True)]
    _write(everywhere, tmp_path, Path("out"), True, True, stands)
    files = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    places = ["out"] if len(new) == 1 else ["out/1-A", "out/2-B"]
    assert sorted(files) == [tmp_path / place / "manifest.json" for place in places]
    assert {file.read_text() for file in files} == {"new"}


def test_force_removes_nothing_where_nothing_was_measured(tmp_path: Path) -> None:
    from sinkscope.cli.watch import _check_out, _write

    a_run(tmp_path / "out")
    everywhere: Any = SimpleNamespace(refused={}, watches=[], measured=[], threads=False, elsewhere=False)
    _write(everywhere, tmp_path, tmp_path / "out", True, True, _check_out(tmp_path / "out", force=True))
    assert (tmp_path / "out" / "manifest.json").is_file()


def test_what_stands_behind_the_program_is_the_program_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also without two dashes: it was taken for options of ours."""
    from sinkscope.cli import application

    monkeypatch.chdir(tmp_path)
    (tmp_path / "program.py").write_text("import sys\nprint(sys.argv)")
    with pytest.raises(SystemExit) as stop:
        application(["watch"])(["watch", "--out", "run", "program.py", "--out", "own", "--limit", "x"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == "['program.py', '--out', 'own', '--limit', 'x']\n"


@pytest.mark.slow
def test_a_program_that_writes_into_the_folder_loses_no_measurement(program: Path, tmp_path: Path) -> None:
    program.write_text(
        f"import os\nos.mkdir({str(tmp_path / 'run')!r})\nopen({str(tmp_path / 'run' / 'x')!r}, 'w')\n"
        + program.read_text()
    )
    done = watched("--out", tmp_path / "run", "--", program, "0")
    assert done.returncode == 0, done.stderr
    out, other = tmp_path / "run", tmp_path / "run-2"
    assert f"sinkscope: warning: {out} holds something else by now: this run goes to {other}\n" in done.stderr
    assert f"see: sinkscope show {other}\n" in done.stderr
    assert sinkscope.load_run(other).summary.sequences == 8


def test_a_script_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    from sinkscope.cli import application

    with pytest.raises(SystemExit) as stop:
        application(["watch"])(["watch", "--out", str(tmp_path / "x"), "--", "missing.py"])
    assert stop.value.code == 2
    assert capsys.readouterr().err.startswith("sinkscope: error: missing.py is no file")


def test_a_tokenizer_that_is_not_there_is_refused_before_the_program_runs(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from sinkscope.cli import application

    program = tmp_path / "program.py"
    program.write_text("print('it ran')")
    (tmp_path / "empty").mkdir()
    words = ["watch", "--tokenizer", str(tmp_path / "empty"), "--out", str(tmp_path / "x"), "--", str(program)]
    with pytest.raises(SystemExit) as stop:
        application(["watch"])(words)
    assert stop.value.code == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == f"sinkscope: error: {tmp_path / 'empty'} gives no tokenizer: no vocabulary files\n"


@pytest.mark.slow
def test_tokens_are_shown_by_a_tokenizer_s_texts(tiny_folder: Path, tokenizer: Any, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import torch, transformers\n"
        f"model = transformers.AutoModel.from_pretrained({str(tiny_folder)!r}).eval()\n"
        "model(torch.arange(3, 30)[None])\n"
    )
    done = watched("--tokenizer", tiny_folder, "--out", tmp_path / "run", "--", program)
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
    first = sinkscope.load_run(tmp_path / "run").manifest.first_token
    assert (first.id, first.text) == (3, tokenizer.convert_ids_to_tokens(3))


@pytest.mark.slow
def test_threads_are_watched_where_that_is_asked_for(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "from threading import Thread\nfrom plain_models import plain, tokens\n"
        "thread = Thread(target=lambda: plain()(tokens()))\nthread.start()\nthread.join()\n"
    )
    done = watched("--out", tmp_path / "run", "--", program)
    assert "nothing was written: this program ran no model in its main thread" in done.stderr
    assert "passes in other threads were not measured: watch all threads (threads=True, or --threads)" in done.stderr
    assert not (tmp_path / "run").exists()
    done = watched("--threads", "--out", tmp_path / "run", "--", program)
    assert done.returncode == 0, done.stderr
    assert sinkscope.load_run(tmp_path / "run").summary.sequences == 2


OTHER = """
import os
import sys
from plain_models import plain, tokens
import sinkscope
print(sys.argv[0], __file__, __package__, flush=True)
plain()(tokens())
class Left:
    def __del__(self):
        print("freed")
sys.left = Left()  # until Python ends
if "fork" in sys.argv:
    child = os.fork()
    if child == 0:
        sys.exit(7)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
if "chdir" in sys.argv:
    os.chdir(os.sep)
if "close" in sys.argv:
    sys.stdout.close()
if "refused" in sys.argv:
    sinkscope.scan("no/such/model")
"""


@pytest.mark.slow
@pytest.mark.parametrize("what", ["fork", "chdir", "close", "refused", "nothing"])
def test_a_program_ends_as_it_would_alone_and_leaves_its_run(what: str, tmp_path: Path) -> None:
    (tmp_path / "other.py").write_text(OTHER)
    environment = {**ENVIRONMENT, "HF_HUB_OFFLINE": "1"}
    alone, beside = (
        subprocess.run(words, env=environment, capture_output=True, text=True, check=False, cwd=tmp_path)
        for words in ([sys.executable, "other.py", what], command("--out", "run", "--", "other.py", what))
    )
    assert alone.stdout.startswith(f"other.py {tmp_path / 'other.py'} None\n")
    assert beside.stdout == alone.stdout
    assert beside.returncode == alone.returncode == (what == "refused")
    told = [line for line in beside.stderr.splitlines() if line not in alone.stderr.splitlines()]
    assert told == ["sinkscope: measured 2 sequences of Plain; see: sinkscope show run"]
    assert sinkscope.load_run(tmp_path / "run").summary.sequences == 2


def test_a_baseline_of_a_watched_run_names_what_can_be_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from plain_models import plain, tokens

    from sinkscope.cli import application

    model = plain()
    with sinkscope.watch(model) as seen:
        model(tokens())
    seen.run().save(tmp_path / "run")
    with pytest.raises(SystemExit) as stop:
        application(["baseline"])(["baseline", str(tmp_path / "run"), "-o", str(tmp_path / "base.json")])
    assert stop.value.code == 0
    assert "next: sinkscope check RUN --baseline" in capsys.readouterr().err
