"""sinkscope.watch over caches that change between two passes: beams in another order, tokens taken back, keys dropped.

What the model saw is read naively in float64: each pass's own maps, with the tokens whose keys the cache held.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import wraps
from typing import Any

import numpy as np
import pytest
import torch
from pressed import PROMPT, WRITTEN, Press, as_seen, assert_reads, attends, every_slot, naive, overwriting, steps, text
from same_runs import assert_same
from tiers import slow_but
from torch import Tensor
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer
from writers import CACHE, generate, in_one_pass, prompt, writer

import sinkscope
from sinkscope import SinkscopeError

pytestmark = pytest.mark.filterwarnings("ignore:sinkscope. :UserWarning")


# beams


@contextmanager
def beams_read(model: Any) -> Iterator[list[Tensor]]:
    """The whole sequences of the beams that each step goes on with, as beam search itself hands them over."""
    found: list[Tensor] = []
    own = model.prepare_inputs_for_generation

    @wraps(own)
    def prepare(input_ids: Tensor, **given: Any) -> Any:
        found.append(input_ids.clone())
        return own(input_ids, **given)

    model.prepare_inputs_for_generation = prepare
    try:
        yield found
    finally:
        del model.prepare_inputs_for_generation


@pytest.mark.parametrize("left", slow_but([0, 4], 4))
@pytest.mark.parametrize("family", slow_but(["llama", "mistral", "gpt2"], "llama"))
def test_each_beam_has_the_rows_of_its_own_ancestors(family: str, left: int) -> None:
    model, given = writer(family), prompt(left)
    given = {name: each.repeat_interleave(3, 0) for name, each in given.items()}
    settings = {"num_beams": 3, "num_return_sequences": 3}
    one = {name: each[::3] for name, each in given.items()}
    unwatched = generate(model, one, **settings)
    with beams_read(model) as beams, sinkscope.watch(model) as seen:
        written = generate(model, one, **settings)
    assert torch.equal(unwatched, written)
    half, last = beams[len(beams) // 2], beams[-1]
    assert any(not bool((last[:, : half.shape[1]] == row).all(1).any()) for row in half)  # some beams were dropped
    alive = torch.nn.functional.pad(beams[-1], (0, 1))  # its last token is read by the last step
    assert_same(seen.run(), in_one_pass(model, alive, given))


def encoder_decoder() -> Any:
    from transformers import BartConfig, BartForConditionalGeneration

    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = BartConfig(
            d_model=32, encoder_layers=1, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
            encoder_ffn_dim=48, decoder_ffn_dim=48, vocab_size=97, pad_token_id=0, decoder_start_token_id=1,
            forced_eos_token_id=None,
        )  # fmt: skip
        return BartForConditionalGeneration(config).eval()


def test_an_encoder_decoders_beams_keep_their_own_text() -> None:
    model = encoder_decoder()
    ids = prompt()["input_ids"]
    with beams_read(model) as beams, sinkscope.watch(model) as seen:
        generate(model, {"input_ids": ids}, num_beams=3, do_sample=False, eos_token_id=None)
    run = seen.run()
    with torch.no_grad(), sinkscope.watch(model) as once:
        model(input_ids=ids.repeat_interleave(3, 0), decoder_input_ids=beams[-1], use_cache=False)
    expected = once.run()
    for stream in ("decoder", "cross"):
        mine, theirs = (each.heads[each.heads["stream"] == stream] for each in (run, expected))
        np.testing.assert_allclose(mine["bos_mass"], theirs["bos_mass"], atol=1e-5)
        np.testing.assert_allclose(mine["entropy"], theirs["entropy"], atol=1e-5)


def test_the_methods_of_caches_are_put_back() -> None:
    before = Cache.reorder_cache, Cache.crop
    with sinkscope.watch(writer("llama")):
        assert Cache.reorder_cache is not before[0]
    assert (Cache.reorder_cache, Cache.crop) == before


# tokens taken back


@pytest.mark.parametrize("family", slow_but(["llama", "gemma3"], "gemma3"))
def test_assisted_generation_gives_the_numbers_of_one_pass(family: str) -> None:
    """Candidates that the model turned down are no part of the sequence, also those of the last pass."""
    model, given = writer(family), {name: each[:1] for name, each in prompt().items()}
    with sinkscope.watch(model) as seen:
        written = generate(model, given, prompt_lookup_num_tokens=3)
    assert_same(seen.run(), in_one_pass(model, written, given))


def test_a_crop_takes_the_newest_tokens_back() -> None:
    model, ids, cache = writer("llama"), prompt()["input_ids"], DynamicCache()
    other = ids.flip(1)
    with torch.no_grad(), sinkscope.watch(model) as seen:
        model(ids[:, :8], **{CACHE: cache})
        model(ids[:, 8:], **{CACHE: cache})
        cache.crop(-6)  # over both passes
        model(other[:, 6:10], **{CACHE: cache})
        cache.crop(-1)
    whole = torch.cat([ids[:, :6], other[:, 6:9]], 1)
    assert_same(seen.run(), sinkscope.scan(model, data=whole, self_check=False))


@pytest.mark.parametrize("pressed", slow_but([False, True], True))
def test_a_slice_of_every_layer_takes_the_newest_tokens_back(pressed: bool) -> None:
    """So do pipelines that ask a second question over one text; keys that a press dropped before stay dropped."""
    model, ids, other = writer("llama"), text(), text().flip(1)
    press = Press(model, lambda _, keys: keys.norm(dim=-1).topk(6, -1).indices)

    def asked(answers: list[Tensor]) -> None:
        cache = DynamicCache()
        places = torch.arange(PROMPT + 4)[None]
        with press.pressing() if pressed else nullcontext():
            model(ids[:, :PROMPT], **{CACHE: cache})
        slots = cache.layers[0].keys.shape[2]
        for answer in answers:
            for layer in cache.layers:
                layer.keys, layer.values = layer.keys[:, :, :slots], layer.values[:, :, :slots]
            for step in range(4):
                given = {CACHE: cache, "position_ids": places[:, PROMPT + step : PROMPT + step + 1]}
                model(answer[:, step : step + 1], **given)

    runs = []
    for answers in ([ids[:, -4:], other[:, :4]], [other[:, :4]]):
        with torch.no_grad(), sinkscope.watch(model) as seen:
            asked(answers)
        runs.append(seen.run())
        assert not seen.left_out
    assert runs[0].manifest.data[0].seq_len == PROMPT + 4
    assert_same(*runs)


def test_a_slice_of_some_layers_is_refused() -> None:
    model, ids, cache = writer("llama"), text(), DynamicCache()
    with torch.no_grad(), sinkscope.watch(model) as seen:
        model(ids[:, :PROMPT], **{CACHE: cache})
        model(ids[:, PROMPT : PROMPT + 1], **{CACHE: cache})
        layer = cache.layers[-1]
        layer.keys, layer.values = layer.keys[:, :, :-2], layer.values[:, :, :-2]
        model(ids[:, PROMPT + 1 : PROMPT + 2], **{CACHE: cache})
    with pytest.raises(SinkscopeError, match="lost its newest tokens") as refused:
        seen.run()
    assert "\n" not in str(refused.value)


# keys dropped


class StreamingLayer(DynamicLayer):
    """Keeps the first `sinks` keys and the newest `window`, as StreamingLLM does."""

    def __init__(self, sinks: int = 2, window: int = 8) -> None:
        super().__init__()
        self.sinks, self.window, self.read = sinks, window, 0

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        whole = super().update(key_states, value_states)
        self.read += key_states.shape[2]
        self.keys, self.values = (self.shortened(each) for each in whole)
        return whole

    def shortened(self, rows: Tensor) -> Tensor:
        if rows.shape[2] <= self.sinks + self.window:
            return rows
        return torch.cat([rows[:, :, : self.sinks], rows[:, :, -self.window :]], 2)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return super().get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        return self.read


def streaming(sinks: int = 2, window: int = 8) -> Cache:
    return Cache(layer_class_to_replicate=lambda: StreamingLayer(sinks, window))


def test_sinks_and_a_window_are_read_as_the_model_saw_them() -> None:
    model, ids = writer("llama"), text()
    with sinkscope.watch(model) as seen:
        steps(model, ids, streaming())
    run = seen.run()

    def held(layer: int, query: int) -> Tensor:
        return torch.tensor([0, 1, *range(query - 8, query + 1)])[None, None].expand(2, 1, -1)

    assert_reads(run, as_seen(model, ids, streaming(), held))
    assert (run.heads["first_visible"] == 1).all()
    assert not run.summary.warnings


@pytest.mark.slow
def test_a_cache_that_drops_the_oldest_loses_the_first_token() -> None:
    """Without sinks it is a window of 9 tokens, though no part of the model says so."""
    model, ids = writer("llama"), text()
    with sinkscope.watch(model) as seen:
        steps(model, ids, streaming(sinks=0))
    run = seen.run()

    def held(layer: int, query: int) -> Tensor:
        return torch.arange(query - 8, query + 1)[None, None].expand(2, 1, -1)

    assert_reads(run, as_seen(model, ids, streaming(sinks=0), held))
    np.testing.assert_allclose(run.heads["first_visible"], (PROMPT - 1) / (PROMPT + WRITTEN - 1), rtol=1e-6)


@pytest.mark.parametrize("lost", slow_but(["lowest", "the first token", "the newest token"], "lowest"))
def test_a_press_is_read_as_the_model_saw_it(lost: str) -> None:
    """Half of the prompt's keys stay, other ones in each sequence, layer and KV head, in the order of their scores."""
    model, ids = writer("llama"), text()

    def choose(layer: int, keys: Tensor) -> Tensor:
        scores = keys.norm(dim=-1)
        scores[..., -2:] = torch.tensor([1e3, 2e3])  # the newest stay
        scores[..., 0] = -1.0 if lost == "the first token" else scores[..., 0]
        scores[..., -1] = -1.0 if lost == "the newest token" else scores[..., -1]
        return scores.topk(6, -1).indices

    press = Press(model, choose)
    with press.pressing(), sinkscope.watch(model) as seen:
        steps(model, ids, DynamicCache())
    run, kept = seen.run(), press.kept
    assert not torch.equal(kept[0], kept[1])
    assert not torch.equal(kept[0][:, 0], kept[0][:, 1])

    def held(layer: int, query: int) -> Tensor:
        new = torch.arange(PROMPT, query + 1).expand(2, kept[layer].shape[1], -1)
        return torch.cat([kept[layer], new], 2)

    with Press(model, lambda layer, _: kept[layer]).pressing():
        maps = as_seen(model, ids, DynamicCache(), held)
    assert_reads(run, maps)
    if lost == "the first token":
        np.testing.assert_allclose(run.heads["first_visible"], (PROMPT - 1) / (PROMPT + WRITTEN - 1), rtol=1e-6)


