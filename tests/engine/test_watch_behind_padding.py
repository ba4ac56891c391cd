"""sinkscope.watch of sequences that go on over a cache behind the padding of their prompts, held against one pass over
the same tokens without padding."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from models import random_ids, tiny
from tiers import slow_but
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache
from writers import CACHE

import sinkscope

PROMPTS, MORE = (12, 9, 5), 6


def prompt() -> tuple[Tensor, Tensor, Tensor]:
    """Prompts padded on the right to 12 tokens, their mask, and what follows each."""
    ids = random_ids(len(PROMPTS), PROMPTS[0])
    mask = torch.ones_like(ids)
    for row, length in enumerate(PROMPTS):
        ids[row, length:], mask[row, length:] = 0, 0
    return ids, mask, random_ids(len(PROMPTS), MORE, seed=1)


def stepped(model: Any, cache: Any, pieces: list[int], before: int = 0) -> sinkscope.Watch:
    """Reads the padded prompts and then their answers in pieces. `before`: padding on the left of all."""
    ids, mask, more = prompt()
    ids, mask = (torch.nn.functional.pad(each, (before, 0)) for each in (ids, mask))
    lengths = torch.tensor(PROMPTS)
    with torch.no_grad(), sinkscope.watch(model) as seen:
        first = (mask.cumsum(1) - 1).clamp(min=0)
        model(ids, attention_mask=mask, position_ids=first, use_cache=True, **{CACHE: cache})
        start = 0
        for piece in more.split(pieces, 1):
            mask = torch.cat([mask, torch.ones_like(piece)], 1)
            places = lengths[:, None] + start + torch.arange(piece.shape[1])
            model(piece, attention_mask=mask, position_ids=places, use_cache=True, **{CACHE: cache})
            start += piece.shape[1]
    return seen


def assert_alone(run: Any, model: Any, texts: list[Tensor], places: list[Tensor] | None = None) -> None:
    """Every column of every sequence is that of its tokens alone, at these places."""
    for row, text in enumerate(texts):
        at = torch.arange(len(text)) if places is None else places[row]
        with torch.no_grad(), sinkscope.watch(model) as seen:
            whole = torch.ones_like(text[None])  # without it, places that begin anew are taken for packed texts
            model(text[None], attention_mask=whole, position_ids=at[None], use_cache=False)
        expected = seen.run().sequences
        found = run.sequences[run.sequences["sequence"] == row]
        assert len(found) == len(expected)
        keys = ["stream", "layer", "head"]
        found, expected = (table.sort_values(keys, ignore_index=True) for table in (found, expected))
        for name in expected.columns[expected.dtypes == np.float64]:
            np.testing.assert_allclose(found[name], expected[name], rtol=1e-4, atol=1e-5, err_msg=f"{row} {name}")


@pytest.mark.parametrize("pieces", slow_but([[1] * MORE, [2, 3, 1]], [2, 3, 1]))
@pytest.mark.parametrize("family", slow_but(["llama", "qwen3", "gpt2", "gpt_neox"], "llama"))
def test_answers_behind_padding_are_read(family: str, pieces: list[int]) -> None:
    model = tiny(family)
    seen = stepped(model, DynamicCache(), pieces)
    assert not seen.left_out
    ids, mask, more = prompt()
    run = seen.run()
    texts = [torch.cat([ids[row, mask[row].bool()], more[row]]) for row in range(len(PROMPTS))]
    assert_alone(run, model, texts)
    lengths = run.manifest.data[0]
    assert (lengths.seq_len, lengths.shortest) == (PROMPTS[0] + MORE, PROMPTS[2] + MORE)


def test_padding_on_both_sides_is_left_out() -> None:
    model = tiny("llama")
    seen = stepped(model, DynamicCache(), [1] * MORE, before=3)
    assert not seen.left_out
    ids, mask, more = prompt()
    assert_alone(seen.run(), model, [torch.cat([ids[row, mask[row].bool()], more[row]]) for row in range(len(PROMPTS))])


@pytest.mark.slow
def test_a_static_cache_is_read_behind_padding() -> None:
    model = tiny("llama")
    seen = stepped(model, StaticCache(config=model.config, max_cache_len=24), [1] * MORE)
    assert not seen.left_out
    ids, mask, more = prompt()
    assert_alone(seen.run(), model, [torch.cat([ids[row, mask[row].bool()], more[row]]) for row in range(len(PROMPTS))])


def test_generation_from_prompts_padded_on_the_right_is_read() -> None:
    """The second answer ends early: what comes behind its end counts nowhere. `generate` does not go on counting where
    the prompt ended, and its places are the model's."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.3, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    ids, mask, _ = prompt()
    settings: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    free = model.generate(ids, attention_mask=mask, eos_token_id=None, **settings)
    last = int(free[1, PROMPTS[0] + 3])
    model.generation_config.eos_token_id = last
    with sinkscope.watch(model) as seen:
        written = model.generate(ids, attention_mask=mask, eos_token_id=last, **settings)
    assert not seen.left_out
    given: list[Tensor] = []
    hook = model.register_forward_pre_hook(
        lambda module, args, kwargs: given.append(kwargs["position_ids"].expand(3, -1)), with_kwargs=True
    )
    model.generate(ids, attention_mask=mask, eos_token_id=last, **settings)
    hook.remove()
    every, texts, places = torch.cat(given, 1), list[Tensor](), list[Tensor]()
    for row, length in enumerate(PROMPTS):
        answer = written[row, PROMPTS[0] :].tolist()
        ended = last in answer and set(answer[answer.index(last) + 1 :]) == {0}
        kept = answer[: answer.index(last) + 1] if ended else answer[:-1]
        texts.append(torch.tensor([*ids[row, :length].tolist(), *kept]))
        places.append(torch.cat([every[row, :length], every[row, PROMPTS[0] : PROMPTS[0] + len(kept)]]))
    assert len(texts[1]) < PROMPTS[1] + 7
    assert_alone(seen.run(), model, texts, places)
