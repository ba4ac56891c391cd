"""Batches whose sequences have masks of their own: each sequence has the numbers that it has alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from models import VOCABULARY
from torch import Tensor
from writers import writer

import sinkscope

T = 24


def prefix(allowed: Tensor) -> Tensor:
    """The first 8 tokens see each other."""
    allowed[:8, :8] = True
    return allowed


def with_gaps(allowed: Tensor) -> Tensor:
    """Two tokens see a later one that is not the next."""
    allowed[[2, 9], [7, 12]] = True
    return allowed


def hiding(allowed: Tensor) -> Tensor:
    """A window of 9 keys, still in causal order."""
    return allowed.triu(-8)


def masks(change: Any, bias: float | None) -> Tensor:
    """(3, 1, T, T): the first sequence's mask is changed, and `bias` is added to it; the others are causal."""
    order = torch.ones(T, T, dtype=torch.bool).tril()
    allowed = torch.stack([change(order.clone()), order, order])[:, None]
    if bias is None:
        return allowed
    added = torch.zeros(3, 1, T, T)
    added[0] = bias * torch.arange(T).sub(torch.arange(T)[:, None])
    return added.masked_fill(~allowed, -torch.inf)


@pytest.mark.parametrize(
    ("change", "bias"), [(prefix, None), (with_gaps, None), (hiding, 0.25), (prefix, 0.25), (hiding, None)]
)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_sequence_has_the_numbers_that_it_has_alone(family: str, change: Any, bias: float | None) -> None:
    """Which pairs qk_cos_other and logit_gap are means over depends on whether a sequence is causal, not its batch."""
    model = writer(family, sliding_window=T) if family == "gemma3" else writer(family)
    ids = torch.randint(3, VOCABULARY, (3, T), generator=torch.Generator().manual_seed(5))
    mask = masks(change, bias)
    given = {"full_attention": mask, "sliding_attention": mask} if family == "gemma3" else mask

    def of(rows: slice) -> Any:
        own = {kind: each[rows] for kind, each in given.items()} if isinstance(given, dict) else given[rows]
        with torch.no_grad(), sinkscope.watch(model, spectra=3) as seen:
            model(ids[rows], attention_mask=own, use_cache=False)
        return seen.run().sequences

    together = of(slice(0, 3))
    for number in range(3):
        alone = of(slice(number, number + 1))
        own = together[together["sequence"] == number]
        names = [name for name in own.columns if own[name].dtype.kind == "f"]
        np.testing.assert_allclose(own[names], alone[names], rtol=1e-4, atol=2e-5, err_msg=str(names))
        assert alone["logit_gap"].notna().any()