def test_a_cache_that_changes_keys_is_refused() -> None:
    """A merged key is no token's."""
    model, ids, cache = writer("llama"), text(), DynamicCache()
    with torch.no_grad(), sinkscope.watch(model) as seen:
        model(ids[:, :PROMPT], **{CACHE: cache})
        for layer in cache.layers:
            layer.keys = torch.cat([layer.keys[:, :, :3], layer.keys[:, :, 3:5].mean(2, True), layer.keys[:, :, 5:]], 2)
            layer.values = torch.cat([layer.values[:, :, :4], layer.values[:, :, 5:]], 2)
        model(ids[:, PROMPT : PROMPT + 1], **{CACHE: cache})
    with pytest.raises(SinkscopeError, match="keys or values that no token had") as refused:
        seen.run()
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("when", ["after the prefill", "after a step"])
@pytest.mark.parametrize("what", ["keys", "values"])
@pytest.mark.parametrize("pressed", slow_but([False, True], True))
@pytest.mark.parametrize(
    ("family", "dtype"), slow_but([("llama", torch.bfloat16), ("mistral", torch.float32)], ("llama", torch.bfloat16))
)
def test_a_row_overwritten_in_the_middle_is_refused(
    when: str, what: str, pressed: bool, family: str, dtype: torch.dtype
) -> None:
    """In place, as some presses do: the first and the last slot do not tell, nor do lengths."""
    model, ids, cache = writer(family).to(dtype), text(), DynamicCache()
    press = Press(model, lambda _, keys: keys.norm(dim=-1).topk(6, -1).indices)
    with torch.no_grad(), sinkscope.watch(model) as seen:
        with press.pressing() if pressed else nullcontext():
            model(ids[:, :PROMPT], **{CACHE: cache})
        for step in range(PROMPT, PROMPT + 3):
            if (step == PROMPT) == (when == "after the prefill"):
                row = getattr(cache.layers[1], what)
                row[1, 0, 4] = row[1, 0, 4] * 1.01
            model(ids[:, step : step + 1], **{CACHE: cache}, position_ids=torch.tensor([[step]]))
    with pytest.raises(SinkscopeError, match=r"layers\.1\.self_attn holds keys or values that no token had") as refused:
        seen.run()
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "change", [torch.Tensor.neg_, lambda keys: keys.mul_(2.0**16), lambda keys: keys.copy_(keys.flip(1))]
)
def test_a_change_of_all_keys_is_refused(change: Any) -> None:
    """Another sign, another scale, other heads: the sum of all bits of a slot may be the same after it."""
    model, ids, cache = writer("llama"), text(), DynamicCache()
    with torch.no_grad(), sinkscope.watch(model) as seen:
        model(ids[:, :PROMPT], **{CACHE: cache})
        change(cache.layers[1].keys)
        model(ids[:, PROMPT : PROMPT + 1], **{CACHE: cache})
    with pytest.raises(SinkscopeError, match=r"layers\.1\.self_attn holds keys or values that no token had"):
        seen.run()


