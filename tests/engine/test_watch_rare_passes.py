"""sinkscope.watch beside passes of rare kinds: each is read rightly or left out with a line; the program goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from same_runs import assert_same
from tiers import slow_but
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import scaled_dot_product_attention
from transformers import BertConfig, BertModel, DynamicCache
from writers import CACHE, generate, in_one_pass, prompt, writer

import sinkscope
from sinkscope import SinkscopeError

pytestmark = [
    pytest.mark.filterwarnings("ignore:sinkscope. :UserWarning"),
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
]

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Attention(nn.Module):
    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.qkv, self.proj, self.attend = nn.Linear(32, 96), nn.Linear(32, 32), attend

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        mixed: Tensor = self.proj(self.attend(query, key, value).transpose(1, 2).flatten(2))
        return mixed


class Two(nn.Module):
    """Two layers of attention, on vectors; or what a mapping holds of them."""

    def __init__(self, attend: Attend = scaled_dot_product_attention) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = Attention(attend), Attention(attend)

    def forward(self, x: Any) -> Tensor:
        given = x[1] if isinstance(x, dict) else x
        after: Tensor = self.second(given + self.first(given))
        return after


def in_float64(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return ((query @ key.mT).softmax(-1, dtype=torch.float64) @ value.double()).float()


def with_score_mod(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return flex_attention(query, key, value, score_mod=lambda score, b, h, i, j: score * 0.5)  # type: ignore[return-value]


VECTORS = torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(1))


def packed(lengths: tuple[int, ...]) -> Tensor:
    return torch.cat([torch.arange(length) for length in lengths]).expand(2, -1)


@pytest.mark.parametrize("by_name", [True, False])
def test_a_row_of_several_texts_is_left_out_where_the_model_keeps_them_apart(by_name: bool) -> None:
    """Two texts would count as one sequence, most of whose queries cannot see its first token."""
    model, ids, positions = writer("llama"), prompt()["input_ids"], packed((5, 7))
    with torch.no_grad(), sinkscope.watch(model) as seen:
        if by_name:
            model(ids, position_ids=positions, use_cache=False)
        else:
            model(ids, None, positions, use_cache=False)
        assert seen.left_out[0].startswith("a row holds several texts")
        model(ids, position_ids=packed((12,)), use_cache=False)
    assert seen.run().summary.sequences == 2


def test_a_row_of_several_texts_between_which_the_model_attends_is_one_sequence() -> None:
    """transformers keeps texts apart only in a pass without a cache."""
    model, given = writer("llama"), prompt()
    with torch.no_grad(), sinkscope.watch(model) as seen:
        model(**given, position_ids=packed((5, 7)))
        model(given["input_ids"], position_ids=packed((5, 7)), **{CACHE: DynamicCache()})
    run = seen.run()
    assert (run.summary.sequences, seen.left_out) == (4, [])
    np.testing.assert_allclose(run.heads["first_visible"], 1.0)


def test_texts_of_an_encoder_are_told_apart_by_its_mask() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = BertConfig(
            vocab_size=32, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48
        )
        model = BertModel(config).eval()
    ids, positions = torch.randint(32, (2, 12)), packed((5, 7))
    text = (positions == 0).cumsum(1)
    apart = torch.where(text[:, None, :, None] == text[:, None, None, :], 0.0, -torch.inf)
    with torch.no_grad(), sinkscope.watch(model) as seen:
        model(ids, position_ids=positions)
        model(ids, attention_mask=apart, position_ids=positions)
    assert seen.run().summary.sequences == 2
    assert [line.startswith("a row holds several texts") for line in seen.left_out] == [True]


def test_a_text_that_is_written_without_a_cache_is_told_of() -> None:
    model, given = writer("llama"), prompt()
    with sinkscope.watch(model) as seen:
        generate(model, given, use_cache=False, max_new_tokens=3, min_new_tokens=3)
        with torch.no_grad():
            model(given["input_ids"].flip(0), use_cache=False)
    run = seen.run()
    assert run.summary.sequences == 8
    [told] = [line for line in run.manifest.warnings if "with all tokens of the one before" in line]
    assert told.startswith("4 sequences begin")


def test_padding_on_the_left_is_no_other_text() -> None:
    model, given = writer("llama"), prompt(4)
    positions = (given["attention_mask"].cumsum(1) - 1).clamp(min=0)
    for hidden in (0, 1):
        at = positions.masked_fill(given["attention_mask"] == 0, hidden)
        with torch.no_grad(), sinkscope.watch(model) as seen:
            model(**given, position_ids=at, use_cache=False)
        assert (seen.run().summary.sequences, seen.left_out) == (2, [])


def test_a_cache_that_is_given_by_position_is_joined() -> None:
    model, ids = writer("llama"), prompt()["input_ids"]
    cache = DynamicCache()
    with torch.no_grad(), sinkscope.watch(model) as seen:
        model(ids[:, :8], None, None, cache)
        model(ids[:, 8:], None, torch.arange(8, 12)[None], cache)
    assert_same(seen.run(), sinkscope.scan(model, data=ids, self_check=False))


def test_an_error_in_a_step_ends_its_sequences_with_the_pass_before() -> None:
    model, given = writer("llama"), prompt()
    written = generate(model, given)
    passes = 0

    def fail(*_: Any) -> None:
        nonlocal passes
        passes += 1
        if passes == 7:
            raise RuntimeError("no memory")

    with sinkscope.watch(model) as seen, pytest.raises(RuntimeError, match="no memory"):
        hook = model.model.layers[-1].register_forward_pre_hook(fail)
        generate(model, given)
    hook.remove()
    assert seen.left_out == ["a pass raised an error: its sequences are measured up to the pass before"]
    assert_same(seen.run(), in_one_pass(model, written[:, : 12 + 6], given))


def test_an_error_in_a_pass_without_a_cache_is_told() -> None:
    model = Two()
    with torch.no_grad(), sinkscope.watch(model) as seen:
        model(VECTORS)
        with model.second.proj.register_forward_pre_hook(lambda *_: 1 / 0), pytest.raises(ZeroDivisionError):
            model(VECTORS)
    assert seen.left_out == ["a pass raised an error: its sequences were left out"]
    assert seen.run().summary.sequences == 2


@pytest.mark.parametrize(
    ("model", "given", "why"),
    [
        (Two(with_score_mod), VECTORS, "score_mod"),
        (
            nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 1),
            [VECTORS[0], VECTORS[1, :5]],
            "nested tensors are not read",
        ),
    ],
    ids=["a score_mod", "nested tensors"],
)
def test_what_cannot_be_read_ends_no_program(model: nn.Module, given: Any, why: str) -> None:
    model = model.eval()
    given = torch.nested.nested_tensor(given) if isinstance(given, list) else given  # warns, so not above
    with torch.no_grad():
        unwatched = model(given)
        with sinkscope.watch(model) as seen:
            watched = model(given)
    for own, other in zip(unwatched.unbind(), watched.unbind(), strict=True):
        torch.testing.assert_close(own, other)
    assert len(seen.left_out) == 1
    assert why in seen.left_out[0]
    with pytest.raises(SinkscopeError, match=why):
        seen.run()


def test_a_pass_without_numbers_is_told_of() -> None:
    model = Two().to("meta")
    with torch.no_grad(), sinkscope.watch(model) as seen:
        model(VECTORS.to("meta"))
    assert seen.left_out == ["a pass was not read: tensors on the meta device hold no numbers"]


class Kept:
    """A cache of somebody's own, with a method of another signature than transformers'."""

    def get_seq_length(self, layer: int) -> int:
        return layer


def test_a_cache_of_another_kind_ends_no_program() -> None:
    class Model(Two):
        def forward(self, x: Any, cache: Kept) -> Tensor:
            return super().forward(x)

    model = Model()
    with torch.no_grad(), sinkscope.watch(model) as seen:
        model(VECTORS, cache=Kept())
    assert "a pass was not read: unexpected TypeError" in seen.left_out[0]


def test_a_mapping_with_other_keys_than_names_is_read() -> None:
    model = Two()
    with torch.no_grad(), sinkscope.watch(model) as seen:
        model({1: VECTORS})
    assert (seen.run().summary.sequences, seen.left_out) == (2, [])


def test_layers_that_run_in_other_groups_leave_a_run() -> None:
    """Three rows through each layer by itself, then two through both: these stand in no table with the others."""
    model = Two()
    with torch.no_grad(), sinkscope.watch(model) as seen:
        model.forward(VECTORS.repeat(2, 1, 1)[:3])
        model(VECTORS)
    run = seen.run()
    assert run.summary.sequences == 3
    assert any("and for others that are measured apart" in line for line in run.manifest.warnings)


def test_attention_in_float64_between_layers_in_float32_is_read() -> None:
    model, plain = Two(in_float64), Two(lambda query, key, value: (query @ key.mT).softmax(-1) @ value)
    with torch.no_grad(), sinkscope.watch(model) as seen:
        model(VECTORS)
    with torch.no_grad(), sinkscope.watch(plain) as expected:
        plain(VECTORS)
    assert_same(seen.run(), expected.run())


SHARING = {
    "sliding_window": 64,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 8,
    "head_dim": 12,
    "global_head_dim": 16,
    "vocab_size_per_layer_input": 99,
}
"""A Gemma 4 whose last two layers share the keys of its first two."""


@pytest.mark.parametrize("left", slow_but([0, 4], 4))
@pytest.mark.parametrize("attention", slow_but(["sdpa", "eager"], "sdpa"))
def test_layers_that_run_for_the_last_tokens_alone_are_left_out(attention: str, left: int) -> None:
    """generate asks for one row of logits, for which Gemma 4 runs the layers that share keys over one token alone."""
    model, given = writer("gemma4_text", **SHARING, attn_implementation=attention), prompt(left)
    with sinkscope.watch(model) as seen:
        generate(model, given)
        with torch.no_grad():
            model(**given, logits_to_keep=3, use_cache=False)
    if not hasattr(model.model, "_maybe_slice_kv_shared_inputs"):
        assert not seen.left_out
        return
    shorter = "model.layers.2.self_attn, model.layers.3.self_attn for the last tokens of a text alone"
    whole = attention == "sdpa" and not left  # no mask is given, and none could be cut
    assert [shorter in why for why in seen.left_out] == [True]
    assert ("(2 times)" in seen.left_out[0]) != whole
    with sinkscope.watch(model) as seen:
        written = generate(model, given)
        seen.label("all tokens")
        generate(model, given, output_hidden_states=True, return_dict_in_generate=True)
    run, expected = seen.run(), in_one_pass(model, written, given)
    domains = run.heads.groupby("domain")
    bos = {name: rows["bos_mass"].to_numpy(float) for name, rows in domains}
    every = expected.heads["bos_mass"].to_numpy(float)
    np.testing.assert_allclose(bos["all tokens"], every, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(bos["watched"], every[: len(every) // 2], rtol=1e-4, atol=1e-5)
