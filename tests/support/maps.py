"""Attention maps formed whole, and a run's attention-mass columns held against them."""

from __future__ import annotations

from typing import Any

import torch
from families import LENGTH
from torch import Tensor


def columns(probabilities: Tensor) -> dict[str, Tensor]:
    """The attention-mass columns of one sequence's maps (H, Tq, Tk), float64, by their written definitions."""
    first = probabilities[..., 0]
    total = probabilities.sum(-1)
    shares = probabilities.clamp(min=1e-300)
    found = {
        "bos_mass": first[:, 1:].mean(-1),
        "sink_score": first.mean(-1),
        "tail_mass": first[:, max(1, first.shape[-1] - 64) :].mean(-1),
        "entropy": -(probabilities * shares.log()).sum(-1).mean(-1),
        "learned_sink_mass": torch.where(total > 0, 1 - total, 0.0).mean(-1),  # a query that sees no key has none
    }
    if probabilities.shape[-2] == probabilities.shape[-1]:
        found["self_mass"] = probabilities.diagonal(0, -2, -1)[:, 1:].mean(-1)
        found["previous_mass"] = probabilities.diagonal(-1, -2, -1).mean(-1)
    return found


def compare_maps(run: Any, maps: list[Tensor], lengths: list[int]) -> None:
    """Every attention-mass column of every head of every sequence, within 1e-5."""
    rows = run.sequences[run.sequences["head"].notna()]
    for site, both in zip(run.manifest.attention, maps, strict=True):
        for number, length in enumerate(lengths):
            valid = [slice(0, length) if size == LENGTH else slice(None) for size in both.shape[-2:]]
            expected = columns(both[number, :, valid[0], valid[1]].double())
            own = rows[(rows["module"] == site.module) & (rows["sequence"] == number)].sort_values("head")
            assert len(own) == site.heads == both.shape[1]
            for name, values in expected.items():
                ours = torch.tensor(own[name].to_numpy(float))
                assert float((ours - values).abs().max()) < 1e-5, f"{site['module']} sequence {number} {name}"
