"""The trigger task opened: other defaults, other lengths, solutions in closed form, checkpoints, the study."""

from __future__ import annotations

import json
import math
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiers import slow_but
from typer.testing import CliRunner

import sinkscope
from sinkscope.cli import app
from sinkscope.trigger import study as experiment
from sinkscope.trigger import task
from sinkscope.trigger.evaluation import by_length, evaluate, head_pattern, join_patterns, name_pattern
from sinkscope.trigger.explicit import explicit, sink_logit
from sinkscope.trigger.model import TriggerConfig, TriggerModel
from sinkscope.trigger.screen import render_summary
from sinkscope.trigger.task import DEFAULTS, draw_default
from sinkscope.trigger.theory import PATTERNS, forced_patterns
from sinkscope.trigger.training import STATE, Recipe, Training, train
from sinkscope.trigger.trajectory import checkpoint_steps, emergence, keeper, trajectory

SMALL = Recipe("softmax", dim=6, length=6, steps=12)


def call(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["trigger", *arguments])


def refused(*arguments: str) -> str:
    """The one line on stderr of a command that ends with exit code 2 and prints nothing."""
    result = call(*arguments)
    assert (result.exit_code, result.stdout) == (2, ""), result.stderr
    (line,) = result.stderr.splitlines()
    return str(line)


def weights_of(model: TriggerModel) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


# --- targets ---


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("kind", DEFAULTS)
def test_targets_twin(kind: str, residual: bool) -> None:
    """Each row by itself, in float64."""
    data, default = task.draw(7, 9, 6, torch.Generator().manual_seed(1)), draw_default(kind, 6, 3)
    found = task.targets(data, residual, default)
    x = data.inputs.double().numpy()
    values = None if default.values is None else default.values.double().numpy()
    for n, j in enumerate(data.trigger.tolist()):
        for i in range(9):
            if i == j:
                row = sum(x[n, t] for t in range(1, j + 1)) / j
            elif values is None:
                row = np.zeros(6)
            elif kind == "constant":
                row = values
            else:
                row = np.array([sum(values[out, k] * x[n, i, k] for k in range(6)) for out in range(6)])
            np.testing.assert_allclose(found[n, i], row + residual * x[n, i], atol=1e-6)


def test_a_default_is_drawn_from_the_seed_alone() -> None:
    for kind, shape in (("constant", (16,)), ("self", (16, 16))):
        one, again, other = (draw_default(kind, 16, seed).values for seed in (4, 4, 5))
        assert one is not None
        assert again is not None
        assert other is not None
        assert one.shape == shape
        assert torch.equal(one, again)
        assert not torch.equal(one, other)
    assert draw_default("zero", 16, 4).values is None
    many = torch.stack([draw_default("constant", 16, seed).values for seed in range(200)])  # type: ignore[misc]
    assert -1 <= many.min() < -0.99 < 0.99 < many.max() <= 1
    matrix = draw_default("self", 64, 0).values
    assert matrix is not None
    assert float(matrix.var() * 64) == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("kind", ["constant", "self"])
def test_a_checkpoint_keeps_its_default(kind: str, tmp_path: Path) -> None:
    recipe = Recipe("softmax", dim=6, length=6, steps=2, seed=3, default=kind)
    model = train(recipe, tmp_path / "model")
    drawn = draw_default(kind, 6, 3).values
    read = TriggerModel.from_pretrained(tmp_path / "model").config.off
    assert drawn is not None
    assert read.kind == kind
    assert torch.equal(read.values, drawn)
    data = task.evaluation(1000, 6, 6, 3)
    with torch.no_grad():
        missed = model(inputs_embeds=data.inputs).last_hidden_state - task.targets(data, False, read)
    assert evaluate(model, seed=3).error == pytest.approx(float(missed.abs().max()), rel=1e-6)
    assert model.config.training["evaluation_error"] == pytest.approx(evaluate(model, seed=3).error, rel=1e-6)
    words = sinkscope.scan(str(tmp_path / "model"), num_sequences=5).summary.task["in_words"]
    assert re.fullmatch(r"[01] of 1 head .* where no trigger stands \(\d\.\d{3}\)\.", words[0])
    assert words[-1].startswith("In rows without a trigger the target is")
    assert f"--default {kind}" in model.config.training["command"]


