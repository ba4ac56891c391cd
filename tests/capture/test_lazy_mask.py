"""Masks made in strips: the same numbers as with the whole mask, no T x T tensor, and a restored registry."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pandas as pd
import pytest
import torch
import transformers
from families import tiny_model
from tiers import slow_but
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.masking_utils import AttentionMaskInterface, create_causal_mask, create_sliding_window_causal_mask

import sinkscope
from sinkscope.capture.masks import lazy as lazy_mask
from sinkscope.capture.masks.lazy import LazyMask, lazy_masks
from sinkscope.capture.masks.visibility import read_mask

# Sliding and full layers, chunks, learned sinks and additive masks, a soft-cap, a sparse indexer, an encoder with
# windows on both sides, a prefix that sees itself, streams, inline attention.
FAMILIES = ("gemma3_text", "llama4_text", "gpt_oss", "gemma2", "deepseek_v32", "mistral", "gpt2", "bloom")
LENGTH = 48
NO_CACHE = None
"""Handed over by position: transformers 5.24 gave the parameter another name."""
FAST = ((True, "gemma3_text"), (True, "gpt_oss"), (False, "llama4_text"), (True, "bloom"))


def config(**sizes: Any) -> Any:
    chosen = transformers.MistralConfig(hidden_size=8, num_attention_heads=2, num_hidden_layers=1, **sizes)
    chosen._attn_implementation = "sdpa"
    return chosen


def make(**options: Any) -> Tensor | None:
    """Makes a sliding-window mask as a model does."""
    implementation = options.pop("implementation", "sdpa")
    chosen = config(sliding_window=options.pop("window", 5))
    chosen._attn_implementation = implementation
    embeds, attention_mask = torch.zeros(options.pop("batch", 2), LENGTH, 8), options.pop("attention_mask")
    mask: Tensor | None = create_sliding_window_causal_mask(chosen, embeds, attention_mask, NO_CACHE, **options)
    return mask


def padded() -> Tensor:
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    mask[0, 30:] = 0
    mask[1, :7] = 0
    return mask


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("attention_mask", [None, padded()])
def test_every_strip_is_the_mask_s(implementation: str, attention_mask: Tensor | None) -> None:
    expected = make(implementation=implementation, attention_mask=attention_mask)
    assert expected is not None
    with lazy_masks(1):
        mask = make(implementation=implementation, attention_mask=attention_mask)
    assert isinstance(mask, LazyMask)
    assert mask.shape == expected.shape
    assert mask.dtype == expected.dtype
    assert torch.equal(mask.strip(5, 9, 3, 20).expand(2, -1, -1, -1), expected[:, :, 5:9, 3:20])
    cut = mask[1:2, :, 8:40, 10:]
    assert isinstance(cut, LazyMask)
    assert torch.equal(cut.whole(), expected[1:2, :, 8:40, 10:])
    assert torch.equal(cut.strip(1, 3, 2, 9), expected[1:2, :, 9:11, 12:19])


def test_slices_stay_lazy_and_all_else_is_the_real_mask() -> None:
    expected = make(attention_mask=padded())
    assert expected is not None
    with lazy_masks(1):
        mask = make(attention_mask=padded())
    assert isinstance(mask, LazyMask)
    assert mask[:, :, :, :LENGTH] is mask
    assert mask[...] is mask
    assert mask[..., :9].identity == mask[:, :, :, :9].identity != mask.identity
    for index in ((0,), (slice(None), 0), (..., slice(None, None, 2)), torch.tensor([1]), (slice(None), slice(0, 0))):
        assert torch.equal(mask[index], expected[index])
    assert torch.equal(mask & True, expected)
    assert torch.equal(mask.float().sum(-1), expected.float().sum(-1))
    assert torch.equal(torch.cat([mask, mask]), torch.cat([expected, expected]))
    assert "LazyMask" in repr(mask)


WRITES: list[Callable[[Tensor], object]] = [
    lambda mask: mask.__setitem__((..., slice(3, None), 2), -5.0),
    lambda mask: mask.masked_fill_(torch.eye(LENGTH, dtype=torch.bool), -7.0),
    lambda mask: mask[..., :9].mul_(0.5),
    lambda mask: mask.transpose(-1, -2)[..., 4].add_(1.0),
]


@pytest.mark.parametrize("write", WRITES)
def test_what_is_written_into_a_mask_stays(write: Callable[[Tensor], object]) -> None:
    expected = make(attention_mask=padded(), implementation="eager")
    assert expected is not None
    with lazy_masks(1):
        mask = make(attention_mask=padded(), implementation="eager")
    assert isinstance(mask, LazyMask)
    cut, before = mask[:1], mask.identity
    write(expected)
    write(mask)
    assert torch.equal(mask.whole(), expected)
    assert torch.equal(cut.strip(2, 9, 1, 12), expected[:1, :, 2:9, 1:12])
    assert mask.identity != before


def test_one_row_for_all_queries_is_read_as_such() -> None:
    expected = make(attention_mask=padded())
    assert expected is not None
    with lazy_masks(1):
        mask = make(attention_mask=padded())
    assert isinstance(mask, LazyMask)
    size = (False, LENGTH, LENGTH, torch.device("cpu"))
    ours, real = read_mask(mask[:, :, 20:21], *size), read_mask(expected[:, :, 20:21], *size)
    assert torch.equal(ours.counts.expand(2, 1, LENGTH), real.counts.expand(2, 1, LENGTH))


@pytest.mark.parametrize("large", [1, 10**9])
@pytest.mark.parametrize("implementation", slow_but(["sdpa", "eager"], "sdpa"))
def test_a_mask_that_a_model_writes_into_between_layers_is_read_again(
    large: int, implementation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The self-check compares the second layer with the mask it used, not with the mask of the first."""
    monkeypatch.setattr(lazy_mask, "LARGE", large)
    model = tiny_model(transformers.AutoModel, "mistral")
    model.config._attn_implementation = implementation
    model.config.sliding_window = 32

    def hide(module: Any, args: Any, kwargs: Any) -> None:
        mask = kwargs["attention_mask"]
        if mask is None:  # in the dry run, which is shorter than the window
            return
        mask[..., 8:, 0] = torch.finfo(mask.dtype).min if mask.is_floating_point() else False

    model.layers[1].register_forward_pre_hook(hide, with_kwargs=True)
    ids = torch.randint(5, model.config.vocab_size, (1, LENGTH), generator=torch.Generator().manual_seed(0))
    run = sinkscope.scan(model, data=ids)
    assert run.manifest.self_check.status == "passed"


