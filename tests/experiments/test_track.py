"""`sinkscope track`: checkpoints of one training, one folder a step, two tables, a figure; resumed where it stopped."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from click.testing import Result
from trainings import causal_llama, ids
from typer.testing import CliRunner

import sinkscope
from sinkscope.cli import app
from sinkscope.experiments.training.steps import Step, steps_of, tables
from sinkscope.experiments.training.trajectory import emergence
from sinkscope.present.terminal.trajectory import render_trajectory
from sinkscope.runs.schema.training_tables import TRAINING_TABLES


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three steps of one model; at the last, its keys and queries are larger."""
    folder = tmp_path_factory.mktemp("training")
    model, saved = causal_llama(), []
    for step in (0, 20, 100):
        if step == 100:
            for name, weight in model.named_parameters():
                if "q_proj" in name or "k_proj" in name:
                    weight.data *= 30
        saved.append(folder / f"checkpoint-{step}")
        model.save_pretrained(saved[-1])
    return saved


SHORT = ("--data", "random", "--seq-len", "16", "--num-sequences", "3", "--bos", "never")


def track(checkpoints: list[Path], out: Path, *more: str) -> Result:
    return CliRunner().invoke(app, ["track", *map(str, reversed(checkpoints)), *SHORT, "--out", str(out), *more])


