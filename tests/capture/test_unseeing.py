"""Queries that see no key: no column counts them, and the model goes on with what its own softmax makes of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from families import tiny_model
from models import random_ids
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoModelForCausalLM

import sinkscope
from sinkscope.capture import Capture, plan
from sinkscope.capture.calls import AttentionCall
from sinkscope.capture.kernels.attend import read
from sinkscope.checkpoints import wrap_model
from sinkscope.checkpoints.forward import Forward

LOWEST = torch.finfo(torch.float32).min


def call_of(mask: Tensor, groups: int = 4) -> AttentionCall:
    torch.manual_seed(0)
    query, key, value = torch.randn(2, 4, 9, 8), torch.randn(2, groups, 9, 8), torch.randn(2, groups, 9, 6)
    return AttentionCall(query, key, value, mask, scaling=8**-0.5)


def mask_of(hidden: float, blind: int = 5) -> Tensor:
    """Causal, but that one query of the first sequence sees nothing."""
    mask = torch.zeros(2, 1, 9, 9).masked_fill(torch.ones(9, 9, dtype=torch.bool).triu(1), hidden)
    mask[0, :, blind] = hidden
    return mask


@pytest.mark.parametrize("groups", [4, 2])
def test_a_finite_mask_lets_them_attend_to_all_keys_alike(groups: int) -> None:
    call = call_of(mask_of(LOWEST), groups)
    key, value = (tensor.repeat_interleave(4 // groups, 1) for tensor in (call.key, call.value))
    output, sums = read(call)
    torch.testing.assert_close(output, scaled_dot_product_attention(call.query, key, value, call.mask).transpose(1, 2))
    torch.testing.assert_close(output[0, 5], value[0].mean(1))
    assert not sums.first[0, :, 5].any()
    assert sums.total[0, :, 5].eq(0).all()
    assert sums.columns[0].sum(-1).allclose(torch.tensor(8.0)), "the other queries' mass"


@pytest.mark.parametrize("mask", [mask_of(-torch.inf), mask_of(-torch.inf) == 0])
def test_other_masks_let_them_attend_to_nothing(mask: Tensor) -> None:
    assert not read(call_of(mask))[0][0, 5].any()


def test_a_model_with_such_queries_computes_as_without_us() -> None:
    """BLT's last patch may hold no byte yet: what its query writes is read by the later layers of patches."""
    base = wrap_model(tiny_model(AutoModelForCausalLM, "blt")).model
    forward, ids = Forward(base), random_ids(3, 32)
    found = plan(base, lambda: forward(ids[:1, :16]))
    layers = [path for path, _ in base.named_modules() if path.startswith("global_transformer.layers.")]
    states: list[Tensor] = []

    def keep(module: nn.Module, args: Any, output: Any) -> None:
        states.append(output[0] if isinstance(output, tuple) else output)

    handle = base.get_submodule(layers[0]).register_forward_hook(keep)
    with torch.no_grad():
        forward(ids)
        with Capture(base, found, lambda view, row: None, 0.3).watching():
            forward(ids)
    handle.remove()
    torch.testing.assert_close(states[0], states[1], rtol=1e-4, atol=1e-5)


def test_a_watch_and_a_scan_of_such_a_model_agree() -> None:
    model, ids = wrap_model(tiny_model(AutoModelForCausalLM, "blt")).model, random_ids(3, 32)
    scanned = sinkscope.scan(model, data=ids, batch_size=3)
    with torch.no_grad(), sinkscope.watch(model) as seen:
        model(ids, use_cache=False)
    assert not seen.left_out
    watched = seen.run()
    names = ["module", "head", "bos_mass", "sink_score", "entropy", "learned_sink_mass", "honor", "value_drain"]
    pd.testing.assert_frame_equal(
        watched.heads[names].sort_values(["module", "head"], ignore_index=True),
        scanned.heads[names].sort_values(["module", "head"], ignore_index=True), rtol=1e-4, atol=1e-5,
    )  # fmt: skip
    assert np.isfinite(watched.heads["bos_mass"]).all()
