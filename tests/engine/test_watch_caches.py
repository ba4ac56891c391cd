"""sinkscope.watch over caches of keys and values: steps are joined into what one pass over all tokens gives."""

from __future__ import annotations

import gc
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from models import VOCABULARY
from same_runs import assert_same
from tiers import slow_but
from torch import Tensor, nn
from torch._C import _len_torch_function_stack
from transformers import AttentionInterface, DynamicCache, GenerationConfig, StoppingCriteria, StoppingCriteriaList
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from writers import CACHE, NEW, generate, in_one_pass, prompt, writer

import sinkscope
from sinkscope import SinkscopeError
from sinkscope.capture import rows, shelf
from sinkscope.capture.rows import Rows
from sinkscope.capture.steps import Steps

pytestmark = pytest.mark.filterwarnings("ignore:sinkscope. :UserWarning")


@pytest.mark.parametrize("left", slow_but([0, 4], 4))
@pytest.mark.parametrize("cache", slow_but(["dynamic", "static"], "dynamic"))
@pytest.mark.parametrize("family", slow_but(["llama", "gemma3", "mistral", "gpt2", "gpt_oss"], "gemma3"))
def test_generation_gives_the_numbers_of_one_pass(family: str, cache: str, left: int) -> None:
    if cache == "static" and family in ("gpt2", "gpt_oss"):
        pytest.skip("the same code as for the others")
    model, given = writer(family), prompt(left)
    settings = {} if cache == "dynamic" else {"cache_implementation": cache}
    unwatched = generate(model, given, **settings)
    with sinkscope.watch(model) as seen:
        written = generate(model, given, **settings)
    assert torch.equal(unwatched, written)
    run = seen.run()
    assert_same(run, in_one_pass(model, written, given))
    assert not run.summary.warnings
    assert run.manifest.data[0].seq_len == 12 + NEW - 1


@pytest.mark.parametrize("cache", slow_but(["dynamic", "static"], "dynamic"))
@pytest.mark.parametrize("chunk", [8, 16])  # of fewer tokens than the prompt, and of more
def test_chunks_end_while_a_model_writes(chunk: int, cache: str) -> None:
    """The first query of a chunk sees none of the keys that its cache holds."""
    experts = {"num_local_experts": 2, "intermediate_size_mlp": 48}
    model, given = writer("llama4_text", attention_chunk_size=chunk, head_dim=12, **experts), prompt()
    settings = {} if cache == "dynamic" else {"cache_implementation": cache}
    with sinkscope.watch(model) as seen:
        written = generate(model, given, **settings)
    assert written.shape[1] > 17
    assert_same(seen.run(), in_one_pass(model, written, given))
    assert not seen.left_out


@pytest.mark.parametrize("left", slow_but([0, 4], 4))
def test_a_sequence_is_measured_until_it_is_long_enough(left: int) -> None:
    """What was kept of it goes once it has so many positions, though the model writes on; a prompt is read whole."""
    model, given = writer("llama"), prompt(left)
    unwatched = generate(model, given)
    with sinkscope.watch(model, until=16) as seen:
        written = generate(model, given)
        assert not any(joined for _, joined, _ in seen._follower._open.values())
    assert torch.equal(unwatched, written)
    assert not seen.left_out
    assert_same(seen.run(), in_one_pass(model, written[:, :17], given))
    with sinkscope.watch(model, until=5) as seen:
        generate(model, given)
    assert seen.run().manifest.data[0].seq_len == 12
    with pytest.raises(SinkscopeError, match="until=1: a whole number from 2 on"):
        sinkscope.watch(model, until=1)