def test_zero_is_written_as_0_1_wrote_it(tmp_path: Path) -> None:
    """No new key, no new option: a study of 0.1 goes on, and its folders read as zero."""
    train(SMALL, tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert not [name for name in config if "default" in name]
    assert "default" not in config["training"]["command"]
    shipped = Path(sinkscope.__file__).parent / "data" / "trigger-softmax" / "config.json"
    assert set(json.loads(shipped.read_text())) == set(config)
    assert TriggerConfig().off.values is None
    assert Recipe().name == "softmax-1x1-seed0"
    assert Recipe(default="self").name == "softmax-self-1x1-seed0"


def test_a_state_of_0_1_is_resumed(tmp_path: Path) -> None:
    """Its recipe has no default; one of another default is still another training."""
    training = Training(SMALL)
    training.advance()
    training.save(tmp_path)
    with safe_open(tmp_path / STATE, framework="pt") as file:
        facts = json.loads(file.metadata()["of"])
    del facts["recipe"]["default"]
    save_file(load_file(tmp_path / STATE), tmp_path / STATE, {"of": json.dumps(facts)})
    with pytest.raises(sinkscope.SinkscopeError, match="another training"):
        train(Recipe("softmax", dim=6, length=6, steps=12, default="self"), tmp_path, resume=True)
    whole = Training(SMALL)
    whole.run()
    assert same(weights_of(train(SMALL, tmp_path, resume=True)), weights_of(whole.model))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"default": "linear"}, "unknown default 'linear': choose one of zero, constant, self"),
        ({"default_values": [0.5]}, "default_values are not 6 finite numbers"),
        ({"default_values": None}, "default_values are not 6 finite numbers"),
        ({"default_values": ["a"] * 6}, "default_values are not 6 finite numbers"),
        ({"default_values": [math.inf] * 6}, "default_values are not 6 finite numbers"),
        ({"default_values": [[0.5], [0.5, 1]]}, "default_values are not 6 finite numbers"),
        ({"default": "self"}, "default_values are not 6 x 6 finite numbers"),
    ],
)
def test_damaged_defaults(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    explicit("softmax", default=draw_default("constant", 6, 0), dim=6, length=6).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(sinkscope.SinkscopeError, match=message):
        sinkscope.scan(str(tmp_path))


# --- verdicts ---


@pytest.mark.parametrize(
    ("total", "first", "own", "name"),
    [
        (1, 0.9, 0.1, "sink"),
        (1, 0.89, 0.11, "spread"),
        (1, 0.05, 0.9, "diagonal"),
        (0.099, 0.0, 0.0, "none"),
        (0.1, 0.0, 0.0, "spread"),
        (2, 0.95, 0.95, "spread"),
        (5, 0.95, 0.2, "sink"),
    ],
)
def test_verdicts(total: float, first: float, own: float, name: str) -> None:
    assert name_pattern(total, first, own) == name


def test_verdicts_of_several_heads() -> None:
    assert join_patterns(["sink", "sink"]) == "sink"
    assert join_patterns(["sink", "diagonal"]) == "diagonal + sink"


@pytest.mark.parametrize("sparse", [False, True])
def test_pattern_twin(sparse: bool) -> None:
    """Loops over sequences and rows, in float64; `sparse` empties most rows, as relu does."""
    a = np.tril(np.random.default_rng(0).random((5, 8, 8)))
    if sparse:
        a[:, [1, 2, 4, 5, 6]] = 0
        a[2, 7] = 0
    trigger, sums, firsts, owns, filled = 3, [], [], [], []
    for sequence in a:
        for i in range(1, 8):
            if i == trigger:
                continue
            total = sum(sequence[i])
            sums.append(total)
            filled.append(total > 0)
            firsts.append(sequence[i][0] / total if total else 0)
            owns.append(sequence[i][i] / total if total else 0)
    found = head_pattern(1, 2, torch.from_numpy(a), trigger)
    assert (found.layer, found.head) == (1, 2)
    assert found.total_mean == pytest.approx(np.mean(sums))
    assert found.self_share_mean == pytest.approx(np.mean(owns))
    assert found.filled_mean == pytest.approx(np.mean(filled))
    assert found.pattern_share == name_pattern(float(np.mean(filled)), float(np.mean(firsts)), float(np.mean(owns)))


def test_the_two_verdicts_differ_where_rows_do_not_sum_to_one() -> None:
    faint = torch.zeros(2, 6, 6, dtype=torch.float64)
    faint[:, :, 0] = 1e-3
    assert (head_pattern(0, 0, faint, 3).pattern, head_pattern(0, 0, faint, 3).pattern_share) == ("none", "sink")
    loud = torch.eye(6, dtype=torch.float64).repeat(2, 1, 1) + faint * 1e3
    assert (head_pattern(0, 0, loud, 3).pattern, head_pattern(0, 0, loud, 3).pattern_share) == ("spread", "spread")
    negative = -torch.eye(6, dtype=torch.float64).repeat(2, 1, 1)
    assert head_pattern(0, 0, negative, 3).pattern == "diagonal"


# --- theory ---


def test_what_each_pattern_could_reach() -> None:
    """Solved are those that the theory names, to float32's rounding of the targets; nothing else comes near."""
    solved = {(row["default"], row["pattern"]) for row in forced_patterns(300) if row["error"] < 1e-5}
    two = {"sink + sink", "diagonal + sink", "diagonal + diagonal", "spread + spread"}
    assert solved == {
        *((kind, name) for kind in ("zero", "constant") for name in {"sink", *two}),
        ("self", "diagonal + sink"),
        ("self", "diagonal + diagonal"),
    }
    others = [row["error"] for row in forced_patterns(300) if (row["default"], row["pattern"]) not in solved]
    assert len(others) == len(DEFAULTS) * len(PATTERNS) - len(solved)
    assert min(others) > 0.3


def test_no_logits_reach_the_diagonal_at_a_midpoint() -> None:
    """Row 3 is the midpoint of tokens 1 and 2: A[3,3] <= 1/2, whatever the weights."""
    model = TriggerModel(TriggerConfig(num_attention_heads=4))
    data = task.draw(50, 6, 16, torch.Generator().manual_seed(0), trigger=5)
    data.inputs[:, 3] = (data.inputs[:, 1] + data.inputs[:, 2]) / 2
    for seed, scale in enumerate((0.1, 1.0, 10.0)):
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(std=scale)
            a = model(inputs_embeds=data.inputs, output_attentions=True).attentions[0]
        assert a[:, :, 3, 3].max() <= 0.5 + 1e-4


# --- closed forms ---


@pytest.mark.parametrize("length", [4, 16, 96])
@pytest.mark.parametrize(("heads", "kind"), [(1, "zero"), (2, "zero"), (2, "constant")])
def test_explicit_relu_has_no_loss_and_no_sink_at_any_length(heads: int, kind: str, length: int) -> None:
    model = explicit("relu", heads, draw_default(kind, 16, 0))
    for trigger in {2, length - 1}:
        found = evaluate(model, count=100, length=length, trigger=trigger)
        assert found.error < 5e-6
        assert found.loss < 1e-12
        assert found.maps[..., 1:, 0].abs().max() == 0


@pytest.mark.parametrize("length", [4, 16, 64])
@pytest.mark.parametrize("kind", ["zero", "constant"])
def test_mass_of_the_explicit_softmax(kind: str, length: int) -> None:
    """One head: A[i,0] = e^b / (e^b + i), A[j,0] = e^-b / (e^-b + j). Two: e^-b / (e^-b + i), head 1 reversed at j."""
    default, j = draw_default(kind, 16, 0), 3
    largest = 0.0 if default.values is None else float(default.values.abs().max())
    rows = np.arange(1, length)
    one, two = (evaluate(explicit("softmax", n, default), count=20, length=length, trigger=j).maps[0] for n in (1, 2))
    big, small = math.exp(sink_logit(16, largest, 1e-3)), math.exp(-sink_logit(16, largest, 1e-3))
    expected = np.where(rows == j, small / (small + rows), big / (big + rows))
    np.testing.assert_allclose(one[0, 1:, 0], expected, rtol=1e-4)
    big, small = math.exp(sink_logit(16, largest, 1e-3, 2)), math.exp(-sink_logit(16, largest, 1e-3, 2))
    np.testing.assert_allclose(two[1, 1:, 0], small / (small + rows), rtol=1e-4)
    expected = np.where(rows == j, big / (big + rows), small / (small + rows))
    np.testing.assert_allclose(two[0, 1:, 0], expected, rtol=1e-4)


@pytest.mark.parametrize(("heads", "pattern"), [(1, "sink"), (2, "spread")])
@pytest.mark.parametrize("error", [1e-2, 1e-4])
@pytest.mark.parametrize("kind", ["zero", "constant"])
def test_explicit_softmax_keeps_its_bound_on_the_worst_inputs(
    heads: int, pattern: str, error: float, kind: str
) -> None:
    """All tokens alike at a corner of the cube, where nothing averages out; and the bound is no loose one."""
    default = draw_default(kind, 6, 1)
    model = explicit("softmax", heads, default, dim=6, length=6, error=error)
    worst = 0.0
    for trigger in range(1, 6):
        for corner in torch.cartesian_prod(*[torch.tensor([-1.0, 1.0])] * 3):
            data = task.draw(1, 6, 6, torch.Generator().manual_seed(0), trigger)
            data.inputs[:, 1:, 2:5] = corner
            with torch.no_grad():
                found = model(inputs_embeds=data.inputs).last_hidden_state
            worst = max(worst, float((found - task.targets(data, False, default)).abs().max()))
    assert worst <= error + 1e-6
    assert worst > error / 4
    assert {one.pattern for one in evaluate(model, count=50).patterns} == {pattern}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--default", "self"], "default self has no solution with one layer"),
        (["--default", "constant"], "no solution with one ReLU head: pass --heads 2"),
        (["--default", "linear"], "unknown default 'linear'"),
        (["--attention", "gated"], "no solution in closed form for 'gated'"),
        (["--heads", "3"], "heads 3"),
        (["--attention", "softmax", "--error", "0"], "error 0"),
        (["--attention", "softmax", "--error", "nan"], "error nan"),
        (["--length", "0"], "length 0"),
        (["--dim", "3"], "dimension 3"),
        (["--seed", "-1"], "seed -1"),
    ],
)
def test_explicit_refuses(options: list[str], message: str, tmp_path: Path) -> None:
    assert message in refused("explicit", str(tmp_path / "out"), *options)
    assert not (tmp_path / "out").exists()


