"""The Triton kernels against whole attention matrices in float64.

`test_kernel` runs this file in a process of its own, because Triton reads TRITON_INTERPRET when it is imported. With
TRITON_INTERPRET=1 tensors are on the CPU, otherwise on a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import random_ids, tiny
from torch import Tensor

import sinkscope
from sinkscope.capture.calls import AttentionCall
from sinkscope.capture.kernels import attend as attention
from sinkscope.capture.kernels import sums, triton_call
from sinkscope.capture.kernels.attend import attend_in_blocks

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, of hidden logits and of NaN
MASKS = ("causal", "full", "triangle", "window", "random", "holes", "additive", "alibi", "packed")
WIDTHS = [(8, 8), (16, 64), (24, 24), (80, 80), (64, 40), (128, 128), (192, 128), (256, 256), (512, 512), (576, 512)]
SUMS = (
    *("first", "entropy", "margin", "learned_sink", "first_share", "columns", "logit_gap", "diagonal", "previous"),
    "early_columns",
)


@pytest.fixture(autouse=True, scope="module")
def _interpreter_mended() -> Iterator[None]:
    with mended_interpreter() if INTERPRETED else nullcontext():
        yield


@contextmanager
def mended_interpreter() -> Iterator[None]:
    """Mends two faults of Triton's interpreter.

    It multiplies bfloat16 numbers as the integers that store them, so they are made float32 first. Triton 3.6's loop
    bounds are arrays of one number, which numpy 2.4 no longer accepts as a number.
    """
    from triton.language import bfloat16, float32
    from triton.runtime import interpreter

    plain_dot, plain_patch = interpreter.InterpreterBuilder.create_dot, interpreter._patch_lang_tensor

    def widened(operand: Any) -> Any:
        if operand.dtype.scalar != bfloat16:
            return operand
        return interpreter.TensorHandle((operand.data.astype(np.uint32) << 16).view(np.float32), float32)

    def create_dot(self: Any, left: Any, right: Any, *rest: Any) -> Any:
        return plain_dot(self, widened(left), widened(right), *rest)

    def patch_tensor(tensor: Any, *rest: Any) -> None:
        plain_patch(tensor, *rest)
        tensor.__index__ = lambda self: self.handle.data.item()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
        patch.setattr(interpreter, "_patch_lang_tensor", patch_tensor)
        yield


def draw(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def make_mask(kind: str, heads: int, queries: int, keys: int, seed: int) -> Tensor | None:
    """A mask as transformers passes it: bool or additive, each dimension shared or not."""
    i, j = torch.arange(queries, device=DEVICE)[:, None], torch.arange(keys, device=DEVICE)[None]
    causal = j <= i
    if kind in ("causal", "full"):
        return None
    if kind == "triangle":
        return causal[None, None]
    if kind == "window":
        return (causal & (i - j < max(2, queries // 3)))[None, None]
    if kind == "random":
        return (draw(seed, 1, heads, queries, keys) > 0) | (i == j)
    if kind == "holes":  # the first queries see no key, as in padding, and no query sees the first keys
        return (causal & (i >= queries // 3) & (j >= queries // 4))[None, None]
    if kind == "packed":  # two sequences in one row: key 0 is out of reach of the second
        return (causal & ((i < queries // 2) == (j < queries // 2)))[None, None]
    if kind == "additive":
        return torch.where(causal, 0.0, torch.finfo(torch.float32).min)[None, None]
    slopes = draw(seed, 1, heads, 1, 1).abs()
    return torch.where(causal, -slopes * (i - j), -torch.inf)


def naive(call: AttentionCall, mask: Tensor | None, causal: bool) -> dict[str, Tensor]:
    """The output and all sums of a call, from the whole matrix in float64."""
    repeat = call.query.shape[1] // call.key.shape[1]
    key, value = (each.double().repeat_interleave(repeat, 1) for each in (call.key, call.value))
    raw = call.query.double() @ key.mT * call.scaling
    if call.softcap is not None:
        raw = call.softcap * (raw / call.softcap).tanh()
    if call.bias is not None:
        raw = raw + call.bias.double()
    queries, keys = raw.shape[-2:]
    order = torch.ones(queries, keys, dtype=torch.bool, device=raw.device).tril()
    seen = (order if causal else torch.ones_like(order)).expand(raw.shape)
    finite = False
    if mask is not None:
        added = torch.zeros((), device=raw.device) if mask.dtype == torch.bool else mask.double()
        seen = (mask if mask.dtype == torch.bool else mask > -1e30).expand(raw.shape)
        finite = bool(((added != 0) & (added > -1e30)).any())
        raw = raw + added.expand(raw.shape).masked_fill(~seen, 0.0)
    extra = raw[..., :0] if call.sinks is None else call.sinks.double().expand(*raw.shape[:3], -1)
    both = torch.cat([raw.masked_fill(~seen, -torch.inf), extra], -1)
    p = both.softmax(-1).nan_to_num(0.0)
    a = p[..., :keys]
    counted = seen if finite else order.expand(raw.shape) if call.visible.causal else torch.ones_like(seen)
    others = both[..., 1:].logsumexp(-1)
    result = {
        "output": (a @ value).transpose(1, 2),
        "first": a[..., 0],
        "entropy": torch.special.entr(a).sum(-1),
        "margin": torch.where(seen[..., 0] & (others > -torch.inf), both[..., 0] - others, torch.nan),
        "learned_sink": p[..., keys:].sum(-1),
        "first_share": torch.where(a.sum(-1) > 0, a[..., 0] / a.sum(-1), 0.0),
        "columns": a.sum(-2),
        "logit_gap": raw[..., 0] - (raw * counted).sum(-1) / counted.sum(-1).clamp(min=1),
        "first_is_largest": (a.argmax(-1) == 0) & seen[..., 0],
    }
    if queries == keys:
        result |= {"diagonal": a.diagonal(0, -2, -1), "previous": torch.zeros_like(a[..., 0])}
        result["previous"][..., 1:] = a.diagonal(-1, -2, -1)
    if queries >= 64:
        result["early_columns"] = a[..., :64, :64].sum(-2)
    return result


def close(ours: Tensor | None, expected: Tensor, name: str, tolerance: float = 1e-5) -> None:
    assert ours is not None, name
    torch.testing.assert_close(
        ours.double(),
        expected.double(),
        rtol=tolerance,
        atol=tolerance,
        equal_nan=True,
        msg=lambda text: f"{name}: {text}",
    )


def check(call: AttentionCall, mask: Tensor | None, causal: bool) -> None:
    """Asserts that sums are within 1e-5 of float64, the output within its dtype's steps, both near the torch walk's."""
    assert triton_call.supports(call)
    expected = naive(call, mask, causal)
    output, ours = triton_call.attend(call)
    walked, theirs = attend_in_blocks(call)
    assert output.dtype == call.query.dtype
    assert output.shape == (*call.query.shape[:1], call.query.shape[2], call.query.shape[1], call.value.shape[-1])
    coarse = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[call.query.dtype]
    close(output, expected["output"], "output", coarse)
    close(output, walked.view(output.shape), "output of the walk", coarse)
    for name in SUMS:
        own = getattr(ours, name)
        if name in expected:
            close(own, expected[name], name)
            close(own, getattr(theirs, name), f"{name} of the walk", 2e-5)
        else:
            assert own is None
            assert getattr(theirs, name) is None
    assert torch.equal(ours.first_is_largest, expected["first_is_largest"])
    assert ours.causal == theirs.causal
    assert ours.visible is call.visible.counts
    assert call.sinks is not None or not ours.learned_sink.any()


def make(
    kind: str, batch: int, heads: tuple[int, int], lengths: tuple[int, int], widths: tuple[int, int],
    dtype: torch.dtype = torch.float32, softcap: float | None = None, sinks: int = 0, bias: bool = False, seed: int = 0,
) -> tuple[AttentionCall, Tensor | None, bool]:  # fmt: skip
    """A call with its mask. Tensors have the memory layout that models pass: [B, T, H, d] with two axes exchanged."""
    queries, keys = lengths
    query = draw(seed, batch, queries, heads[0], widths[0], dtype=dtype).transpose(1, 2)
    key = draw(seed + 1, batch, keys, heads[1], widths[0], dtype=dtype).transpose(1, 2)
    value = draw(seed + 2, batch, heads[1], keys, widths[1], dtype=dtype)
    mask = make_mask(kind, heads[0], queries, keys, seed + 3)
    call = AttentionCall(
        query, key, value, mask, kind == "causal", 1.5 * widths[0] ** -0.5, softcap,
        bias=draw(seed + 4, 1, heads[0], queries, keys) if bias else None,
        sinks=draw(seed + 5, 1, heads[0], 1, sinks) if sinks else None,
    )  # fmt: skip
    return call, mask, kind == "causal"


@given(
    st.sampled_from(MASKS),
    st.integers(1, 2),
    st.sampled_from([(1, 1), (2, 1), (2, 2)]),
    st.integers(1, 150),
    st.sampled_from(WIDTHS),
    st.sampled_from(triton_call.DTYPES),
    st.sampled_from([None, 3.0]),
    st.sampled_from([0, 0, 1, 2]),
    st.booleans(),
    st.integers(0, 10_000),
)
@settings(max_examples=30, deadline=None, derandomize=True)
def test_shapes_every_sum_is_the_full_matrix_s(
    kind: str, batch: int, heads: tuple[int, int], length: int, widths: tuple[int, int], dtype: torch.dtype,
    softcap: float | None, sinks: int, bias: bool, seed: int,
) -> None:  # fmt: skip
    check(*make(kind, batch, heads, (length, length), widths, dtype, softcap, sinks, bias, seed))


@pytest.mark.parametrize("lengths", [(3, 11), (70, 130), (130, 17), (1, 5)])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_features_cross_attention(lengths: tuple[int, int], softcap: float | None) -> None:
    check(*make("full", 1, (2, 1), lengths, (16, 16), softcap=softcap))


@pytest.mark.parametrize("widths", [(96, 96), (300, 260), (512, 512), (576, 512)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_features_wide_heads_are_multiplied_in_slices(widths: tuple[int, int], dtype: torch.dtype) -> None:
    check(*make("window", 1, (2, 1), (40, 40), widths, dtype))


@pytest.mark.parametrize("kind", ["window", "alibi", "holes", "random"])
def test_features_strips_of_a_mask(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Column sums add up over the strips of a mask, whether a strip is one block of queries or a part of one."""
    monkeypatch.setattr(sums, "BLOCK_BYTES", 1)
    monkeypatch.setattr(sums, "DEVICE_BLOCK_BYTES", 1)
    check(*make(kind, 1, (2, 1), (70, 70), (16, 16), softcap=3.0 if kind in ("window", "random") else None))


