"""sinkscope.watch over caches where a model forms its attention maps itself, or adds a bias that grows with its cache.

What passes over a cache compute is held against one pass over all tokens, column by column.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from models import VOCABULARY, tiny
from same_runs import assert_same
from tiers import slow_but
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DynamicCache,
    EncoderDecoderCache,
    LEDConfig,
    LEDForConditionalGeneration,
    StaticCache,
    T5Config,
    T5ForConditionalGeneration,
)
from writers import CACHE, generate, in_one_pass, prompt

import sinkscope
from sinkscope import SinkscopeError
from sinkscope.capture.kernels.map_walk import AttentionMap, following, map_rows

pytestmark = pytest.mark.filterwarnings("ignore:sinkscope. :UserWarning")

OWN: dict[str, dict[str, Any]] = {
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4},
    "gpt_neo": {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]],
                "window_size": 8},
    "xglm": {"d_model": 32, "num_layers": 2, "attention_heads": 4, "ffn_dim": 64},
    "falcon": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "alibi": True},
}  # fmt: skip
"""The first three compute attention in their own code; the last adds a bias in its mask."""


def model_of(family: str) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = AutoConfig.for_model(family, vocab_size=VOCABULARY, **OWN[family])
        model = AutoModelForCausalLM.from_config(config).eval()
    model.generation_config.eos_token_id = None
    return model


@pytest.mark.parametrize("left", slow_but([0, 4], 4))
@pytest.mark.parametrize("family", slow_but(OWN, "falcon"))
def test_generation_gives_the_numbers_of_one_pass(family: str, left: int) -> None:
    model, given = model_of(family), prompt(left)
    unwatched = generate(model, given)
    with sinkscope.watch(model) as seen:
        written = generate(model, given)
    assert torch.equal(unwatched, written)
    assert not seen.left_out
    assert_same(seen.run(), in_one_pass(model, written, given), atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("family", slow_but(OWN, "falcon"))
def test_more_than_64_tokens_are_joined(family: str) -> None:
    """The column sums of the first 64 queries end in the middle of a pass, behind another one."""
    model, ids = model_of(family), torch.randint(3, VOCABULARY, (2, 90), generator=torch.Generator().manual_seed(2))
    cache = DynamicCache()
    with torch.no_grad(), sinkscope.watch(model) as seen:
        for piece in ids.split([30, 50, 1, 1, 8], 1):
            model(piece, **{CACHE: cache})
    assert not seen.left_out
    assert_same(seen.run(), sinkscope.scan(model, data=ids, self_check=False), atol=2e-5)


def written_by_hand(model: Any, ids: Tensor) -> Any:
    """Watches a prompt of 12 tokens and steps over the others, as `generate` makes them."""
    cache = DynamicCache()
    with torch.no_grad(), sinkscope.watch(model) as seen:
        for piece in ids.split([12, *[1] * (ids.shape[1] - 12)], 1):
            model(piece, **{CACHE: cache})
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("family", slow_but(OWN, "falcon"))
def test_a_sequence_that_has_ended_is_cut(family: str) -> None:
    """`generate` goes on with padding behind a sequence's last token while others of its batch are written."""
    model, last = model_of(family), 7
    model.generation_config.eos_token_id = last
    ids = torch.randint(8, VOCABULARY, (2, 30), generator=torch.Generator().manual_seed(4))
    ids[1, 20], ids[1, 21:] = last, 0
    mask = torch.ones_like(ids)
    mask[1, 21:] = 0
    seen = written_by_hand(model, ids)
    one = sinkscope.scan(model, data={"input_ids": ids, "attention_mask": mask}, self_check=False)
    assert_same(seen.run(), one, atol=2e-5)


def test_a_text_that_goes_on_behind_its_end_is_told() -> None:
    """The sums have left out what came behind, and cannot know that it was text."""
    model, last = model_of("bloom"), 7
    model.generation_config.eos_token_id = last
    ids = torch.randint(8, VOCABULARY, (2, 30), generator=torch.Generator().manual_seed(4))
    ids[1, 20] = last
    with pytest.raises(SinkscopeError, match="goes on behind a token that ends texts"):
        written_by_hand(model, ids).run()