def test_explicit_command(tmp_path: Path) -> None:
    """Scan reads what it writes, the self-check among it; a folder with files is left alone."""
    out = str(tmp_path / "out")
    result = call("explicit", out, "--attention", "softmax", "--heads", "2", "--default", "constant")
    assert result.exit_code == 0, result.stderr
    run = sinkscope.scan(out, num_sequences=20)
    assert run.manifest.self_check.status == "passed"
    assert run.heads["bos_mass"].max() < 0.1
    assert "0 of 2 heads have a sink" in run.summary.task["in_words"][0]
    command = json.loads((tmp_path / "out" / "config.json").read_text())["training"]["command"]
    assert f"again: {command} FOLDER\n" in result.output
    again = call(*command.split()[2:], str(tmp_path / "again"))
    assert again.exit_code == 0, again.stderr
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "out" / name).read_bytes()
    assert "not empty" in refused("explicit", out)
    nowhere = tmp_path / "again" / "config.json" / "out"
    assert f"cannot write {nowhere}: Not a directory" in refused("explicit", str(nowhere))


# --- lengths ---


@pytest.mark.slow
def test_the_explicit_sink_at_other_lengths() -> None:
    """Its error grows as the number of keys that it holds out."""
    table = by_length(explicit("softmax", error=1e-3), [16, 128], count=200)
    assert table[["length", "trigger"]].drop_duplicates().to_numpy().tolist() == [
        [16, 7],
        [16, 15],
        [128, 7],
        [128, 127],
    ]
    first = table[table["trigger"] == 7].set_index("length")
    assert first.loc[16, "error"] < 1e-3 < 5e-3 < first.loc[128, "error"] < 127 / 15 * 1e-3
    logit = math.exp(sink_logit(16, 0.0, 1e-3))
    for length, row in first.iterrows():
        rows = np.delete(np.arange(1, length), 6)
        assert row["bos_mean"] == pytest.approx(np.mean(logit / (logit + rows)), rel=1e-5)
        assert row["bos_min"] == pytest.approx(logit / (logit + length - 1), rel=1e-5)