@pytest.mark.parametrize("in_memory", [shelf.IN_MEMORY, 0], ids=["memory", "file"])
@pytest.mark.parametrize("left", slow_but([0, 4], 0))
@pytest.mark.parametrize("family", slow_but(["llama", "gpt2", "gpt_oss"], "llama"))
def test_the_rows_of_steps_are_put_into_few_pieces_of_memory(
    family: str, left: int, in_memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thousands of small ones between the growing tensors of a cache left gaps of a megabyte a step. What is more than
    a part of memory is in a file."""
    monkeypatch.setattr(rows, "TOGETHER", 5)
    monkeypatch.setattr(shelf, "IN_MEMORY", in_memory)
    model, given = writer(family), prompt(left)
    with sinkscope.watch(model) as seen:
        written = generate(model, given)
        ((_, open_one, _),) = seen._follower._open.values()
        assert open_one is not None
        every = [rows for site in open_one._sites.values() for rows in vars(site).values() if isinstance(rows, Rows)]
        assert every
        for kept in every:
            pieces = {piece.untyped_storage().data_ptr() for piece in kept.pieces or ()}
            assert len(pieces) <= 3 + NEW // 5, "the prompt, the first step, and tables"
    assert_same(seen.run(), in_one_pass(model, written, given))


def test_a_step_that_was_interrupted_while_it_was_read_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C between two attention calls of a step, in our own share of it."""
    model, calls = writer("llama"), iter(range(100))
    plain = Steps.add

    def add(steps: Steps, *given: Any) -> None:
        if next(calls) == 2 * model.config.num_hidden_layers + 1:
            raise KeyboardInterrupt
        plain(steps, *given)

    monkeypatch.setattr(Steps, "add", add)
    with pytest.raises(KeyboardInterrupt), sinkscope.watch(model) as seen:
        generate(model, prompt())
    assert seen.left_out == ["a step was interrupted while it was read: its sequences were left out"]


def test_layers_with_and_without_a_window_whose_caches_dropped_the_same_keys() -> None:
    """Each kind of layer by itself is read; so are both together. The window hides keys in the prompt alone."""
    model = writer("gemma3", sliding_window=10)
    assert len({*model.config.layer_types}) == 2
    ids, kept = prompt()["input_ids"], [0, *range(8, 12)]
    cache = DynamicCache()
    with torch.no_grad(), sinkscope.watch(model) as seen:
        model(ids, **{CACHE: cache})
        for layer in cache.layers:
            layer.keys, layer.values = layer.keys[:, :, kept], layer.values[:, :, kept]
        for place in range(12, 15):
            model(ids[:, :1], **{CACHE: cache}, position_ids=torch.full((2, 1), place))
    assert not seen.left_out
    assert seen.run().manifest.self_check.status == "passed"


def test_hidden_states_that_a_program_writes_into_after_a_pass_are_not_told_as_written() -> None:
    """A large tensor stays where it is until the sequence ends: what is not known any more is empty."""
    model = writer("llama")
    ids = torch.randint(3, VOCABULARY, (1, 2 * tokens_of(model)), generator=torch.Generator().manual_seed(1))
    runs = []
    for write in (False, True):
        with torch.no_grad(), sinkscope.watch(model) as seen:
            states = model(ids, output_hidden_states=True).hidden_states
            if write:
                states[1].mul_(0.01)
        runs.append(seen.run())
    before, after = (run.layers["norm_first"].to_numpy() for run in runs)
    assert np.isnan(after[1])
    np.testing.assert_array_equal(np.delete(after, 1), np.delete(before, 1))


def tokens_of(model: Any) -> int:
    """So many tokens have hidden states that are not small."""
    return int(rows.SMALL // (4 * model.config.hidden_size))


def test_tokens_that_were_taken_back_do_not_make_a_sequence_long() -> None:
    """As of a draft that the model does not keep, where somebody slices the cache: the next pass shows it."""
    model, ids = writer("llama"), prompt()["input_ids"]
    cache = DynamicCache()
    with torch.no_grad(), sinkscope.watch(model, until=10) as seen:
        model(ids[:, :6], **{CACHE: cache})
        model(ids[:, -6:], **{CACHE: cache})
        for layer in cache.layers:
            layer.keys, layer.values = layer.keys[:, :, :8], layer.values[:, :, :8]
        kept = torch.cat([ids[:, :6], ids[:, -6:-4]], 1)
        for token in ids[:, 1:5].split(1, 1):
            model(token, **{CACHE: cache})
            kept = torch.cat([kept, token], 1)[:, :10]
        assert seen.sequences == 2
    assert_same(seen.run(), sinkscope.scan(model, data=kept, self_check=False))


def test_weights_that_change_after_a_generation_are_not_its_own() -> None:
    """It is measured when the next pass begins, or a label."""
    model, given = writer("llama"), prompt()
    with torch.no_grad(), sinkscope.watch(model) as seen:
        expected = in_one_pass(model, generate(model, given), given)
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[:, 0] *= 3
        seen.label("changed")
    assert_same(seen.run(), expected)


@pytest.mark.slow
def test_steps_of_a_loop_of_ones_own_are_joined() -> None:
    """A prefill in two pieces, then one token at a time, over a cache that the caller made."""
    model, given = writer("llama"), prompt()
    ids, cache = given["input_ids"], DynamicCache()
    with torch.no_grad(), sinkscope.watch(model) as seen:
        for piece in (ids[:, :5], ids[:, 5:10], ids[:, 10:11], ids[:, 11:]):
            model(piece, **{CACHE: cache})
    assert_same(seen.run(), sinkscope.scan(model, data=ids, self_check=False))


@pytest.mark.parametrize("sizes", [(12, 3, 1, 4), pytest.param((5, 1, 4), marks=pytest.mark.slow)])
def test_kv_heads_may_be_repeated_in_some_passes_alone(sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers repeats them for torch's attention under a mask, which a pass of several tokens over a cache has.
    Behind an attention function of the user's own, torch's calls are all that is heard."""
    masked = list[bool]()

    def own(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **given: Any) -> Any:
        masked.append(mask is not None)
        return sdpa_attention_forward(module, query, key, value, mask, **given)

    monkeypatch.setitem(AttentionInterface._global_mapping, "sdpa", own)
    model, cache = writer("llama"), DynamicCache()
    ids = prompt()["input_ids"].repeat(1, 2)[:, : sum(sizes)]
    with torch.no_grad(), sinkscope.watch(model) as seen:
        for piece in ids.split(list(sizes), 1):
            model(piece, **{CACHE: cache})
    monkeypatch.undo()
    assert set(masked) == {True, False}
    assert not seen.left_out
    assert_same(seen.run(), sinkscope.scan(model, data=ids, self_check=False))


def test_two_caches_in_turn_are_two_sequences() -> None:
    model, ids = writer("llama"), prompt()["input_ids"]
    caches = DynamicCache(), DynamicCache()
    with torch.no_grad(), sinkscope.watch(model) as seen:
        for start in range(0, 12, 4):
            for row, cache in enumerate(caches):
                model(ids[row : row + 1, start : start + 4], **{CACHE: cache})
        assert seen.sequences == 0  # both go on
    assert_same(seen.run(), sinkscope.scan(model, data=ids, self_check=False))


def test_a_cache_that_died_is_measured_before_the_block_ends() -> None:
    model, given = writer("llama"), prompt()
    with sinkscope.watch(model) as seen:
        for _ in range(3):
            generate(model, given)
        assert seen.sequences == 4
    assert seen.sequences == 6


def test_a_cache_filled_outside_is_refused() -> None:
    model, ids, cache = writer("llama"), prompt()["input_ids"], DynamicCache()
    with torch.no_grad():
        model(ids, **{CACHE: cache})
        with sinkscope.watch(model) as seen:
            model(ids[:, :1], **{CACHE: cache})
    with pytest.raises(SinkscopeError, match="filled outside the watch"):
        seen.run()


def test_an_encoder_decoder_writes_with_all_three_kinds_of_attention() -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = T5Config(
            d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, vocab_size=VOCABULARY, decoder_start_token_id=1,
            pad_token_id=0, feed_forward_proj="relu",
        )  # fmt: skip
        model = T5ForConditionalGeneration(config).eval()
    ids = prompt()["input_ids"]
    with torch.no_grad(), sinkscope.watch(model) as seen:
        model(input_ids=ids, decoder_input_ids=ids[:, :8], use_cache=False)
    run = seen.run()
    assert set(run.heads["stream"]) == {"encoder", "decoder", "cross"}
    assert np.isfinite(run.heads["bos_mass"]).all()


@pytest.mark.slow
def test_a_sequence_ends_with_its_text_while_others_go_on() -> None:
    """The second row's padding after its end-of-text token is no text, though the model attends to it."""
    model, given = writer("llama"), prompt()
    free = generate(model, given)
    end = int(free[1, 18])
    assert end not in free[0]
    assert end not in free[1, 12:18]
    model.generation_config.eos_token_id = end
    with sinkscope.watch(model) as seen:
        written = generate(model, given, min_new_tokens=1)
    assert torch.equal(written[1, 19:], torch.zeros_like(written[1, 19:]))
    mask = torch.ones_like(written[:, :-1])
    mask[1, 19:] = 0
    one = sinkscope.scan(model, data={"input_ids": written[:, :-1], "attention_mask": mask}, self_check=False)
    assert_same(seen.run(), one)


def by_argument(model: Any, given: dict[str, Tensor], end: int) -> Tensor:
    return generate(model, given, min_new_tokens=1, eos_token_id=end)


def by_config(model: Any, given: dict[str, Tensor], end: int) -> Tensor:
    config = GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=end, pad_token_id=0)
    written: Tensor = model.generate(**given, generation_config=config)
    return written


class Stops(StoppingCriteria):
    """Ends a text by a token, as `stop_strings` do by words."""

    def __init__(self, end: int) -> None:
        self.end = end

    def __call__(self, input_ids: Tensor, *_: Any, **__: Any) -> Tensor:
        return input_ids[:, -1] == self.end


def by_criterion(model: Any, given: dict[str, Tensor], end: int) -> Tensor:
    """The token that ends a text stands in none; it makes what is written behind the end padding."""
    stops = StoppingCriteriaList([Stops(end)])
    written = generate(model, given, min_new_tokens=1, eos_token_id=3, stopping_criteria=stops)
    assert 3 not in written[:, 12:]
    return written


@pytest.mark.parametrize("write", slow_but([by_argument, by_config, by_criterion], by_argument, by_criterion))
def test_a_text_ends_by_what_its_generation_was_told(write: Callable[..., Tensor]) -> None:
    """Not by the model's own token, which stands in the middle of the first row."""
    model, given = writer("llama"), prompt()
    free = generate(model, given)
    own, end = int(free[0, 15]), int(free[1, 18])
    model.generation_config.eos_token_id = own
    with sinkscope.watch(model) as seen:
        written = write(model, given, end)
    assert own in written[0, 13:-2]
    assert end not in written[0]
    assert (written[1, 18] == end) & (written[1, 19:] == 0).all()
    mask = torch.ones_like(written[:, :-1])
    mask[1, 19:] = 0
    one = sinkscope.scan(model, data={"input_ids": written[:, :-1], "attention_mask": mask}, self_check=False)
    assert_same(seen.run(), one)


@pytest.mark.slow
def test_half_precision_is_joined_too() -> None:
    model, given = writer("llama").to(torch.bfloat16), prompt()
    with sinkscope.watch(model) as seen:
        written = generate(model, given)
    one = in_one_pass(model, written, given)
    np.testing.assert_allclose(seen.run().heads["bos_mass"], one.heads["bos_mass"], atol=0.02)


@pytest.mark.slow
def test_steps_hold_what_grows_with_the_tokens_alone() -> None:
    """Neither the keys nor the mask that each step was given are kept: those of all steps together grow with T^2."""
    model, ids, cache = writer("llama"), prompt()["input_ids"], DynamicCache()
    held = []
    with torch.no_grad(), sinkscope.watch(model):
        model(ids, **{CACHE: cache}, attention_mask=torch.ones_like(ids))
        for step in range(1, 121):
            mask = torch.ones(2, 12 + step, dtype=torch.int64)
            model(ids[:, :1], **{CACHE: cache}, attention_mask=mask)
            if step % 40 == 0:
                held.append(_bytes_held())
    first, second = (after - before for before, after in pairwise(held))
    assert second < 1.3 * first


def _bytes_held() -> int:
    gc.collect()
    storages = [each.untyped_storage() for each in gc.get_objects() if type(each) is Tensor]
    return sum({each.data_ptr(): each.nbytes() for each in storages}.values())


def test_steps_look_at_attention_alone() -> None:
    """After a prefill and a step, modules without attention have no hook and torch calls pass by; a new sequence and
    the end of the block have them all again, or none."""
    model, ids, cache = writer("llama"), prompt()["input_ids"], DynamicCache()
    mlp, attention = model.model.layers[0].mlp, model.model.layers[0].self_attn
    modes = []
    attention.k_proj.register_forward_pre_hook(lambda *_: modes.append(_len_torch_function_stack()))
    with torch.no_grad(), sinkscope.watch(model) as seen:
        model(ids, **{CACHE: cache})
        model(ids[:, :1], **{CACHE: cache})
        assert mlp._forward_hooks
        model(ids[:, :1], **{CACHE: cache})
        assert not mlp._forward_hooks
        assert attention._forward_hooks
        model(ids, use_cache=False)
        assert mlp._forward_hooks
        model(ids[:, :1], **{CACHE: cache})
        seen.rest()
        assert not attention._forward_hooks
    assert modes == [1, 1, 0, 1, 0]
    assert not mlp._forward_pre_hooks


def test_padding_in_a_dict_of_features_is_seen() -> None:
    """As sentence-transformers hands them to its modules; each text is measured without its padding."""
    model, given = writer("llama"), prompt(left=4)

    class Features(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, features: dict[str, Tensor]) -> Tensor:
            return self.inner(**features, use_cache=False).logits

    with torch.no_grad(), sinkscope.watch(Features()) as seen:
        seen.model(given)
    np.testing.assert_allclose(
        seen.run().heads["bos_mass"], sinkscope.scan(model, data=given, self_check=False).heads["bos_mass"], atol=1e-5
    )


def test_windows_folded_into_the_batch_are_no_sequences() -> None:
    class Windows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, pixels: Tensor) -> Tensor:
            x = pixels.unflatten(1, (4, 4)).flatten(0, 1)
            return self.attention(x, x, x)[0]

    with torch.no_grad(), sinkscope.watch(Windows()) as seen:
        seen.model(torch.randn(2, 16, 8))
    with pytest.raises(SinkscopeError, match="no map of queries and keys"):
        seen.run()


@pytest.mark.parametrize("rows", [1, 2])
def test_a_conversation_over_one_cache_goes_on_behind_the_first_answer(rows: int) -> None:
    """It was cut where the first generation had stopped, for which no token ends a text."""
    model = writer("llama")
    ids, cache = torch.randint(3, VOCABULARY, (rows, 8), generator=torch.Generator().manual_seed(3)), DynamicCache()
    with torch.no_grad(), sinkscope.watch(model) as seen:
        for turn in range(3):
            given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            written = generate(model, given, eos_token_id=VOCABULARY - 1, **{CACHE: cache})
            asked = torch.randint(3, VOCABULARY, (rows, 4), generator=torch.Generator().manual_seed(turn))
            ids = torch.cat([written, asked], 1)
    assert seen.left_out == []
    assert_same(seen.run(), in_one_pass(model, written, {"attention_mask": torch.ones_like(written[:, :-1])}))


def test_a_sequence_alone_has_no_padding_behind_its_end_token() -> None:
    """What follows was taken for it where all of it is one token."""
    model, ids = writer("llama"), torch.randint(3, VOCABULARY, (1, 10), generator=torch.Generator().manual_seed(3))
    model.generation_config.eos_token_id = int(ids[0, -2])
    cache = DynamicCache()
    with torch.no_grad(), sinkscope.watch(model) as seen:
        model(ids[:, :6], **{CACHE: cache})
        for place in range(6, 10):
            model(ids[:, place : place + 1], **{CACHE: cache})
    assert_same(seen.run(), sinkscope.scan(model, data=ids, self_check=False))
