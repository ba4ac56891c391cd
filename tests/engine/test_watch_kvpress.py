"""sinkscope.watch over caches that kvpress prunes: presses, and its pipeline with two questions about one text.

kvpress 0.5 is written for transformers below 5.3: from 5.3 on its hook is not called with the keywords that it reads.
`as_before` adds them; all else is kvpress' own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from conftest import make_tokenizer
from libraries import library
from pressed import PROMPT, WRITTEN, Press, as_seen, assert_reads, every_slot, naive, steps
from torch import Tensor
from transformers import DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from writers import CACHE, writer

import sinkscope

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def kvpress() -> Iterator[Any]:
    """kvpress puts functions of its own around every attention function when it is imported; they are put back."""
    names = ("_global_mapping", "_local_mapping")
    before = {name: dict(getattr(ALL_ATTENTION_FUNCTIONS, name)) for name in names}
    found = library("kvpress")
    if {name: getattr(ALL_ATTENTION_FUNCTIONS, name) for name in names} == before:  # imported before
        found.attention_patch.patch_attention_functions()
    yield found
    for name in names:
        functions = getattr(ALL_ATTENTION_FUNCTIONS, name)
        functions.clear()
        functions.update(before[name])


def as_before(given: dict[str, Any]) -> dict[str, Any]:
    """What an attention module is called with, and what transformers 5.2 called it with beside that."""
    return {**given, "past_key_values": given[CACHE], "cache_position": given["position_ids"][0]}


@contextmanager
def fitted(press: Any) -> Iterator[dict[int, Tensor]]:
    """Calls the press' hook with the keywords of older transformers. Yields the tokens (B, G, n) whose keys it kept in
    each layer."""
    kept, own = dict[int, Tensor](), press.forward_hook

    def hook(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        layer = kwargs[CACHE].layers[module.layer_idx]
        before = layer.keys
        found = own(module, args, as_before(kwargs), output)
        if kwargs["position_ids"][0, 0] > 0:  # a step: presses prune after the prefill
            return found
        same = (layer.keys[:, :, :, None] == before[:, :, None]).all(-1)
        assert bool((same.sum(-1) == 1).all())
        kept[module.layer_idx] = same.int().argmax(-1)
        return found

    press.forward_hook = hook
    try:
        yield kept
    finally:
        del press.forward_hook


def presses(kvpress: Any) -> dict[str, Any]:
    return {
        "knorm": kvpress.KnormPress(0.5),
        "streaming": kvpress.StreamingLLMPress(0.5, n_sink=4),
        "expected": kvpress.ExpectedAttentionPress(0.5, n_future_positions=8, n_sink=2),
    }


def assert_as_pressed(model: Any, run: sinkscope.Run, ids: Tensor, kept: dict[int, Tensor], prompt: int) -> None:
    """The run's numbers are those of float64 maps over the tokens that the press kept and those that came later."""

    def held(layer: int, query: int) -> Tensor:
        new = torch.arange(prompt, query + 1).expand(len(ids), kept[layer].shape[1], -1)
        return torch.cat([kept[layer], new], 2)

    with Press(model, lambda layer, _: kept[layer]).pressing():
        maps = as_seen(model, ids, DynamicCache(), held, prompt)
    assert_reads(run, maps)