def test_length_of_training_gives_the_evaluation_itself() -> None:
    model = explicit("relu")
    (row,) = by_length(model, [16], [7], count=50).to_dict("records")
    found = evaluate(model, count=50)
    assert {name: row[name] for name in found.heads[0] if name in row} == {
        name: value for name, value in found.heads[0].items() if name in row
    }
    assert (row["error"], row["loss"]) == (found.error, found.loss)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_model_of_another_type_is_evaluated_in_it(dtype: torch.dtype) -> None:
    """The closed form's logits are rounded to 8 bits, its marks are exact."""
    plain, other = evaluate(explicit("softmax"), count=50), evaluate(explicit("softmax").to(dtype), count=50)
    assert other.heads[0]["bos_mean"] == pytest.approx(plain.heads[0]["bos_mean"], abs=2e-3)
    gated = evaluate(TriggerModel(TriggerConfig("gated")).to(dtype), count=50)
    assert gated.heads[0]["gate_mean"] == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--length", "0"], "length 0"),
        (["--length", "16", "--length", "3"], "length 3"),
        (["--length", "1024"], "GiB, more than 2: pass a smaller --num-sequences or --length"),
        (["--trigger", "16", "--length", "16"], "trigger position 16: one of 1 .. 15"),
        (["--trigger", "0"], "trigger position 0"),
        (["--num-sequences", "0"], "0 sequences"),
        (["--seed", "-1"], "seed -1"),
    ],
)
def test_evaluate_refuses(options: list[str], message: str) -> None:
    assert message in refused("evaluate", "example:trigger-relu", *options)