def test_features_a_window_s_tiles_are_read_and_no_others() -> None:
    """Keys out of reach of a block hold NaN: it would show in every sum that touched them."""
    call, _, _ = make("window", 1, (1, 1), (150, 150), (16, 16))
    late = slice(128, 150)  # the window is 50: queries 128.. see no key before 79
    spoilt = replace(call, key=call.key.clone(), value=call.value.clone())
    spoilt.key[:, :, 1:64] = torch.nan
    spoilt.value[:, :, 1:64] = torch.nan
    (output, ours), (clean, right) = triton_call.attend(spoilt), triton_call.attend(call)
    assert torch.equal(output[:, late], clean[:, late])
    assert torch.equal(ours.entropy[..., late], right.entropy[..., late])


def test_features_sinks_of_each_query() -> None:
    call, mask, causal = make("causal", 1, (2, 1), (70, 70), (24, 24))
    check(replace(call, sinks=draw(9, 1, 2, 70, 3)), mask, causal)
    check(replace(call, sinks=draw(9, 1, 2, 1, 1).bfloat16()), mask, causal)
    check(replace(call, sinks=draw(9, 1, 2, 1, 1) + 25), mask, causal)
    unseen = draw(9, 1, 2, 70, 3) > 0
    unseen[:, :, :9] = True  # no sink at all
    check(replace(call, sinks=draw(9, 1, 2, 70, 3).masked_fill(unseen, -torch.inf)), mask, causal)


