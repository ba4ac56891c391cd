"""Layers of a person's own code have the heads that they compute with, whatever the configuration names."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from watched import warnings_of

import sinkscope

WIDTH = 32


class Attention(nn.Module):
    """Causal attention, formed by hand. `one_by_one`: a product for each head. `folded`: batch and heads are one
    axis."""

    def __init__(self, heads: int, one_by_one: bool = False, folded: bool = False) -> None:
        super().__init__()
        self.h, self.one_by_one, self.folded = heads, one_by_one, folded
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)

        def mix(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            logits = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(later, -torch.inf)
            return logits.softmax(-1) @ v

        q, k, v = (layer(x).unflatten(-1, (self.h, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        if self.one_by_one:
            mixed = torch.stack([mix(q[:, head], k[:, head], v[:, head]) for head in range(self.h)], 1)
        elif self.folded:
            mixed = mix(*(each.flatten(0, 1) for each in (q, k, v))).unflatten(0, (-1, self.h))
        else:
            mixed = mix(q, k, v)
        written: Tensor = self.o(mixed.transpose(1, 2).flatten(2))
        return written


class Net(nn.Module):
    """Attention modules in a list, each added to the stream."""

    def __init__(self, *attentions: Attention, named: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.blocks = nn.Embedding(50, WIDTH), nn.ModuleList(attentions)
        if named is not None:
            self.config = SimpleNamespace(num_attention_heads=named)

    def forward(self, ids: Tensor) -> Tensor:
        x: Tensor = self.embed(ids)
        for block in self.blocks:
            x = x + block(x)
        return x


def ids_of(sequences: int) -> Tensor:
    return torch.randint(0, 50, (sequences, 20), generator=torch.Generator().manual_seed(0))


def watched(model: nn.Module, sequences: int) -> sinkscope.Run:
    with torch.no_grad(), sinkscope.watch(model) as seen:
        model(ids_of(sequences))
    return seen.run()


def scanned(model: nn.Module, sequences: int) -> sinkscope.Run:
    return sinkscope.scan(model, data=ids_of(sequences))


@pytest.mark.parametrize("sequences", [2, 3, 4])
@pytest.mark.parametrize("folded", [True, False])
@pytest.mark.parametrize("fewer", [1, 2])
def test_a_layer_may_have_fewer_heads_than_the_configuration_names(fewer: int, folded: bool, sequences: int) -> None:
    """It was left out without a word."""
    torch.manual_seed(1)
    model = Net(*(Attention(heads, folded=folded) for heads in (4, fewer, 4)), named=4).eval()
    for run in (watched(model, sequences), scanned(model, sequences)):
        assert run.layers["heads"].tolist() == [4, fewer, 4]
        assert run.sequences["sequence"].nunique() == sequences
        assert warnings_of(run) == []


def test_heads_computed_one_by_one_are_one_layer_in_a_list_of_attentions() -> None:
    torch.manual_seed(1)
    apart = [Attention(4, one_by_one=True) for _ in range(2)]
    for each in apart:
        each.num_heads = 4
    model = Net(*apart).eval()
    for run in (watched(model, 2), scanned(model, 2)):
        assert run.layers["heads"].tolist() == [4, 4]
        assert run.heads["honor"].notna().all()