def test_evaluate_and_scan_at_another_length() -> None:
    """Two ways to the same numbers: whole maps here, the capture there."""
    options = ("example:trigger-softmax", "--length", "32", "--num-sequences", "30", "--csv")
    evaluated, scanned = (call(command, *options) for command in ("evaluate", "scan"))
    assert (evaluated.exit_code, scanned.exit_code) == (0, 0), evaluated.stderr + scanned.stderr
    ours = dict(zip(*(line.split(",") for line in evaluated.stdout.splitlines()[:2]), strict=True))
    theirs = dict(zip(*(line.split(",") for line in scanned.stdout.splitlines()), strict=True))
    for name in ("bos_min", "bos_mean", "bos_trigger", "share_mean"):
        assert float(ours[name]) == pytest.approx(float(theirs[name]), abs=2e-6), name
    assert ours["length"] == "32"
    assert "length 3" in refused("scan", "example:trigger-softmax", "--length", "3")
    table = call("evaluate", "example:trigger-relu", "--num-sequences", "10")
    assert [line.split()[0] for line in table.stdout.splitlines()[3:11]] == [
        str(length) for length in (16, 32, 64, 128) for _ in range(2)
    ]
    names = table.stdout.splitlines()[2].split("  ")
    assert len({*names} - {""}) == len([name for name in names if name]), "a name for each column"
    assert max(map(len, table.stdout.splitlines())) <= 80


