"""A keyword of the attention interface that sinkscope does not know, declared from outside the package."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from models import random_ids, tiny
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaAttention

import sinkscope
from sinkscope.capture import AttentionCall, Capture, LayerView, attention_keyword, plan
from sinkscope.capture.keywords import KEYWORDS
from sinkscope.checkpoints.forward import Forward

IDS = random_ids(2, 70)


def multiplied_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float, logit_multiplier: Tensor
) -> tuple[Tensor, Tensor]:
    """The model's own attention over whole maps: multiplies the logits of head h by logit_multiplier[h]."""
    key, value = (each.repeat_interleave(module.num_key_value_groups, 1) for each in (key, value))
    maps = (query @ key.mT * scaling * logit_multiplier.view(1, -1, 1, 1) + mask).softmax(-1)
    return (maps @ value).transpose(1, 2), maps


class MultipliedAttention(LlamaAttention):  # type: ignore[misc]
    """Llama's attention without rotary embeddings; passes `logit_multiplier` (H,) to the attention function."""

    def forward(self, hidden_states: Tensor, attention_mask: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        query, key, value = (
            project(hidden_states).view(shape).transpose(1, 2) for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, multiplied_attention)
        factors = torch.tensor([0.25, 0.5, 2.0, 4.0], dtype=query.dtype)
        output, maps = attend(self, query, key, value, attention_mask, scaling=self.scaling, logit_multiplier=factors)
        return self.o_proj(output.flatten(2)), maps


@pytest.fixture
def model() -> PreTrainedModel:
    llama = tiny("llama", "eager", num_hidden_layers=2).double()
    for layer in llama.layers:
        layer.self_attn.__class__ = MultipliedAttention
    return llama


@pytest.fixture
def declared() -> Iterator[None]:
    """Declares the keyword: it scales the queries, which scales the logits before bias, mask and soft-cap."""

    @attention_keyword("logit_multiplier")
    def multiplied(call: AttentionCall, factors: Tensor) -> AttentionCall:
        return replace(call, query=call.query * factors.view(1, -1, 1, 1))

    yield
    del KEYWORDS["logit_multiplier"]


@pytest.mark.usefixtures("declared")
def test_the_sums_and_the_output_follow_a_declared_keyword(model: PreTrainedModel) -> None:
    forward, views = Forward(model), []

    def receive(view: LayerView, row: int) -> None:
        views.append(view.attention)

    with torch.no_grad():
        own = forward(IDS, output_attentions=True)
        with Capture(model, plan(model, lambda: forward(IDS[:1, :16])), receive, 0.3).watching():
            watched = forward(IDS)
    torch.testing.assert_close(watched.last_hidden_state, own.last_hidden_state, rtol=1e-12, atol=1e-12)
    assert len(views) == len(own.attentions) == 2
    for sums, maps in zip(views, own.attentions, strict=True):
        assert maps.dtype == torch.float64
        torch.testing.assert_close(sums.first, maps[..., 0], rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(sums.columns, maps.sum(-2), rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(sums.entropy, torch.special.entr(maps).sum(-1), rtol=1e-10, atol=1e-12)


@pytest.mark.usefixtures("declared")
def test_a_scan_of_padded_sequences_reads_a_declared_keyword(model: PreTrainedModel) -> None:
    """The self-check compares with the model's own maps; a sequence gives the same alone and in a padded batch."""
    mask = torch.ones_like(IDS)
    mask[1, 50:] = 0
    run = sinkscope.scan(model, data={"input_ids": IDS, "attention_mask": mask}, batch_size=2)
    assert run.manifest.self_check.status == "passed"
    assert run.manifest.self_check.reference == "eager attention maps"
    with torch.no_grad():
        maps = model(IDS[1:, :50], output_attentions=True).attentions
    rows = run.sequences[(run.sequences["sequence"] == 1) & run.sequences["head"].notna()]
    for layer, own in enumerate(maps):
        ours = rows[rows["layer"] == layer].sort_values("head")["bos_mass"].to_numpy()
        np.testing.assert_allclose(ours, own[0, :, 1:, 0].mean(-1).numpy(), rtol=1e-6)


def test_a_keyword_that_nobody_declared_fails_the_self_check(model: PreTrainedModel) -> None:
    with pytest.raises(sinkscope.SinkscopeError, match="self-check failed"):
        sinkscope.scan(model, data=IDS)


def test_a_keyword_is_declared_once() -> None:
    with pytest.raises(
        sinkscope.SinkscopeError, match=r"'softcap' is declared already, by sinkscope\.capture\.keywords"
    ):
        attention_keyword("softcap")(lambda call, cap: call)
