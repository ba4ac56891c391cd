"""Metrics of others are guests: one that goes wrong loses its columns, and every other column stands."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Scan
from models import random_ids, tiny
from pandas.testing import assert_frame_equal
from torch import Tensor

import sinkscope
from sinkscope import LayerView, SinkscopeError, head_metric, layer_metric
from sinkscope.metrics import guests
from sinkscope.runs.schema.base import to_json

TABLES = ("heads", "layers", "positions", "length_curve", "sequences", "sinks", "tokens")
IDS = random_ids(3, 24)
MET: list[Any] = []
"""What the guests below leave behind, to be looked at."""


def declared_as(name: str, compute: Callable[..., Any], **declaration: Any) -> Any:
    def copy(view: LayerView) -> Any:
        return compute(view)

    copy.__name__, copy.__doc__ = name, "Something of a head."
    return head_metric(unit="ratio", range="[0, 1]", **declaration)(copy)


def good(view: LayerView) -> Tensor:
    return view.attention.first[..., 0]


def then(do: Callable[[LayerView], Any]) -> Callable[[LayerView], Tensor]:
    """A guest that does something, and returns what is asked."""

    def compute(view: LayerView) -> Tensor:
        do(view)
        return good(view)

    return compute


def raises(error: BaseException) -> Callable[[LayerView], Any]:
    def compute(view: LayerView) -> Any:
        raise error

    return compute


class Speechless(Exception):
    def __str__(self) -> str:
        raise ValueError("not even that")


with warnings.catch_warnings(action="ignore"):  # torch means to remove them
    QUANTISED = torch.quantize_per_tensor(torch.zeros(2, 4), 0.1, 0, torch.qint8)


def set_x(view: LayerView) -> None:
    view.x = torch.zeros(1)


def set_first(view: LayerView) -> None:
    view.attention.first = 3  # type: ignore[assignment]


def forget(view: LayerView) -> None:
    del view.attention.first


def swallow(view: LayerView) -> None:
    try:
        view.attention.first.zero_()
    except SinkscopeError:
        MET.append("refused")


def leave_a_write_to_a_cached_value(view: LayerView) -> None:
    view.query_sums.norms.mul_(0)


def descend(view: LayerView) -> Any:
    return descend(view) + 1


WRITES = {
    "in_place": then(lambda view: view.attention.first.mul_(2)),
    "a_part": then(lambda view: view.query[:, 0].zero_()),
    "by_index": then(lambda view: view.x.__setitem__(0, 0.0)),
    "as_out": then(lambda view: torch.zeros(view.x.shape, out=view.x)),
    "for_each": then(lambda view: torch._foreach_zero_([view.raw_query, view.raw_key])),
    "detached": then(lambda view: view.attention.first.data.detach().fill_(1)),
    "what_is_cached": then(leave_a_write_to_a_cached_value),
    "resized": then(lambda view: view.raw_query.resize_(1)),  # type: ignore[union-attr]
}  # fmt: skip
SETS = {"set_x": (then(set_x), "sets `x`"), "set_first": (then(set_first), "sets `first`"),
        "forget": (then(forget), "sets `first`")}  # fmt: skip
CHANGES = {
    "gradients_on": (lambda view: torch.set_grad_enabled(True), "whether torch follows gradients"),
    "default_dtype": (lambda view: torch.set_default_dtype(torch.float64), "torch's default dtype"),
    "default_device": (lambda view: torch.set_default_device("meta"), "torch's default device"),
    "threads": (lambda view: torch.set_num_threads(torch.get_num_threads() + 1), "the number of torch's threads"),
    "folder": (lambda view: os.chdir("/"), "the working directory"),
}
BAD: dict[str, tuple[Callable[[LayerView], Any], str]] = {
    "an_error": (raises(ValueError("first line\nsecond line")), "ValueError: first line (line "),
    "no_text": (raises(KeyError()), "KeyError: "),
    "speechless": (raises(Speechless()), "Speechless: "),
    "leaves": (lambda view: sys.exit(0), "SystemExit: 0"),
    "no_exception": (raises(BaseException("no exception")), "BaseException: no exception"),
    "generator_exit": (raises(GeneratorExit()), "GeneratorExit: "),
    "one_of_ours": (raises(SinkscopeError("a line of ours")), "a line of ours"),
    "too_deep": (descend, "RecursionError: "),
    "shape": (lambda view: view.attention.first, "returned (2, 4, 24); a tensor [sequence, head] = (2, 4) is needed"),
    "number": (lambda view: 0.5, "returned float; a tensor"),
    "nothing": (lambda view: None, "returned NoneType; a tensor"),
    "unknown": (lambda view: view.attention.firsts, "AttributeError: "),  # type: ignore[attr-defined]
    "complex": (lambda view: good(view) * 1j, "returned complex numbers; a dense tensor of real numbers is needed"),
    "sparse": (lambda view: good(view).to_sparse(), "returned a sparse tensor; a dense tensor"),
    "meta": (lambda view: good(view).to("meta"), "returned a tensor without numbers (meta); a dense tensor"),
    "quantised": (lambda view: QUANTISED[: view.batch], "returned quantised numbers; a dense tensor"),
    "closes": (then(lambda view: sys.stdout.close()), "it closes stdout or stderr"),
    **{name: (compute, "it writes into what it was shown") for name, compute in WRITES.items()},
    **{name: (compute, f"it {words} of what it was shown") for name, (compute, words) in SETS.items()},
    **{name: (then(do), f"it changes {words}") for name, (do, words) in CHANGES.items()},
}


def measured(*metrics: Any, **options: Any) -> sinkscope.Run:
    model = tiny("llama", num_hidden_layers=2)
    return sinkscope.scan(model, data=IDS, self_check=False, batch_size=2, metrics=metrics, **options)


@pytest.fixture(scope="module")
def plain() -> sinkscope.Run:
    return measured()


@pytest.fixture(scope="module", params=[False, True], ids=["no_grad", "inference_mode"])
def run(request: pytest.FixtureRequest) -> sinkscope.Run:
    """A scan with every bad guest among good ones."""
    bad = [declared_as(name, compute) for name, (compute, _) in BAD.items()]
    with torch.inference_mode(request.param):
        return measured(declared_as("before", good), *bad, declared_as("after", good), declared_as("quiet", swallow_it))


def swallow_it(view: LayerView) -> Tensor:
    swallow(view)
    return good(view)


def assert_same_but(run: sinkscope.Run, plain: sinkscope.Run, more: set[str]) -> None:
    """Every table is that of a scan without guests, but for the columns of `more`."""
    for name in TABLES:
        table, wanted = getattr(run, name), getattr(plain, name)
        own = [column for column in table if column not in wanted]
        assert {column.removeprefix("mean_").removesuffix("_sem") for column in own} <= more, name
        assert_frame_equal(table.drop(columns=own), wanted, check_exact=True)


def test_every_other_column_is_as_without_them(run: sinkscope.Run, plain: sinkscope.Run) -> None:
    assert_same_but(run, plain, {"before", "after", "quiet"})
    for name in ("before", "after", "quiet"):
        assert run.heads[name].notna().all()
        assert (run.heads[name] == run.heads["before"]).all()
    assert "refused" in MET


@pytest.mark.parametrize("name", BAD)
def test_a_bad_metric_loses_its_column_and_is_named(name: str, run: sinkscope.Run) -> None:
    for table in (run.heads, run.layers, run.sequences):
        assert not {column for column in table if name in (column, column.removesuffix("_sem").removeprefix("mean_"))}
    [warning] = [line for line in run.manifest.warnings if line.startswith(f"metric {name} is left out: ")]
    assert warning.startswith(f"metric {name} is left out: {BAD[name][1]}")
    assert "\n" not in warning
    assert run.manifest.metrics[name].failed is not None
    assert name not in run.manifest.conventions
    assert run.summary.warnings == run.manifest.warnings


def test_the_process_is_as_before(run: sinkscope.Run) -> None:
    assert torch.get_default_dtype() == torch.float32
    assert torch.get_default_device().type == "cpu"
    assert torch.is_grad_enabled()
    assert Path.cwd() != Path("/")
    assert not sys.stdout.closed


def test_numpy_gets_a_copy(plain: sinkscope.Run) -> None:
    def by_numpy(view: LayerView) -> Tensor:
        view.x.numpy()[:] = 0
        view.x_sums.norms.mul_(0)  # computed for this guest alone
        np.asarray(view.attention.first)[:] = 0
        np.from_dlpack(view.query)
        view.key.untyped_storage().fill_(0)
        return good(view)

    run = measured(declared_as("by_numpy", by_numpy))
    assert_same_but(run, plain, {"by_numpy"})
    assert (run.heads["by_numpy"] > 0).any()


def test_a_write_that_cannot_be_held_off_ends_the_scan() -> None:
    """From a thread of the guest's own: no column can be trusted any more."""

    def by_a_thread(view: LayerView) -> Tensor:
        worker = threading.Thread(target=view.attention.first.zero_)
        worker.start()
        worker.join()
        return good(view)

    with pytest.raises(SinkscopeError, match=r"^metric own: it changed `first`, which other columns read"):
        measured(declared_as("own", by_a_thread))