# --- checkpoints ---


@pytest.mark.parametrize(("number", "steps"), [(1, 7), (2, 2), (5, 5), (20, 50_000), (100, 400), (40, 41)])
def test_checkpoint_steps(number: int, steps: int) -> None:
    found = checkpoint_steps(number, steps)
    assert len(found) == len(set(found)) == number
    assert found[-1] == steps
    assert found == sorted(found)
    assert number == 1 or found[0] == 1
    gaps = [later - earlier for earlier, later in pairwise(found)]
    assert all(later >= earlier - 1 for earlier, later in pairwise(gaps)), "dense early"


@pytest.mark.parametrize("number", [0, -1, 13])
def test_impossible_numbers_of_checkpoints(number: int, tmp_path: Path) -> None:
    line = refused("train", "--out", str(tmp_path / "out"), "--steps", "12", "--checkpoints", str(number))
    assert f"checkpoints {number}: 1 to 12" in line
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_checkpoints_leave_the_training_as_it_was(tmp_path: Path) -> None:
    """Same weights with and without; every folder holds the weights of its step, and scan reads it."""
    plain = train(SMALL, tmp_path / "plain")
    seen: dict[int, dict[str, torch.Tensor]] = {}
    keep = keeper(tmp_path / "kept", 5, 12)

    def both(training: Training) -> None:
        seen[training.step] = weights_of(training.model)
        keep(training)

    kept = train(SMALL, tmp_path / "kept", keep=both)
    assert same(weights_of(plain), weights_of(kept))
    names = {path.name for path in (tmp_path / "kept").iterdir()}
    due = [0, *checkpoint_steps(5, 12)]
    assert names == {"config.json", "model.safetensors", *(f"step-{step:06d}" for step in due)}
    for step in due:
        model = TriggerModel.from_pretrained(tmp_path / "kept" / f"step-{step:06d}")
        assert same(weights_of(model), seen[step])
        record = model.config.training
        assert (record["steps"], record["stopped"]) == (step, "checkpoint" if step < 12 else "steps")
    text = (tmp_path / "kept" / "step-000000" / "config.json").read_text()
    assert json.loads(text, parse_constant=pytest.fail)["training"]["loss"] is None
    assert (tmp_path / "plain" / "config.json").read_bytes() == (tmp_path / "kept" / "config.json").read_bytes()
    assert sinkscope.scan(str(tmp_path / "kept" / "step-000001"), num_sequences=5).summary.task is not None


def test_a_checkpoint_that_cannot_be_written_ends_the_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    training = Training(SMALL)
    with pytest.raises(sinkscope.SinkscopeError, match=r"cannot write .*/file: Not a directory"):
        training.run(keep=keeper(tmp_path / "file", 3, 12))
    assert training.step == 0
    assert training.model.config.training == {}


def test_a_kill_between_two_checkpoints_leaves_a_folder_to_go_on_in(tmp_path: Path) -> None:
    """No state was saved by the clock yet: the one of step 0 is there before the first checkpoint."""
    keep = keeper(tmp_path / "out", 12, 12)

    def killed(training: Training) -> None:
        keep(training)
        if training.step == 4:
            raise SystemExit

    with pytest.raises(SystemExit):
        train(SMALL, tmp_path / "out", keep=killed)
    (tmp_path / "out" / ".step-000005.new").mkdir()  # killed while it wrote the next
    train(SMALL, tmp_path / "out", resume=True, keep=keep)
    train(SMALL, tmp_path / "whole", keep=keeper(tmp_path / "whole", 12, 12))
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        path.name for path in (tmp_path / "whole").iterdir()
    }
    for step in range(13):
        one, other = (tmp_path / name / f"step-{step:06d}" / "model.safetensors" for name in ("out", "whole"))
        assert one.read_bytes() == other.read_bytes()


