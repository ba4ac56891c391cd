"""What the sink hangs on: solutions without a sink are written down, cases are changed one at a time, BOS is moved."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from typer.testing import CliRunner

import sinkscope
from sinkscope.capture.scores import SCORES, attention_score
from sinkscope.cli.trigger import app
from sinkscope.trigger import task
from sinkscope.trigger.evaluation import Evaluation, evaluate
from sinkscope.trigger.explicit import explicit
from sinkscope.trigger.model import KINDS, TriggerConfig, TriggerModel
from sinkscope.trigger.necessity import FOLLOWED, GROUPS, PLACES, moved, necessity, plans
from sinkscope.trigger.screen import render_necessity
from sinkscope.trigger.task import TARGETS
from sinkscope.trigger.training import LATER, OPTIMIZERS, Recipe, Training, train

LAST, WIDTH = 15, 16
FAR = 12.0
"""A logit at which exp and sigmoid are below 1e-5, or within it of 1."""


def written(attention: str, scores: dict[tuple[int, int], float], value: torch.Tensor, **more: str) -> TriggerModel:
    """One head whose logit is the sum of numbers by (mark of the query, mark of the key), with a value matrix."""
    model = TriggerModel(TriggerConfig(attention, **more))
    layer = model.layers[0].self_attn
    with torch.no_grad():
        for each in (layer.q_proj, layer.k_proj):
            each.weight.zero_()
        for row, ((asking, asked), logit) in enumerate(scores.items()):
            layer.q_proj.weight[row, asking] = logit
            layer.k_proj.weight[row, asked] = 1
        layer.v_proj.weight.copy_(value)
        layer.o_proj.weight.copy_(torch.eye(WIDTH))
    return model.eval()


def without_bos(gain: float = 1.0) -> torch.Tensor:
    """The value gain * x_t of every token but BOS, whose value is 0."""
    value = gain * torch.eye(WIDTH)
    value[task.BOS, task.BOS] = 0
    return value


ORDINARY = ((LAST, LAST), (LAST, task.TRIGGER), (LAST, task.BOS), (task.BOS, task.BOS))
"""Marks of query and key in rows without a trigger."""
HIDDEN = dict.fromkeys(ORDINARY, -FAR)
ON = {(task.TRIGGER, LAST): FAR, (task.TRIGGER, task.TRIGGER): FAR}
ONE = {(task.TRIGGER, LAST): 1.0, (task.TRIGGER, task.TRIGGER): 1.0}
MARK = torch.zeros(WIDTH, WIDTH)
MARK[task.TRIGGER, task.TRIGGER] = 1

SINKLESS = {
    "exp-free": lambda: written("exp-free", HIDDEN, without_bos()),
    "sigmoid-free": lambda: written("sigmoid-free", HIDDEN | ON, without_bos()),
    "relu-norm": lambda: written("relu-norm", ONE, without_bos()),
    "relu": lambda: written("relu", ONE, without_bos()),
    "two heads": lambda: explicit("softmax", heads=2),
    "mark": lambda: written(
        "softmax", {(LAST, task.TRIGGER): -FAR, (task.TRIGGER, task.TRIGGER): FAR}, MARK, target="mark"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SINKLESS)
def test_what_the_table_calls_sinkless_is_written_down(name: str) -> None:
    found = evaluate(SINKLESS[name](), count=200)
    assert found.error < 1e-3
    assert found.sinks == 0
    assert found.heads[0]["bos_mean"] < 0.5


def test_half_of_the_mass_is_enough_for_half_of_the_error() -> None:
    """Row i has logit log(i) for none: BOS's is fixed, so the first ordinary row decides."""
    logit = math.log(15 * 1.1)  # A[i,0] >= 1.1 / 2.1 in the last row, more in all others
    model = written("softmax", {(LAST, task.BOS): logit, (task.TRIGGER, task.BOS): -FAR}, without_bos())
    found = evaluate(model, count=200)
    assert found.error < 0.5
    assert found.sinks == 0