def test_one_folder_a_step_and_the_tables_of_all(checkpoints: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = track(checkpoints, out)
    assert result.exit_code == 0, result.stderr
    names = {path.name for path in out.iterdir() if not path.name.startswith(".")}
    assert names == {
        "step-00000000", "step-00000020", "step-00000100", "trajectory.csv", "emergence.csv", "trajectory.png",
        "trajectory.svg",
    }  # fmt: skip
    trajectory, emerged = pd.read_csv(out / "trajectory.csv"), pd.read_csv(out / "emergence.csv")
    for step in (0, 20, 100):
        run = sinkscope.load_run(out / f"step-{step:08}")
        rows = trajectory[(trajectory["step"] == step) & (trajectory["metric"] == "sink_score")]
        own = rows[rows["level"] == "head"]
        assert own["value"].to_numpy() == pytest.approx(run.heads["sink_score"].to_numpy(), rel=1e-8)
        model = rows[rows["level"] == "model"]
        assert model["value"].item() == pytest.approx(run.summary.streams["text"].sink_score.mean, rel=1e-8)
    assert len(emerged) == 8
    for name, table in (("trajectory", trajectory), ("emergence", emerged)):
        assert list(table.columns) == [column.name for column in TRAINING_TABLES[name].columns()]
    again = emergence(trajectory, 0.3)
    assert again.to_csv(index=False, float_format="%.9g") == (out / "emergence.csv").read_text()
    assert max(map(len, result.stdout.splitlines())) <= 80


@pytest.mark.slow
def test_a_second_call_scans_nothing_and_gives_the_same_bytes(checkpoints: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    track(checkpoints[:2], out)
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    result = track(checkpoints[:2], out)
    assert result.exit_code == 0
    assert result.stderr.count("already finished") == 2
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


@pytest.mark.slow
def test_a_step_that_fails_does_not_stop_the_rest(checkpoints: list[Path], tmp_path: Path) -> None:
    broken = tmp_path / "checkpoint-50"
    broken.mkdir()
    result = track([*checkpoints, broken], tmp_path / "out", "--json")
    assert result.exit_code == 2
    assert len(json.loads(result.stdout)) == 8
    assert "1 of 4 steps failed" in result.stderr
    assert sorted(set(pd.read_csv(tmp_path / "out/trajectory.csv")["step"])) == [0, 20, 100]


@pytest.mark.slow
def test_an_interrupt_ends_it_and_a_second_call_goes_on(
    checkpoints: list[Path], tmp_path: Path, patch_forward: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the second batch of the second step: no third step, no tables."""
    passes = list[int]()

    def before(ids: torch.Tensor) -> None:
        passes.append(1)
        if len(passes) == (4 + 3) + 4 + 2:  # each step: a dry run, the self-check's three passes, three batches
            raise KeyboardInterrupt

    patch_forward(before)
    monkeypatch.setattr("sinkscope.engine.loop.chosen_batch", lambda length, device: 1)
    stopped = track(checkpoints, tmp_path / "out")
    assert stopped.exit_code == 130, stopped.stderr
    assert "--resume goes on" in stopped.stderr
    assert "error" not in stopped.stderr
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"step-00000000", "step-00000020"}
    assert track(checkpoints, tmp_path / "out").exit_code == 0
    assert sorted(set(pd.read_csv(tmp_path / "out/trajectory.csv")["step"])) == [0, 20, 100]


@pytest.mark.slow
def test_without_matplotlib_the_tables_are_written(
    checkpoints: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sinkscope.present.figures.canvas.available", lambda: False)
    result = track(checkpoints, tmp_path / "out")
    assert result.exit_code == 0, result.stderr
    assert "no figure: it needs matplotlib (pip install 'sinkscope[figures]')" in result.stderr
    assert {path.name for path in (tmp_path / "out").iterdir() if path.is_file()} == {"trajectory.csv", "emergence.csv"}
    assert "written to" in result.stdout


def test_of_many_heads_the_first_to_emerge_are_listed() -> None:
    heads = [(layer, head) for layer in range(2) for head in range(5)]
    rows = [
        {"step": step, "domain": "prose", "stream": "text", "level": "head", "layer": layer, "head": head,
         "metric": metric, "value": float(step > 0), "sem": 0.0}
        for step in (0, 20, 40) for layer, head in heads for metric in ("sink_score", "bos_mass")
    ]  # fmt: skip
    model = [
        {"step": step, "domain": "prose", "stream": "text", "level": "model", "metric": metric, "value": 0.5,
         "sem": 0.0}
        for step in (0, 20, 40) for metric in ("sink_rate", "sink_score", "bos_mass", "dormant")
    ]  # fmt: skip
    trajectory = pd.DataFrame(rows + model).astype({"layer": "Int64", "head": "Int64"})
    emerged = emergence(trajectory, 0.3)
    assert emerged["emerged"].notna().sum() == 10
    lines = render_trajectory(trajectory, emerged, 0.3).splitlines()
    assert sum(re.match(r"\d\.\d +20 ", line) is not None for line in lines) == 8, lines
    assert "2 more heads are in emergence.csv" in lines


@pytest.mark.slow
def test_another_text_is_refused_by_name(checkpoints: list[Path], tmp_path: Path) -> None:
    track(checkpoints[:2], tmp_path / "out")
    result = track(checkpoints[:2], tmp_path / "out", "--seed", "1")
    assert result.exit_code == 2
    assert "seed" in result.stderr


@pytest.mark.slow
def test_steps_with_other_thresholds_make_no_table(checkpoints: list[Path]) -> None:
    options: dict[str, Any] = {"data": ids(2), "self_check": False}
    runs = {
        step: sinkscope.scan(str(checkpoints[0]), epsilon=epsilon, **options) for step, epsilon in ((0, 0.3), (20, 0.2))
    }
    with pytest.raises(
        sinkscope.SinkscopeError, match=r"scanned with different --epsilon \(\[0\.2, 0\.3\]\): scan them"
    ):
        tables(runs)


def test_the_step_of_a_checkpoint(tmp_path: Path) -> None:
    final = tmp_path / "final-7b"
    final.mkdir()
    (final / "trainer_state.json").write_text(json.dumps({"global_step": 900}))
    assert steps_of([str(final), "out/checkpoint-500"], [])[0] == Step(500, "out/checkpoint-500")
    assert steps_of([str(final), "out/checkpoint-500"], [])[1] == Step(900, str(final))
    assert steps_of(["EleutherAI/pythia-160m"], ["step1000", "step0"]) == [
        Step(0, "EleutherAI/pythia-160m", "step0"), Step(1000, "EleutherAI/pythia-160m", "step1000"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("models", "revisions", "said"),
    [
        (["a-1", "b-2"], ["step1"], "name one MODEL"),
        (["best", "last"], [], "names no training step"),
        (["a-1", "b-1"], [], "both step 1"),
        (["a-1"], [], "at least two"),
    ],
)
def test_checkpoints_without_an_order_are_refused(models: list[str], revisions: list[str], said: str) -> None:
    with pytest.raises(sinkscope.SinkscopeError, match=said):
        steps_of(models, revisions)