def test_features_a_bias_all_queries_share_and_one_that_forbids() -> None:
    call, mask, causal = make("full", 1, (2, 2), (40, 40), (16, 16))
    check(replace(call, bias=draw(9, 1, 2, 1, 40)), mask, causal)
    forbidding = draw(9, 1, 1, 40, 40)
    forbidding[..., 7:] = -torch.inf
    output, ours = triton_call.attend(replace(call, bias=forbidding))
    shorter = replace(call, key=call.key[:, :, :7], value=call.value[:, :, :7], bias=forbidding[..., :7])
    expected, theirs = attend_in_blocks(shorter)
    close(output, expected.view(output.shape), "output")
    close(ours.margin, theirs.margin, "margin")
    close(ours.columns[..., :7], theirs.columns, "columns")
    assert not ours.columns[..., 7:].any()


def test_features_padding_one_sequence_and_other_masks_of_each_head() -> None:
    keep = torch.ones(2, 1, 80, 80, dtype=torch.bool, device=DEVICE).tril()
    keep[1, :, :, :30] = False
    call, _, _ = make("causal", 2, (2, 1), (80, 80), (16, 16), torch.bfloat16)
    check(replace(call, mask=keep), keep, False)
    each = draw(3, 2, 2, 80, 80) > -0.5
    check(replace(call, mask=each), each, False)