def test_what_is_written_after_the_last_pass_is_not_measured() -> None:
    model, ids, runs = writer("llama"), text(), []
    for change in (False, True):
        cache = DynamicCache()
        with torch.no_grad(), sinkscope.watch(model) as seen:
            model(ids[:, :PROMPT], **{CACHE: cache})
            for layer in cache.layers if change else ():
                layer.keys.mul_(1.001)
        runs.append(seen.run())
    assert_same(*runs)


def lost_keys(draw: int = 0) -> dict[int, Tensor]:
    """The slots that each head lost, (B, G, PROMPT) of two layers: other numbers in each."""
    seeded = torch.Generator().manual_seed(draw)
    return {layer: torch.rand(2, 2, PROMPT, generator=seeded) < 0.5 for layer in (0, 1)}


@pytest.mark.parametrize("family", slow_but(["llama", "mistral"], "mistral"))
def test_keys_that_a_press_overwrote_are_read_as_dropped(family: str) -> None:
    model, ids, hidden = writer(family, num_hidden_layers=2), text(), lost_keys()
    assert len({int(each.sum()) for layer in hidden.values() for each in layer.flatten(0, 1)}) > 3
    with attends(model, overwriting(hidden)):
        alone = steps(model, ids, DynamicCache())
        with sinkscope.watch(model) as seen:
            watched = steps(model, ids, DynamicCache())
    assert all(torch.equal(one.logits, other.logits) for one, other in zip(alone, watched, strict=True))
    assert not seen.left_out
    assert_reads(seen.run(), as_seen(model, ids, DynamicCache(), every_slot, attention=naive(hidden)))


