"""A scan of a torch module that is no transformers model."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from plain_models import HEADS, WAYS, WIDTH, plain, tokens
from tiers import slow_but
from torch import nn

import sinkscope
from sinkscope import SinkscopeError

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without:UserWarning")


@pytest.mark.parametrize("way", slow_but(WAYS, "product", "multi_head"))
def test_every_way_to_attend_is_read(way: str) -> None:
    model, ids = plain(way), tokens()
    run = sinkscope.scan(model, data=ids)
    assert run.manifest.model.id == "Plain"
    assert run.manifest.model.config_sha256 is None
    assert [each.module for each in run.manifest.attention] == [
        f"blocks.{layer}.attn" + (".attention" if way == "multi_head" else "") for layer in range(2)
    ]
    np.testing.assert_allclose(run.heads.query("layer == 0")["bos_mass"], first_layer_mass(model, ids), atol=1e-6)


def first_layer_mass(model: nn.Module, ids: torch.Tensor) -> list[float]:
    """bos_mass of layer 0 in float64, from the weights."""
    block = model.blocks[0]
    x = block.norm(model.tokens(ids) + model.places(torch.arange(ids.shape[1]))).double()
    mixer = getattr(block.attn, "attention", None)
    joint = block.attn.c_attn if mixer is None else mixer
    weight, bias = (joint.weight, joint.bias) if mixer is None else (joint.in_proj_weight, joint.in_proj_bias)
    query, key, _ = (x @ weight.double().T + bias.double()).view(*ids.shape, 3, HEADS, -1).unbind(2)
    logits = torch.einsum("bihd,bjhd->bhij", query, key) * (WIDTH // HEADS) ** -0.5
    later = torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1)
    found: list[float] = logits.masked_fill(later, -torch.inf).softmax(-1)[:, :, 1:, 0].mean((0, 2)).tolist()
    return found


def test_padding_is_refused_where_the_module_takes_no_mask() -> None:
    with pytest.raises(SinkscopeError, match="Plain takes no attention_mask"):
        sinkscope.scan(plain(), data=[[1, 2, 3, 4], [5, 6, 7]], self_check=False)


def test_what_is_no_module_is_refused() -> None:
    with pytest.raises(SinkscopeError, match=r"a model \(torch.nn.Module\) or a name is needed, not int"):
        sinkscope.scan(3, data=tokens())
