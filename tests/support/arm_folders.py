"""Folders of arms made by hand: what the engine would measure is given as numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from sinkscope.runs.run import Run
from sinkscope.runs.saved.ablation import Ablation
from sinkscope.runs.saved.arms import summarise
from sinkscope.runs.saved.arms_table import MEASURES, ArmNumbers

SEQUENCES = 5
LOSSES = np.random.default_rng(0).normal(3.0, 0.2, SEQUENCES)
CHANGES = {
    "unablated": [0.0], "keys:first1": [1.5], "value:<b>1</b>": [0.2], "keys:random1": [0.01, 0.02], "kv:4": [-0.05],
}  # fmt: skip
CONTROLS = {"keys:first1": "keys:random1", "value:<b>1</b>": "keys:random1"}


def losses(missing: int = 0) -> dict[str, np.ndarray]:
    """Losses of each arm, [draw, sequence]; `missing`: of so many sequences the arms have none."""
    noise = np.random.default_rng(1)
    found = {}
    for name, changes in CHANGES.items():
        spread = 0.0 if name == "unablated" else 0.1
        own = np.stack([LOSSES + change + spread * noise.standard_normal(SEQUENCES) for change in changes])
        if name != "unablated":
            own[:, :missing] = np.nan
        found[name] = own
    return found


def write_arms(folder: Path, run: Run, missing: int = 0, kind: str = "arms", **model: Any) -> Path:
    """Saves a measurement of arms of the run's model, as `arms` or `ablate` do; `model`: facts to change."""
    rest = dict.fromkeys(MEASURES, np.zeros(SEQUENCES)) | {"size": np.ones(SEQUENCES)}
    measured = [
        ArmNumbers(name, None, None, draw if len(rows) > 1 else None, rest | {"loss": row})
        for name, rows in losses(missing).items()
        for draw, row in enumerate(rows)
    ]
    facts = {
        "model": run.manifest.model.model_dump(by_alias=True) | model,
        "run": {"path": "runs/x", "data": [data.fingerprint for data in run.manifest.data]},
        "data": {"spec": "prose", "sequences": SEQUENCES, "seq_len": 64},
    }
    documents = ["a"] * SEQUENCES
    arms = summarise(measured, CONTROLS, documents, facts, [])
    if kind == "arms":
        arms.save(folder)
    else:
        Ablation(arms.table, arms.sequences, {}, facts, ["It costs <much>."], [], arms.table).save(folder)
    return folder