@pytest.mark.slow
@pytest.mark.parametrize("error", [MemoryError(), torch.OutOfMemoryError("CUDA out of memory. ")])
def test_out_of_memory_halves_the_batch(error: Exception, plain: sinkscope.Run) -> None:
    def large(view: LayerView) -> Tensor:
        if view.batch > 1:
            raise error
        return good(view)

    run = measured(declared_as("own", large))
    assert run.heads["own"].notna().all()
    assert run.manifest.batch_size == 1


def test_what_is_missing_is_no_failure() -> None:
    run = measured(declared_as("own", raises(sinkscope.Missing())))
    assert run.heads["own"].isna().all()
    assert not run.manifest.warnings


def test_what_a_metric_prints_goes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    measured(declared_as("own", then(lambda view: print("working"))))
    captured = capsys.readouterr()
    assert captured.out == ""
    assert set(captured.err.splitlines()) == {"working"}


def test_both_columns_of_a_normalised_metric_go() -> None:
    run = measured(declared_as("own", raises(ValueError("no")), normalised=True))
    assert not {"own", "own_ln"} & {*run.heads}
    [warning] = run.manifest.warnings
    assert warning.startswith("metric own (with own_ln) is left out: ValueError: no")


@pytest.mark.parametrize("sampled", [False, True])
def test_a_layer_metric_too(sampled: bool, plain: sinkscope.Run) -> None:
    @layer_metric(unit="ratio", range="[0, 1]", sampled=sampled)
    def own(view: LayerView) -> Tensor:
        """Something of a layer."""
        raise ValueError("no")

    run = measured(own)
    assert_same_but(run, plain, set())
    assert run.manifest.warnings[0].startswith("metric own is left out: ValueError: no")


