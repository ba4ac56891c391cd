"""The trigger-conditional task: data, models, training, the claim itself, commands."""

from __future__ import annotations

import errno
import json
import re
import shutil
import signal
import threading
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from models import tiny
from tiers import slow_but
from typer.testing import CliRunner

import sinkscope
from sinkscope.cli import app
from sinkscope.trigger import task
from sinkscope.trigger.evaluation import evaluate
from sinkscope.trigger.explicit import explicit, explicit_relu
from sinkscope.trigger.model import KINDS, TriggerConfig, TriggerModel
from sinkscope.trigger.reproduce import Trained, head_table, model_table, recipes, verdict, write
from sinkscope.trigger.theory import forced_curve, forced_mass
from sinkscope.trigger.training import STATE, TOLERANCE, Recipe, Training, train


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def model_of(attention: str, layers: int = 2, heads: int = 2, scale: float = 10.0) -> TriggerModel:
    if attention == "exp-free":
        scale = 3.0  # nothing bounds an exponential that no sum divides
    torch.manual_seed(0)
    model = TriggerModel(TriggerConfig(attention, num_hidden_layers=layers, num_attention_heads=heads))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale)
            if parameter.ndim == 1:
                parameter.add_(0.5)
    return model.eval()


# --- data and targets ---


@pytest.mark.parametrize(("dim", "length"), [(16, 16), (4, 4), (7, 9)])
def test_marks(dim: int, length: int) -> None:
    data = task.draw(300, length, dim, generator())
    x = data.inputs
    assert torch.equal(x[:, 0], torch.eye(dim)[0].expand(300, -1))
    for row, j in zip(x, data.trigger.tolist(), strict=True):
        assert row[:, 0].tolist() == [1.0] + [0.0] * (length - 1)
        assert row[:, 1].tolist() == [float(i == j) for i in range(length)]
        assert row[:, -1].tolist() == [float(i not in (0, j)) for i in range(length)]
    numbers = x[:, 1:, 2:-1]
    assert (numbers.abs() <= 1).all()
    assert (numbers[torch.arange(300), data.trigger - 1] != 0).all()
    assert set(data.trigger.tolist()) == set(range(2, length))
    if dim == 16:
        assert abs(float(numbers.mean())) < 0.01
        assert abs(float(numbers.var()) - 1 / 3) < 0.01


def test_targets_by_hand() -> None:
    x = torch.tensor([[[1, 0, 0, 0], [0, 0, 0.5, 1], [0, 0, -0.25, 1], [0, 1, 0.75, 0], [0, 0, 0.9, 1]]])
    data = task.Draw(x, torch.tensor([3]))
    mean = torch.tensor([0, 1 / 3, 1 / 3, 2 / 3])
    expected = torch.zeros(1, 5, 4)
    expected[0, 3] = mean
    torch.testing.assert_close(task.targets(data, residual=False), expected)
    residual = x.clone()
    residual[0, 3] = torch.tensor([0, 1 + 1 / 3, 0.75 + 1 / 3, 2 / 3])
    torch.testing.assert_close(task.targets(data, residual=True), residual)


def test_targets_are_the_mean_of_every_token_but_bos() -> None:
    data = task.draw(20, 12, 6, generator(3))
    y = task.targets(data, residual=False)
    for n, j in enumerate(data.trigger.tolist()):
        torch.testing.assert_close(y[n, j], sum(data.inputs[n, i] for i in range(1, j + 1)) / j)
        assert (y[n, [i for i in range(12) if i != j]] == 0).all()


def test_evaluation_has_its_trigger_at_7_and_is_seeded() -> None:
    data, again = task.evaluation(50, 16, 16, 4), task.evaluation(50, 16, 16, 4)
    assert (data.trigger == 7).all()
    assert torch.equal(data.inputs, again.inputs)
    assert (task.evaluation(5, 4, 4, 0).trigger == 3).all()
    assert not torch.equal(data.inputs, task.evaluation(50, 16, 16, 5).inputs)


@pytest.mark.parametrize(("dim", "length"), [(3, 16), (16, 3)])
def test_sizes_without_a_task_are_refused(dim: int, length: int) -> None:
    with pytest.raises(sinkscope.SinkscopeError, match="at least 4"):
        task.draw(1, length, dim, generator())


