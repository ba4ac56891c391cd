"""SinkCallback in real training loops: it logs what a scan measures, and changes neither weights nor losses."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from models import VOCABULARY
from torch import nn
from trainings import STEPS, callback, causal_llama, ids, losses, rows, trained
from transformers import Trainer, TrainerCallback, TrainingArguments

import sinkscope
from sinkscope.engine.launch import Processes
from sinkscope.experiments.training.callback import keep_until, undisturbed
from sinkscope.experiments.training.trajectory import TRAJECTORY, emergence


def same_weights(first: nn.Module, second: nn.Module) -> bool:
    pairs = zip(first.state_dict().values(), second.state_dict().values(), strict=True)
    return all(torch.equal(one, other) for one, other in pairs)


class Noise(TrainerCallback):
    """Draws from the global generator at every step, as a user's own code may."""

    def __init__(self) -> None:
        self.drawn: list[tuple[float, float]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.drawn.append((float(torch.rand(())), float(np.random.rand())))


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
def test_training_is_the_same_to_the_last_bit(tmp_path: Path, checkpointing: bool) -> None:
    noise, beside = Noise(), Noise()
    models = [causal_llama(), causal_llama()]
    for model in models if checkpointing else []:
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable()  # renamed in transformers 5.23
    plain = trained(tmp_path / "a", [noise], models[0])
    watched = trained(tmp_path / "b", [callback(), beside], models[1])
    assert losses(plain) == losses(watched)
    assert len(losses(plain)) == STEPS
    assert same_weights(plain.model, watched.model)
    assert noise.drawn == beside.drawn
    assert watched.model.training


@pytest.mark.slow
def test_it_logs_what_a_scan_of_the_model_measures(tmp_path: Path) -> None:
    own = callback()
    trainer = trained(tmp_path, [own])
    run = sinkscope.scan(trainer.model.eval(), data=ids(4), self_check=False)
    logged = [entry for entry in trainer.state.log_history if "sink/bos_mass" in entry]
    assert [entry["step"] for entry in logged] == [0, 2, 4, 6]
    found = run.summary.streams["text"]
    assert logged[-1]["sink/bos_mass"] == found.bos_mass.mean
    assert logged[-1]["sink/rate_0.3"] == found.sink_rate_percent["0.3"].T
    assert logged[-1]["sink/dormant"] == found.dormant.count
    assert logged[-1]["sink/max_abs"] == run.layers["max_abs"].max()
    assert logged[-1]["sink/norm_ratio"] == run.layers["norm_ratio"].max()
    assert logged[-1]["sink/entropy_min"] == run.heads["entropy"].min()
    assert logged[-1]["sink/layer_1/bos_mass"] == run.layers["mean_bos_mass"][1]
    assert own.run is not None
    pd.testing.assert_frame_equal(own.run.heads, run.heads)
    table = pd.read_csv(tmp_path / "trajectory.csv")
    assert list(table.columns) == list(TRAJECTORY)
    assert sorted(set(table["step"])) == [0, 2, 4, 6]
    last = table[(table["step"] == 6) & (table["metric"] == "sink_score") & (table["level"] == "head")]
    assert last["value"].to_numpy() == pytest.approx(run.heads["sink_score"].to_numpy(), rel=1e-8)
    assert last["sem"].to_numpy() == pytest.approx(run.heads["sink_score_sem"].to_numpy(), rel=1e-8)


@pytest.mark.slow
def test_the_values_reach_tensorboards_event_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "events"))
    own = callback()
    trainer = trained(tmp_path, [own], report_to=["tensorboard"])
    events = EventAccumulator(str(tmp_path / "events"))
    events.Reload()
    logged = {e["step"]: e["sink/bos_mass"] for e in trainer.state.log_history if "sink/bos_mass" in e}
    tag = next(tag for tag in events.Tags()["scalars"] if tag.endswith("sink/bos_mass"))
    assert {event.step: event.value for event in events.Scalars(tag)} == pytest.approx(logged)


