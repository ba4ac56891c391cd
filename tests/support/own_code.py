"""A small language model whose attention is any function of q, k and v, and its float64 columns."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import numpy as np
import torch
from plain_models import HEADS, VOCABULARY, WIDTH, tokens
from torch import Tensor, nn

import sinkscope

Attend = Callable[["Attention", Tensor, Tensor, Tensor], Tensor]
"""Takes the module, q, k and v, each (B, H, T, d); returns the output (B, H, T, d)."""


class Attention(nn.Module):
    """Calls `attend`. `noted` gets the maps that it passes to `note`."""

    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.attend, self.n_head = attend, HEADS
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.noted = list[Tensor]()

    def note(self, maps: Tensor) -> Tensor:
        """Keeps a map (B, H, T, T), which it returns."""
        self.noted.append(maps.detach())
        return maps

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (each.unflatten(2, (HEADS, -1)).transpose(1, 2) for each in self.qkv(x).split(WIDTH, 2))
        mixed: Tensor = self.proj(self.attend(self, query, key, value).transpose(1, 2).reshape(x.shape))
        return mixed


class Block(nn.Module):
    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(WIDTH), attention

    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = x + self.attn(self.norm(x))
        return mixed


class Writer(nn.Module):
    """Two blocks around attention that `make()` gives."""

    def __init__(self, make: Callable[[], nn.Module], layers: int = 2) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(128, WIDTH)
            self.blocks = nn.ModuleList([Block(make()) for _ in range(layers)])
            self.head = nn.Linear(WIDTH, VOCABULARY)
            for parameter in self.parameters():
                nn.init.normal_(parameter, std=0.3)
        self.eval()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


def writer(attend: Attend) -> Writer:
    """A model in eval mode that attends by a function."""
    return Writer(lambda: Attention(attend))


def hidden(length: int) -> Tensor:
    """The later keys of each query, (T, T)."""
    return torch.ones(length, length, dtype=torch.bool).triu(1)


def softmax(query: Tensor, key: Tensor) -> Tensor:
    """Causal attention, (..., T, T)."""
    logits = query @ key.mT * query.shape[-1] ** -0.5
    return logits.masked_fill(hidden(query.shape[-2]), -torch.inf).softmax(-1)


def maps_of(model: nn.Module, ids: Tensor) -> list[Tensor]:
    """The maps that the model's own code notes in float64, (B, H, T, T) each, in the order of its modules."""
    exact = deepcopy(model).double()
    for module in exact.modules():
        getattr(module, "noted", []).clear()
    with torch.no_grad():
        exact(ids)
    return [noted for module in exact.modules() for noted in getattr(module, "noted", ())]


def watched(model: nn.Module, ids: Tensor) -> Any:
    """The run of one watched pass, whose output is that of the model alone."""
    with torch.no_grad():
        alone = model(ids)
        with sinkscope.watch(model) as seen:
            assert torch.equal(model(ids), alone)
    run = seen.run()
    assert not seen.left_out
    return run


def scanned(model: nn.Module, ids: Tensor) -> Any:
    """The run of a scan in batches of two."""
    return sinkscope.scan(model, data=ids, batch_size=2)


READ = [watched, scanned]


def assert_float64(run: Any, maps: list[Tensor], atol: float = 1e-5) -> None:
    """Each layer's columns are those of its map, (B, H, T, T)."""
    assert len(run.layers) == len(maps)
    for layer, attention in enumerate(maps):
        heads = run.heads[run.heads["layer"] == layer]
        expected = {
            "bos_mass": attention[:, :, 1:, 0].mean((0, 2)),
            "self_mass": attention.diagonal(0, -2, -1)[..., 1:].mean((0, 2)),
            "previous_mass": attention.diagonal(-1, -2, -1).mean((0, 2)),
            "entropy": torch.special.entr(attention).sum(-1).mean((0, 2)),
        }
        for name, values in expected.items():
            np.testing.assert_allclose(heads[name], values, atol=atol, err_msg=f"layer {layer} {name}")


def ids_of(sequences: int = 3, length: int = 48) -> Tensor:
    """Random token ids, longer than a dry run's."""
    return tokens(sequences, length)
