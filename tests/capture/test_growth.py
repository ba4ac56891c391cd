"""A cache that only grew is not read again; whatever else happens to one is noticed."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from same_runs import assert_same
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from writers import CACHE, generate, in_one_pass, prompt, writer

import sinkscope
from sinkscope.capture import still_cached
from sinkscope.capture.growth import Growth, cache_growth
from sinkscope.capture.still_cached import SlotSums

STEPS = 6


def grown(layer: Any, *tokens: int) -> list[Growth]:
    found: list[Growth] = []
    with cache_growth(found.append):
        for count in tokens:
            layer.update(*torch.randn(2, 1, 2, count, 4))
    return found


def test_a_layer_holds_after_a_pass_what_the_next_one_finds() -> None:
    first, second, third = grown(DynamicLayer(), 5, 1, 2)
    assert first.before is None
    for one, other in ((first, second), (second, third)):
        assert one.left is not None
        assert one.left.same(other.before)
    assert [growth.key.shape[2] for growth in (first, second, third)] == [5, 6, 8]


def test_a_window_leaves_the_newest_slots() -> None:
    """The layer shows the end of the memory that its pass attended to."""
    growths = grown(DynamicSlidingWindowLayer(sliding_window=4), 6, 1, 1)
    assert [growth.key.shape[2] for growth in growths] == [6, 4, 4]
    assert [growth.left is not None and growth.left.count for growth in growths] == [3, 3, 3]
    assert all(one.left is not None and one.left.same(other.before) for one, other in pairwise(growths))


class Rounding(DynamicLayer):
    """Gives back other keys than it was given."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        return keys.round(), values


def test_nothing_is_told_of_layers_that_others_wrote() -> None:
    assert not grown(Rounding(), 5, 1)


def test_nothing_is_told_where_torch_does_not_count_writes() -> None:
    with torch.inference_mode():
        assert not grown(DynamicLayer(), 5, 1)


def test_methods_of_others_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    own = DynamicLayer.update
    monkeypatch.setattr(DynamicLayer, "update", lambda layer, key, value: own(layer, key.round(), value))
    assert not grown(DynamicLayer(), 5, 1)


def test_what_fails_here_does_not_reach_the_model() -> None:
    """In torch.vmap, tensors have no place in memory."""
    found: list[Growth] = []

    def attends(key: Tensor) -> Tensor:
        layer = DynamicSlidingWindowLayer(sliding_window=4)
        layer.update(key[None], key[None])
        grown_keys: Tensor = layer.update(key[None], key[None])[0]
        return grown_keys

    with cache_growth(found.append):
        out = torch.vmap(attends)(torch.randn(3, 2, 5, 4))
    assert out.shape == (3, 1, 2, 8, 4)


def test_nothing_is_left_on_the_layers() -> None:
    before = DynamicLayer.update, DynamicSlidingWindowLayer.update
    grown(DynamicLayer(), 2)
    assert (DynamicLayer.update, DynamicSlidingWindowLayer.update) == before


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_the_slots_of_a_generation_are_read_in_its_first_two_passes(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of gemma3's layers has a window, and drops keys from the 17th token on."""
    model, plain, read = writer(family), still_cached._slot_sums, list[int]()
    monkeypatch.setattr(
        still_cached, "_slot_sums", lambda *tensors: read.append(tensors[0].shape[2]) or plain(*tensors)
    )
    with sinkscope.watch(model) as seen:
        written = generate(model, prompt())
    assert {*read} <= {12, 13}
    assert_same(seen.run(), in_one_pass(model, written, prompt()))


# what else may happen to a cache


def negated(layer: Any) -> None:
    layer.keys[:, :, 2:3] *= -1


def replaced(layer: Any) -> None:
    layer.values = layer.values.flip(-1)


def swapped(layer: Any) -> None:
    layer.keys = layer.keys[:, :, [1, 0, *range(2, layer.keys.shape[2])]] + 0.5


def written(model: Any, change: Callable[[Any], None], when: str) -> sinkscope.Watch:
    """A text of some steps; at the fourth, `change` gets the first layer of the cache: before the pass, within it
    before the layer attends, or behind its attention."""
    ids, cache = prompt()["input_ids"], DynamicCache(config=model.config)
    attending = model.get_submodule("model.layers.0.self_attn")

    def hook(*_: object) -> None:
        change(cache.layers[0])

    with torch.no_grad(), sinkscope.watch(model) as seen:
        model(ids, **{CACHE: cache})
        for step in range(STEPS):
            handles = []
            if step == 3 and when == "before":
                change(cache.layers[0])
            elif step == 3:
                register = {"within": attending.register_forward_pre_hook, "behind": attending.register_forward_hook}
                handles.append(register[when](hook))
            model(ids[:, step : step + 1], **{CACHE: cache})
            for handle in handles:
                handle.remove()
    return seen


def rounded(layer: Any) -> None:
    layer.keys.data = layer.keys.data.bfloat16().float()


@pytest.mark.filterwarnings("ignore:sinkscope. :UserWarning")
@pytest.mark.parametrize("when", ["before", "within", "behind"])
@pytest.mark.parametrize("change", [negated, replaced, swapped, rounded])
def test_a_cache_that_was_written_into_or_got_other_tensors_is_noticed(
    change: Callable[[Any], None], when: str
) -> None:
    seen = written(writer("llama"), change, when)
    assert len(seen.left_out) == 1
    assert "holds keys or values that no token had" in seen.left_out[0] or "writes into the tensors" in seen.left_out[0]


@pytest.mark.parametrize("when", ["before", "within", "behind"])
def test_a_cache_whose_tensors_were_copied_is_read(when: str) -> None:
    def copied(layer: Any) -> None:
        layer.keys, layer.values = layer.keys.clone(), layer.values.clone()

    model = writer("llama")
    run = written(model, copied, when).run()
    ids = prompt()["input_ids"]
    whole = torch.cat([ids, ids[:, :STEPS]], 1)
    assert_same(run, sinkscope.scan(model, data={"input_ids": whole}, self_check=False))


@pytest.mark.filterwarnings("ignore:sinkscope. :UserWarning")
def test_a_write_that_torch_does_not_count_shows_in_what_attention_returns() -> None:
    """`.data` counts apart. The output that follows from the keys that were kept is not the model's own."""

    def unseen(layer: Any) -> None:
        layer.keys.data[:, :, 2:3] *= -5

    seen = written(writer("llama"), unseen, "before")
    assert len(seen.left_out) == 1
    assert "attends in another way than sinkscope reads" in seen.left_out[0]


@pytest.mark.parametrize(
    "change", [lambda sums: sums.cut(2), lambda sums: sums.move(torch.tensor([0])), SlotSums.settle]
)
def test_growth_says_nothing_more_once_sequences_moved_or_lost_tokens(change: Callable[[SlotSums], None]) -> None:
    """A layer with a window may still hold tokens that were sliced off the others."""
    layer, sums = DynamicLayer(), SlotSums()
    *begun, last = grown(layer, 6, 1, 1, 1)
    for growth in begun:
        past = 0 if growth.before is None else growth.before.count
        answer = sums.changed(growth.key, growth.value, past, growth) if past else None
        sums.keep(growth.key, growth.value, growth)
    assert answer is False
    change(sums)
    assert sums.changed(last.key, last.value, 8, last) is not False