class Tracker(TrainerCallback):
    """As trackio's: what is logged after the end of the training is an error."""

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.open = True

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        assert self.open
        if "sink/bos_mass" in kwargs["logs"]:
            self.seen.append(state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.open = False


@pytest.mark.slow
def test_the_last_step_is_logged_before_the_trackers_close(tmp_path: Path) -> None:
    tracker = Tracker()
    trained(tmp_path, [tracker, callback()], max_steps=3)
    assert tracker.seen == [0, 2, 3]


def test_a_loop_of_ones_own(tmp_path: Path) -> None:
    model, seen = causal_llama().train(), []
    own = callback(output=tmp_path / "t.csv", log=seen.append)
    model.model.layers[0].eval()  # a frozen layer stays as its owner left it
    model.lm_head.weight.grad = torch.ones_like(model.lm_head.weight)
    before = torch.get_rng_state()
    values = own.measure(7, model)
    assert seen == [values]
    assert torch.equal(torch.get_rng_state(), before)
    assert model.training
    assert not model.model.layers[0].training
    assert model.lm_head.weight.grad.eq(1).all()
    assert set(pd.read_csv(tmp_path / "t.csv")["step"]) == {7}


def test_the_largest_activation_is_that_of_all_sequences() -> None:
    """Not the mean over sequences of each one's largest."""
    model, largest = causal_llama().eval(), [0.0]
    values = callback().measure(0, model)
    for layer in model.model.layers:
        layer.register_forward_pre_hook(lambda module, args: largest.append(float(args[0].abs().max())))
    with torch.no_grad():
        model(ids(4))
    assert values["sink/max_abs"] == pytest.approx(max(largest), rel=1e-6)


def test_a_threshold_on_attention_that_is_no_softmax_is_not_logged(tmp_path: Path) -> None:
    """Each weight of a sigmoid may be near 1; trajectory.csv has no rate there either."""
    model = causal_llama()
    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(
            lambda module, args, kwargs: (args, kwargs | {"score": "sigmoid"}), with_kwargs=True
        )
    values = callback(output=tmp_path / "t.csv").measure(0, model)
    table = pd.read_csv(tmp_path / "t.csv")
    assert table.loc[table["metric"] == "sink_rate", "value"].isna().all()
    assert "sink/bos_mass" in values
    assert not [name for name in values if name.startswith("sink/rate")]


def test_a_second_training_to_the_same_step_measures_it_again(tmp_path: Path) -> None:
    """Its end was taken for measured, and the rows of the first training's end had gone when it began."""
    own, model = callback(every=100, output=tmp_path / "t.csv"), causal_llama()
    for first in (0, 3):
        for step, event in ((first, own.on_train_begin), (5, own.on_train_end)):
            event(SimpleNamespace(), SimpleNamespace(is_world_process_zero=True, global_step=step), None, model=model)
        assert sorted(set(pd.read_csv(tmp_path / "t.csv")["step"])) == [0, 5]


@pytest.mark.slow
def test_the_events_of_a_loop_without_a_trainer(tmp_path: Path) -> None:
    """Only a Trainer has a log that reaches trackers: without one the values go to the file and to `log`."""
    seen: list[dict[str, float]] = []
    own, model = callback(output=tmp_path / "t.csv", log=seen.append), causal_llama()
    events: tuple[Any, ...] = (SimpleNamespace(output_dir="nowhere"), SimpleNamespace(is_world_process_zero=True))
    for step, event in ((0, own.on_train_begin), (1, own.on_step_end), (2, own.on_step_end), (3, own.on_train_end)):
        events[1].global_step = step
        event(*events, None, model=model)
    table = pd.read_csv(tmp_path / "t.csv")
    assert sorted(set(table["step"])) == [0, 2, 3]
    assert len(seen) == 3
    assert seen[0] == seen[2] == own.measure(4, model)
    assert not Path("nowhere").exists()


def test_a_trajectory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(sinkscope.SinkscopeError, match=r"cannot write .*file/t\.csv: (File exists|Not a directory)"):
        callback(output=tmp_path / "file" / "t.csv").measure(0, causal_llama())
    assert (tmp_path / "file").read_text() == "mine"


def test_a_disk_that_is_full_leaves_no_part_of_a_row(tmp_path: Path) -> None:
    """The next measurement would have written behind it, in the same line."""
    resource = pytest.importorskip("resource")
    path, model = tmp_path / "t.csv", causal_llama()
    own = callback(output=path)
    own.measure(0, model)
    whole, limits = path.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) + 100, limits[1]))
    try:
        with pytest.raises(sinkscope.SinkscopeError, match=r"cannot write .*: File too large"):
            own.measure(2, model)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == whole
    own.measure(4, model)
    table = pd.read_csv(path)
    assert [*dict.fromkeys(table["step"])] == [0, 4]
    assert path.read_bytes().startswith(whole)
    assert len(table) == 2 * table["step"].eq(0).sum()


