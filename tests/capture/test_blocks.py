"""Both walks against a plain softmax over the whole matrix in float64, for many shapes, masks and block sizes."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from drawn import make_mask
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sinkscope.capture import loops
from sinkscope.capture.calls import AttentionCall
from sinkscope.capture.kernels import walk as walks
from sinkscope.capture.kernels.attend import attend_in_blocks as attend
from sinkscope.capture.kernels.sums import block_edges
from sinkscope.capture.kernels.walk import Walk
from sinkscope.capture.masks.visibility import read_mask

MASKS = ("causal", "full", "window", "bool", "additive", "alibi", "holes", "late")


@pytest.fixture(autouse=True, scope="module", params=["torch", "compiled"])
def walk(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every test here reads each call in torch, and again with the compiled loop wherever that supports the call."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loops, "LEAST", 0 if request.param == "compiled" else math.inf)
        yield request.param


def reference(call: dict[str, Any], mask: Tensor | None, causal: bool) -> dict[str, Tensor]:
    """Output and sums computed from the full matrix, in float64."""
    query, key, value = (call[name].double() for name in ("query", "key", "value"))
    repeat = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
    queries, keys = query.shape[2], key.shape[2]
    logits = query @ key.mT * call["scaling"]
    if call["softcap"] is not None:
        logits = (logits / call["softcap"]).tanh() * call["softcap"]
    seen = torch.ones(queries, keys, dtype=torch.bool)
    seen = seen.tril() if causal else seen
    seen = seen.expand(logits.shape).clone()
    if mask is not None:
        seen = mask.expand(logits.shape) if mask.dtype == torch.bool else (mask > -1e30).expand(logits.shape)
        if mask.dtype != torch.bool:
            logits = logits + mask.double().clamp(min=-1e30).expand(logits.shape) * seen
    raw = logits
    logits = logits.masked_fill(~seen, -torch.inf)
    extra = torch.full((*logits.shape[:3], 0), 0.0, dtype=torch.float64)
    if call["sinks"] is not None:
        extra = call["sinks"].double().expand(logits.shape[0], -1, queries, -1)
    both = torch.cat([logits, extra], -1)
    full = torch.nan_to_num(both.softmax(-1), nan=0.0)
    p = full[..., :keys]
    others = torch.cat([both[..., 1:]], -1).logsumexp(-1)
    margin = torch.where(seen[..., 0] & (others > -torch.inf), both[..., 0] - others, torch.nan)
    is_causal = queries == keys and not bool((seen & ~torch.ones(queries, keys, dtype=torch.bool).tril()).any())
    bias = mask is not None and mask.dtype != torch.bool and bool(((mask != 0) & (mask > -1e30)).any())
    order = (
        torch.ones(queries, keys, dtype=torch.bool).tril() if is_causal else torch.ones(queries, keys, dtype=torch.bool)
    )
    counted = seen if bias else order.expand(logits.shape)
    mean_logit = (raw.masked_fill(~counted, 0.0)).sum(-1) / counted.sum(-1).clamp(min=1)
    result = {
        "out": (p @ value).transpose(1, 2),
        "first": p[..., 0],
        "entropy": torch.special.entr(p).sum(-1),
        "margin": margin,
        "learned_sink": full[..., keys:].sum(-1),
        "columns": p.sum(-2),
        "logit_gap": raw[..., 0] - mean_logit,
        "largest": (p.argmax(-1) == 0) & seen[..., 0],
    }
    if queries == keys:
        result["diagonal"] = p.diagonal(0, -2, -1)
        result["previous"] = torch.nn.functional.pad(p.diagonal(-1, -2, -1), (1, 0))
    return result


@given(
    st.sampled_from(MASKS),
    st.integers(1, 3),
    st.sampled_from([(1, 1), (2, 1), (4, 2), (3, 3)]),
    st.integers(2, 90),
    st.sampled_from([(4, 4), (8, 3), (3, 8)]),
    st.sampled_from([None, 3.0]),
    st.sampled_from([0, 1, 2]),
    st.sampled_from([1, 4096, 2**22]),
    st.integers(0, 10_000),
)
def test_every_sum_is_the_full_matrix_s(
    kind: str, batch: int, heads: tuple[int, int], length: int, widths: tuple[int, int],
    softcap: float | None, sinks: int, block_bytes: int, seed: int,
) -> None:  # fmt: skip
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    call: dict[str, Any] = {
        "query": 2 * draw(batch, heads[0], length, widths[0]),
        "key": draw(batch, heads[1], length, widths[0]),
        "value": draw(batch, heads[1], length, widths[1]),
        "scaling": 0.7,
        "softcap": softcap,
        "sinks": draw(1, heads[0], 1, sinks) if sinks else None,
    }
    mask = make_mask(kind, batch, heads[0], length, generator)
    causal = kind == "causal"
    expected = reference(call, mask, causal)
    out, sums = attend(AttentionCall(**call, mask=mask, causal=causal), block_bytes)
    close(out, expected["out"], 1e-5)
    for name in ("first", "diagonal", "previous", "entropy", "learned_sink", "columns"):
        close(getattr(sums, name), expected[name], 2e-5)
    close(sums.margin, expected["margin"], 1e-4)
    if kind not in ("holes", "late"):
        close(sums.logit_gap, expected["logit_gap"], 1e-4)
        assert torch.equal(sums.first_is_largest, expected["largest"])
    if length >= 64:
        assert sums.early_columns is not None
        shorter = reference(
            {**call, "query": call["query"][:, :, :64]}, None if mask is None else mask[..., :64, :], causal
        )
        close(sums.early_columns, shorter["columns"][..., :64], 2e-5)


def close(ours: Tensor | None, expected: Tensor, tolerance: float) -> None:
    assert ours is not None
    torch.testing.assert_close(ours.double(), expected, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize("queries", [3, 17])
def test_cross_attention(queries: int) -> None:
    generator = torch.Generator().manual_seed(0)
    call: dict[str, Any] = {
        "query": torch.randn(2, 4, queries, 8, generator=generator),
        "key": torch.randn(2, 4, 11, 8, generator=generator),
        "value": torch.randn(2, 4, 11, 8, generator=generator),
        "scaling": 1.0, "softcap": None, "sinks": None,
    }  # fmt: skip
    expected = reference(call, None, False)
    out, sums = attend(AttentionCall(**call))
    close(out, expected["out"], 1e-5)
    close(sums.columns, expected["columns"], 1e-5)
    assert sums.diagonal is None
    assert sums.previous is None
    assert not sums.causal


def test_margins_past_float32_s_smallest_number() -> None:
    """exp(-200) underflows; the margin does not, because it is computed from logits."""
    query = torch.ones(1, 1, 3, 1) * 200
    key = torch.tensor([1.0, 0.0, 0.0]).view(1, 1, 3, 1)
    _, sums = attend(AttentionCall(query, key, key, causal=True))
    close(sums.margin[0, 0, 1:], torch.tensor([200.0, 200.0 - torch.tensor(2.0).log().item()]).double(), 1e-6)
    assert sums.margin[0, 0, 0].isnan()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_inputs_are_summed_in_float32(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 2, 50, 8, generator=generator).to(dtype) for _ in range(3))
    out, sums = attend(AttentionCall(query, key, value, causal=True, scaling=0.5))
    call = {"query": query, "key": key, "value": value, "scaling": 0.5, "softcap": None, "sinks": None}
    expected = reference(call, None, True)
    assert out.dtype == dtype
    assert sums.columns.dtype == torch.float32
    close(sums.columns, expected["columns"], 1e-5)
    close(sums.entropy, expected["entropy"], 1e-5)


def test_blocks_cover_every_query_once_with_an_edge_at_64() -> None:
    for queries in (1, 15, 64, 65, 100, 700):
        for size in (1, 10_000, 10**9):
            edges = block_edges(queries, 4 * queries, torch.device("cpu"), size)
            assert edges[0][0] == 0
            assert edges[-1][1] == queries
            assert all(a[1] == b[0] for a, b in pairwise(edges))
            assert queries < 64 or any(stop == 64 for _, stop in edges)


def test_blocks_share_the_memory_of_the_first() -> None:
    """Under a causal order each block is wider than the last: new memory for each would cost more than its numbers."""
    query, key, value = (torch.randn(1, 2, 96, 8) for _ in range(3))
    walk = Walk(AttentionCall(query, key, value, causal=True), 1, 2, 1, 96, 96)
    places = set()
    for start in range(0, 96, 16):
        walk.block(start, start + 16)
        assert walk.buffers is not None
        places.add(walk.buffers[0].data_ptr())
    assert len(places) == 1


@pytest.mark.parametrize("causal", [True, False])
def test_gaps_of_keys_that_hardly_differ(causal: bool) -> None:
    """Keys of norm 1000 that differ by 0.01: float32 logits would lose the gap, their mean key in float64 does not."""
    generator = torch.Generator().manual_seed(0)
    common = torch.randn(8, generator=generator) * 300
    key = (common + 0.01 * torch.randn(1, 2, 150, 8, generator=generator)).float()
    query = torch.randn(1, 4, 150, 8, generator=generator)
    _, sums = attend(AttentionCall(query, key, key, causal=causal, scaling=0.5))
    logits = query.double() @ key.double().repeat_interleave(2, 1).mT * 0.5
    order = torch.ones(150, 150, dtype=torch.float64).tril() if causal else torch.ones(150, 150, dtype=torch.float64)
    means = (logits * order).sum(-1) / order.sum(-1)
    close(sums.logit_gap, logits[..., 0] - means, 1e-6)


def test_memory_is_a_block_not_the_matrix() -> None:
    """The largest tensor made during a call has far fewer than T x T elements for each head."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = function(*args, **(kwargs or {}))
            if isinstance(result, Tensor):
                self.seen = max(self.seen, result.numel())
            return result

    length, heads = 2048, 8
    query, key = torch.randn(1, heads, length, 16), torch.randn(1, 2, length, 16)
    with Largest() as largest:
        attend(AttentionCall(query, key, key, causal=True, scaling=0.25))
    assert largest.seen <= 2 * heads * length * max(16, 2**22 // (4 * heads * length))
    assert largest.seen < heads * length * length / 20


def test_a_mask_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="mask of shape"):
        read_mask(torch.ones(1, 1, 5, 5, dtype=torch.bool), True, 6, 6, torch.device("cpu"))


def test_scratch_memory_is_shared_by_calls_and_holds_nothing_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls in inference mode and outside it, of another dtype and of other lengths leave earlier numbers alone."""
    monkeypatch.setattr(walks, "_scratch", threading.local())
    made = []
    for length, dtype, inference in ((32, torch.float32, True), (32, torch.float32, False), (96, torch.float32, False),
                                     (64, torch.float64, False), (48, torch.float32, False)):  # fmt: skip
        draw = torch.Generator().manual_seed(length)
        rows = [torch.randn(2, 4, length, 8, generator=draw).to(dtype) for _ in range(3)]
        with torch.inference_mode(inference):
            made.append((rows, attend(AttentionCall(*rows, causal=True, scaling=0.5), block_bytes=2**14)))
    assert walks._scratch.areas[0].numel() >= 48 * 16
    for (query, key, value), (output, sums) in made:
        length = query.shape[2]
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        maps = (query.double() @ key.double().mT * 0.5).masked_fill(later, -torch.inf).softmax(-1)
        torch.testing.assert_close(sums.first.double(), maps[..., 0], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(sums.columns.double(), maps.sum(2), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(output.double(), (maps @ value.double()).transpose(1, 2), rtol=1e-5, atol=1e-5)
