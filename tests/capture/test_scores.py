"""Scores other than softmax: the torch walk against the whole matrix in float64, and which sums are NaN."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from drawn import make_call
from packaged import package
from tiers import slow_but

from sinkscope.capture.calls import AttentionCall
from sinkscope.capture.kernels.attend import attend_in_blocks as attend
from sinkscope.capture.kernels.map_walk import AttentionMap, map_sums
from sinkscope.capture.scores import SCORES, attention_score, normalises
from sinkscope.errors import SinkscopeError

SIZES = [(1, 1, 1, 5, 4), (2, 4, 2, 33, 8), (1, 2, 1, 80, 3)]
MASKS = ("causal", "full", "window", "bool", "holes", "alibi")

WEIGHTS = {
    "relu": lambda s, i: max(s, 0.0) / i,
    "sigmoid": lambda s, i: 1 / (1 + math.exp(-s)),
    "relu-norm": lambda s, i: max(s, 0.0),
    "sigmoid-norm": lambda s, i: 1 / (1 + math.exp(-s)),
    "exp-free": lambda s, i: math.exp(s) / i,
    "sigmoid-free": lambda s, i: 1 / (1 + math.exp(-s)) / i,
}


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
                    a[b, h, i, t] = WEIGHTS[score](s, max(i, 1))
    total = a.sum(-1, keepdim=True)
    return torch.where(total > 0, a / total, 0.0) if score.endswith("-norm") else a


@pytest.mark.parametrize("score", WEIGHTS)
@pytest.mark.parametrize("mask", slow_but(MASKS, *list(MASKS)[:2]))
@pytest.mark.parametrize("sizes", [pytest.param(SIZES[0], marks=pytest.mark.slow), SIZES[1]])
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
    call = replace(make_call(SIZES[1], "causal", "softmax")[0], sinks=torch.ones(1, 4, 1, 1))
    sums = attend(call)[1]
    torch.testing.assert_close(sums.first_share, sums.first / (1 - sums.learned_sink))
    assert (sums.first_share > sums.first).all()


@pytest.mark.parametrize("sink", [-3.0, 0.0, 12.0, 16.0, 20.0, 60.0, 70.0])
@pytest.mark.parametrize("mask", ["causal", "window", "holes"])
def test_share_is_exact_where_a_learned_sink_takes_nearly_the_whole_row(mask: str, sink: float) -> None:
    call, given = make_call(SIZES[1], mask, "softmax")
    order = torch.ones(33, 33).tril().bool()
    seen = order if given is None else order & given
    logits = call.query.double() @ call.key.double().repeat_interleave(2, 1).mT * call.scaling
    weights = torch.where(seen, logits.exp(), 0.0)
    keys = weights.sum(-1)
    sunk = replace(call, sinks=torch.full((1, 4, 1, 1), sink))
    total, share = keys / (keys + math.exp(sink)), torch.where(keys > 0, weights[..., 0] / keys, 0.0)
    both = torch.cat([torch.where(seen, logits, -1e4), torch.full((2, 4, 33, 1), sink)], -1).float()
    seen_map = AttentionMap(both.softmax(-1)[..., :-1], both)
    for sums in (attend(sunk)[1], attend(sunk, 1)[1], map_sums(seen_map)):
        assert sums.row_total is not None
        torch.testing.assert_close(sums.row_total.double(), total, rtol=1e-5, atol=0)
        torch.testing.assert_close(sums.first_share.double(), share, rtol=1e-5, atol=1e-9)


def test_share_is_0_where_a_learned_sink_leaves_float32_no_row() -> None:
    call = replace(make_call(SIZES[1], "causal", "softmax")[0], sinks=torch.full((1, 4, 1, 1), 200.0))
    assert not attend(call)[1].first_share.any()


def test_every_score_that_ships_has_a_second_implementation() -> None:
    assert {name for name in SCORES if SCORES.ships(name)} == set(WEIGHTS)


def test_unknown_score_is_refused() -> None:
    with pytest.raises(SinkscopeError, match="the attention score 'max': choose one of relu, sigmoid"):
        attend(make_call(SIZES[0], "causal", "max")[0])


def test_one_s_own_score_is_measured_like_any_other() -> None:
    @attention_score("square-norm", normalised=True)
    def square(logits: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return logits.square()

    try:
        call, _ = make_call(SIZES[1], "causal", "square-norm")
        key = call.key.double().repeat_interleave(2, 1)
        weights = (call.query.double() @ key.mT * call.scaling).square().tril()
        torch.testing.assert_close(attend(call)[1].first.double(), weights[..., 0] / weights.sum(-1))
        assert normalises("square-norm")
        with pytest.raises(SinkscopeError, match="is declared already, by test_scores"):
            attention_score("square-norm")(square)
    finally:
        SCORES.remove("square-norm")
    with pytest.raises(SinkscopeError, match="softmax' is sinkscope's own"):
        attention_score("softmax")(square)


def test_an_empty_row_of_a_normalised_score_stays_empty() -> None:
    call, _ = make_call(SIZES[0], "causal", "relu-norm")
    call = replace(call, query=torch.ones_like(call.query), key=-torch.ones_like(call.key))
    output, sums = attend(call)
    assert not output.any()
    assert not sums.row_total.any()


OWN_SCORES = """
def absolute(logits, rows):
    return logits.abs()
def fails(logits, rows):
    return {}["nokey"]
def small(logits, rows):
    return logits[..., 0]
BAD = 1
"""


def test_a_package_brings_a_score(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = {"absolute": "absolute", "bad": "BAD", "fails": "fails", "small": "small"}
    entries = {name: f"own_scores:{place}" for name, place in entries.items()}
    package(tmp_path, "own-scores", "sinkscope.attention_scores", entries, own_scores=OWN_SCORES)
    monkeypatch.syspath_prepend(tmp_path)
    call, _ = make_call(SIZES[0], "causal", "absolute")
    assert (attend(call)[1].first >= 0).all()
    assert not normalises("absolute")
    for name, told in (
        ("bad", "bad: own-scores's own_scores:BAD is not a function"),
        ("fails", "fails: own-scores fails: 'nokey' is missing"),
        ("small", r"small: own-scores fails: it returned \[.*\]; a weight for each of \[.*\] logits is needed"),
    ):
        with pytest.raises(SinkscopeError, match=f"^the attention score {told}$"):
            attend(replace(call, score=name))