def test_overwritten_keys_that_get_attention_are_refused() -> None:
    model, ids = writer("llama", num_hidden_layers=2), text()
    with attends(model, overwriting(lost_keys(), scale=1.0)), sinkscope.watch(model) as seen:
        steps(model, ids, DynamicCache())
    with pytest.raises(SinkscopeError, match="keys or values that no token had") as refused:
        seen.run()
    assert "\n" not in str(refused.value)


def test_a_second_question_may_overwrite_other_keys() -> None:
    """The first answer is sliced off every layer; the press then drops more of the text."""
    model, ids, other = writer("llama", num_hidden_layers=2), text(), text().flip(1)
    few, more = lost_keys(), {layer: each | lost_keys(1)[layer] for layer, each in lost_keys().items()}
    runs = []
    for answers in ([(ids[:, -4:], few), (other[:, :4], more)], [(other[:, :4], more)]):
        cache = DynamicCache()
        with torch.no_grad(), sinkscope.watch(model) as seen:
            model(ids[:, :PROMPT], **{CACHE: cache})
            for answer, hidden in answers:
                for layer in cache.layers:
                    layer.keys, layer.values = layer.keys[:, :, :PROMPT], layer.values[:, :, :PROMPT]
                with attends(model, overwriting(hidden)):
                    for step in range(4):
                        places = torch.tensor([[PROMPT + step]])
                        model(answer[:, step : step + 1], **{CACHE: cache}, position_ids=places)
        assert not seen.left_out
        runs.append(seen.run())
    assert runs[0].manifest.data[0].seq_len == PROMPT + 4
    assert_same(*runs)


