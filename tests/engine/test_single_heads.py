"""Heads that a model computes one by one, in a module or a call each, are the heads of one layer.

The first model is the one that Karpathy's lecture writes: a list of heads, concatenated, then a projection.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from own_code import READ, Attention, Writer, assert_float64, hidden, ids_of, maps_of, scanned, softmax, watched, writer
from plain_models import HEADS, WIDTH
from same_runs import assert_same
from tiers import slow_but
from torch import Tensor, nn
from torch.nn import functional

import sinkscope


class Head(nn.Module):
    """One head of self-attention."""

    def __init__(self) -> None:
        super().__init__()
        self.key, self.query, self.value = (nn.Linear(WIDTH, WIDTH // HEADS, bias=False) for _ in range(3))
        self.dropout = nn.Dropout(0.2)
        self.noted = list[Tensor]()

    def forward(self, x: Tensor) -> Tensor:
        key, query = self.key(x), self.query(x)
        weights = query @ key.transpose(-2, -1) * key.shape[-1] ** -0.5
        weights = functional.softmax(weights.masked_fill(hidden(x.shape[1]), float("-inf")), dim=-1)
        self.noted.append(weights.detach())
        mixed: Tensor = self.dropout(weights) @ self.value(x)
        return mixed


class SdpaHead(Head):
    def forward(self, x: Tensor) -> Tensor:
        self.noted.append(softmax(self.query(x), self.key(x)).detach())
        return functional.scaled_dot_product_attention(self.query(x), self.key(x), self.value(x), is_causal=True)


class Heads(nn.Module):
    """Several heads side by side."""

    def __init__(self, kind: type[Head] = Head) -> None:
        super().__init__()
        self.heads = nn.ModuleList([kind() for _ in range(HEADS)])
        self.proj, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = self.dropout(self.proj(torch.cat([head(x) for head in self.heads], dim=-1)))
        return mixed


class Chain(Heads):
    """Each head reads what the one before wrote: they are layers."""

    def forward(self, x: Tensor) -> Tensor:
        for head in self.heads:
            x = x + functional.pad(head(x), (0, WIDTH - WIDTH // HEADS))
        return x


def whole_maps(model: nn.Module, ids: Tensor) -> list[Tensor]:
    """The maps of each layer's heads, (B, H, T, T)."""
    maps = maps_of(model, ids)
    return [torch.stack(maps[first : first + HEADS], 1) for first in range(0, len(maps), HEADS)]


def joint(model: Writer) -> Writer:
    """The same model with all heads of a layer in one product."""
    whole = writer(lambda module, query, key, value: module.note(softmax(query, key)) @ value)
    own = model.state_dict()
    for layer, block in enumerate(whole.blocks):
        parts = [
            own[f"blocks.{layer}.attn.heads.{h}.{n}.weight"] for n in ("query", "key", "value") for h in range(HEADS)
        ]
        block.attn.qkv.weight.data, block.attn.qkv.bias.data = torch.cat(parts), torch.zeros(3 * WIDTH)
    whole.load_state_dict({name: own[name] for name in whole.state_dict() if "qkv" not in name}, strict=False)
    return whole


@pytest.mark.parametrize("kind", slow_but([Head, SdpaHead], Head))
@pytest.mark.parametrize("read", READ)
def test_a_list_of_heads_is_one_layer(read: Any, kind: type[Head]) -> None:
    model, ids = Writer(lambda: Heads(kind)), ids_of()
    run = read(model, ids)
    assert [(each.module, each.heads) for each in run.manifest.attention] == [
        (f"blocks.{layer}.attn", HEADS) for layer in range(2)
    ]
    assert_float64(run, whole_maps(model, ids))
    assert_same(run, read(joint(model), ids), atol=2e-5)
    assert run.heads[["ov_drain", "honor"]].notna().all(axis=None)


def test_a_watch_of_training_reads_them_before_dropout() -> None:
    model, ids = Writer(Heads), ids_of()
    expected = whole_maps(model, ids)[0][:, :, 1:, 0].mean((0, 2))
    with sinkscope.watch(model.train()) as seen:
        model(ids).sum().backward()
    np.testing.assert_allclose(seen.run().heads.query("layer == 0")["bos_mass"], expected, atol=1e-5)


@pytest.mark.parametrize("read", slow_but(READ, watched))
def test_heads_that_read_each_other_are_layers(read: Any) -> None:
    model, ids = Writer(Chain), ids_of()
    run = read(model, ids)
    assert [each.heads for each in run.manifest.attention] == [1] * (2 * HEADS)
    assert_float64(run, [each[:, None] for each in maps_of(model, ids)])


@pytest.mark.parametrize("read", slow_but(READ, watched))
def test_blocks_in_a_sequential_have_a_residual_stream(read: Any) -> None:
    model, ids = Writer(Heads), ids_of()
    expected = read(model, ids)
    model.blocks = nn.Sequential(*model.blocks).eval()
    run = read(model, ids)
    assert [each.block for each in run.manifest.attention] == ["blocks.0", "blocks.1"]
    assert_same(run, expected)
    assert run.layers["inf_norm"].notna().all()


def head_by_head(module: Attention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """A call for each head."""
    module.note(softmax(query, key))
    heads = zip(query.unbind(1), key.unbind(1), value.unbind(1), strict=True)
    return torch.stack([softmax(own_query, own_key) @ own_value for own_query, own_key, own_value in heads], 1)


def head_by_head_by_sdpa(module: Attention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    module.note(softmax(query, key))
    heads = zip(query.split(1, 1), key.split(1, 1), value.split(1, 1), strict=True)
    return torch.cat([functional.scaled_dot_product_attention(*each, is_causal=True) for each in heads], 1)


@pytest.mark.parametrize("attend", slow_but([head_by_head, head_by_head_by_sdpa], head_by_head))
@pytest.mark.parametrize("read", slow_but(READ, scanned))
def test_a_call_for_each_head_is_one_layer(read: Any, attend: Any) -> None:
    model, ids = writer(attend), ids_of()
    run = read(model, ids)
    assert_float64(run, maps_of(model, ids))
    assert {each.projection for each in run.manifest.attention} == {"blocks.0.attn.proj", "blocks.1.attn.proj"}
