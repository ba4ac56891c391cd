"""What the passes of a watch computed in, which a program may change between two of them."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import sinkscope
from sinkscope.engine.scan import scan_request


@pytest.fixture
def model() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=50,
        attn_implementation="sdpa",
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(3, 50, (2, 9), generator=torch.Generator().manual_seed(0))


def test_a_model_that_is_moved_before_its_first_pass(model: Any, ids: Tensor) -> None:
    with torch.no_grad(), sinkscope.watch(model) as seen:
        model.to(torch.bfloat16)
        model.set_attn_implementation("eager")
        model(ids)
    manifest = seen.run().manifest
    assert (manifest.model.dtype, manifest.model.attention_implementation) == ("bfloat16", "eager")
    assert manifest.self_check is not None
    assert manifest.self_check.bound == 5e-2
    assert not manifest.warnings


def test_a_model_that_is_moved_behind_its_last_pass(model: Any, ids: Tensor) -> None:
    with torch.no_grad(), sinkscope.watch(model) as seen:
        model.generate(ids[:1], max_new_tokens=3, pad_token_id=0)
        model.to(torch.float64)
    assert seen.run().manifest.model.dtype == "float32"


def test_autocast_is_what_a_pass_computes_in(model: Any, ids: Tensor) -> None:
    with torch.no_grad(), sinkscope.watch(model) as seen, torch.autocast("cpu", torch.bfloat16):
        model(ids)
    assert seen.run().manifest.model.dtype == "bfloat16"


def test_passes_that_differ_are_told_of(model: Any, ids: Tensor) -> None:
    with warnings.catch_warnings(), torch.no_grad(), sinkscope.watch(model) as seen:
        warnings.simplefilter("error")
        model(ids)
        model.to(torch.bfloat16)
        model(ids.flip(1))
    manifest = seen.run().manifest
    assert manifest.model.dtype == "bfloat16 and float32"
    assert manifest.warnings == ["the passes differ in their dtype: bfloat16 and float32"]


def test_no_scan_repeats_a_watch(model: Any, ids: Tensor) -> None:
    with torch.no_grad(), sinkscope.watch(model) as seen:
        model(ids)
    with pytest.raises(sinkscope.SinkscopeError, match="that run was watched, which no scan repeats"):
        scan_request(seen.run().manifest.request, model=model)
