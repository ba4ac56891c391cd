"""A field of an attention call that a kernel does not know: the kernel leaves the call to a walk, which refuses it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from sinkscope.capture.calls import AttentionCall
from sinkscope.capture.kernels import attend, compiled_walk, per_query, triton_call
from sinkscope.capture.kernels.walk import Walk
from sinkscope.capture.views import Cut
from sinkscope.errors import SinkscopeError

LENGTH = 200


@dataclass(frozen=True, eq=False)
class Shifted(AttentionCall):
    """A call of which a package says more: `shift` is added to the logits of key 0, `marks` are there to be cut."""

    shift: float = 0.0
    marks: Tensor | None = None


def a_call(**changes: Any) -> Shifted:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, 3, LENGTH, 8, generator=generator) for _ in range(3))
    return replace(Shifted(query, key, value, causal=True, scaling=0.5), **changes)


class ShiftedWalk(Walk):
    """The walk of a package that knows the field."""

    UNDERSTOOD = Walk.UNDERSTOOD | {"shift"}

    def _logits(self, start: int, stop: int, seen: Any) -> Tensor:
        logits = super()._logits(start, stop, seen)
        if seen.low == 0:
            logits[..., 0] += self.call.shift  # type: ignore[attr-defined]
        return logits


def test_a_field_at_its_default_changes_nothing() -> None:
    call = a_call()
    assert call.beyond(Walk.UNDERSTOOD) == []
    assert compiled_walk.supports(call)
    assert triton_call.supports(call)
    valid = (0, 5), LENGTH
    assert Cut(0, valid, valid).call(call).query.shape[2] == 5
    assert Cut(0, None, valid).call(call).query.shape[2] == LENGTH
    assert Cut(0, None, valid).call(call).key.shape[2] == 5


@pytest.mark.parametrize("changes", [{"shift": 2.0}, {"marks": torch.zeros(2)}, {"shift": None}])
def test_no_kernel_computes_a_call_with_a_field_that_it_does_not_know(changes: dict[str, Any]) -> None:
    call, name = a_call(**changes), next(iter(changes))
    assert not compiled_walk.supports(call)
    assert not triton_call.supports(call)
    groups = torch.zeros(2, LENGTH, dtype=torch.long)
    for compute in (attend.read, attend.attend_in_blocks, lambda one: per_query.group_masses(one, groups, 1)):
        with pytest.raises(SinkscopeError) as refused:
            compute(call)
        assert str(refused.value) == (
            f"an attention call of score 'softmax' sets {name}, which sinkscope does not compute: an attention "
            "keyword may change only bias, bias_of_seen, causal, key, learned, mask, query, scaling, sinks, softcap, "
            "value, window"
        )


def test_a_walk_that_names_the_field_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attend, "Walk", ShiftedWalk)
    call = a_call(shift=2.0)
    output, sums = attend.read(call)
    logits = call.query.double() @ call.key.double().mT * call.scaling
    logits[..., 0] += 2.0
    maps = logits.masked_fill(torch.ones(LENGTH, LENGTH).triu(1).bool(), -torch.inf).softmax(-1)
    torch.testing.assert_close(sums.first.double(), maps[..., 0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(output.double(), (maps @ call.value.double()).transpose(1, 2), rtol=1e-5, atol=1e-5)


def test_raw_attention_has_no_learned_sinks() -> None:
    call = a_call(score="relu", sinks=torch.zeros(1, 3, 1, 1))
    with pytest.raises(SinkscopeError, match="score 'relu' sets sinks, which sinkscope does not compute"):
        attend.read(call)
    with pytest.raises(SinkscopeError, match="score 'relu' sets sinks"):
        per_query.group_masses(call, torch.zeros(2, LENGTH, dtype=torch.long), 1)


def test_a_tensor_that_nobody_can_cut_is_refused_in_a_padded_batch() -> None:
    with pytest.raises(SinkscopeError, match="marks of an attention call cannot be cut to one sequence"):
        Cut(0, ((0, 5), LENGTH), None).call(a_call(marks=torch.zeros(2)))


def test_a_field_without_a_default_is_never_left_out() -> None:
    @dataclass(frozen=True, eq=False, kw_only=True)
    class Needed(AttentionCall):
        level: int

    one = a_call()
    assert Needed(one.query, one.key, one.value, level=0).beyond(Walk.UNDERSTOOD) == ["level"]


def test_every_field_of_a_call_is_known_to_some_walk() -> None:
    call = a_call(
        mask=torch.zeros(1, 1, LENGTH, LENGTH), softcap=3.0, bias=torch.zeros(1, 1, LENGTH, LENGTH), window=4,
        sinks=torch.zeros(1, 3, 1, 1),
    )  # fmt: skip
    assert call.beyond(Walk.UNDERSTOOD) == []
    assert set(call.beyond(())) >= {"query", "mask", "causal", "scaling", "softcap", "bias", "sinks", "window"}