@pytest.mark.parametrize("sizes", [{"hidden_size": 10**9}, {"length": 10**12}, {"num_hidden_layers": 10**9}])
def test_sizes_that_no_memory_holds_are_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(sinkscope.SinkscopeError, match="at most"):
        TriggerConfig(**sizes)


# --- models ---


@pytest.mark.parametrize("attention", KINDS)
def test_gradients_flow_into_every_parameter(attention: str) -> None:
    model = model_of(attention)
    data = task.draw(8, 16, 16, generator())
    model(inputs_embeds=data.inputs).last_hidden_state.square().mean().backward()
    unused = ["sinks"] if attention != "learned-sink" else []
    for name, parameter in model.named_parameters():
        assert name not in unused
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


@pytest.mark.parametrize("attention", slow_but(KINDS, "learned-sink"))
def test_scan_measures_what_the_model_does(attention: str, tmp_path: Path) -> None:
    """The capture against the model's own maps; the self-check; save and load; inputs as documented."""
    model = model_of(attention)
    model.save_pretrained(tmp_path / "model")
    run, again = sinkscope.scan(model, num_sequences=40), sinkscope.scan(str(tmp_path / "model"), num_sequences=40)
    assert run.manifest.self_check.status == "passed"
    assert run.manifest.self_check.layers == 2
    assert run.heads.equals(again.heads)
    assert run.manifest.data[0].fingerprint == again.manifest.data[0].fingerprint
    assert run.summary.first_token.as_dict() == {"id": 0, "text": "bos", "distinct": 1, "is_bos": True}
    rows = evaluate(model, count=40).heads
    for ours, expected in zip(run.summary.task["heads"], rows, strict=True):
        for name, value in ours.items():
            assert value == pytest.approx(expected[name], abs=2e-6), name
    raw = not KINDS[attention].softmax
    for name in ("entropy", "uniformity", "sink_margin", "learned_sink_mass"):
        assert bool(run.heads[name].isna().all()) == raw, name
    taken = run.heads["learned_sink_mass"]
    assert raw or bool((taken > 0.01).all()) == (KINDS[attention].sink is not None)


def test_capture_leaves_the_output_as_it_was() -> None:
    from sinkscope.capture import Capture, plan
    from sinkscope.checkpoints.forward import Forward

    for attention in KINDS:
        model, data = model_of(attention), task.evaluation(6, 16, 16, 0)
        forward = Forward(model)
        found = plan(model, lambda forward=forward, data=data: forward(data.inputs[:1]))
        with torch.no_grad():
            plain = forward(data.inputs).last_hidden_state
            with Capture(model, found, lambda view, row: None, 0.3).watching():
                watched = forward(data.inputs).last_hidden_state
            assert torch.equal(forward(data.inputs).last_hidden_state, plain)
        torch.testing.assert_close(watched, plain, rtol=1e-5, atol=1e-6)


def test_scan_refuses_other_data_and_other_models_keep_theirs() -> None:
    with pytest.raises(sinkscope.SinkscopeError, match="its own task"):
        sinkscope.scan("example:trigger-softmax", data="prose")
    with pytest.raises(sinkscope.SinkscopeError, match="its own task"):
        sinkscope.scan("example:trigger-softmax", data=[[1, 2, 3]])


def test_a_damaged_config_is_refused_in_one_line(tmp_path: Path) -> None:
    model_of("softmax").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"attention": "linear"}))
    with pytest.raises(sinkscope.SinkscopeError, match="unknown attention 'linear'"):
        sinkscope.scan(str(tmp_path))


# --- theory ---


def test_explicit_relu_solves_the_task_without_a_sink() -> None:
    model = explicit_relu()
    found = evaluate(model)
    assert found.error < 1e-6
    assert found.loss < 1e-12
    assert found.maps[..., 0].abs().max() == 0
    assert found.heads[0]["trigger_mean_key"] == pytest.approx(1 / 7)
    data = task.draw(50, 9, 5, generator())
    small = explicit_relu(dim=5, length=9)
    with torch.no_grad():
        torch.testing.assert_close(small(data.inputs).last_hidden_state, task.targets(data, residual=False))


def test_a_softmax_pays_for_mass_off_bos() -> None:
    curve = forced_curve()
    losses = [point.loss for point in curve]
    assert all(before > after for before, after in pairwise(losses))
    assert losses[-1] < 1e-12
    assert forced_mass(0.99).error > TOLERANCE > forced_mass(0.998).error
    half, quarter = forced_mass(0.998).loss, forced_mass(0.999).loss
    assert half / quarter == pytest.approx(4, rel=0.01)  # the loss goes as the square of the mass that left