def test_a_slice_of_overwritten_layers_alone_is_refused() -> None:
    model, ids, cache = writer("llama", num_hidden_layers=2), text(), DynamicCache()
    hidden = lost_keys()
    with torch.no_grad(), attends(model, overwriting(hidden)), sinkscope.watch(model) as seen:
        model(ids[:, :PROMPT], **{CACHE: cache})
        model(ids[:, PROMPT : PROMPT + 1], **{CACHE: cache})
        model(ids[:, PROMPT + 1 : PROMPT + 2], **{CACHE: cache})
        layer = cache.layers[1]
        layer.keys, layer.values = layer.keys[:, :, :-1], layer.values[:, :, :-1]
        model(ids[:, PROMPT + 2 : PROMPT + 3], **{CACHE: cache})
    with pytest.raises(SinkscopeError, match="lost its newest tokens"):
        seen.run()


def test_keys_overwritten_behind_a_window_are_read() -> None:
    """The prompt is longer than the window, which lets the oldest keys go between the passes."""
    model, ids, hidden = writer("mistral", num_attention_heads=8, num_key_value_heads=8), text(), {}
    layers, window = range(model.config.num_hidden_layers), model.config.sliding_window
    seeded = torch.Generator().manual_seed(0)
    for layer in layers:
        hidden[layer] = torch.rand(2, 8, window - 1, generator=seeded) < 0.5
        hidden[layer][0, 0, -2:] = True  # a head that loses its newest keys
    with torch.no_grad(), attends(model, overwriting(hidden)), sinkscope.watch(model) as seen:
        cache = DynamicCache(config=model.config)
        model(ids[:, : window + 1], **{CACHE: cache})
        model(ids[:, window + 1 : window + 2], **{CACHE: cache})
    assert not seen.left_out
    assert seen.run().manifest.data[0].seq_len == window + 2


def test_another_text_that_is_overwritten_after_the_last_pass_stays_as_it_was() -> None:
    """An encoder's keys in a cache that a later text writes into."""
    from transformers import EncoderDecoderCache

    model = encoder_decoder()
    ids, runs = text(), []
    for change in (False, True):
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        with torch.no_grad(), sinkscope.watch(model) as seen:
            model(input_ids=ids, decoder_input_ids=ids[:, :9], use_cache=True, **{CACHE: cache})
            for layer in cache.cross_attention_cache.layers if change else ():
                layer.keys.zero_()
        runs.append(seen.run())
    assert_same(*runs)


def test_a_batch_of_another_size_is_refused() -> None:
    model, ids, cache = writer("llama"), text(), DynamicCache()
    with torch.no_grad(), sinkscope.watch(model) as seen:
        model(ids[:, :PROMPT], **{CACHE: cache})
        cache.batch_repeat_interleave(2)
        model(ids[:, PROMPT : PROMPT + 1].repeat_interleave(2, 0), **{CACHE: cache})
    with pytest.raises(SinkscopeError, match="holds 4 sequences after 2") as refused:
        seen.run()
    assert "\n" not in str(refused.value)


def test_slots_that_change_places_are_told_apart() -> None:
    """The sum of the bits of all slots is the same; each key's column is another's."""
    model, ids, cache = writer("llama"), text(), DynamicCache()
    order = [0, 2, 1, *range(3, PROMPT)]
    runs = []
    for change in (False, True):
        with torch.no_grad(), sinkscope.watch(model) as seen:
            cache = DynamicCache()
            model(ids[:, :PROMPT], **{CACHE: cache})
            for layer in cache.layers if change else ():
                layer.keys, layer.values = layer.keys[:, :, order], layer.values[:, :, order]
            for step in range(PROMPT, PROMPT + 3):
                model(ids[:, step : step + 1], **{CACHE: cache}, position_ids=torch.tensor([[step]]))
        assert not seen.left_out
        runs.append(seen.run())
    assert_same(*runs)


def test_keys_that_come_back_are_refused() -> None:
    model, ids, cache = writer("llama"), text(), DynamicCache()
    with torch.no_grad(), sinkscope.watch(model) as seen:
        model(ids[:, :PROMPT], **{CACHE: cache})
        whole = [(layer.keys, layer.values) for layer in cache.layers]
        for shown, new in (([0, 5, 11], 0), ([0, 4, 5, 11], 1)):
            for layer, (keys, values) in zip(cache.layers, whole, strict=True):
                last = layer.keys.shape[2] - new
                layer.keys = torch.cat([keys[:, :, shown], layer.keys[:, :, last:]], 2)
                layer.values = torch.cat([values[:, :, shown], layer.values[:, :, last:]], 2)
            model(ids[:, PROMPT : PROMPT + 1], **{CACHE: cache})
    with pytest.raises(SinkscopeError, match="came back"):
        seen.run()
