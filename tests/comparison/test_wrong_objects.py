"""What is handed over in the place of a run, a baseline or a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from desk import scanned

import sinkscope
from sinkscope import SinkscopeError, baseline_of, check, compare
from sinkscope.metrics.extension import with_own_metrics


@pytest.mark.parametrize("wrong", ["runs/gemma", Path("runs/gemma"), None, 3])
def test_what_is_no_run_is_refused(wrong: Any) -> None:
    """The name of a run's folder is the likeliest."""
    run, said = scanned(), rf"^a Run is needed, not {type(wrong).__name__}: sinkscope\.load_run\(FOLDER\) reads one"
    for call in (lambda: compare(run, wrong), lambda: compare(wrong, run), lambda: check(wrong, baseline_of(run)),
                 lambda: baseline_of(wrong)):  # fmt: skip
        with pytest.raises(SinkscopeError, match=said):
            call()


@pytest.mark.parametrize("wrong", ["sinks.json", None, "run"])
def test_what_is_no_baseline_is_refused(wrong: Any) -> None:
    run = scanned()
    with pytest.raises(SinkscopeError, match=r"^a Baseline is needed, not .*: read_baseline\(FILE\) reads"):
        check(run, run if wrong == "run" else wrong)


@pytest.mark.parametrize("call", [sinkscope.scan, sinkscope.dry_run])
def test_no_model_is_refused(call: Any) -> None:
    """A model NoneType was looked for on the hub."""
    with pytest.raises(SinkscopeError, match=r"^a model \(torch\.nn\.Module\) or a name is needed, not None$"):
        call(None)


def test_one_file_of_metrics_need_not_be_a_list(tmp_path: Path) -> None:
    text = "from sinkscope import head_metric\n\n\n@head_metric(unit='x', range='x')\ndef mine(view):\n    'It.'\n"
    (tmp_path / "mine.py").write_text(text)
    for given in (tmp_path / "mine.py", str(tmp_path / "mine.py")):
        assert with_own_metrics(given).names("heads")[-1] == "mine"  # type: ignore[arg-type]