def test_a_row_that_sums_to_1_needs_its_sink_for_the_trigger_s_own_token_too() -> None:
    """As for the mean: where x_1 .. x_i are all v, row i reads (1 - A[i,0]) W v, and W keeps v."""
    sure = written("softmax", {(LAST, task.BOS): FAR, (task.TRIGGER, task.TRIGGER): FAR}, without_bos(), target="own")
    found = evaluate(sure, count=200)
    assert found.error < 2e-3
    assert found.heads[0]["bos_mean"] > 0.999


def test_every_yes_of_the_table_has_its_solution() -> None:
    """And every no is a row whose sum is 1."""
    known = {"attention": set(SINKLESS), "heads": {2}, "target": {"mark"}, "tolerance": {0.5}}
    for cases in GROUPS.values():
        for case in cases:
            says = case.sinkless.startswith("yes")
            assert says == any(value in known.get(name, ()) for name, value in case.changes.items()), case
            assert says or KINDS[case.changes.get("attention", "softmax")].normalised


def test_plans_change_one_thing_at_a_time() -> None:
    planned = plans(seeds=2)
    assert len(planned) == 2 * sum(map(len, GROUPS.values()))
    assert {plan.recipe.name for plan in planned if plan.case.name == "as in the paper"} == {
        "softmax-1x1-seed0", "softmax-1x1-seed1",
    }  # fmt: skip
    assert len({plan.recipe for plan in planned}) == len({plan.recipe.name for plan in planned})
    for wrong in ({"groups": ["normalization"]}, {"seeds": 0}, {"steps": 0}):
        with pytest.raises(sinkscope.SinkscopeError):
            plans(**wrong)  # type: ignore[arg-type]


def test_a_recipe_names_later_options_only_where_they_are_set() -> None:
    assert Recipe().command.endswith("--steps 50000")
    changed = Recipe(target="own", weight_decay=0.5, learning_rate=0.01)
    assert changed.command.endswith("--steps 50000 --target own --learning-rate 0.01 --weight-decay 0.5")
    assert changed.name == "softmax-target-own-learning-rate-0.01-weight-decay-0.5-1x1-seed0"
    assert set(LATER) == {
        "default", "target", "tolerance", "optimizer", "learning_rate", "weight_decay", "init",
    }  # fmt: skip
    assert (Recipe().rate, Recipe(layers=2).rate, Recipe(learning_rate=0.5).rate) == (1e-3, 1e-4, 0.5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optimizer": "adamm"}, "one of adam, adamw, sgd, muon; did you mean adam"),
        ({"optimizer": "muon", "attention": "learned-sink"}, "a learned sink is none"),
        ({"tolerance": 0.0}, "tolerance 0"), ({"learning_rate": -1.0}, "learning rate -1"),
        ({"init": float("nan")}, "init nan"), ({"weight_decay": -0.1}, "weight decay -0.1"),
        ({"target": "owm"}, "unknown target 'owm'"),
    ],
)  # fmt: skip
def test_impossible_recipes_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(sinkscope.SinkscopeError, match=message):
        Recipe(**changes).config()  # type: ignore[arg-type]


@pytest.mark.parametrize("target", TARGETS)
def test_targets_twin(target: str) -> None:
    data = task.draw(9, 8, 6, torch.Generator().manual_seed(2))
    found, x = task.targets(data, False, target=target), data.inputs.double().numpy()
    for n, j in enumerate(data.trigger.tolist()):
        asked = {"mean": x[n, 1 : j + 1].mean(0), "own": x[n, j], "mark": np.eye(6)[1]}[target]
        np.testing.assert_allclose(found[n, j], asked, atol=1e-6)
        assert not found[n, [i for i in range(8) if i != j]].any()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_goes_on_where_it_was(optimizer: str, tmp_path: Path) -> None:
    recipe = Recipe(dim=6, length=6, steps=6, optimizer=optimizer, weight_decay=0.1, target="own", init=0.3)
    whole, half = Training(recipe), Training(recipe)
    whole.run()
    for _ in range(3):
        half.advance()
    half.save(tmp_path)
    rest = Training(recipe)
    rest.load(tmp_path)
    rest.run()
    for name, weight in whole.model.state_dict().items():
        assert torch.equal(weight, rest.model.state_dict()[name]), name
    assert Training(Recipe(dim=6, length=6)).model.state_dict()["layers.0.self_attn.q_proj.weight"].std() < 0.1


