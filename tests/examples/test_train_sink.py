"""examples/train_sink.py: two steps of it. What it shows takes 800 (docs/training.md)."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from tiers import slow_but

import sinkscope

FILE = Path(__file__).parents[2] / "examples" / "train_sink.py"


@pytest.fixture(scope="module")
def example() -> dict[str, Any]:
    return runpy.run_path(str(FILE))


def test_a_row_is_bos_and_a_stretch_twice(example: dict[str, Any]) -> None:
    text = torch.arange(100, 200)
    twice, once = (example["row"](text, 3, plain).tolist() for plain in (False, True))
    assert twice == [256, *range(103, 135), *range(103, 135)]
    assert once == [256, *range(103, 167)]
    held_out, trained = (sum(map(len, example["text_of"](part))) for part in (True, False))
    assert 0.05 < held_out / trained < 0.25


def test_the_three_models_differ_in_the_extra_logit_alone(example: dict[str, Any]) -> None:
    first, second, third = (example["small_model"](kind, 0).state_dict() for kind in example["EXTRA_LOGIT"])
    for key, weight in first.items():
        assert torch.equal(second[key], third[key])
        assert torch.equal(weight, second[key]) == ("sinks" not in key)


@pytest.mark.slow
@pytest.mark.parametrize("denominator", ["softmax", "learned"])
def test_it_writes_what_it_measured(
    denominator: str, example: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    example["train"](denominator, tmp_path, example["Recipe"](steps=2, every=1))
    losses, trajectory = pd.read_csv(tmp_path / "loss.csv"), pd.read_csv(tmp_path / "trajectory.csv")
    assert sorted(set(losses["step"])) == sorted(set(trajectory["step"])) == [0, 1, 2]
    assert losses["loss"].iloc[-1] < losses["loss"].iloc[0]
    assert len(pd.read_csv(tmp_path / "emergence.csv")) == 8
    assert (tmp_path / "trajectory.png").read_bytes().startswith(b"\x89PNG")
    run = sinkscope.load_run(tmp_path / "last-step")
    at_last = trajectory[(trajectory["step"] == 2) & (trajectory["metric"] == "sink_score")]
    heads = at_last[at_last["level"] == "head"]["value"].to_numpy()
    assert heads == pytest.approx(run.heads["sink_score"].to_numpy(), rel=1e-6)
    assert (run.heads["learned_sink_mass"].max() > 0.01) == (denominator == "learned")
    assert f"{denominator}: loss" in capsys.readouterr().out


@pytest.mark.parametrize("score", slow_but(["sigmoid", "relu"], "relu"))
def test_a_score_without_normalisation_takes_the_softmax_s_place(score: str, example: dict[str, Any]) -> None:
    """The same weights but the extra logit's; no row is divided by its sum, and later keys stay hidden."""
    model, plain = example["small_model"](score, 0).eval(), example["small_model"]("softmax", 0)
    ids = torch.randint(0, 256, (2, 9), generator=torch.Generator().manual_seed(0))
    named = dict(plain.named_parameters())
    assert all(torch.equal(weight, named[name]) for name, weight in model.named_parameters())
    with torch.no_grad():
        whole, part = model(ids).logits, model(ids[:, :5]).logits
    torch.testing.assert_close(whole[:, :5], part)
    run = sinkscope.scan(model, data=ids, self_check=False)
    assert {site.score for site in run.manifest.attention} == {score}
    maps = model(ids, output_attentions=True).attentions
    raw = torch.stack([layer.detach()[:, :, 1:, 0] for layer in maps]).mean((1, 3)).flatten()
    assert run.heads["bos_mass"].to_numpy() == pytest.approx(raw.numpy(), rel=1e-4)


def test_knobs_change_the_training_s_data_and_weights(example: dict[str, Any]) -> None:
    few, all_rows = (example["Rows"](50, False, share) for share in (0.01, 1.0))
    assert len({tuple(each["input_ids"].tolist()) for each in few}) <= 50
    text = torch.cat(example["text_of"](False))
    first = bytes(text[: round(0.01 * len(text))].tolist())
    assert all(bytes(each["input_ids"][1:33].tolist()) in first for each in few)
    assert not all(bytes(each["input_ids"][1:33].tolist()) in first for each in all_rows)
    small, large = (example["small_model"]("softmax", 0, init).model.layers[0] for init in (0.02, 0.2))
    ratio = large.self_attn.q_proj.weight.std() / small.self_attn.q_proj.weight.std()
    assert float(ratio.detach()) == pytest.approx(10, rel=1e-3)