# --- training ---


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("trigger")
    for attention in ("softmax", "relu"):
        train(Recipe(attention), folder / attention)
    return {attention: folder / attention for attention in ("softmax", "relu")}


def first_rows(path: Path) -> np.ndarray:
    """A[i,0] of every sequence and non-trigger row i >= 1."""
    model = TriggerModel.from_pretrained(path).eval()
    data = task.evaluation(1000, 16, 16, 0)
    with torch.no_grad():
        first = model(inputs_embeds=data.inputs, output_attentions=True).attentions[0][:, 0, :, 0]
    return np.delete(first.numpy(), [0, 7], axis=1)


@pytest.mark.slow
def test_softmax_solves_the_task_with_a_sink(trained: dict[str, Path]) -> None:
    record = json.loads((trained["softmax"] / "config.json").read_text())["training"]
    assert record["stopped"] == "criterion"
    assert record["batch_error"] < TOLERANCE
    assert record["evaluation_error"] < TOLERANCE
    assert first_rows(trained["softmax"]).min() >= 0.99
    head = sinkscope.scan(str(trained["softmax"])).summary.task["heads"][0]
    assert head["bos_min"] >= 0.99
    assert head["bos_trigger"] < 0.01


@pytest.mark.slow
def test_relu_solves_it_without(trained: dict[str, Path]) -> None:
    record = json.loads((trained["relu"] / "config.json").read_text())["training"]
    assert record["stopped"] == "criterion"
    assert record["batch_error"] < TOLERANCE
    assert record["evaluation_error"] < TOLERANCE
    assert first_rows(trained["relu"]).max() <= 0.01
    head = sinkscope.scan(str(trained["relu"])).summary.task["heads"][0]
    assert head["bos_mean"] <= 0.01
    assert head["share_mean"] <= 0.01


@pytest.mark.slow
@pytest.mark.parametrize("attention", slow_but(["softmax", "relu"], "relu"))
def test_shipped_examples_are_what_the_command_trains(attention: str, trained: dict[str, Path]) -> None:
    """Same recipe; same numbers on scan as a model trained here, and as their own config says."""
    shipped, own = sinkscope.scan(f"example:trigger-{attention}"), sinkscope.scan(str(trained[attention]))
    # Another machine rounds otherwise and stops some steps apart; what ReLU gives BOS in the trigger's row still moves.
    for name, room in (("bos_mean", 0.005), ("bos_min", 0.005), ("share_mean", 0.005), ("bos_trigger", 0.02)):
        ours, theirs = (run.summary.task["heads"][0][name] for run in (own, shipped))
        assert theirs == pytest.approx(ours, abs=room), name
    folder = Path(sinkscope.__file__).parent / "data" / f"trigger-{attention}"
    model = TriggerModel.from_pretrained(folder).eval()
    record = model.config.training
    assert record["command"] == Recipe(attention).command
    assert record["stopped"] == "criterion"
    assert record["evaluation_error"] < TOLERANCE
    assert evaluate(model, seed=record["seed"]).error == pytest.approx(record["evaluation_error"], rel=1e-3)
    assert sum(file.stat().st_size for file in folder.iterdir()) < 8192


@pytest.mark.slow
def test_a_lucky_batch_does_not_solve_the_task(trained: dict[str, Path]) -> None:
    """The batch meets the bound, the evaluation after its step does not (Adam's first step is a large one)."""
    training = Training(Recipe(steps=1))
    training.model.load_state_dict(TriggerModel.from_pretrained(trained["softmax"]).state_dict())
    training.run()
    assert training.error < TOLERANCE < training.evaluation_error
    assert training.evaluation_error == pytest.approx(evaluate(training.model).error, rel=1e-3)
    assert not training.solved


