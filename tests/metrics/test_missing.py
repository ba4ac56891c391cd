"""What is missing stays empty: it is not a number, and it does not count as a no."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from families import tiny_model
from models import random_ids, tiny
from tiers import slow_but
from transformers import AutoModel

import sinkscope
from sinkscope.present.html.report import render_report
from sinkscope.present.terminal.run import render_run

OWN = ("self_mass", "previous_mass", "pattern")


@pytest.mark.slow
@pytest.mark.parametrize("family", slow_but(["t5", "bart"], "t5"))
def test_cross_attention_has_no_diagonal_however_long_the_encoder_s_text(family: str, tmp_path: Path) -> None:
    run = sinkscope.scan(tiny_model(AutoModel, family), data=random_ids(2, 20), self_check=False, smoothing=True)
    cross = run.heads["stream"] == "cross"
    assert cross.any()
    assert run.heads.loc[cross, [*OWN, "self_mass_sem"]].isna().all(axis=None)
    assert run.heads.loc[~cross, list(OWN)].notna().all(axis=None)
    assert run.heads.loc[cross, ["bos_mass", "sink_score", "entropy", "uniformity"]].notna().all(axis=None)
    places = run.positions["stream"] == "cross"
    assert run.positions.loc[places, ["bos_mass", "bos_share"]].isna().all(axis=None)
    assert run.positions.loc[places, "alpha"].notna().all()
    assert run.positions.loc[~places, ["bos_mass", "bos_share"]].notna().all(axis=None)
    read = ["sink_margin_pairs", "rank_output"]  # of keys alone, and of what heads write: neither needs a diagonal
    read += [f"{name}_sem" for name in read]
    folded = run.smoothing.drop(columns=["stream", "layer", "head", "module", *read])
    assert folded[run.smoothing["stream"] == "cross"].isna().all(axis=None)
    assert run.smoothing[read].notna().all(axis=None)
    run.save(tmp_path / "run")
    saved = sinkscope.load_run(tmp_path / "run")
    assert saved.heads["pattern"].equals(run.heads["pattern"])
    assert " -\n" in render_run(saved, width=100)
    assert "cross" in render_report([saved])


def test_short_sequences_do_not_lower_the_sink_rate_of_the_first_64_queries() -> None:
    ids = random_ids(3, 70)
    mask = torch.tensor([[int(place < length) for place in range(70)] for length in (70, 66, 9)])
    run = sinkscope.scan(tiny("llama"), data={"input_ids": ids, "attention_mask": mask}, epsilon=0.05, self_check=False)
    rates = run.summary.streams["text"].sink_rate_percent
    early = run.sequences[run.sequences["head"].notna()]["sink_score_t64"].dropna()
    assert len(early) == 2 * len(run.heads)
    assert rates["0.05"].t64 == pytest.approx(100 * (early > 0.05).mean())
    assert rates["0.05"].t64 == pytest.approx(100 * run.heads["sink_rate_t64"].mean())
    curve = run.length_curve[run.length_curve["length"] == 64]
    assert np.allclose(curve["sink_rate"], run.heads["sink_rate_t64"])
    assert rates["0.05"].t64 > 90


def test_a_head_without_the_rule_s_column_is_not_called_active() -> None:
    rule = "self_mass<0.5"
    run = sinkscope.scan(tiny_model(AutoModel, "bart"), data=random_ids(2, 20), self_check=False, dormant_rule=rule)
    summary = run.summary.streams["cross"]
    assert (summary.dormant.count, summary.dormant.unknown) == (0, summary.heads)
    assert f"Dormant by {rule}: unknown, since its column is missing in every head." in summary.in_words
    layers = run.layers.set_index("stream")["dormant_heads"]
    assert layers["cross"].isna().all()
    assert layers["encoder"].notna().all()
    assert f"({rule}): unknown" in render_run(run, width=100)
