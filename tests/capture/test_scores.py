"""Scores other than softmax: the torch walk against the whole matrix in float64, and which sums are NaN."""

from __future__ import annotations

import pytest
import torch
from drawn import make_call

from sinkscope.capture.calls import AttentionCall
from sinkscope.capture.kernels.attend import attend_in_blocks as attend
from sinkscope.capture.kernels.unnormalised import SCORES
from sinkscope.errors import SinkscopeError

SIZES = [(1, 1, 1, 5, 4), (2, 4, 2, 33, 8), (1, 2, 1, 80, 3)]
MASKS = ("causal", "full", "window", "bool", "holes", "alibi")


def naive(call: AttentionCall, given: torch.Tensor | None, mask: str, score: str) -> torch.Tensor:
    """A computed entry by entry in float64."""
    batch, heads, length, _ = call.query.shape
    key = call.key.double().repeat_interleave(heads // call.key.shape[1], 1)
    logits = call.query.double() @ key.mT * call.scaling
    a = torch.zeros_like(logits)
    for b in range(batch):
        for h in range(heads):
            for i in range(length):
                for t in range(length):
                    s = float(logits[b, h, i, t])
                    if given is None:
                        if mask == "causal" and t > i:
                            continue
                    else:
                        entry = given[min(b, len(given) - 1), min(h, given.shape[1] - 1), i, t]
                        if (given.dtype == torch.bool and not entry) or float(entry) < -1e30:
                            continue
                        s += 0.0 if given.dtype == torch.bool else float(entry)
                    a[b, h, i, t] = max(s, 0.0) / max(i, 1) if score == "relu" else 1 / (1 + torch.tensor(-s).exp())
    return a


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("sizes", SIZES[:2])
def test_walk_against_the_whole_matrix(sizes: tuple[int, int, int, int, int], mask: str, score: str) -> None:
    call, seen = make_call(sizes, mask, score)
    a = naive(call, seen, mask, score)
    value = call.value.double().repeat_interleave(sizes[1] // sizes[2], 1)
    total = a.sum(-1)
    for block_bytes in (None, 1):
        output, sums = attend(call, block_bytes)
        expected = {
            "first": a[..., 0],
            "columns": a.sum(-2),
            "diagonal": a.diagonal(0, -2, -1),
            "row_total": total,
            "first_share": torch.where(total > 0, a[..., 0] / total, 0.0),
        }
        torch.testing.assert_close(output.double(), (a @ value).transpose(1, 2), rtol=1e-4, atol=1e-5)
        for name, values in expected.items():
            torch.testing.assert_close(getattr(sums, name).double(), values, rtol=1e-4, atol=1e-5, msg=name)
        torch.testing.assert_close(sums.previous[..., 1:].double(), a.diagonal(-1, -2, -1), rtol=1e-4, atol=1e-5)
        largest = (a[..., 0] >= a.amax(-1)) & (a[..., 0] > 0)
        assert torch.equal(sums.first_is_largest, largest)
        for name in ("entropy", "margin", "learned_sink"):
            assert getattr(sums, name).isnan().all(), name


def test_block_size_changes_nothing_and_early_columns_are_kept() -> None:
    call, _ = make_call(SIZES[2], "causal", "relu")
    (whole, sums), (cut, parts) = attend(call), attend(call, 1)
    torch.testing.assert_close(whole, cut)
    assert sums.early_columns is not None
    assert parts.early_columns is not None
    torch.testing.assert_close(sums.early_columns, parts.early_columns)
    torch.testing.assert_close(sums.logit_gap, parts.logit_gap)


def test_share_of_a_softmax_row_is_its_probability() -> None:
    call, _ = make_call(SIZES[1], "causal", "softmax")
    sums = attend(call)[1]
    assert sums.row_total is None
    assert torch.equal(sums.first_share, sums.first)


def test_share_with_a_learned_sink_is_among_keys() -> None:
    from dataclasses import replace

    call = replace(make_call(SIZES[1], "causal", "softmax")[0], sinks=torch.ones(1, 4, 1, 1))
    sums = attend(call)[1]
    torch.testing.assert_close(sums.first_share, sums.first / (1 - sums.learned_sink))
    assert (sums.first_share > sums.first).all()


def test_unknown_score_is_refused() -> None:
    with pytest.raises(SinkscopeError, match="unknown attention score 'max'"):
        attend(make_call(SIZES[0], "causal", "max")[0])