@pytest.mark.parametrize("left", slow_but([0, 4], 4))
@pytest.mark.parametrize("family", slow_but(OWN, "bloom"))
def test_beams_go_on_with_the_sequences_that_were_chosen(family: str, left: int) -> None:
    """Every beam of the last step is a sequence; the ids say which."""
    model, given = model_of(family), prompt(left)
    with sinkscope.watch(model) as seen:
        generate(model, given, num_beams=3, max_new_tokens=8, min_new_tokens=8)
    assert not seen.left_out
    (heap,) = seen._heaps.values()
    (kind,) = heap.kinds.values()
    rows = [torch.from_numpy(row) for row in kind.ids]
    assert len(rows) == 6
    data = {
        "input_ids": torch.nn.utils.rnn.pad_sequence(rows, batch_first=True),
        "attention_mask": torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True),
    }
    assert_same(seen.run(), sinkscope.scan(model, data=data, self_check=False), atol=2e-5)


def test_another_text_is_read_over_all_steps() -> None:
    """T5's cross-attention and its decoder, whose bias grows with the cache."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = T5Config(
            d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, vocab_size=VOCABULARY, decoder_start_token_id=1,
            pad_token_id=0, feed_forward_proj="relu", eos_token_id=None,
        )  # fmt: skip
        model = T5ForConditionalGeneration(config).eval()
    given = prompt()
    torch.manual_seed(0)
    with sinkscope.watch(model) as seen:
        written = generate(model, given, do_sample=True)
    with torch.no_grad(), sinkscope.watch(model) as one:
        model(**given, decoder_input_ids=written[:, :-1], use_cache=False)
    run = seen.run()
    assert not seen.left_out
    assert set(run.heads["stream"]) == {"encoder", "decoder", "cross"}
    assert_same(run, one.run(), atol=2e-5, tables=("heads", "layers"))  # curves end with the encoder's text or not


@pytest.mark.parametrize("left", slow_but([0, 4], 4))
@pytest.mark.parametrize("family", slow_but(OWN, "bloom"))
def test_a_static_cache_is_read_without_its_empty_places(family: str, left: int) -> None:
    """`generate` makes masks over the whole cache of some models, of 2 axes or of 4: the maps show the padding."""
    if family == "gpt_neo":
        pytest.skip("its local layers then see the cache's empty places in place of its keys")
    model, given = model_of(family), prompt(left)
    try:
        unwatched = generate(model, given, cache_implementation="static")
    except (ValueError, RuntimeError) as error:
        pytest.skip(f"{family} takes no static cache: {error}")
    if not torch.equal(unwatched, generate(model, given)):
        pytest.skip(f"{family} computes something else over a static cache")
    with sinkscope.watch(model) as seen:
        written = generate(model, given, cache_implementation="static")
    assert torch.equal(unwatched, written)
    assert not seen.left_out
    assert_same(seen.run(), in_one_pass(model, written, given), atol=2e-5)


def test_a_static_cache_may_be_emptied_and_filled_again() -> None:
    """Its tensors are then written anew: what was read of them is kept apart."""
    model, ids = model_of("xglm"), prompt()["input_ids"]
    cache = StaticCache(config=model.config, max_cache_len=16)
    with torch.no_grad(), sinkscope.watch(model) as seen:
        for text in (ids, ids.flip(1)):
            cache.reset()
            for piece in text.split([9, 1, 2], 1):
                model(piece, **{CACHE: cache})
        cache.reset()
    assert not seen.left_out
    assert_same(seen.run(), sinkscope.scan(model, data=torch.cat([ids, ids.flip(1)]), self_check=False), atol=2e-5)


def test_a_sequence_without_a_token_in_the_first_pass_is_told() -> None:
    model, ids = model_of("xglm"), prompt()["input_ids"]
    mask = torch.ones(2, 1, 12, 12).tril()
    mask[1, :, :, :6] = 0
    mask = (1 - mask) * torch.finfo(torch.float32).min
    cache = DynamicCache()
    with torch.no_grad(), sinkscope.watch(model) as seen:
        for start, stop in ((0, 5), (5, 12)):
            model(ids[:, start:stop], attention_mask=mask[:, :, start:stop, :stop], **{CACHE: cache})
    with pytest.raises(SinkscopeError, match="has no token in the first pass"):
        seen.run()


def masked_by_hand(model: Any, ids: Tensor, mask: Tensor, first: Tensor | None) -> Any:
    """Watches a prompt of 12 tokens under the mask `first`, and steps over the others under `mask`."""
    cache = DynamicCache()
    with torch.no_grad(), sinkscope.watch(model) as seen:
        model(ids[:, :12], attention_mask=first, **{CACHE: cache})
        for length in range(12, ids.shape[1]):
            model(ids[:, length : length + 1], attention_mask=mask[:, : length + 1], **{CACHE: cache})
    return seen


def test_the_end_of_a_mask_counts_where_another_sequence_ends_by_its_last_token() -> None:
    model = model_of("falcon")
    model.generation_config.eos_token_id = 7
    ids = torch.randint(8, VOCABULARY, (3, 30), generator=torch.Generator().manual_seed(4))
    ids[0, 18], ids[0, 19:] = 7, 0
    given = torch.ones_like(ids)
    given[1, 21:] = 0
    seen = masked_by_hand(model, ids, given, given[:, :12])
    mask = given.clone()
    mask[0, 19:] = 0
    one = sinkscope.scan(model, data={"input_ids": ids, "attention_mask": mask}, self_check=False)
    assert_same(seen.run(), one, atol=2e-5)


@pytest.mark.parametrize("at", slow_but([slice(21, None), slice(4)], slice(21, None)))
def test_padding_that_the_first_pass_does_not_tell_is_told(at: slice) -> None:
    """The sums have the queries there, and the attention that these give."""
    ids = torch.randint(8, VOCABULARY, (2, 30), generator=torch.Generator().manual_seed(4))
    mask = torch.ones_like(ids)
    mask[1, at] = 0
    with pytest.raises(SinkscopeError, match="has padding that its first pass does not tell"):
        masked_by_hand(model_of("bloom"), ids, mask, None).run()


def test_sequences_that_a_cache_repeats_are_told() -> None:
    model, ids, cache = model_of("bloom"), prompt()["input_ids"], DynamicCache()
    with torch.no_grad(), sinkscope.watch(model) as seen:
        model(ids, **{CACHE: cache})
        cache.batch_repeat_interleave(2)
        model(ids.repeat_interleave(2, 0)[:, :3], **{CACHE: cache})
    with pytest.raises(SinkscopeError, match="holds 4 sequences after 2"):
        seen.run()


def test_another_text_of_as_many_tokens_is_not_cut_where_a_sequence_has_ended() -> None:
    """LED's cross-attention, in its own code, over 20 steps and the 20 tokens of its encoder."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = LEDConfig(
            d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4,
            encoder_ffn_dim=48, decoder_ffn_dim=48, attention_window=4, max_encoder_position_embeddings=32,
            max_decoder_position_embeddings=32, vocab_size=VOCABULARY, pad_token_id=0, decoder_start_token_id=1,
        )  # fmt: skip
        model = LEDForConditionalGeneration(config).eval()
    model.generation_config.eos_token_id = 7
    text, ids = torch.randint(8, VOCABULARY, (2, 2, 20), generator=torch.Generator().manual_seed(4))
    ids[1, 12], ids[1, 13:] = 7, 0
    mask = torch.ones_like(ids)
    mask[1, 13:] = 0
    cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
    with torch.no_grad(), sinkscope.watch(model) as seen:
        given = {"encoder_outputs": model.get_encoder()(text)}
        for piece in ids.split(1, 1):
            model(decoder_input_ids=piece, **{CACHE: cache}, **given)
    with torch.no_grad(), sinkscope.watch(model) as one:
        model(input_ids=text, decoder_input_ids=ids, decoder_attention_mask=mask, use_cache=False)
    assert_same(seen.run(), one.run(), atol=1e-4, tables=("heads", "layers"))