def test_a_metric_that_fails_late_leaves_nothing_of_itself(plain: sinkscope.Run) -> None:
    """Its values of the first batch are right, and no table shows them."""
    calls = []

    def late(view: LayerView) -> Tensor:
        calls.append(view)
        return good(view) if len(calls) < 4 else good(view) / int("none")

    run = measured(declared_as("own", late))
    assert len(calls) == 4  # the second layer of the second batch; not called again
    assert_same_but(run, plain, set())


def test_a_dormant_rule_on_a_metric_that_fails_marks_no_head() -> None:
    run = measured(declared_as("own", raises(ValueError("no"))), dormant_rule="own<2")
    assert run.heads["dormant"].isna().all()
    assert run.layers["dormant_heads"].isna().all()


def test_strict_refuses_it() -> None:
    with pytest.raises(SinkscopeError, match=r"^--strict: metric own is left out: ValueError: no"):
        measured(declared_as("own", raises(ValueError("no"))), strict=True)


def test_strict_keeps_the_batches_before_it_for_a_scan_that_is_not_strict(
    tmp_path: Path, tiny_folder: Path, scan_cli: Scan
) -> None:
    """It fails in the third batch of three: no run is left, and the line says what finishes the scan."""
    file = tmp_path / "late.py"
    file.write_text(
        "from sinkscope import head_metric\n\ncalls = []\n\n"
        '@head_metric(unit=\'1\', range=\'0 to 1\')\ndef late(view):\n    """alpha_0."""\n    calls.append(view)\n'
        "    if len(calls) > 4:\n        raise ValueError('too late')\n    return view.attention.first.mean(-1)\n",
        "utf-8",
    )
    words = (tiny_folder, "--num-sequences", 6, "--batch-size", 2, "--metrics", file, "--no-self-check", "--quiet")
    stopped = scan_cli(*words, "--strict")
    assert (stopped.code, stopped.stdout) == (2, "")
    (line,) = stopped.stderr.splitlines()
    assert line == (
        "sinkscope: error: --strict: metric late is left out: ValueError: too late (line 10 of late.py); "
        f"4 of 6 sequences are kept in {stopped.folder}: --resume without --strict goes on without this metric, "
        "--force starts anew"
    )
    assert [path.name for path in stopped.folder.iterdir()] == ["shards"], "nothing that looks like a run"
    file.write_text(file.read_text("utf-8").replace("> 4", "> 0"), "utf-8")  # another metric now: refused
    assert "--force to start anew" in scan_cli(*words, "--resume").stderr
    file.write_text(file.read_text("utf-8").replace("> 0", "> 4"), "utf-8")
    calls = file.read_text("utf-8").replace("calls = []", "calls = [0] * 5")
    file.write_text(calls, "utf-8")
    assert scan_cli(*words, "--force", "--strict").code == 2, "it fails in the first batch now, which keeps nothing"
    assert not any(stopped.folder.iterdir())