def test_features_margins_past_float32_s_smallest_number() -> None:
    query = torch.ones(1, 1, 3, 1, device=DEVICE) * 200
    key = torch.tensor([1.0, 0.0, 0.0], device=DEVICE).view(1, 1, 3, 1)
    _, ours = triton_call.attend(AttentionCall(query, key, key, causal=True))
    close(ours.margin[0, 0, 1:], torch.tensor([200.0, 199.3068528194], device=DEVICE), "margin", 1e-6)
    assert ours.margin[0, 0, 0].isnan()
    _, ours = triton_call.attend(AttentionCall(-query, key, key, causal=True))
    close(ours.margin[0, 0, 1:], torch.tensor([-200.0, -200.6931471806], device=DEVICE), "margin", 1e-6)


def test_features_equal_keys_tie_for_key_0() -> None:
    key = torch.zeros(1, 1, 70, 16, device=DEVICE)
    call = AttentionCall(draw(0, 1, 1, 70, 16), key, draw(1, 1, 1, 70, 16), causal=True)
    ours = triton_call.attend(call)[1]
    assert ours.first_is_largest.all()
    steps = torch.arange(1, 71, device=DEVICE)
    close(ours.first[0, 0], 1 / steps, "first", 1e-6)
    close(ours.entropy[0, 0], steps.log(), "entropy", 1e-6)


def test_features_a_soft_cap_far_from_its_edge_changes_little() -> None:
    """tanh keeps its digits near 0: with a cap of 1e4, s - cap tanh(s / cap) is s^3 / 3e8."""
    call, _, _ = make("causal", 1, (1, 1), (60, 60), (16, 16))
    capped = triton_call.attend(replace(call, softcap=1e4))[1]
    close(capped.margin, triton_call.attend(call)[1].margin, "margin", 2e-6)
    close(capped.logit_gap, triton_call.attend(call)[1].logit_gap, "logit_gap", 2e-6)


def test_features_a_nan_is_not_hidden() -> None:
    call, _, _ = make("causal", 1, (1, 1), (40, 40), (16, 16))
    call.query[:, :, 20] = torch.nan
    output, ours = triton_call.attend(call)
    assert output[:, 20].isnan().all()
    assert ours.first[..., 20].isnan().all()
    assert ours.entropy[..., 20].isnan().all()
    assert ours.columns[..., :21].isnan().all()
    assert not ours.first[..., :20].isnan().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_features_two_runs_are_the_same_bytes(dtype: torch.dtype) -> None:
    call, _, _ = make("alibi", 1, (1, 1), (130, 130), (24, 24), dtype, softcap=3.0, sinks=1)
    (one, first), (two, second) = triton_call.attend(call), triton_call.attend(call)
    assert torch.equal(one, two)
    for name in SUMS:
        left, right = getattr(first, name), getattr(second, name)
        assert left is not None
        assert left.cpu().numpy().tobytes() == right.cpu().numpy().tobytes(), name


def tables() -> Any:
    """pandas; skips the test on a machine that lacks what a scan's tables need."""
    for name in ("pydantic", "scipy", "pyarrow"):
        pytest.importorskip(name)
    return pytest.importorskip("pandas")


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_models_a_scan_has_the_numbers_of_the_walk(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pd = tables()
    model, ids = tiny(family, num_hidden_layers=2, layer_types=None).to(DEVICE), random_ids(1, 70)
    monkeypatch.setattr(attention, "_compiles", lambda device: False)
    walked = sinkscope.scan(model, data=ids)
    monkeypatch.setattr(attention, "_compiles", lambda device: True)
    ours = sinkscope.scan(model, data=ids)
    assert {site.kernel for site in walked.manifest.attention} == {attention.TORCH}
    assert {site.kernel for site in ours.manifest.attention} == {attention.TRITON}
    assert ours.manifest.self_check.status == "passed"
    assert ours.manifest.warnings == walked.manifest.warnings
    for name in ("heads", "layers", "positions", "length_curve"):
        pd.testing.assert_frame_equal(getattr(ours, name), getattr(walked, name), rtol=1e-4, atol=1e-5)


def test_models_every_call_went_through_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scans above would also agree if the torch walk had computed both."""
    tables()
    calls: list[Any] = []
    plain = triton_call.attend
    monkeypatch.setattr(attention, "_compiles", lambda device: True)
    monkeypatch.setattr(triton_call, "attend", lambda call: calls.append(call) or plain(call))
    monkeypatch.setattr(attention, "attend_in_blocks", lambda call: pytest.fail("read by the walk"))
    sinkscope.scan(tiny("llama", num_hidden_layers=1).to(DEVICE), data=random_ids(1, 40))
    assert len(calls) >= 3
    assert not attention._triton_failed.is_set()
