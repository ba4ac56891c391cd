"""SinkCallback in a training of two processes: DDP and FSDP train the same, and log what one process would measure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from launches import launch
from tiers import nightly
from trainings import causal_llama, ids

import sinkscope

pytestmark = pytest.mark.slow  # each starts four processes

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "support" / "train_launched.py"


def trained(how: str, watched: bool, out: Path) -> list[dict[str, Any]]:
    """What each of two processes saved."""
    code, _, errors = launch(SCRIPT, how, int(watched), out)
    assert code == 0, errors
    return [torch.load(f"{out}.{process}.pt") for process in range(2)]


@pytest.mark.parametrize(
    "how", ["trainer", pytest.param("ddp", marks=nightly), "fsdp", pytest.param("fully_shard", marks=nightly)]
)
def test_training_is_the_same_to_the_last_bit(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{SCRIPT.parent}")
    plain = trained(how, False, tmp_path / "plain")
    watched = trained(how, True, tmp_path / "watched")
    for before, after in zip(plain, watched, strict=True):
        assert before["losses"] == after["losses"]
        assert len(before["losses"]) >= 4
        assert before["weights"].keys() == after["weights"].keys()
        assert all(torch.equal(before["weights"][name], after["weights"][name]) for name in before["weights"])
    assert watched[0]["values"] == watched[1]["values"]
    model = causal_llama().eval()
    model.load_state_dict(watched[0]["weights"])
    alone = sinkscope.scan(model, data=ids(4), self_check=False)
    last = watched[0]["values"][-1]
    assert last["sink/bos_mass"] == pytest.approx(alone.summary.streams["text"].bos_mass.mean, rel=1e-6)
    rows = pd.read_csv(tmp_path / "watched.csv")
    own = rows[(rows["metric"] == "sink_score") & (rows["level"] == "head")]
    final = own[own["step"] == own["step"].max()]["value"].to_numpy()
    assert final == pytest.approx(alone.heads["sink_score"].to_numpy(), rel=1e-6)
    assert len(own) == len(alone.heads) * own["step"].nunique()  # one process writes