def test_what_is_left_out_stays_left_out() -> None:
    """A plain causal mask stays None for sdpa: a lazy mask would be slower than none."""
    embeds = torch.zeros(2, LENGTH, 8)
    with lazy_masks(1):
        assert create_causal_mask(config(), embeds, None, NO_CACHE) is None
        assert create_causal_mask(config(), embeds, torch.ones(2, LENGTH), NO_CACHE) is None
        assert isinstance(create_causal_mask(config(), embeds, padded(), NO_CACHE), LazyMask)
    with lazy_masks(2 * LENGTH * LENGTH + 1):
        small = make(attention_mask=None)
    assert small is not None
    assert not isinstance(small, LazyMask)


def test_the_registry_is_left_as_found() -> None:
    before = dict(AttentionMaskInterface._global_mapping)
    with pytest.raises(KeyError), lazy_masks():
        assert AttentionMaskInterface._global_mapping != before
        raise KeyError
    assert AttentionMaskInterface._global_mapping == before


@pytest.mark.parametrize("attention_mask", [None, padded()])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_lazy_mask_is_read_as_the_whole_one(implementation: str, attention_mask: Tensor | None) -> None:
    size = (LENGTH, LENGTH, torch.device("cpu"))
    whole = read_mask(make(implementation=implementation, attention_mask=attention_mask), True, *size)
    with lazy_masks(1):
        lazy = read_mask(make(implementation=implementation, attention_mask=attention_mask), True, *size)
    assert torch.equal(whole.counts, lazy.counts)
    assert whole.causal == lazy.causal
    assert lazy.mask is None  # the spans are enough: no mask is made a second time
    for start, stop in ((0, 16), (16, 48)):
        for ours, other in zip(whole.block(start, stop).ragged, lazy.block(start, stop).ragged, strict=True):
            assert ours[0] == other[0]
            assert torch.equal(ours[1], other[1])


@pytest.mark.slow
@pytest.mark.parametrize(("padding", "family"), slow_but(product((False, True), FAMILIES), *FAST))
def test_a_scan_with_lazy_masks_is_the_same(family: str, padding: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(transformers.AutoModel, family)
    ids = torch.randint(5, model.config.get_text_config().vocab_size, (2, LENGTH), generator=torch.Generator())
    data: Any = {"input_ids": ids, "attention_mask": padded()} if padding else ids
    plain = sinkscope.scan(model, data=data, self_check=False)
    monkeypatch.setattr(lazy_mask, "LARGE", 1)
    lazy = sinkscope.scan(model, data=data, self_check=False)
    pd.testing.assert_frame_equal(plain.heads, lazy.heads, check_exact=True)
    pd.testing.assert_frame_equal(plain.layers, lazy.layers, check_exact=True)


class Largest(TorchDispatchMode):
    """Records the number of elements of the largest tensor made."""

    seen = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and not isinstance(result, LazyMask):
            self.seen = max(self.seen, result.numel())
        return result


@pytest.mark.parametrize("family", slow_but(["gemma3_text", "mistral", "gpt_oss"], "gemma3_text"))
def test_nothing_of_a_long_scan_is_square(family: str) -> None:
    """At T = 4096 a whole mask, of the sliding layers or an additive one, would have T x T = 16.8 million elements."""
    model = tiny_model(transformers.AutoModel, family)
    model.config.max_position_embeddings = 8192
    length = 4096
    ids = torch.randint(5, model.config.vocab_size, (1, length), generator=torch.Generator())
    with Largest() as largest:
        sinkscope.scan(model, data=ids, self_check=False)
    assert largest.seen < length * length / 4
