"""Names that are no text: Python reads bytes that are not UTF-8 as lone surrogates, which no file of a run can hold."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Scan

from sinkscope import SinkscopeError, load_run
from sinkscope.cli import main

Ended = Callable[..., tuple[int | str | None, str]]
ODD = "caf\udce9"


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Ended:
    """Exit code and stderr of the `sinkscope` command, run in this process."""

    def run(*words: object) -> tuple[int | str | None, str]:
        monkeypatch.setattr(sys, "argv", ["sinkscope", *map(str, words)])
        with pytest.raises(SystemExit) as end:
            main()
        return end.value.code, capsys.readouterr().err

    return run


@pytest.mark.parametrize("option", ["--name", "--data", "--out", ""])
def test_a_word_that_is_no_text_is_refused_before_anything_is_measured(
    option: str, ended: Ended, tmp_path: Path
) -> None:
    """With --out, all was measured and kept, and no --resume could write it."""
    code, said = ended("scan", tmp_path / "no-such-model", *([option] if option else []), f"{tmp_path}/{ODD}")
    assert code == 2
    assert said == (
        f"sinkscope: error: '{tmp_path}/caf\\udce9' is not UTF-8: rename the file or folder; where the name is right, "
        "set LC_ALL=C.UTF-8\n"
    )
    assert list(tmp_path.iterdir()) == []


def test_a_working_folder_that_is_no_text_is_refused(
    ended: Ended, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ODD).mkdir()
    monkeypatch.chdir(tmp_path / ODD)
    code, said = ended("scan", "./no-such-model")
    assert code == 2
    assert "cannot write to runs/no-such-model: the name of a folder in its path is not UTF-8; rename it" in said
    assert list((tmp_path / ODD).iterdir()) == []


def test_saving_a_run_refuses_it_too(tiny_folder: Path, scan_cli: Scan, tmp_path: Path) -> None:
    run = load_run(scan_cli(tiny_folder).folder)
    with pytest.raises(SinkscopeError, match="is not UTF-8"):
        run.save(tmp_path / ODD)
    assert not (tmp_path / ODD).exists()


def test_a_program_may_get_any_word(ended: Ended, tmp_path: Path) -> None:
    """What stands behind -- is the program's own."""
    program = tmp_path / "program.py"
    program.write_text("import sys\nsys.exit(len(sys.argv[1]))\n", "utf-8")
    assert ended("watch", "--out", tmp_path / "run", "--", program, ODD)[0] != 2