def test_an_interrupt_in_the_middle_of_a_step_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C after a batch is drawn and before its step: the step is made, then the state is saved."""
    recipe = Recipe("relu", dim=5, length=5, steps=20)
    whole = Training(recipe)
    whole.run()
    draw, calls = task.draw, []

    def interrupted(*arguments: Any, **keywords: Any) -> task.Draw:
        drawn = draw(*arguments, **keywords)
        calls.append(1)
        if len(calls) == 8:
            signal.raise_signal(signal.SIGINT)
        return drawn

    part = Training(recipe)
    monkeypatch.setattr(task, "draw", interrupted)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        part.run(folder=tmp_path)
    assert signal.getsignal(signal.SIGINT) is before
    assert part.step == 8
    monkeypatch.undo()
    model = train(recipe, tmp_path, resume=True)
    for name, value in whole.model.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name


def test_a_killed_training_goes_on_from_what_the_clock_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = Recipe("relu", dim=5, length=5, steps=12)
    advance = Training.advance

    def killed(self: Training) -> None:
        if self.step == 7:
            raise SystemExit
        advance(self)

    monkeypatch.setattr(Training, "advance", killed)
    monkeypatch.setattr("sinkscope.trigger.training.SAVE_SECONDS", -1.0)
    with pytest.raises(SystemExit):
        train(recipe, tmp_path)
    monkeypatch.undo()
    saved, whole = Training(recipe), Training(recipe)
    saved.load(tmp_path)
    assert saved.step == 7
    whole.run()
    model = train(recipe, tmp_path, resume=True)
    for name, value in whole.model.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name


def test_a_training_in_another_thread_is_the_same() -> None:
    """No signal reaches it, and it leaves the main thread's handler alone."""
    recipe = Recipe("relu", dim=5, length=5, steps=5)
    handlers: list[Any] = []
    here, there = Training(recipe), Training(recipe)
    here.run()
    keep = (lambda training: handlers.append(signal.getsignal(signal.SIGINT)),)
    thread = threading.Thread(target=there.run, args=(None, None, *keep))
    thread.start()
    thread.join()
    assert handlers == [signal.getsignal(signal.SIGINT)] * 6
    for name, value in here.model.state_dict().items():
        assert torch.equal(there.model.state_dict()[name], value), name


def test_a_folder_with_somebody_s_files_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(sinkscope.SinkscopeError, match="is not empty: give another --out"):
        train(Recipe(steps=2), tmp_path, resume=True)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    with pytest.raises(sinkscope.SinkscopeError, match=r"cannot write .*notes\.txt/out: Not a directory"):
        train(Recipe(steps=2), tmp_path / "notes.txt" / "out")


def test_a_state_that_cannot_be_written_ends_the_training_in_one_line(tmp_path: Path) -> None:
    """Also where safetensors meets the error, which is no OSError to Python."""
    (tmp_path / f"{STATE}.new").mkdir()
    with pytest.raises(sinkscope.SinkscopeError, match=f"^cannot write {tmp_path}: .*Is a directory") as caught:
        train(Recipe(steps=2), tmp_path, keep=lambda training: None)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_a_state_saved_at_the_end_is_not_trained_past_it(tmp_path: Path, trained: dict[str, Path]) -> None:
    training = Training(Recipe())
    training.model.load_state_dict(TriggerModel.from_pretrained(trained["softmax"]).state_dict())
    training.advance()
    training.error = training.evaluation_error = 0.9 * TOLERANCE
    training.save(tmp_path)
    model = train(Recipe(), tmp_path, resume=True)
    assert model.config.training["steps"] == 1
    assert model.config.training["stopped"] == "criterion"


def test_a_kill_in_the_first_save_leaves_a_folder_to_start_in(tmp_path: Path) -> None:
    (tmp_path / f"{STATE}.new").write_bytes(b"half")
    assert train(Recipe(steps=2), tmp_path, resume=True).config.training["steps"] == 2