@pytest.mark.parametrize("name", ["knorm", "streaming", "expected"])
def test_a_press_is_read_as_the_model_saw_it(kvpress: Any, name: str) -> None:
    model, press = writer("llama"), presses(kvpress)[name]
    ids = torch.randint(3, 97, (1, PROMPT + WRITTEN), generator=torch.Generator().manual_seed(2))

    def work() -> Tensor:
        with press(model):
            return torch.cat([each.logits for each in steps(model, ids, DynamicCache())], 1)

    with fitted(press) as kept:
        alone = work()
        with sinkscope.watch(model) as seen:
            watched = work()
    assert torch.equal(alone, watched)
    assert {each.shape[2] for each in kept.values()} == {PROMPT // 2}
    assert not seen.left_out
    assert_as_pressed(model, seen.run(), ids, kept, PROMPT)


def test_the_pipeline_answers_two_questions_as_without_a_watch(kvpress: Any) -> None:
    """The answer to the first question is cut off the cache before the second is asked: it is no part of the text."""
    tokenizer, press = make_tokenizer(), kvpress.KnormPress(0.5)
    model = writer("llama", vocab_size=len(tokenizer))
    pipe = kvpress.KVPressTextGenerationPipeline(model=model, tokenizer=tokenizer)
    context, questions = "The old man walked by the river and looked at the house.", ["Who walked?", "Where to?"]

    def work() -> list[str]:
        found: list[str] = pipe(context, questions=questions, press=press, max_new_tokens=6)["answers"]
        return found

    with fitted(press) as kept, written_by(model) as read:
        alone = work()
        read.clear()
        with sinkscope.watch(model) as seen:
            assert work() == alone
    assert not seen.left_out
    first, last = torch.cat(read[:1], 1), torch.cat(read[-6:], 1)  # a prefill; a question and five tokens of its answer
    assert_as_pressed(model, seen.run(), torch.cat([first, last], 1), kept, first.shape[1])


@contextmanager
def written_by(model: Any) -> Iterator[list[Tensor]]:
    """The token ids that each pass reads."""
    found: list[Tensor] = []
    hook = model.model.register_forward_pre_hook(
        lambda _, args, given: found.append(given["input_ids"]), with_kwargs=True
    )
    try:
        yield found
    finally:
        hook.remove()


@pytest.mark.parametrize("length", [1, 3])
def test_a_press_that_overwrites_keys_is_read_as_the_model_saw_it(kvpress: Any, length: int) -> None:
    """AdaKV drops other numbers of keys in each head: it writes keys that get no attention in the place of those.

    Also where a step reads several tokens, as a question does.
    """
    model, press = writer("llama"), kvpress.AdaKVPress(presses(kvpress)["expected"])
    ids = torch.randint(3, 97, (1, PROMPT + WRITTEN), generator=torch.Generator().manual_seed(2))
    own, hidden = press.forward_hook, dict[int, Tensor]()

    def hook(module: Any, args: Any, given: dict[str, Any], output: Any) -> Any:
        found = own(module, args, as_before(given), output)
        if given["position_ids"][0, 0] == 0:
            which = hidden[module.layer_idx] = torch.zeros(1, module.config.num_key_value_heads, PROMPT, dtype=bool)
            which[module.masked_key_indices] = True
        return found

    press.forward_hook = hook

    def work() -> Tensor:
        with press(model):
            return torch.cat([each.logits for each in steps(model, ids, DynamicCache(), length=length)], 1)

    alone = work()
    with sinkscope.watch(model) as seen:
        watched = work()
    assert torch.equal(alone, watched)
    assert not seen.left_out
    assert len({int(each.sum()) for each in torch.cat([*hidden.values()], 1)[0]}) > 2
    assert_reads(seen.run(), as_seen(model, ids, DynamicCache(), every_slot, attention=naive(hidden)))


def test_an_error_in_the_middle_leaves_nothing_behind(kvpress: Any) -> None:
    model, press, ids = writer("llama"), presses(kvpress)["knorm"], torch.arange(3, 25)[None]

    def fail(*_: Any) -> None:
        raise KeyError("in the middle")

    before = [(len(each._forward_hooks), len(each._forward_pre_hooks)) for each in model.modules()]
    functions = dict(ALL_ATTENTION_FUNCTIONS._global_mapping)
    broken = model.model.layers[-1].mlp.register_forward_hook(fail)
    with pytest.raises(KeyError), fitted(press), press(model), sinkscope.watch(model):
        steps(model, ids, DynamicCache())
    broken.remove()
    assert [(len(each._forward_hooks), len(each._forward_pre_hooks)) for each in model.modules()] == before
    assert functions == ALL_ATTENTION_FUNCTIONS._global_mapping
