"""The margin of key 0 over the next best key: against whole logits, under masks, caps and learned sinks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sinkscope.capture.calls import AttentionCall
from sinkscope.capture.kernels.attend import read
from sinkscope.capture.kernels.map_walk import AttentionMap
from sinkscope.capture.kernels.per_query import pair_margins

BATCH, HEADS, GROUPS, LENGTH, DIM = 2, 4, 2, 40, 6


def call(**more: Any) -> AttentionCall:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(BATCH, HEADS, LENGTH, DIM, generator=generator)
    key, value = torch.randn(2, BATCH, GROUPS, LENGTH, DIM, generator=generator)
    return AttentionCall(query, key, value, **{"causal": True, "scaling": 0.5, **more})


def whole_logits(seen: AttentionCall) -> torch.Tensor:
    logits = seen.query.double() @ seen.key.double().repeat_interleave(HEADS // GROUPS, 1).mT * seen.scaling
    if seen.softcap is not None:
        logits = (logits / seen.softcap).tanh() * seen.softcap
    return logits if seen.bias is None else logits + seen.bias


def expected(logits: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """Row by row; `seen`: whether query i sees key j, [query, key]."""
    margins = torch.full(logits.shape[:-1], torch.nan, dtype=torch.float64)
    for i in range(LENGTH):
        others = [j for j in range(1, LENGTH) if seen[i, j]]
        if seen[i, 0] and others:
            margins[..., i] = logits[..., i, 0] - logits[..., i, others].amax(-1)
    return margins


causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
window = causal & ~torch.ones_like(causal).tril(-9)
bias = torch.linspace(-3, 3, LENGTH).expand(1, 1, LENGTH, LENGTH)


@pytest.mark.parametrize(
    ("more", "seen"),
    [
        ({}, causal),
        ({"causal": False}, torch.ones_like(causal)),
        ({"softcap": 0.7}, causal),
        ({"bias": bias}, causal),
        ({"mask": window[None, None]}, window),
        ({"mask": torch.where(window, 0.0, torch.finfo(torch.float32).min)[None, None]}, window),
        ({"sinks": torch.full((1, HEADS, 1, 1), 9.0)}, causal),
    ],
    ids=["causal", "both ways", "soft-cap", "bias", "window", "added window", "learned sink"],
)
def test_the_margin_is_that_over_the_best_other_key(more: dict[str, Any], seen: torch.Tensor) -> None:
    """A learned sink is no key: the margin does not move with it."""
    made = call(**more)
    found = pair_margins(made)
    torch.testing.assert_close(found.double(), expected(whole_logits(made), seen), rtol=1e-5, atol=1e-5, equal_nan=True)
    assert found[..., 0].isnan().all() == (more.get("causal") is not False)


def test_a_map_of_the_model_s_own_is_read_by_its_logits() -> None:
    made = call()
    logits = whole_logits(made).masked_fill(~causal, -1e9)
    found = pair_margins(AttentionMap(logits.softmax(-1), logits))
    torch.testing.assert_close(found, expected(logits, causal), equal_nan=True)
    assert pair_margins(AttentionMap(logits.softmax(-1), None)) is None


def test_a_score_that_is_not_normalised_has_no_margin() -> None:
    assert pair_margins(call(score="relu")) is None


def test_a_single_key_has_no_other() -> None:
    made = call()
    short = AttentionCall(made.query[:, :, :1], made.key[:, :, :1], made.value[:, :, :1], causal=True)
    assert pair_margins(short).isnan().all()


@pytest.mark.parametrize("mask", [None, "window", "nothing but key 0"])
def test_the_compiled_loop_has_found_the_same_margins(mask: str | None) -> None:
    """The loop that sums the probabilities sees both logits on its way; bit for bit they are those of a walk."""
    length = 150
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(BATCH, HEADS, length, DIM, generator=generator)
    key, value = torch.randn(2, BATCH, GROUPS, length, DIM, generator=generator)
    seen = torch.ones(length, length, dtype=torch.bool).tril()
    seen[3:, 0] = mask != "window"
    seen[40:60, 1:] &= mask != "nothing but key 0"
    made = AttentionCall(query, key, value, mask=None if mask is None else seen[None, None], causal=True, scaling=3.0)
    walked = pair_margins(made)
    assert not made.found
    read(made)
    found = pair_margins(made)
    assert "pair_margins" in made.found
    assert torch.equal(found.nan_to_num(9e9), walked.nan_to_num(9e9))
    assert found.isnan().any()
    assert not found.isnan().all()