@pytest.mark.slow
def test_resumed_training_is_the_uninterrupted_one(tmp_path: Path) -> None:
    recipe = Recipe("learned-sink", layers=2, heads=2, dim=6, length=6, seed=3, steps=60)
    whole = Training(recipe)
    whole.run()
    part = Training(recipe)

    def stop(step: int, *rest: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        part.run(stop, tmp_path)
    assert (tmp_path / STATE).is_file()
    with pytest.raises(sinkscope.SinkscopeError, match="--resume"):
        train(recipe, tmp_path)
    with pytest.raises(sinkscope.SinkscopeError, match="another training"):
        train(Recipe("learned-sink", layers=2, heads=2, dim=6, length=6, seed=4, steps=60), tmp_path, resume=True)
    model = train(recipe, tmp_path, resume=True)
    for name, value in whole.model.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name
    assert not (tmp_path / STATE).exists()
    assert model.config.training["steps"] == 60
    again = train(recipe, tmp_path, resume=True)
    assert torch.equal(again.layers[0].self_attn.sinks, model.layers[0].self_attn.sinks)
    with pytest.raises(sinkscope.SinkscopeError, match="finished"):
        train(recipe, tmp_path)


def test_a_damaged_state_is_refused(tmp_path: Path) -> None:
    (tmp_path / STATE).write_bytes(b"nothing")
    with pytest.raises(sinkscope.SinkscopeError, match="damaged"):
        train(Recipe(), tmp_path, resume=True)


# --- the study ---


def study(model: TriggerModel, attention: str, solved: bool = True) -> list[Trained]:
    size = model.config.num_hidden_layers
    return [Trained(Recipe(attention, size, size), 10, solved, 0.001, evaluate(model, count=20))]


@pytest.mark.slow
def test_verdict_says_what_happened(trained: dict[str, Path]) -> None:
    softmax, relu = (TriggerModel.from_pretrained(trained[kind]).eval() for kind in ("softmax", "relu"))
    held = verdict(study(softmax, "softmax") + study(relu, "relu"))
    assert "claim held for softmax" in held
    assert "claim held for ReLU" in held
    spread = model_of("softmax", scale=1.0)
    assert verdict(study(spread, "softmax")).startswith("REFUTED")
    assert "no evidence" in verdict(study(spread, "softmax", solved=False))
    assert "REFUTED" not in verdict(study(spread, "softmax", solved=False))


def test_verdict_on_sinks_that_the_claim_does_not_ask_for() -> None:
    """Of ReLU, which may have one, and of kinds of attention that the paper does not train."""
    sunk, spread = study(explicit("softmax"), "gated"), study(explicit("softmax", heads=2), "gated")
    largest = [max(row["bos_mean"] for row in own[0].evaluation.heads) for own in (spread, sunk)]
    assert largest[0] < 0.1 < 0.9 < largest[1]
    assert verdict(sunk + spread) == (
        "Beyond the paper, gated: 1 of 2 models that solved the task have a sink (largest heads: "
        f"{largest[0]:.3f} to {largest[1]:.3f})."
    )
    assert verdict(study(explicit("softmax"), "gated", solved=False)).startswith("Not solved within their steps")
    assert verdict(study(explicit("softmax"), "relu")) == (
        "ReLU has a sink in relu-1x1-seed0: that it never needs one is the claim, not that it has none."
    )


def test_study_tables() -> None:
    assert len(recipes()) == 18
    assert [(r.attention, r.layers, r.seed) for r in recipes(["gated"], [2, 1], 1)] == [
        ("gated", 2, 0),
        ("gated", 1, 0),
    ]
    assert len(recipes(["relu"], [1, 1], 2)) == 2, "the same model is trained once"
    for wrong in ({"attentions": ["linear"]}, {"sizes": [0]}, {"seeds": 0}, {"seeds": 10**12}):
        with pytest.raises(sinkscope.SinkscopeError):
            recipes(**wrong)
    models = study(model_of("softmax"), "softmax")
    heads, table = head_table(models), model_table(models)
    assert heads["published_bos_mean"].tolist() == [0.922, 1.0, 0.930, 1.0]
    assert table["published_sinks"].tolist() == [4]


# --- commands ---


def call(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["trigger", *arguments])


def test_a_study_s_files_are_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They were written in place: a full disk left half a table where a whole one had been."""
    models = study(model_of("softmax"), "softmax")
    write(tmp_path, models, lambda models, curve: {"a.png": b"first"})
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert set(before) == {"models.csv", "heads.csv", "forced_mass.csv", "verdict.txt", "a.png"}

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(sinkscope.SinkscopeError, match=r"cannot write .*models\.csv: No space left"):
        write(tmp_path, study(model_of("relu"), "relu"))
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--length", "3"], "length 3"),
        (["--dim", "3"], "dimension 3"),
        (["--attention", "linear"], "unknown attention 'linear'"),
        (["--heads", "0"], "heads 0"),
        (["--steps", "0"], "steps 0"),
        (["--seed", "-1"], "seed -1"),
        (["--seed", str(2**63)], f"seed {2**63}"),
    ],
)
def test_wrong_arguments_get_one_line_and_exit_2(options: list[str], message: str, tmp_path: Path) -> None:
    result = call("train", "--out", str(tmp_path / "out"), *options)
    assert result.exit_code == 2
    assert message in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_scan_of_a_seed_that_no_generator_takes() -> None:
    result = call("scan", "example:trigger-relu", "--seed", str(2**63))
    assert result.exit_code == 2
    assert result.stderr == f"sinkscope: error: --seed {2**63}: at most {2**62 - 1:,} is possible\n"


def test_out_may_not_be_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    result = call("train", "--out", str(tmp_path / "file"))
    assert result.exit_code == 2
    assert "is a file" in result.stderr
    result = call("reproduce", "--out", str(tmp_path / "file"), "--quick")
    assert result.exit_code == 2
    assert "is a file: give another --out" in result.stderr
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize(
    ("options", "step"), [(["--learning-rate", "1e99"], 1), (["--init", "1e99", "--checkpoints", "2"], 0)]
)
def test_a_training_that_diverges_is_refused(options: list[str], step: int, tmp_path: Path) -> None:
    """It left weights that no scan reads, and its trajectory could not be drawn."""
    out = tmp_path / "out"
    result = call("train", "--out", str(out), "--steps", "3", *options)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert re.fullmatch(
        rf"sinkscope: error: the training diverged: loss or error is (inf|nan) after step {step}; give a smaller "
        r"--learning-rate or --init, and another --out\n",
        result.stderr,
    )
    assert not (out / "config.json").exists()


def test_train_and_scan_commands(tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    result = call("train", "--out", out, "--attention", "gated", "--steps", "20")
    assert result.exit_code == 0
    assert "not solved" in result.stdout
    assert result.stdout.endswith(f"\nwritten to {out}\nnext: sinkscope scan {out}\n")
    assert max(len(line) for line in result.stdout.splitlines() if out not in line) <= 80
    assert call("train", "--out", out).exit_code == 2
    table = call("scan", out, "--num-sequences", "10", "--csv")
    assert table.exit_code == 0
    assert table.stdout.splitlines()[0].startswith("layer,head,bos_min")
    assert "gated attention" in call("scan", out, "--num-sequences", "10").stdout


@pytest.mark.slow
def test_reproduce_command(tmp_path: Path, trained: dict[str, Path]) -> None:
    """Models that are there are taken as they are; tables, verdict and figures are written."""
    for attention, folder in trained.items():
        shutil.copytree(folder, tmp_path / "models" / Recipe(attention).name)
    result = call("reproduce", "--out", str(tmp_path), "--size", "1", "--seeds", "1")
    assert result.exit_code == 0, result.stderr
    assert "The claim held for softmax" in " ".join(result.stdout.split())
    assert "The claim held for ReLU" in (tmp_path / "verdict.txt").read_text()
    models = pd.read_csv(tmp_path / "models.csv")
    assert models["sinks"].tolist() == models["published_sinks"].tolist() == [1, 0]
    assert pd.read_csv(tmp_path / "heads.csv")["bos_mean"].round(2).tolist() == [1.0, 0.0]
    assert pd.read_csv(tmp_path / "forced_mass.csv")["loss"].is_monotonic_decreasing
    assert (tmp_path / "forced_mass.png").exists() == (find_spec("matplotlib") is not None)
    assert call("reproduce", "--out", str(tmp_path), "--attention", "linear").exit_code == 2


@pytest.mark.slow
def test_without_matplotlib_the_study_has_no_figures(
    tmp_path: Path, trained: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sinkscope.present.figures.canvas.available", lambda: False)
    for attention, folder in trained.items():
        shutil.copytree(folder, tmp_path / "models" / Recipe(attention).name)
    result = call("reproduce", "--out", str(tmp_path), "--size", "1", "--seeds", "1")
    assert result.exit_code == 0, result.stderr
    assert "no figures: they need matplotlib (pip install 'sinkscope[figures]')" in result.stderr
    files = {"models.csv", "heads.csv", "forced_mass.csv", "verdict.txt"}
    assert {path.name for path in tmp_path.iterdir() if path.is_file()} == files


def test_scan_of_another_model_says_so(tmp_path: Path) -> None:
    tiny("llama").save_pretrained(tmp_path)
    result = call("scan", str(tmp_path))
    assert result.exit_code == 2
    assert "is not a model of the trigger task" in result.stderr
