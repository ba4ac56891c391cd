"""What the arms show of Gemma-3-270M."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from real import prose
from scipy import stats
from tiers import nightly

import sinkscope
from sinkscope.checkpoints import LoadOptions, open_checkpoint
from sinkscope.experiments.arms.arm import Pass, Setting
from sinkscope.experiments.arms.engine import run
from sinkscope.experiments.arms.experiment import planned
from sinkscope.experiments.arms.grammar import read_arm
from sinkscope.experiments.arms.readings import Reference, SinkCount

GEMMA = "example:gemma-3-270m"
pytestmark = [pytest.mark.slow, pytest.mark.real, nightly]


def test_gemma_massive_activations_are_a_bias_and_rounding_hurts_most_at_the_sink() -> None:
    """On so little text the rounded losses lie within their errors; the divergence of predictions shows the sinks."""
    read = sinkscope.scan(GEMMA, seq_len=64, num_sequences=4, self_check=False)
    names = ["massive:zero/first", "massive:mean/first", "acts:8/tensor", "kv:4", "kv:4+first1"]
    rows: Any = sinkscope.arms(GEMMA, names, run=read, num_sequences=6, draws=2).table.set_index("arm")
    increase = rows["increase"]
    assert increase["massive:mean/first"] < increase["massive:zero/first"] / 10
    assert rows["kl"]["acts:8/tensor+sinks"] < 0.7 * rows["kl"]["acts:8/tensor"]
    assert rows["kl"]["kv:4+first1"] < 0.8 * rows["kl"]["kv:4"]


def test_gemma_needs_a_sink_beside_its_window() -> None:
    """A window of 256 of 1024 keys in the full layers: without the first key it costs more."""
    checkpoint = open_checkpoint(GEMMA, LoadOptions(head=True))
    base, found = planned(checkpoint)
    setting = Setting(checkpoint, base, found, prose(checkpoint, 1024, 4), None, 0, 0.3)
    found_losses = {}
    for name in ("window:256+0/full", "window:256+1/full"):
        arm = read_arm(name).ready(setting)
        parts = []
        for row in range(len(setting.ids)):
            ids = setting.ids[row : row + 1]
            logits = run(Pass(setting, ids, row), arm, SinkCount(0.3))
            parts.append(Reference(logits, ids).compare(logits)["loss"])
        found_losses[name] = torch.cat(parts).numpy()
    none, one = found_losses.values()
    assert none.mean() > one.mean()
    assert stats.ttest_rel(none, one).pvalue < 0.01


def test_gemma_forgets_cheaper_where_distant_keys_write_little() -> None:
    """Half of the KV heads with a window: a plan from a run beside random plans of its size."""
    read = sinkscope.scan(
        GEMMA, seq_len=192, num_sequences=3, measure="streaming", window=16, sinks=4, self_check=False
    )  # fmt: skip
    plan = "window:16+4/distant_write:low50%"
    rows: Any = sinkscope.arms(GEMMA, [plan], run=read, num_sequences=4, draws=2).table.set_index("arm")
    control = rows.loc[rows["control"][plan]]
    assert control["size"] == rows["size"][plan] == 4
    assert rows["increase"][plan] < 0.75 * control["increase"]
    assert rows["kl"][plan] < 0.75 * control["kl"]
