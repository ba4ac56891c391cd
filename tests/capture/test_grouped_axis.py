"""Grouped queries with an axis of their own, beside the same attention with one axis of heads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from own_code import READ, Writer, hidden, ids_of
from plain_models import WIDTH
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

import sinkscope

GROUPS, ROWS = 2, 2
EACH = WIDTH // (GROUPS * ROWS)
Way = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Takes q (B, T, G, R, d) and k, v (B, T, G, d); returns (B, T, G, R, d)."""


class Attention(nn.Module):
    def __init__(self, way: Way) -> None:
        super().__init__()
        self.way, self.num_heads = way, GROUPS * ROWS
        self.q, self.k, self.v = (
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, GROUPS * EACH),
            nn.Linear(WIDTH, GROUPS * EACH),
        )
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        query = self.q(x).unflatten(2, (GROUPS, ROWS, EACH))
        key, value = (layer(x).unflatten(2, (GROUPS, EACH)) for layer in (self.k, self.v))
        return self.out(self.way(query, key, value).reshape(x.shape))  # type: ignore[no-any-return]


def _softmax(logits: Tensor) -> Tensor:
    return (logits * EACH**-0.5).masked_fill(hidden(logits.shape[-1]), -torch.inf).softmax(-1)


def together(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    mixed = scaled_dot_product_attention(
        query.flatten(2, 3).transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), is_causal=True, enable_gqa=True
    )
    return mixed.transpose(1, 2).unflatten(2, (GROUPS, ROWS))


def by_einsum(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    maps = _softmax(torch.einsum("btgrd,bsgd->bgrts", query, key))
    return torch.einsum("bgrts,bsgd->btgrd", maps, value)


def by_product(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    key, value = (tensor.transpose(1, 2).unsqueeze(2) for tensor in (key, value))
    return (_softmax(query.permute(0, 2, 3, 1, 4) @ key.mT) @ value).permute(0, 3, 1, 2, 4)


def _expanded(tensor: Tensor) -> Tensor:
    return tensor.transpose(1, 2).unsqueeze(2).expand(-1, -1, ROWS, -1, -1)


def of_expanded(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    maps = _softmax(query.permute(0, 2, 3, 1, 4) @ _expanded(key).mT)
    return (maps @ _expanded(value)).permute(0, 3, 1, 2, 4)


def by_torch(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    length = query.shape[1]
    mixed = scaled_dot_product_attention(
        query.permute(0, 2, 3, 1, 4), _expanded(key), _expanded(value), ~hidden(length).expand(1, 1, 1, -1, -1)
    )
    return mixed.permute(0, 3, 1, 2, 4)


def windows(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The second axis of heads has keys of its own: it may be one of windows."""
    own = _expanded(key) * torch.arange(1.0, ROWS + 1).view(-1, 1, 1)
    return (_softmax(query.permute(0, 2, 3, 1, 4) @ own.mT) @ _expanded(value)).permute(0, 3, 1, 2, 4)


@pytest.mark.parametrize("read", READ)
@pytest.mark.parametrize("way", [by_einsum, by_product, of_expanded, by_torch])
def test_query_heads_of_a_group_may_have_an_axis_of_their_own(way: Way, read: Any) -> None:
    ids = ids_of()
    run, reference = (read(Writer(lambda way=way: Attention(way)), ids) for way in (way, together))
    assert [(site.heads, site.kv_groups) for site in run.manifest.attention] == [(GROUPS * ROWS, GROUPS)] * 2
    for table in ("heads", "layers"):
        ours, theirs = (getattr(each, table).select_dtypes("number").to_numpy(float) for each in (run, reference))
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def test_an_axis_with_keys_of_its_own_is_not_taken_for_heads() -> None:
    with pytest.raises(sinkscope.SinkscopeError, match="only in parts"):
        sinkscope.scan(Writer(lambda: Attention(windows)), data=ids_of())
