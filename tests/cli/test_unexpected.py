"""What the command says of errors that nothing foresaw: one line, and where it was only when asked."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Refused, Scan

from sinkscope.cli.common import warn_in_one_line
from sinkscope.errors import SinkscopeError, all_lines, first_line, in_one_line


@pytest.mark.parametrize("where", [False, True])
def test_a_defect_is_one_line_and_a_traceback_when_asked(
    where: bool, tiny_folder: Path, scan_cli: Scan, monkeypatch: pytest.MonkeyPatch
) -> None:
    def defect(*args: object, **kwargs: object) -> None:
        raise LookupError("first line\nsecond line")

    monkeypatch.setattr("sinkscope.engine.loop.Loop.run", defect)
    monkeypatch.setenv("SINKSCOPE_TRACEBACK", "1" if where else "")
    outcome = scan_cli(tiny_folder)
    assert outcome.code == 2
    assert outcome.stdout == ""
    *trace, line = outcome.stderr.splitlines()
    assert line == "sinkscope: error: unexpected LookupError: first line (SINKSCOPE_TRACEBACK=1 shows where)"
    assert bool(trace) == where
    assert ("in defect" in outcome.stderr) == where


def test_what_another_package_raised_is_traced_when_asked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    error = SinkscopeError("theirs fails: x")
    error.__cause__ = KeyError("x")
    assert in_one_line(error) == "theirs fails: x"
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("SINKSCOPE_TRACEBACK", "1")
    assert in_one_line(error) == "theirs fails: x"
    assert capsys.readouterr().err == "KeyError: 'x'\n"


def test_memory_of_the_host_is_no_defect() -> None:
    assert in_one_line(MemoryError()) == "out of memory: try a smaller --seq-len or --batch-size"


def test_a_warning_of_another_library_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    warn_in_one_line()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("first line\nsecond line", UserWarning, stacklevel=1)
    assert capsys.readouterr().err == "sinkscope: warning: first line\\nsecond line\n"


def test_a_key_that_another_library_misses_is_called_missing() -> None:
    """A KeyError says its key alone, which tells nobody what is wrong."""
    assert first_line(KeyError("sliding_attention")) == all_lines(KeyError("sliding_attention"))
    assert all_lines(KeyError("sliding_attention")) == "'sliding_attention' is missing"
    assert all_lines(KeyError()) == "it gives no reason"


def test_a_package_that_does_not_load_is_one_line_while_options_are_made(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As under `sinkscope plot --help`, whose options ask every question for its figures."""
    import sinkscope.cli

    def fails(name: object) -> object:
        raise sinkscope.SinkscopeError("--measure own: guest does not load")

    monkeypatch.setattr(sinkscope.cli, "application", fails)
    monkeypatch.setattr("sys.argv", ["sinkscope", "plot", "--help"])
    with pytest.raises(SystemExit) as end:
        sinkscope.cli.main()
    assert end.value.code == 2
    assert capsys.readouterr().err == "sinkscope: error: --measure own: guest does not load\n"


def test_what_hides_behind_a_lazy_import_is_told() -> None:
    try:
        try:
            raise RuntimeError("operator torchvision::nms does not exist")
        except RuntimeError as error:
            raise ModuleNotFoundError("Could not import module 'PreTrainedModel'.") from error
    except ModuleNotFoundError as error:
        said = in_one_line(error)
    assert said.startswith("a library cannot be imported: operator torchvision::nms does not exist; install releases")
    assert "PreTrainedModel" not in said


@pytest.mark.slow
def test_a_torchvision_of_another_torch_is_one_line(tiny_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "__init__.py").write_text("raise RuntimeError('operator torchvision::nms')\n")
    (tmp_path / "torchvision-9.0.dist-info").mkdir()
    (tmp_path / "torchvision-9.0.dist-info" / "METADATA").write_text("Name: torchvision\nVersion: 9.0\n")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-m", "sinkscope", "scan", str(tiny_folder)], env={**os.environ, "PYTHONPATH": path},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("sinkscope: error: a library cannot be imported: operator torchvision::nms; install")


def test_code_that_ends_the_program_while_a_model_runs_is_one_line(
    tiny_folder: Path, refused: Refused, patch_forward: Callable[[Callable[[Any], None]], None]
) -> None:
    """Exit code 1 is kept for a failed check."""

    def ends(_: Any) -> None:
        sys.exit(1)

    patch_forward(ends)
    assert refused(tiny_folder) == (
        "code that is not sinkscope's ended the program (exit code 1): a model's own, or that of a metric"
    )