@pytest.mark.slow
def test_a_step_that_is_measured_again_is_replaced(tmp_path: Path) -> None:
    """By the same callback, and by another one over the same file."""
    path, model = tmp_path / "t.csv", causal_llama()
    own = callback(output=path)
    for step in (0, 5, 10):
        own.measure(step, model)
    first = path.read_bytes()
    own.measure(5, model)
    assert path.read_bytes() == first
    model.model.layers[0].self_attn.q_proj.weight.data *= 30
    callback(output=path).measure(5, model)
    table, before = pd.read_csv(path), path.with_name("before.csv")
    before.write_bytes(first)
    assert list(dict.fromkeys(table["step"])) == [0, 5, 10]
    others = pd.read_csv(before)
    assert len(table) == len(others)
    pd.testing.assert_frame_equal(table[table["step"] != 5], others[others["step"] != 5])
    assert not table[table["step"] == 5].equals(others[others["step"] == 5])


def test_rows_are_not_added_to_somebody_s_file(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("step,mine\n1,2\n")
    with pytest.raises(sinkscope.SinkscopeError, match="no trajectory"):
        callback(output=tmp_path / "t.csv").measure(0, causal_llama())
    assert (tmp_path / "t.csv").read_text() == "step,mine\n1,2\n"


@pytest.mark.parametrize("every", [0, -1, 1.5, "x", None, True, float("nan")])
def test_a_number_of_steps_that_is_none(every: Any) -> None:
    with pytest.raises(sinkscope.SinkscopeError, match=r"^every=.*: give a number of training steps, 1 or more$"):
        callback(every=every)


def test_numpy_s_whole_numbers_are_numbers_of_steps() -> None:
    assert callback(every=np.int64(3)).every == 3


@pytest.mark.slow
def test_a_log_that_raises_ends_no_training(tmp_path: Path) -> None:
    """It is told of once, and gets the values of every measurement."""
    seen: list[dict[str, float]] = []

    def log(values: dict[str, float]) -> None:
        seen.append(values)
        raise ConnectionError("the tracker is gone")

    with pytest.warns(UserWarning, match="log= of SinkCallback failed at step 0: .*the tracker is gone") as told:
        trainer = trained(tmp_path, [callback(log=log)], max_steps=4)
    assert len(told) == 1
    assert trainer.state.global_step == 4
    assert [entry["step"] for entry in trainer.state.log_history if "sink/bos_mass" in entry] == [0, 2, 4]
    assert len(seen) == 3
    assert sorted(set(pd.read_csv(tmp_path / "trajectory.csv")["step"])) == [0, 2, 4]


def test_a_training_that_starts_anew_leaves_no_row_of_the_last_one(tmp_path: Path) -> None:
    callback(output=tmp_path / "trajectory.csv").measure(500, causal_llama())
    keep_until(tmp_path / "trajectory.csv", 501)
    assert set(pd.read_csv(tmp_path / "trajectory.csv")["step"]) == {500}
    keep_until(tmp_path / "trajectory.csv", 0)
    assert not (tmp_path / "trajectory.csv").exists()


@pytest.mark.filterwarnings("ignore::FutureWarning")  # peft calls what transformers has renamed
def test_shards_with_adapters_are_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """The main process copies the whole model, and builds it from a configuration that names no adapter. It fails in a
    step of its own, or the other processes would wait for it while it trains on."""
    import peft

    class Told(Processes):
        def on_main(self, step: Any) -> Any:
            try:
                return step()
            except sinkscope.SinkscopeError:
                told.append(1)
                raise

    told: list[int] = []
    monkeypatch.setattr("sinkscope.experiments.training.callback.processes_of_training", Told)
    monkeypatch.setattr("sinkscope.experiments.training.callback.is_sharded", lambda model: True)
    loras = [peft.LoraConfig(target_modules=["q_proj"], r=2) for _ in range(2)]
    own = causal_llama()
    peft.inject_adapter_in_model(loras[0], own)  # as transformers' add_adapter does, with any version of peft
    for model, name in ((peft.get_peft_model(causal_llama(), loras[1]), "PeftModel"), (own, "LlamaForCausalLM")):
        with pytest.raises(sinkscope.SinkscopeError, match=f"^{name} under FSDP holds weights that its configuration"):
            callback().measure(0, model)
    assert len(told) == 2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.compile's own, on import
def test_the_model_inside_wrappers_is_measured() -> None:
    model = causal_llama()
    wrapped = [nn.DataParallel(model), torch.compile(model)]
    own = callback()
    plain = own.measure(0, model)
    assert [own.measure(0, each) == plain for each in wrapped] == [True, True]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")  # peft calls what transformers has renamed
def test_adapters_are_measured_with_the_model() -> None:
    import peft

    model = causal_llama()
    own = callback()
    before = own.measure(0, model)
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "k_proj"], r=2))
    assert own.measure(0, adapted) == before  # a new adapter adds 0
    for name, weight in adapted.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(weight)
    assert own.measure(0, adapted) != before