def test_tokens_that_a_cache_took_back_are_told() -> None:
    model, ids, cache = model_of("bloom"), prompt()["input_ids"], DynamicCache()
    with torch.no_grad(), sinkscope.watch(model) as seen:
        model(ids, **{CACHE: cache})
        cache.crop(-4)
        model(ids[:, 8:], **{CACHE: cache})
    with pytest.raises(SinkscopeError, match="computes attention in its own code, of tokens that its cache took back"):
        seen.run()


def test_keys_that_changed_in_the_cache_are_told() -> None:
    model, ids, cache = model_of("bloom"), prompt()["input_ids"], DynamicCache()
    with torch.no_grad(), sinkscope.watch(model) as seen:
        model(ids, **{CACHE: cache})
        cache.layers[0].keys[:, :, 2] += 1
        model(ids[:, :1], **{CACHE: cache})
    with pytest.raises(SinkscopeError, match="over a cache that changed keys or values"):
        seen.run()


@pytest.mark.parametrize(("family", "told_later"), [("bloom", False), ("bloom", True), ("llama", False)])
def test_padding_behind_a_prompt_is_told(family: str, told_later: bool) -> None:
    model, ids, cache = tiny(family) if family == "llama" else model_of(family), prompt()["input_ids"], DynamicCache()
    mask = torch.ones_like(ids)
    mask[1, 9:] = 0
    with torch.no_grad(), sinkscope.watch(model) as seen:
        model(ids, **{CACHE: cache}, attention_mask=mask)
        later = torch.cat([mask, mask[:, :1]], 1) if told_later else None
        model(ids[:, :1], **{CACHE: cache}, attention_mask=later)
    with pytest.raises(SinkscopeError, match="behind padding, which is not read: pad prompts on the left"):
        seen.run()