def test_muon_trains_the_projections_of_attention_at_the_schedule_s_rate(example: dict[str, Any]) -> None:
    """Scaled to AdamW's size, a step of Muon moves a weight by about 0.2 of the rate (root mean square; its five
    iterations leave singular values of 0.7 to 1.2). Loading a state, as
    the Trainer does before the first step, puts other groups in the place of the first ones."""
    model = example["small_model"]("learned", 0)
    named = dict(model.named_parameters())
    optimizer = example["MuonBesideAdamW"](model, 0.5, 0.0)
    held = [weight for group in optimizer.param_groups for weight in group["params"]]
    assert len(held) == len({id(weight) for weight in held}) == len(named)
    matrices = {id(weight) for weight in optimizer.param_groups[0]["params"]}
    trained = {name.split(".", 3)[-1] for name, weight in named.items() if id(weight) in matrices}
    assert trained == {f"self_attn.{letter}_proj.weight" for letter in "qkvo"}

    optimizer.load_state_dict(optimizer.state_dict())
    before = {name: weight.detach().clone() for name, weight in named.items()}
    ids = torch.randint(0, 256, (8, 65), generator=torch.Generator().manual_seed(0))
    model(ids, labels=ids).loss.backward()
    for rate in (0.0, 0.01):
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        name = "model.layers.0.self_attn.q_proj.weight"
        moved = (named[name] - before[name]).square().mean().sqrt()
        assert float(moved.detach()) == pytest.approx(0.2 * rate, rel=0.35, abs=1e-9)
        changed = {name for name, weight in named.items() if not torch.equal(weight, before[name])}
        assert not changed if rate == 0 else {"lm_head.weight", "model.norm.weight", name} <= changed


def test_kinds_are_compared_with_intervals_over_seeds(example: dict[str, Any]) -> None:
    """Student's t with two degrees of freedom: 4.303 standard errors."""
    rows = [
        {
            "attention": "softmax",
            "seed": seed,
            "loss": loss,
            "sinks": seed,
            "share_sinks": 1,
            "elsewhere": 0,
            "largest": 0.5,
            "bos": 0.2,
            "share": 0.2,
        }
        for seed, loss in enumerate((1.0, 1.1, 1.2))
    ]
    line = example["compared"](pd.DataFrame(rows)).splitlines()[2]
    assert line.startswith("| softmax | 3 | 1.100 (0.852 to 1.348) | 0 to 2 | 1 | 0.500")
    assert "| 1.000 | 0 | 1 |" in example["compared"](pd.DataFrame(rows[:1]))


def test_the_loss_counts_from_a_position_on(example: dict[str, Any]) -> None:
    """Token 33 begins the second time of the stretch. All but the labels stays."""
    late, whole = (example["Rows"](4, False, 1.0, first)[0] for first in (33, 1))
    assert torch.equal(late["input_ids"], whole["input_ids"])
    assert (late["labels"] == -100).tolist() == [True] * 33 + [False] * 32
    assert torch.equal(late["labels"][33:], whole["input_ids"][33:])
    model = example["small_model"]("softmax", 0).eval()
    with torch.no_grad():
        own = model(late["input_ids"][None], labels=late["labels"][None])
    scores = own.logits[0, 32:-1].log_softmax(-1)
    expected = -scores.gather(1, late["input_ids"][33:, None]).mean()
    assert float(own.loss) == pytest.approx(float(expected), rel=1e-5)


def test_each_knob_is_turned_alone(example: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every option that Gu et al. turn is turned once or more, and one thing at a time."""
    asked = []

    def train(kind: str, out: Path, recipe: Any, seed: int) -> dict[str, Any]:
        asked.append(recipe)
        return {"attention": kind, "seed": seed, "loss": 1.0 + seed, "sinks": seed, "largest": 0.5, "elsewhere": 0}

    own = example["turn_knobs"]
    monkeypatch.setitem(own.__globals__, "train", train)
    table = own(example["Recipe"](steps=7), ["softmax"], [0, 1], tmp_path)
    plain = example["Recipe"](steps=7)
    changed = [{name for name in vars(plain) if getattr(recipe, name) != getattr(plain, name)} for recipe in asked]
    assert changed[:2] == [set(), set()]
    assert all(len(names - {"learning_rate"}) <= 1 and names for names in changed[2:])
    options = {"learning_rate", "weight_decay", "data_share", "optimizer", "init", "loss_from", "plain"}
    assert set().union(*changed) == options
    assert len(pd.read_csv(tmp_path / "knobs.csv")) == len(table) == 2 * len(example["KNOBS"])
    assert "| weight decay 0 | 2 | 1.000 to 2.000 | 0 to 1 | 0.500 | 0 |" in example["turned"](table)
