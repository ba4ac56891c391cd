"""z is what the projections of q, k and v read, wherever the norm before them stands."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import sinkscope

WIDTH, HEADS = 32, 4


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (each.unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in (q, k, v))
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


class Inner(nn.Module):
    """An attention module with its norm inside."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.proj = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(attend(*self.qkv(self.norm(x)).chunk(3, -1)))  # type: ignore[no-any-return]


class Core(nn.Module):
    """Attention without weights, which is handed q, k and v."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v)


class Block(nn.Module):
    """`way`: where attention is written: in the block, in a module with the norm inside, or in one without weights."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.norm = way, nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.inner, self.core = Inner() if way == "inner" else None, Core() if way == "core" else None

    @property
    def read_by(self) -> nn.Module:
        return self.norm if self.inner is None else self.inner.norm

    def forward(self, x: Tensor) -> Tensor:
        if self.inner is not None:
            return x + self.inner(x)  # type: ignore[no-any-return]
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        mixed = attend(q, k, v) if self.core is None else self.core(q, k, v)
        return x + self.proj(mixed)  # type: ignore[no-any-return]


class Net(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(50, WIDTH)
        self.blocks = nn.ModuleList(Block(way) for _ in range(2))
        with torch.no_grad():
            for block in self.blocks:
                for vector in (block.read_by.weight, block.read_by.bias):
                    vector.add_(torch.randn_like(vector))

    def forward(self, ids: Tensor) -> Tensor:
        x: Tensor = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return x


IDS = torch.randint(0, 50, (3, 20), generator=torch.Generator().manual_seed(0))


def cosines(z: Tensor) -> float:
    """cos_first_input in float64."""
    unit = functional.normalize(z.double(), dim=-1)
    return float((unit[:, 1:] * unit[:, :1]).sum(-1).mean())


@pytest.mark.parametrize("measured", ["scan", "watch"])
@pytest.mark.parametrize("way", ["block", "inner", "core"])
def test_the_tokens_that_attention_reads_are_those_behind_its_norm(way: str, measured: str) -> None:
    """They were those that the attending module is given: x, or q."""
    model = Net(way).eval()
    read, hooks = (
        [],
        [
            block.read_by.register_forward_hook(lambda module, args, output: read.append(output))
            for block in model.blocks
        ],
    )
    with torch.no_grad():
        model(IDS)
    for hook in hooks:
        hook.remove()
    if measured == "scan":
        run = sinkscope.scan(model, data=IDS, measure="smoothing")
        assert run.tables()["smoothing"][["tr_bw", "rank_w", "rank_qk"]].notna().all(axis=None)
    else:
        with torch.no_grad(), sinkscope.watch(model) as seen:
            model(IDS)
        run = seen.run()
    np.testing.assert_allclose(run.layers["cos_first_input"], [cosines(z) for z in read], rtol=1e-5, atol=1e-6)


def test_each_round_of_a_loop_has_its_own_tokens() -> None:
    """Outside of a ModuleList, every round had those of the last one."""
    block, embed = Block("inner"), nn.Embedding(50, WIDTH)

    class Looped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.block = embed, block

        def forward(self, ids: Tensor) -> Tensor:
            x: Tensor = self.embed(ids)
            for _ in range(3):
                x = self.block(x)
            return x

    model, read = Looped().eval(), list[Tensor]()
    with torch.no_grad():
        hook = block.read_by.register_forward_hook(lambda module, args, output: read.append(output))
        model(IDS)
        hook.remove()
    found = sinkscope.scan(model, data=IDS).layers["cos_first_input"]
    np.testing.assert_allclose(found, [cosines(z) for z in read], rtol=1e-5, atol=1e-6)
