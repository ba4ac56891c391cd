"""SinkCallback in TRL's SFTTrainer, with a LoRA adapter; its values reach trackio and TensorBoard beside the loss.

TRL and trackio are no requirement of the tests: `pip install trl trackio` runs this one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from peft import LoraConfig
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import sinkscope

trl = pytest.importorskip("trl", reason="trl is not installed")
trackio = pytest.importorskip("trackio", reason="trackio is not installed")
datasets = pytest.importorskip("datasets", reason="datasets is not installed")

pytestmark = [pytest.mark.slow, pytest.mark.enable_socket, pytest.mark.filterwarnings("ignore")]

STEPS = [0, 2, 3]


def test_sft_with_both_trackers(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "events"))
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    for module in ("trackio.utils", "trackio.sqlite_storage"):  # both read the variable when they are imported
        monkeypatch.setattr(f"{module}.TRACKIO_DIR", tmp_path / "trackio")
    rows = datasets.Dataset.from_dict({"text": [f"The bell of boat {number} rang twice." for number in range(24)]})
    arguments = trl.SFTConfig(
        output_dir=str(tmp_path / "out"), max_steps=3, per_device_train_batch_size=4, logging_steps=1, max_length=32,
        report_to=["trackio", "tensorboard"], project="sinks", run_name="one", save_strategy="no", use_cpu=True,
        disable_tqdm=True, bf16=False, trackio_static_space_id=False,
    )  # fmt: skip
    trainer = trl.SFTTrainer(
        str(tiny_folder), arguments, train_dataset=rows,
        peft_config=LoraConfig(r=2, target_modules=["q_proj", "v_proj"]),
        callbacks=[sinkscope.SinkCallback(every=2, num_sequences=2, seq_len=32)],
    )  # fmt: skip
    trainer.train()
    logged = {e["step"]: e["sink/bos_mass"] for e in trainer.state.log_history if "sink/bos_mass" in e}
    assert list(logged) == STEPS
    assert len(set(logged.values())) > 1
    assert sorted(set(pd.read_csv(tmp_path / "out/trajectory.csv")["step"])) == STEPS
    events = EventAccumulator(str(tmp_path / "events"))
    events.Reload()
    tags = [tag for tag in events.Tags()["scalars"] if tag.endswith("sink/bos_mass")]
    assert {event.step: event.value for event in events.Scalars(tags[0])} == pytest.approx(logged)
    assert tracked("sinks", "one") == pytest.approx(logged)


def tracked(project: str, run: str) -> dict[int, Any]:
    """What trackio has of the BOS mass, by the Trainer's step; its own `step` counts what was logged."""
    from trackio.sqlite_storage import SQLiteStorage

    found = {}
    for entry in SQLiteStorage.get_logs(project, run):
        name = next((key for key in entry if key.endswith("sink/bos_mass")), None)
        if name is not None:
            found[entry["train/global_step"]] = entry[name]
    return found