def test_a_checkpoint_keeps_its_target_and_its_tolerance(tmp_path: Path) -> None:
    model = train(Recipe(dim=6, length=6, steps=50, target="mark", tolerance=2.0), tmp_path / "model")
    assert model.config.training["stopped"] == "criterion"
    assert TriggerModel.from_pretrained(tmp_path / "model").config.target == "mark"
    assert evaluate(model).error == pytest.approx(model.config.training["evaluation_error"], rel=1e-6)
    assert "target" not in TriggerConfig().to_diff_dict()


def test_bos_is_followed_by_its_mark() -> None:
    """Rows after BOS see the same set of keys: errors and masses are as they were, BOS's on its new place."""
    model = explicit("softmax")
    found, before, absent = (moved(model, place, count=100) for place in PLACES)
    assert FOLLOWED in PLACES
    rows = [i for i in range(4, 16) if i != 7]
    logit = math.exp(math.log(15 / 1e-3))
    assert found.mass == pytest.approx(np.mean([logit / (logit + i) for i in rows]), rel=1e-4)
    assert found.error < 1e-3
    assert before.error > 0.5 < absent.error
    assert before.mass == pytest.approx((1 / 2 + 1 / 3 + 1 / 4) / 3, rel=1e-4)
    assert found.share == pytest.approx(found.mass)
    assert found.total == pytest.approx(1)


def test_several_layers_are_refused_where_bos_is_moved() -> None:
    with pytest.raises(sinkscope.SinkscopeError, match="2 layers"):
        moved(TriggerModel(TriggerConfig(num_hidden_layers=2)), FOLLOWED)


def test_one_s_own_attention_trains(tmp_path: Path) -> None:
    @attention_score("square-free")
    def square(logits: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return logits.square() / rows.clamp(min=1)

    try:
        model = train(Recipe("square-free", dim=6, length=6, steps=3), tmp_path / "model")
        found = evaluate(model, count=20)
        assert isinstance(found, Evaluation)
        run = sinkscope.scan(str(tmp_path / "model"), num_sequences=20)
        assert run.manifest.self_check.status == "passed"
        assert run.summary.task["heads"][0]["bos_mean"] == pytest.approx(found.heads[0]["bos_mean"], rel=1e-5)
    finally:
        SCORES.remove("square-free")
    with pytest.raises(sinkscope.SinkscopeError, match="unknown attention 'square-free'"):
        sinkscope.scan(str(tmp_path / "model"))


@pytest.mark.slow
def test_the_command_prints_a_table_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = ("--out", str(tmp_path / "out"), "--group", "anchor", "--seeds", "2", "--steps", "2", "--quiet")
    first = CliRunner().invoke(app, ["necessity", *out])
    assert first.exit_code == 0, first.stderr
    monkeypatch.setattr(Training, "advance", lambda self: pytest.fail("trained again"))
    again = CliRunner().invoke(app, ["necessity", *out[:-1]])
    assert again.exit_code == 0, again.stderr
    table = pd.read_csv(tmp_path / "out" / "necessity.csv")
    assert table["case"].tolist() == [name for name in ("as in the paper", *PLACES) for _ in range(2)]
    assert table["loss"].notna().tolist() == [True] * 2 + [False] * 6
    assert again.stdout == render_necessity(table)
    assert "| anchor | no BOS: key 0 | no solution at all: row 0 sees itself alone | 0 of 2 | 2 |" in again.stdout
    (tmp_path / "file").write_text("mine")
    with pytest.raises(sinkscope.SinkscopeError, match="is a file"):
        necessity(tmp_path / "file", plans(["heads"]))
