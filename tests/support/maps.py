"""A run's attention-mass columns, compared with whole attention maps."""

from __future__ import annotations

from typing import Any

import torch
from families import LENGTH
from torch import Tensor


def columns(probabilities: Tensor, cross: bool = False) -> dict[str, Tensor]:
    """The attention-mass columns of one sequence's maps [head, query, key] in float64, by their definitions."""
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
    if not cross:
        found["self_mass"] = probabilities.diagonal(0, -2, -1)[:, 1:].mean(-1)
        found["previous_mass"] = probabilities.diagonal(-1, -2, -1).mean(-1)
    return found


def compare_maps(run: Any, maps: list[Tensor], lengths: list[int]) -> None:
    """Asserts that every attention-mass column of every head of every sequence is within 1e-5 of its map's."""
    rows = run.sequences[run.sequences["head"].notna()]
    for site, batch in zip(run.manifest.attention, maps, strict=True):
        for number, length in enumerate(lengths):
            valid = [slice(0, length) if size == LENGTH else slice(None) for size in batch.shape[-2:]]
            cross = site.kind.name == "cross"
            expected = columns(batch[number, :, valid[0], valid[1]].double(), cross)
            heads = rows[(rows["module"] == site.module) & (rows["sequence"] == number)].sort_values("head")
            assert len(heads) == site.heads == batch.shape[1]
            assert not cross or heads[["self_mass", "previous_mass"]].isna().all(axis=None)
            for name, values in expected.items():
                ours = torch.tensor(heads[name].to_numpy(float))
                assert float((ours - values).abs().max()) < 1e-5, f"{site.module} sequence {number} {name}"