def test_trajectory(tmp_path: Path) -> None:
    recipe = Recipe("gated", heads=2, dim=6, length=6, steps=12, default="constant")
    train(recipe, tmp_path, keep=keeper(tmp_path, 3, 12))
    (tmp_path / "step-notes").mkdir()
    table = trajectory(tmp_path)
    assert table["step"].tolist() == [step for step in (0, 1, *checkpoint_steps(3, 12)[1:]) for _ in range(2)]
    assert table["head"].tolist() == [0, 1] * 4
    found = evaluate(TriggerModel.from_pretrained(tmp_path / "step-000001").eval())
    for (_, row), head in zip(table[table["step"] == 1].iterrows(), found.heads, strict=True):
        assert (row["error"], row["loss"]) == (found.error, found.loss)
        assert all(row[name] == head[name] for name in ("bos_mean", "bos_min", "share_mean", "self_mean"))
    with pytest.raises(sinkscope.SinkscopeError, match="holds no checkpoints"):
        trajectory(tmp_path / "step-000001")


def test_emergence() -> None:
    masses = {0: [0.1, 0.95, 0.5, 0.9, 0.99], 1: [0.1, 0.2, 0.95, 0.95, 0.3], 2: [0.9, 0.9, 0.9, 0.9, 0.9]}
    rows = [
        {"step": step, "layer": 0, "head": head, "bos_mean": mass}
        for head, values in masses.items()
        for step, mass in zip((0, 1, 10, 100, 1000), values, strict=True)
    ]
    assert emergence(pd.DataFrame(rows)).splitlines() == [
        "layer 0, head 0: a sink at step 100, none yet at step 10, and it stays.",
        "layer 0, head 1: no sink at the end (BOS 0.300 at step 1000).",
        "layer 0, head 2: a sink at step 0, and it stays.",
    ]


@pytest.mark.slow
def test_train_command_with_checkpoints(tmp_path: Path) -> None:
    options = ("--attention", "relu", "--default", "self", "--steps", "20", "--checkpoints", "4")
    result = call("train", "--out", str(tmp_path / "out"), *options)
    assert result.exit_code == 0, result.stderr
    assert "layer 0, head 0: no sink at the end" in result.stdout
    table = pd.read_csv(tmp_path / "out" / "trajectory.csv")
    assert table["step"].tolist() == [0, *checkpoint_steps(4, 20)]
    assert (tmp_path / "out" / "trajectory.png").read_bytes().startswith(b"\x89PNG")
    assert call("train", "--out", str(tmp_path / "out"), *options, "--resume").exit_code == 0
    assert "unknown default 'linear'" in refused("train", "--out", str(tmp_path / "no"), "--default", "linear")


def test_without_matplotlib_a_training_writes_its_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sinkscope.present.figures.canvas.available", lambda: False)
    result = call("train", "--out", str(tmp_path / "out"), "--attention", "relu", "--steps", "2", "--checkpoints", "1")
    assert result.exit_code == 0, result.stderr
    assert "no figure: it needs matplotlib (pip install 'sinkscope[figures]')" in result.stderr
    assert (tmp_path / "out" / "trajectory.csv").is_file()
    assert not (tmp_path / "out" / "trajectory.png").exists()
    assert "head 0: no sink at the end" in result.stdout


@pytest.mark.parametrize(("attention", "sink"), slow_but([("softmax", True), ("relu", False)]))
def test_when_the_sink_comes(attention: str, sink: bool, tmp_path: Path) -> None:
    """The claim over training: softmax's sink comes and stays, ReLU has none at any kept step."""
    train(Recipe(attention, steps=2000), tmp_path, keep=keeper(tmp_path, 20, 2000))
    table = trajectory(tmp_path)
    assert table["error"].iloc[-1] < 5e-3
    assert (table["pattern"].iloc[-1] == "sink") == sink
    assert ("and it stays" in emergence(table)) == sink
    assert sink or table["bos_mean"].max() < 0.1


