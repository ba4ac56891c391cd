"""Softmaxes and maps of a person's own code that are not plain attention."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from plain_models import HEADS, WIDTH, Plain, plain, tokens
from torch import Tensor, nn

import sinkscope


class Experts(nn.Module):
    """A soft mixture of experts, or a router whose softmax weighs the experts' outputs in one product."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.router = way, nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        shares = self.router(x).softmax(-1)
        if self.way == "loop":
            made = sum(shares[..., number : number + 1] * expert(x) for number, expert in enumerate(self.experts))
            assert isinstance(made, Tensor)
            return made
        return (shares[..., None] * torch.stack([expert(x) for expert in self.experts], -2)).sum(-2)


def runs(model: nn.Module) -> list[sinkscope.Run]:
    with torch.no_grad(), sinkscope.watch(model) as seen:
        model(tokens())
    return [seen.run(), sinkscope.scan(model, data=tokens(), measure="smoothing")]


@pytest.mark.parametrize("way", ["loop", "stack"])
def test_attention_behind_a_mixture_of_experts_is_read(way: str) -> None:
    """The router's softmax was followed through the residual stream into the next layer's q and k."""
    model = plain("product")
    for block in model.blocks:
        block.wide, block.narrow = nn.Identity(), Experts(way)
    for run in runs(model.eval()):
        assert len(run.layers) == 2
        assert run.manifest.warnings == []


class Talking(nn.Module):
    """Causal attention whose heads are mixed behind the softmax, by numbers of both signs."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.n_head, self.c_attn, self.c_proj = HEADS, attention.c_attn, attention.c_proj
        self.mix = nn.Parameter(torch.randn(HEADS, HEADS, generator=torch.Generator().manual_seed(0)))
        self.map: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.c_attn(x).chunk(3, -1))
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        maps = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(later, -torch.inf).softmax(-1)
        self.map = torch.einsum("gh,bhij->bgij", self.mix, maps)
        written: Tensor = self.c_proj((self.map @ v).transpose(1, 2).flatten(2))
        return written


def test_negative_weights_are_of_keys_that_a_query_sees() -> None:
    model: Plain = plain("product")
    for block in model.blocks:
        block.attn = Talking(block.attn)
    for run in runs(model.eval()):
        assert run.heads["first_visible"].eq(1).all()
        for layer, block in enumerate(model.blocks):
            maps = block.attn.map
            assert maps is not None
            own = run.heads[run.heads["layer"] == layer]["bos_mass"]
            np.testing.assert_allclose(own, maps[:, :, 1:, 0].double().mean((0, 2)).detach(), rtol=1e-4, atol=1e-6)