@pytest.mark.slow
def test_resumed_without_strict_the_scan_is_finished_without_the_metric(
    tmp_path: Path, tiny_folder: Path, scan_cli: Scan
) -> None:
    file = tmp_path / "third.py"
    file.write_text(
        "from sinkscope import head_metric\n\n@head_metric(unit='1', range='0 to 1')\ndef third(view):\n"
        '    """alpha_0."""\n    return view.attention.first.mean(-1)[: 2 if len(view.attention.first) == 2 else 0]\n',
        "utf-8",
    )  # the last of five sequences is a batch of its own
    words = (tiny_folder, "--num-sequences", 5, "--batch-size", 2, "--metrics", file, "--no-self-check", "--quiet")
    stopped = scan_cli(*words, "--strict")
    assert "4 of 5 sequences are kept" in stopped.stderr
    again = scan_cli(*words, "--strict", "--resume")
    assert (again.code, again.stderr) == (2, stopped.stderr)
    finished = scan_cli(*words, "--resume")
    assert finished.code == 0, finished.stderr
    plain = scan_cli(*words[:5], "--no-self-check", "--quiet", name="plain")
    for table in ("heads.csv", "layers.csv", "sequences.parquet"):
        assert (finished.folder / table).read_bytes() == (plain.folder / table).read_bytes(), table
    assert "left out" in finished.json("manifest")["warnings"][0]


@pytest.mark.slow
def test_resumed_it_stays_left_out(tmp_path: Path, plain: sinkscope.Run) -> None:
    """It failed in the first batch; the scan that goes on never calls it, and shows nothing of it."""
    calls = []

    def once(view: LayerView) -> Tensor:
        calls.append(view)
        return good(view) if len(calls) > 1 else good(view) / int("none")

    metric = declared_as("own", once)

    def scan(stop: bool, **options: Any) -> sinkscope.Run:
        def progress(stage: str, done: int, total: int) -> None:
            if stop and done:
                raise KeyboardInterrupt

        return measured(metric, shards=tmp_path / "run", progress=progress, **options)

    with pytest.raises(sinkscope.Interrupted) as stopped:
        scan(True)
    assert "own" not in stopped.value.run.heads
    with pytest.raises(SinkscopeError, match=r"^--strict: metric own is left out: ValueError"):
        scan(False, resume=True, strict=True)
    run = scan(False, resume=True)
    assert len(calls) == 1
    assert_same_but(run, plain, set())
    assert run.manifest.warnings[0].startswith("metric own is left out: ValueError")
    run.save(tmp_path / "run")
    assert scan(False, resume=True).path == tmp_path / "run"  # finished: the same scan


@pytest.mark.slow
def test_a_metric_that_takes_long_draws_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guests, "SLOW_SECONDS", 0.5)
    run = measured(declared_as("own", then(lambda view: time.sleep(0.3))), declared_as("quick", good))
    [warning] = run.manifest.warnings
    assert warning.startswith("metric own took 1 s, longer than the model and all other columns together (")
    assert run.heads["own"].notna().all()


FILE = """
from sinkscope import head_metric

@head_metric(unit="ratio", range="[0, 1]")
def own(view):
    "What is given to key 0."
    print("working")
    return view.attention.first[..., 0]

@head_metric(unit="ratio", range="[0, 1]")
def wrong(view):
    "Nothing."
    return view.attention.first
"""


def test_on_the_command_line(tiny_folder: Path, scan_cli: Scan, tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text(FILE, encoding="utf-8")
    done = scan_cli(tiny_folder, "--metrics", path, "--no-self-check", "--json")
    reason = "returned (2, 4, 32); a tensor [sequence, head] = (2, 4) is needed"
    assert done.code == 0
    assert done.warnings == [f"metric wrong is left out: {reason}"]
    assert json.loads(done.stdout) == done.json("summary")
    assert done.json("manifest")["metrics"]["wrong"]["failed"] == reason
    strict = scan_cli(tiny_folder, "--metrics", path, "--no-self-check", "--strict", name="strict")
    assert (strict.code, strict.stdout) == (2, "")
    assert strict.stderr.splitlines()[-1] == f"sinkscope: error: --strict: metric wrong is left out: {reason}"
    assert not strict.folder.exists()


def test_a_built_in_metric_that_raises_is_our_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    from sinkscope.metrics import METRICS

    broken = replace(METRICS["heads"]["entropy"], compute=raises(LookupError("a defect")))
    monkeypatch.setitem(METRICS["heads"], "entropy", broken)
    with pytest.raises(LookupError, match="a defect"):
        measured()


def test_the_summary_is_that_of_a_scan_without_it(plain: sinkscope.Run) -> None:
    run = measured(declared_as("own", raises(ValueError("no"))))
    mine = run.summary.model_copy(update={"warnings": []})
    assert to_json(mine) == to_json(plain.summary)