@pytest.mark.slow
def test_softmax_solves_a_constant_with_a_sink(tmp_path: Path) -> None:
    model = train(Recipe("softmax", steps=4000, default="constant"), tmp_path)
    assert model.config.training["stopped"] == "criterion"
    assert evaluate(model).heads[0]["bos_min"] > 0.99


# --- the study ---


def test_plans() -> None:
    names = [recipe.name for recipe in experiment.plans(seeds=2)]
    assert len(names) == len(set(names)) == 3 * 6 * 2
    assert names[:2] == ["softmax-1x1-seed0", "relu-1x1-seed0"]
    assert names[17:19] == ["gated-self-1x1-seed0", "softmax-1x1-seed1"]
    for wrong in ({"seeds": 0}, {"defaults": ["linear"]}, {"attentions": ["linear"]}, {"heads": [0]}, {"steps": 0}):
        with pytest.raises(sinkscope.SinkscopeError):
            experiment.plans(**wrong)  # type: ignore[arg-type]


@pytest.mark.slow
def test_study_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plans = experiment.plans(["constant"], ["softmax", "relu"], [2], 2, 3)
    first = experiment.study(tmp_path, plans)
    monkeypatch.setattr(Training, "advance", lambda self: pytest.fail("trained again"))
    again = experiment.study(tmp_path, plans)
    pd.testing.assert_frame_equal(first, again)
    assert pd.read_csv(tmp_path / "study.csv").shape == (4, len(first.columns))
    assert set(pd.read_csv(tmp_path / "patterns.csv")["pattern"]) == set(PATTERNS)
    with pytest.raises(sinkscope.SinkscopeError, match="another model"):
        experiment.study(tmp_path, experiment.plans(["constant"], ["softmax"], [2], 1, 4))
    row = first.iloc[0]
    found = evaluate(TriggerModel.from_pretrained(tmp_path / "models" / plans[0].name).eval())
    assert row["bos_mean"] == pytest.approx(np.mean([head["bos_mean"] for head in found.heads]))
    default = draw_default("constant", 16, 0)
    y = task.targets(task.evaluation(1000, 16, 16, 0), False, default).double().flatten(0, 1).numpy()
    assert row["explained"] == pytest.approx(1 - found.loss / y.var(0).mean(), rel=1e-9)


def test_summary_of_seeds() -> None:
    row = {
        "default": "zero", "attention": "softmax", "heads": 1, "seed": 0, "solved": True, "steps": 900, "error": 0.004,
        "loss": 1e-6, "explained": 0.99, "pattern": "sink", "pattern_share": "sink", "bos_mean": 0.99, "self_mean": 0.0,
        "total_mean": 1.0, "bos_share": 0.99, "self_share": 0.0, "bos_trigger": 0.0,
    }  # fmt: skip
    other = row | {"seed": 1, "solved": False, "steps": 6000, "pattern": "spread", "bos_mean": 0.2}
    lines = render_summary(pd.DataFrame([row, other, row | {"default": "self"}])).splitlines()
    assert len(lines) == 4
    assert lines[2] == (
        "| 1 | zero | softmax | 1 of 2 | 900 .. 6000 | 0.004 | 0.990 | sink 1, spread 1 | sink | 0.200 .. 0.990 "
        "| 0.000 | 1.000 | 0.000 |"
    )
    assert lines[3].startswith("| 1 | self | softmax | 1 of 1 | 900 |")


def test_study_command(tmp_path: Path) -> None:
    out = ("--out", str(tmp_path / "out"))
    few = ("--seeds", "1", "--steps", "2", "--attention", "sigmoid", "--default", "zero")
    result = call("study", *out, *few)
    assert result.exit_code == 0, result.stderr
    assert "| 1 | zero | sigmoid | 0 of 1 | 2 |" in result.stdout
    assert "unknown default 'linear'" in refused("study", *out, "--default", "linear")
    assert "steps 0" in refused("study", *out, "--steps", "0")
    (tmp_path / "file").write_text("mine")
    assert "is a file" in refused("study", "--out", str(tmp_path / "file"), *few)