@pytest.mark.slow
def test_a_setting_that_cannot_work_ends_the_training_before_its_first_step(tmp_path: Path) -> None:
    with pytest.raises(sinkscope.SinkscopeError, match="every=0"):
        callback(every=0)
    noise = Noise()
    with pytest.raises(sinkscope.SinkscopeError, match=r"vocabulary|token id"):
        trained(tmp_path, [callback(data=ids(2) + VOCABULARY), noise])
    assert noise.drawn == []


@pytest.mark.slow
def test_a_later_failure_is_a_warning_and_training_goes_on(tmp_path: Path) -> None:
    class Breaks(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 1:
                kwargs["model"].model.embed_tokens.weight.data[0] = float("nan")

    with pytest.warns(UserWarning, match="could not measure step 2: .*NaN"):
        trainer = trained(tmp_path, [Breaks(), callback(every=2)], max_steps=2)
    assert trainer.state.global_step == 2


@pytest.mark.slow
def test_a_training_that_resumes_keeps_the_rows_before_it(tmp_path: Path) -> None:
    trained(tmp_path, [callback()], max_steps=4, save_strategy="steps", save_steps=2)
    first = (tmp_path / "trajectory.csv").read_text().splitlines()
    arguments = TrainingArguments(
        output_dir=str(tmp_path), max_steps=4, per_device_train_batch_size=4, report_to=[], use_cpu=True, seed=3,
        save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(causal_llama(), arguments, train_dataset=rows(), callbacks=[callback()])
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert (tmp_path / "trajectory.csv").read_text().splitlines() == first


@pytest.mark.slow
def test_a_training_that_resumes_between_measurements_keeps_its_last_one(tmp_path: Path) -> None:
    """Step 2 was measured as the end of the first training; `every` does not come to it again."""
    trained(tmp_path, [callback(every=3)], max_steps=2, save_strategy="steps", save_steps=2)
    first = (tmp_path / "trajectory.csv").read_text()
    arguments = TrainingArguments(
        output_dir=str(tmp_path), max_steps=4, per_device_train_batch_size=4, report_to=[], use_cpu=True, seed=3,
        save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(causal_llama(), arguments, train_dataset=rows(), callbacks=[callback(every=3)])
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    whole = (tmp_path / "trajectory.csv").read_text()
    assert whole.startswith(first)
    assert pd.read_csv(tmp_path / "trajectory.csv")["step"].unique().tolist() == [0, 2, 3, 4]


@pytest.mark.slow
def test_a_file_that_is_no_trajectory_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "trajectory.csv").write_text("step,mine\n1,2\n")
    with pytest.raises(sinkscope.SinkscopeError, match="no trajectory"):
        trained(tmp_path, [callback()])
    assert (tmp_path / "trajectory.csv").read_text() == "step,mine\n1,2\n"


def test_undisturbed_puts_everything_back_after_an_exception() -> None:
    model = causal_llama().train()
    state = torch.get_rng_state()
    with pytest.raises(ValueError, match="x"), undisturbed(model):
        assert not model.training
        torch.rand(3)
        raise ValueError("x")
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)


def series(*scores: float) -> pd.DataFrame:
    place = {"domain": "d", "stream": "text", "level": "head", "layer": 0, "head": 0, "metric": "sink_score"}
    return pd.DataFrame([place | {"step": 10 * i, "value": score, "sem": 0.0} for i, score in enumerate(scores)])


@pytest.mark.parametrize(
    ("scores", "emerged", "half", "gain", "shape"),
    [
        ((0.1, 0.1, 0.9, 0.9), 20, 20, 1.0, "jump"),
        ((0.1, 0.3, 0.5, 0.7, 0.9), 20, 20, 0.25, "ramp"),  # 0.3 does not exceed epsilon
        ((0.1, 0.6, 0.2, 0.6), 30, 30, 1.0, "jump"),  # the first rise did not stay
        ((0.5, 0.6), 0, None, None, "start"),
        ((0.1, 0.9, 0.2), None, None, None, None),
    ],
)
def test_emergence_in_closed_form(
    scores: tuple[float, ...], emerged: int | None, half: int | None, gain: float | None, shape: str | None
) -> None:
    row = emergence(series(*scores), 0.3).iloc[0]
    assert (row["first"], row["last"]) == (scores[0], scores[-1])
    for name, expected in (("emerged", emerged), ("half_rise", half), ("shape", shape)):
        assert (pd.isna(row[name]) and expected is None) or row[name] == expected
    assert (pd.isna(row["largest_gain"]) and gain is None) or row["largest_gain"] == pytest.approx(gain)
