"""Several threads that share the sequences of an attention call read what one thread reads."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from sinkscope.capture.calls import AttentionCall
from sinkscope.capture.kernels import attend, shared_walk
from sinkscope.capture.kernels.compiled_walk import supports
from sinkscope.capture.kernels.shared_walk import shares
from sinkscope.capture.kernels.sums import AttentionSums


@pytest.fixture(autouse=True)
def _two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def call_of(batch: int = 3, tokens: int = 160) -> AttentionCall:
    draw = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(batch, heads, tokens, 16, generator=draw) for heads in (4, 2, 2))
    return AttentionCall(query, key, value, None, causal=True, scaling=0.25)


def fields_of(sums: AttentionSums) -> dict[str, object]:
    return {field.name: getattr(sums, field.name) for field in dataclasses.fields(sums)}


@pytest.mark.parametrize("batch", [2, 3])
def test_shares_give_what_one_thread_gives(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    call = call_of(batch)
    if not supports(call):
        pytest.skip("numba does not run here")
    assert shares(call) == 2
    out, sums = attend.attend_in_blocks(call)
    monkeypatch.setattr(attend, "shares", lambda call: 1)
    alone, expected = attend.attend_in_blocks(call)
    torch.testing.assert_close(out, alone, rtol=1e-5, atol=1e-6)
    found = fields_of(sums)
    for name, value in fields_of(expected).items():
        if isinstance(value, Tensor):
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6, equal_nan=True)
        else:
            assert found[name] == value
    assert torch.get_num_threads() == 2


def test_each_thread_multiplies_alone() -> None:
    """Of a pool that two threads share, torch uses one thread in each, and as many as before in this one."""
    pool = shared_walk._pool(2)
    assert {pool.submit(torch.get_num_threads).result() for _ in range(8)} == {1}
    assert torch.get_num_threads() == 2


def test_gradients_are_as_in_the_thread_that_asks() -> None:
    call = call_of(2)
    if not supports(call):
        pytest.skip("numba does not run here")
    seen = []

    def read(own: AttentionCall) -> tuple[Tensor, AttentionSums]:
        seen.append(torch.is_grad_enabled())
        return attend._walked(own, attend.CompiledWalk, 2, None)

    with torch.no_grad():
        shared_walk.read_shared(call, 2, read)
    shared_walk.read_shared(call, 2, read)
    assert seen == [False, False, True, True]


def test_who_does_not_share() -> None:
    call = call_of(2)
    assert shares(call_of(1)) == 1, "fewer sequences than threads"
    with torch.inference_mode():
        assert shares(call) == 1
    with torch.autocast("cpu"):
        assert shares(call) == 1
    padded = torch.ones(2, 1, 160, 160, dtype=torch.bool).tril()
    padded[1, :, :, 150:] = False
    assert shares(replace(call, mask=padded)) == 1, "the sequences have masks of their own"
    torch.set_num_threads(1)
    assert shares(call) == 1


def test_an_error_in_a_thread_reaches_the_one_that_asks() -> None:
    def fail(call: AttentionCall) -> tuple[Tensor, AttentionSums]:
        raise MemoryError("full")

    with pytest.raises(MemoryError, match="full"):
        shared_walk.read_shared(call_of(2), 2, fail)
