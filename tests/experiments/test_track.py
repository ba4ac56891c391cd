"""`sinkscope track`: checkpoints of one training, one folder a step, two tables, a figure; resumed where it stopped."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from click.testing import Result
from trainings import callback, causal_llama, ids
from typer.testing import CliRunner

import sinkscope
from sinkscope.cli import app
from sinkscope.cli.scan_job import ScanJob
from sinkscope.errors import SinkscopeError
from sinkscope.experiments.training.trajectory import Step, emergence, steps_of, tables
from sinkscope.present.terminal.trajectory import render_trajectory
from sinkscope.runs.catalogue import table_columns
from sinkscope.runs.schema.other_tables import TRAINING_TABLES


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


@pytest.mark.slow
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
        assert list(table.columns) == [column.name for column in table_columns(TRAINING_TABLES[name])]
    again = emergence(trajectory, 0.3)
    assert again.to_csv(index=False, float_format="%.9g") == (out / "emergence.csv").read_text()
    lines = result.stdout.splitlines()
    assert max(len(line) for line in lines if str(out) not in line) <= 80  # a path is as long as it is


@pytest.fixture(scope="module")
def tracked(checkpoints: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a track of the first two steps wrote. Shared: copy it."""
    out = tmp_path_factory.mktemp("tracked") / "out"
    result = track(checkpoints[:2], out)
    assert result.exit_code == 0, result.stderr
    return out


def contents(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()}


def refused(result: Result, said: str) -> None:
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    lines = [line for line in result.stderr.splitlines() if "error" in line]
    assert len(lines) == 1, result.stderr
    assert said in lines[0]
    assert "unexpected" not in lines[0]


# Which steps the tables hold, and whose files are replaced


@pytest.mark.slow
def test_the_tables_hold_every_step_that_stands_there(checkpoints: list[Path], tracked: Path, tmp_path: Path) -> None:
    """Also those that are not named again, because the training has removed their checkpoints, and those that fail."""
    out = tmp_path / "out"
    shutil.copytree(tracked, out)
    broken = tmp_path / "checkpoint-0"
    broken.mkdir()
    result = track([broken, checkpoints[1], checkpoints[2]], out)
    assert result.exit_code == 2
    assert "1 of 3 steps failed" in result.stderr
    whole = tmp_path / "whole"
    shutil.copytree(out, whole)
    assert sorted(set(pd.read_csv(out / "trajectory.csv")["step"])) == [0, 20, 100]
    fewer = track(checkpoints[1:], out)
    assert fewer.exit_code == 0, fewer.stderr
    assert "step 0" not in fewer.stderr
    assert contents(out) == contents(whole)
    table = pd.read_csv(out / "trajectory.csv")
    assert set(pd.read_csv(tracked / "trajectory.csv")["step"]) == {0, 20}
    own = table[table["step"] <= 20].to_csv(index=False, float_format="%.9g")
    assert own == pd.read_csv(tracked / "trajectory.csv").to_csv(index=False, float_format="%.9g")


def test_the_trajectory_of_a_callback_is_left_alone(checkpoints: list[Path], tmp_path: Path) -> None:
    """SinkCallback writes that name into the Trainer's folder: those measurements cannot be made again."""
    out = tmp_path / "out"
    out.mkdir()
    callback(output=out / "trajectory.csv").measure(20, causal_llama())
    before = contents(out)
    for more in ((), ("--force",)):
        refused(track(checkpoints[:2], out, *more), f"{out / 'trajectory.csv'} holds step 20, of which no run folder")
        assert contents(out) == before
        assert list(out.iterdir()) == [out / "trajectory.csv"], "nothing was scanned"


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("trajectory.csv", "step,mine\n1,2\n", "is no trajectory of sinkscope's: move it, or give another --out"),
        ("trajectory.csv", "", "is no trajectory of sinkscope's: move it, or give another --out"),
        ("emergence.csv", "mine", "stands there without the trajectory.csv"),
        ("trajectory.png", "mine", "stands there without the trajectory.csv"),
    ],
)
def test_a_file_of_somebody_s_is_left_alone(
    name: str, content: str, said: str, checkpoints: list[Path], tmp_path: Path
) -> None:
    (tmp_path / name).write_text(content)
    refused(track(checkpoints[:2], tmp_path), said)
    assert contents(tmp_path) == {name: content.encode()}