@pytest.mark.parametrize("logits", [True, False])
def test_rows_of_a_map_in_pieces_are_its_rows(logits: bool) -> None:
    """`following`, held against the map as a whole: causal, with a window, 100 queries in pieces of any size."""
    scores = torch.randn(2, 3, 100, 100, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    hidden = torch.ones(100, 100, dtype=torch.bool).triu(1) | torch.ones(100, 100, dtype=torch.bool).tril(-40)
    scores = scores.masked_fill(hidden, -1e9)
    shares = scores.softmax(-1)
    whole = map_rows(AttentionMap(shares, scores if logits else None)).sums()
    pieces, start = [], 0
    for size in (1, 30, 2, 31, 7, 29):
        rows, keys = slice(start, start + size), start + size
        seen = AttentionMap(shares[:, :, rows, :keys], scores[:, :, rows, :keys] if logits else None)
        pieces.append(map_rows(seen, start))
        start = keys
    joined = following([following(pieces[:3]), *pieces[3:]]).sums()
    for name, value in vars(whole).items():
        if isinstance(value, Tensor):
            np.testing.assert_allclose(getattr(joined, name).numpy(), value.numpy(), atol=1e-12, err_msg=name)
        else:
            assert getattr(joined, name) == value


class LastOfAll(nn.Module):
    """The last four positions read all positions up to their own, as in Perceiver AR."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (part.unflatten(2, (2, 8)).transpose(1, 2) for part in self.qkv(x).split(16, 2))
        seen = torch.ones(4, x.shape[1], dtype=torch.bool).tril(x.shape[1] - 4)
        written = nn.functional.scaled_dot_product_attention(query[:, :, -4:], key, value, attn_mask=seen)
        return written.transpose(1, 2).flatten(2)


def test_keys_that_a_pass_was_given_are_those_of_no_cache() -> None:
    x = torch.randn(2, 18, 16, generator=torch.Generator().manual_seed(5))
    model = LastOfAll()
    with torch.no_grad(), sinkscope.watch(model) as seen:
        model(x)
    run = seen.run()
    assert not seen.left_out
    assert len(run.heads) == 2
