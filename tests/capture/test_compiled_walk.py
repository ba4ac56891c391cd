"""The compiled loop over rows: closed forms, threads, what it leaves to torch, and machines on which it cannot run."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sinkscope.capture import loops
from sinkscope.capture.calls import AttentionCall
from sinkscope.capture.kernels import attend, compiled_walk
from sinkscope.capture.kernels.sums import AttentionSums
from sinkscope.capture.loops import attention as rows
from sinkscope.capture.loops import compiling
from sinkscope.engine import self_check

LENGTH = 200


def a_call(keys: int = LENGTH, **changes: Any) -> AttentionCall:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    call = AttentionCall(draw(2, 6, LENGTH, 16), draw(2, 3, keys, 16), draw(2, 3, keys, 8), causal=True, scaling=0.5)
    return replace(call, **changes)


def same_bytes(one: AttentionSums, other: AttentionSums) -> bool:
    def equal(left: Any, right: Any) -> bool:
        if isinstance(left, Tensor):
            return torch.equal(left.nan_to_num(-1), right.nan_to_num(-1))
        return bool(left == right)

    return all(equal(getattr(one, field.name), getattr(other, field.name)) for field in fields(one))


def test_a_long_call_is_read_by_the_loop_and_a_short_one_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    weighed: list[tuple[int, ...]] = []
    plain = rows.weigh
    monkeypatch.setattr(rows, "weigh", lambda logits, *rest: (weighed.append(logits.shape), plain(logits, *rest)))
    attend.attend_in_blocks(a_call())
    assert weighed
    weighed.clear()
    whole = a_call()
    attend.attend_in_blocks(replace(whole, query=whole.query[:, :, :60]))
    assert not weighed


def test_the_self_check_compares_the_loop_with_the_model() -> None:
    assert self_check.LENGTH**2 >= loops.LEAST


def test_equal_logits() -> None:
    """Query i gives 1 / (i + 1) to each key: entropy log(i + 1), margin -log(i)."""
    call = a_call(
        query=torch.zeros(1, 1, LENGTH, 4), key=torch.ones(1, 1, LENGTH, 4), value=torch.ones(1, 1, LENGTH, 4)
    )
    assert compiled_walk.supports(call)
    out, sums = attend.attend_in_blocks(call)
    share = 1 / np.arange(1, LENGTH + 1)
    close(sums.first[0, 0], share)
    close(sums.diagonal, share)
    close(sums.previous, [0, *share[1:]])
    close(sums.entropy, -np.log(share))
    close(sums.margin[..., 1:], -np.log(np.arange(1, LENGTH)))
    assert sums.margin[0, 0, 0].isnan()
    close(sums.columns, share[::-1].cumsum()[::-1])
    close(sums.early_columns, share[:64][::-1].cumsum()[::-1])
    close(out, np.ones(LENGTH * 4))


@pytest.mark.parametrize("nats", [5.0, 59.0, 61.0, 80.0, 5000.0])
def test_margins_near_and_past_float32_s_smallest_number(nats: float) -> None:
    key = torch.zeros(1, 1, LENGTH, 1)
    key[:, :, 0] = nats
    _, sums = attend.attend_in_blocks(a_call(query=torch.ones(1, 1, LENGTH, 1), key=key, value=key, scaling=1.0))
    close(sums.margin[..., 1:], nats - np.log(np.arange(1, LENGTH)))
    assert bool(sums.first_is_largest.all())


def test_the_exponential_is_exact_to_float32_over_its_whole_range() -> None:
    """Each row has two keys, one at 0 and one below it, whose share gives the exponential back."""
    below = torch.linspace(-87, 0, 20_000)
    logits = torch.stack([torch.zeros_like(below), below], 1)[None].contiguous()
    sums = np.zeros((rows.ROW_SUMS, 1, 1, len(below)), np.float32)
    largest, columns = np.zeros((1, 1, len(below)), bool), np.zeros((1, 1 + len(below) // rows.CHUNK, 2), np.float32)
    spans = np.zeros((1, 1, len(below)), np.int64), np.full((1, 1, len(below)), 2)
    rows.weigh(logits.numpy(), 0, 0, *spans, sums, largest, columns, 0, 1)
    found = (logits[0, :, 1] / logits[0, :, 0]).double()
    assert float((found / below.double().exp() - 1).abs().max()) < 4e-7


def test_any_number_of_threads_gives_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for threads in (1, 2, 5):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        results.append(attend.attend_in_blocks(a_call(), 1 << 16))
    for out, sums in results[1:]:
        assert torch.equal(out, results[0][0])
        assert same_bytes(sums, results[0][1])


@pytest.mark.slow
def test_the_loop_as_python_is_the_loop_as_compiled() -> None:
    """Also where queries see no key, as in padding: their rows are 0 and nothing outside the block is written."""
    generator = torch.Generator().manual_seed(1)
    logits = (torch.randn(4, 5, 9, generator=generator) * 3).numpy()
    logits[0, 3, 0] = 90.0
    firsts = np.array([[[0, 0, 0, 0, 0, 0, 0]] * 2, [[12, 12, 12, 2, 2, 3, 3]] * 2])
    pasts = np.array([[[3, 4, 5, 6, 7, 8, 9]] * 2, [[0, 0, 0, 4, 5, 8, 9]] * 2])
    found = []
    for weigh in (rows.weigh, rows.weigh.py_func):
        sums, largest = np.full((rows.ROW_SUMS, 2, 2, 7), np.nan, np.float32), np.zeros((2, 2, 7), bool)
        shares, columns = logits.copy(), np.zeros((4, 1, 9), np.float32)
        with np.errstate(divide="ignore"):  # numpy warns of the logarithm of an empty row, which is not used
            weigh(shares, 2, 0, firsts, pasts, sums, largest, columns, 0, 1)
        found.append((shares, sums, largest, columns))
    for compiled, plain in zip(*found, strict=True):
        np.testing.assert_allclose(compiled, plain, rtol=1e-5, atol=1e-6)
    shares, sums, _, columns = found[0]
    assert not shares[2:, 0].any()
    np.testing.assert_allclose(shares.sum(2)[:2], 1, rtol=1e-6)
    np.testing.assert_allclose(shares.sum(1), columns[:, 0], rtol=1e-6)
    assert np.isnan(sums[[rows.MARGIN, rows.PAIR_MARGIN], 1]).all()


@pytest.mark.parametrize("running", [True, False])
def test_the_gap_s_loop_as_python_is_the_one_compiled(running: bool) -> None:
    call = a_call()
    by_token = call.query[:, :, :9].unflatten(1, (3, 2)).movedim(3, 1), call.key[:, :, :9].transpose(1, 2)
    query, key = (tensor.contiguous().numpy() for tensor in by_token)
    found = []
    for gaps in (rows.gaps, rows.gaps.py_func):
        out = np.zeros((2, 3, 2, 9), np.float32)
        for begin in range(4):
            gaps(query, key, running, out, begin, 4)
        found.append(out)
    np.testing.assert_allclose(*found, rtol=1e-5, atol=1e-6)
    logits = np.einsum("bigrd,bjgd->bgrij", query.astype(float), key.astype(float))
    means = logits.cumsum(-1).diagonal(0, -2, -1) / np.arange(1, 10) if running else logits.mean(-1)
    np.testing.assert_allclose(found[0], means - logits[..., 0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "changes",
    [
        {"score": "relu"},
        {"softcap": 20.0},
        {"sinks": torch.zeros(1, 6, 1, 1)},
        {"bias": torch.zeros(1, 6, LENGTH, LENGTH)},
        {"query": a_call().query.double()},
        {"query": a_call().query * math.nan},
        {"key": a_call().key * 1e30, "query": a_call().query * 1e30},
        {"mask": torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).index_fill(3, torch.tensor([5]), False)},
        {"mask": torch.full((1, 6, LENGTH, LENGTH), 0.5)},
    ],
)
def test_what_is_left_to_torch(changes: dict[str, Any]) -> None:
    assert compiled_walk.supports(a_call())
    assert not compiled_walk.supports(a_call(**changes))


def test_a_logit_that_is_not_finite_stays_one() -> None:
    """A wrong number would be worse: the sums of a model whose queries hold NaN are NaN."""
    _, sums = attend.attend_in_blocks(a_call(query=a_call().query.index_fill(2, torch.tensor([7]), math.nan)))
    assert bool(sums.entropy[:, :, 7].isnan().all())
    assert not bool(sums.entropy[:, :, 8].isnan().any())


def test_without_numba_torch_reads_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sinkscope.capture.loops.attention", None)
    loops.loops.cache_clear()
    try:
        assert not compiled_walk.supports(a_call())
        out, _ = attend.attend_in_blocks(a_call())
    finally:
        monkeypatch.undo()
        loops.loops.cache_clear()
    torch.testing.assert_close(out, attend.attend_in_blocks(a_call())[0], rtol=1e-5, atol=1e-6)


def test_a_machine_where_no_machine_code_can_be_kept_compiles_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[bool] = []

    def njit(signature: str, cache: bool = False, **options: Any) -> Any:
        tried.append(cache)
        if cache:
            raise RuntimeError("cannot cache function 'weigh': no locator available")
        return lambda function: (function, signature, options)

    monkeypatch.setattr(compiling, "njit", njit)
    function, signature, options = compiling.compiled("signature")(rows.weigh.py_func)
    assert tried == [True, False]
    assert (function, signature, options["nogil"]) == (rows.weigh.py_func, "signature", True)


FORK = """
import os, signal, torch
from sinkscope.capture.token_sums import token_sums

torch.set_num_threads(3)
x = torch.ones(7, 130, 130)
token_sums(x).norms  # starts the threads, which a fork does not have
child = os.fork()
if not child:
    os._exit(int(bool((token_sums(x).norms != 130**0.5).any())))
signal.alarm(60)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_fork_starts_threads_of_its_own() -> None:
    assert subprocess.run([sys.executable, "-W", "ignore", "-c", FORK], check=False).returncode == 0


def close(ours: Tensor | None, expected: Any) -> None:
    assert ours is not None
    np.testing.assert_allclose(ours.double().flatten().numpy(), np.asarray(expected), rtol=2e-6, atol=2e-6)
