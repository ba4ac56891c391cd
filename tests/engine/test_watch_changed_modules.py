"""sinkscope.watch of a model whose modules come, go or change places inside the block."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from plain_models import Plain, plain, tokens
from same_runs import assert_same
from tiers import slow_but

import sinkscope
from sinkscope import SinkscopeError
from sinkscope.engine.watching.program import Everywhere


def another_attention(model: Plain, other: Plain) -> None:
    model.blocks[1].attn = other.blocks[1].attn


def another_projection(model: Plain, other: Plain) -> None:
    model.blocks[1].attn.c_proj = other.blocks[1].attn.c_proj


def other_places(model: Plain, other: Plain) -> None:
    model.blocks[0], model.blocks[1] = model.blocks[1], model.blocks[0]


def without_the_first(model: Plain, other: Plain) -> None:
    del model.blocks[0]


def with_a_third(model: Plain, other: Plain) -> None:
    model.blocks.append(other.blocks[0])


CHANGES = [another_attention, another_projection, other_places, without_the_first, with_a_third]


@pytest.mark.parametrize("change", slow_but(CHANGES, another_projection, other_places, without_the_first, with_a_third))
@pytest.mark.parametrize("way", ["sdpa", pytest.param("product", marks=pytest.mark.slow)])
def test_a_pass_is_that_of_the_modules_that_ran_in_it(way: str, change: Callable[[Plain, Plain], None]) -> None:
    model, other, ids = plain(way), Plain(way, seed=1).eval(), tokens()
    with torch.no_grad(), sinkscope.watch(model) as seen:
        model(ids)
        seen.reset()
        change(model, other)
        model(ids)
    assert_same(seen.run(), sinkscope.scan(model, data=ids, self_check=False))
    assert not any(
        module._forward_hooks or module._forward_pre_hooks for module in [*model.modules(), *other.modules()]
    )


def test_what_a_module_attended_is_asked_for_before_it_is_taken_out() -> None:
    model, ids = plain(), tokens()
    with torch.no_grad(), sinkscope.watch(model) as seen:
        model(ids)
        del model.blocks[1]
        with pytest.raises(
            SinkscopeError, match=r"blocks.1.attn attended .* no longer a module of the model: call run"
        ):
            seen.run()


def test_a_layer_that_comes_into_a_watched_model_is_no_model_of_a_program() -> None:
    model, ids = plain(), tokens()
    with torch.no_grad(), (everywhere := Everywhere()).watching():
        model(ids)
        with_a_third(model, Plain(seed=1))
        model(ids)
    assert [watch.model for watch in everywhere.measured] == [model]