@pytest.mark.slow
def test_a_callback_s_table_over_the_steps_of_an_interrupted_track(
    checkpoints: list[Path], tracked: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    shutil.copytree(tracked, out)
    for name in ("emergence.csv", "trajectory.png", "trajectory.svg"):
        (out / name).unlink()
    before = contents(out)
    refused(track(checkpoints[:2], out), "has no emergence.csv beside it")
    assert contents(out) == before


@pytest.mark.slow
def test_the_files_are_replaced_together_or_not_at_all(
    checkpoints: list[Path], tracked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    shutil.copytree(tracked, out)
    before = contents(out)

    def fails(*_: Any, **__: Any) -> bytes:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("sinkscope.present.figures.trajectory.draw_trajectory", fails)
        refused(track(checkpoints[1:], out), "No space left on device")
    assert contents(out) == before
    assert {path.name for path in out.iterdir() if path.name.startswith(".")} == set()


@pytest.mark.slow
def test_a_figure_of_older_tables_does_not_stay(
    checkpoints: list[Path], tracked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    shutil.copytree(tracked, out)
    monkeypatch.setattr("sinkscope.present.figures.canvas.available", lambda: False)
    assert track(checkpoints[:2], out).exit_code == 0
    assert set(contents(out)) == {"trajectory.csv", "emergence.csv"}


def test_steps_of_another_training_are_not_mixed_in(checkpoints: list[Path], tracked: Path, tmp_path: Path) -> None:
    out, other = tmp_path / "out", tmp_path / "other"
    shutil.copytree(tracked, out)
    for step in (100, 200):
        shutil.copytree(checkpoints[2], other / f"checkpoint-{step}")
    before = contents(out)
    refused(track(sorted(other.iterdir()), out), f"{out / 'step-00000000'} is a step of another training")
    assert contents(out) == before
    assert not (out / "step-00000100").exists()


@pytest.mark.slow
def test_checkpoints_of_other_sizes_make_no_table(checkpoints: list[Path], tracked: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(tracked, out)
    before = contents(out)
    larger = tmp_path / "checkpoint-200"
    causal_llama(num_hidden_layers=3).save_pretrained(larger)
    result = track([*checkpoints[:2], larger], out)
    refused(result, "step 200 has 12 heads in 3 layers and step 0 has 8 in 2: a trajectory is of one model")
    assert contents(out) == before


def test_steps_over_other_text_make_no_table(checkpoints: list[Path], tracked: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(tracked, out)
    before = contents(out)
    shutil.copytree(checkpoints[2], checkpoints[2].with_name("checkpoint-300"), dirs_exist_ok=True)
    named = [checkpoints[2], checkpoints[2].with_name("checkpoint-300")]
    refused(track(named, out, "--seed", "1"), "step 100 and step 0 were scanned over other text")
    assert contents(out) == before


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


def test_what_fails_alike_in_several_steps_is_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was a line for each of a hundred steps."""

    def scan(self: ScanJob, model: str, target: Path) -> None:
        why = "the file is damaged" if model.endswith("9") else "--seq-len 99999 exceeds the 64 positions"
        raise SinkscopeError(f"{why} of {model}")

    monkeypatch.setattr(ScanJob, "scan", scan)
    steps = [tmp_path / f"checkpoint-{step}" for step in (1, 2, 3, 9)]
    result = track(steps, tmp_path / "out")
    assert result.exit_code == 2
    assert result.stderr.splitlines() == [
        f"sinkscope: error: --seq-len 99999 exceeds the 64 positions of {steps[0]}",
        f"sinkscope: error: the file is damaged of {steps[3]}",
        "sinkscope: error: none of the 4 steps could be scanned",
    ]


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
    assert "; the same command goes on" in stopped.stderr
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
def test_heads_that_appeared_come_before_those_that_were_there_and_the_next_step_draws_them() -> None:
    steps = pd.DataFrame([
        {"step": step, "domain": "d", "stream": "text", "level": "model", "metric": metric, "value": 1.0, "sem": 0.1}
        for step in (0, 1) for metric in ("sink_rate", "sink_score", "bos_mass", "dormant")
    ])  # fmt: skip
    rows = [(0, 0, 0, "start"), (1, 1, 1, "jump")]
    emerged = pd.DataFrame(
        [{"domain": "d", "stream": "text", "layer": layer, "head": head, "emerged": step, "first": 0.1, "last": 0.9,
          "shape": shape}
         for layer, head, step, shape in rows]
    )  # fmt: skip
    text = render_trajectory(steps, emerged, 0.3, [Path("out/trajectory.csv")])
    assert text.index("1.1 ") < text.index("0.0 ", text.index("shape"))
    assert "next: sinkscope plot out --figure trajectory -o trajectory.pdf" in text
    assert (
        "At the last step, 2 of 2 heads have a sink (alpha_0 > 0.3). In 1 of these heads it was there at every "
        "step, in 1 it came in a jump between two measured steps, and in 0 it came over more steps."
    ) in " ".join(text.split())
    assert max(map(len, text.splitlines())) <= 80


def test_without_a_sink_no_head_is_listed() -> None:
    """emergence.csv has a row for each head all the same."""
    steps = pd.DataFrame([
        {"step": step, "domain": "d", "stream": "text", "level": "model", "metric": metric, "value": 1.0, "sem": 0.1}
        for step in (0, 1) for metric in ("sink_rate", "sink_score", "bos_mass", "dormant")
    ])  # fmt: skip
    heads = [(layer, head) for layer in range(2) for head in range(4)]
    rows = [
        {"step": step, "domain": "d", "stream": "text", "level": "head", "layer": layer, "head": head,
         "metric": "sink_score", "value": 0.1, "sem": 0.0}
        for step in (0, 1) for layer, head in heads
    ]  # fmt: skip
    trajectory = pd.concat([steps, pd.DataFrame(rows)]).astype({"layer": "Int64", "head": "Int64"})
    text = render_trajectory(trajectory, emergence(trajectory, 0.3), 0.3)
    assert "No head has a sink at the last step" in text
    assert "nan" not in text
    assert "from step" not in text


def test_each_dataset_has_its_own_steps_and_heads() -> None:
    """A head that reads two datasets is one head in each, not two of the model."""
    values = {"prose": 0.1, "code": 0.9}
    rows = [
        {"step": step, "domain": domain, "stream": "text", "level": "head", "layer": 0, "head": head,
         "metric": "sink_score", "value": value * step, "sem": 0.0}
        for step in (0, 1) for domain, value in values.items() for head in range(2)
    ]  # fmt: skip
    model = [
        {"step": step, "domain": domain, "stream": "text", "level": "model", "metric": metric, "value": value * step,
         "sem": 0.0}
        for step in (0, 1) for domain, value in values.items()
        for metric in ("sink_rate", "sink_score", "bos_mass", "dormant")
    ]  # fmt: skip
    trajectory = pd.DataFrame(rows + model).astype({"layer": "Int64", "head": "Int64"})
    text = render_trajectory(trajectory, emergence(trajectory, 0.3), 0.3)
    prose, code = text.split("code, stream text")
    assert prose.startswith("prose, stream text\n")
    assert "0.100 ± 0.000" in prose
    assert "No head has a sink at the last step" in prose
    assert "0.900 ± 0.000" in code
    assert "At the last step, 2 of 2 heads have a sink" in " ".join(code.split())


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
    ("name", "step"),
    [
        ("stage1-step1000-tokens5B", 1000), ("step_2000-seed3", 2000), ("global_step300", 300), ("Step-40", 40),
        ("tokens-7B", 7), ("run-step5/checkpoint-600", 600), ("v2-checkpoint-80", 80),
    ],
)  # fmt: skip
def test_a_number_behind_the_word_step_is_the_step(name: str, step: int) -> None:
    assert [found.number for found in steps_of([name, "last-step999999"], [])] == [step, 999999]


@pytest.mark.parametrize("step", ["Infinity", "-Infinity", "NaN", "-5", "1.5", "true", '"900"', "null", "9" * 20])
def test_a_recorded_step_that_is_none_is_refused_before_the_first_scan(step: str, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-900"
    folder.mkdir()
    (folder / "trainer_state.json").write_text(f'{{"global_step": {step}}}')
    with pytest.raises(sinkscope.SinkscopeError, match=r"trainer_state\.json: global_step .* is no number of training"):
        steps_of([str(folder), "out/checkpoint-500"], [])


def test_a_folder_whose_state_tells_no_step_is_taken_by_its_name(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-900"
    folder.mkdir()
    for state in ("{}", "[]", "nonsense", "[" * 100_000, f'{{"global_step": {"9" * 5000}}}'):
        (folder / "trainer_state.json").write_text(state)
        assert steps_of([str(folder), "out/checkpoint-500"], [])[1].number == 900


@pytest.mark.parametrize(
    ("models", "revisions", "said"),
    [
        (["a-1", f"checkpoint-{'1' * 23}"], [], "no number of training steps: at most"),
        (["a-1"], ["step1", f"step{'1' * 5000}"], "no number of training steps: at most"),
        (["a-1", "b-2"], ["step1"], "name one MODEL"),
        (["best", "last"], [], "names no training step"),
        (["a-1", "b-1"], [], "both step 1"),
        (["a-1"], [], "at least two"),
    ],
)
def test_checkpoints_without_an_order_are_refused(models: list[str], revisions: list[str], said: str) -> None:
    with pytest.raises(sinkscope.SinkscopeError, match=said):
        steps_of(models, revisions)


@pytest.mark.parametrize("command", ["track", "scan"])
def test_a_device_that_is_not_here_is_one_error_for_all_models(
    command: str, checkpoints: list[Path], tmp_path: Path
) -> None:
    words = [command, *map(str, checkpoints), *SHORT, "--out", str(tmp_path / "out"), "--device", "nowhere"]
    result = CliRunner().invoke(app, words)
    refused(result, "error: device 'nowhere' is none: use auto")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("given", ["", ",", " , "])
def test_revisions_that_name_none_are_refused(given: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = CliRunner().invoke(app, ["track", "owner/model-1", "--revisions", given, "--out", str(out)])
    refused(result, f"--revisions {given!r} names no revision")
