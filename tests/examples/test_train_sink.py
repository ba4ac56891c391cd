"""examples/train_sink.py: two steps of it. What it shows takes 800 (docs/training.md)."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

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
    example["train"](denominator, tmp_path, steps=2, every=1)
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
