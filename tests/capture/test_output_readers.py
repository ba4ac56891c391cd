"""An output projection of any name is found by what it reads."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from plain_models import HEADS, WAYS, WIDTH, Plain, plain, tokens
from torch import Tensor, nn
from torch.nn import functional

import sinkscope

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without:UserWarning")

WRITES = ["lthon", "ahon", "honor", "residual_write", "ov_drain"]


class Outside(nn.Module):
    """An attention whose projection stands outside of it, in a list with a name of its own; `readers` of 2: a gate
    reads what it reads."""

    def __init__(self, attention: nn.Module, readers: int) -> None:
        super().__init__()
        self.mixes, attention.c_proj = nn.ModuleList([attention.c_proj]), nn.Identity()
        self.attention, self.opens = attention, nn.Linear(WIDTH, WIDTH) if readers == 2 else None

    def forward(self, x: Tensor) -> Tensor:
        heads = self.attention(x)
        mixed: Tensor = self.mixes[0](heads)
        return mixed if self.opens is None else mixed * self.opens(heads).sigmoid()


def outside(way: str, readers: int = 1) -> Plain:
    model = plain(way)
    for block in model.blocks:
        block.attn = Outside(block.attn, readers)
    return model.eval()


def by_scan(model: nn.Module, ids: Tensor) -> sinkscope.Run:
    return sinkscope.scan(model, data=ids, measure="smoothing")


def by_watch(model: nn.Module, ids: Tensor) -> sinkscope.Run:
    with torch.no_grad(), sinkscope.watch(model) as seen:
        model(ids)
    return seen.run()


@pytest.mark.parametrize("measured", [by_scan, by_watch])
@pytest.mark.parametrize("way", [way for way in WAYS if way != "multi_head"])
def test_a_projection_of_any_name_gives_the_numbers_of_a_known_one(way: str, measured: object) -> None:
    assert callable(measured)
    ours, known = measured(outside(way), tokens()), measured(plain(way), tokens())
    assert known.heads[WRITES].notna().all(axis=None)
    for name, table in known.tables().items():
        assert (
            ours.tables()[name]
            .drop(columns="module", errors="ignore")
            .equals(table.drop(columns="module", errors="ignore"))
        ), name


@pytest.mark.parametrize("measured", [by_scan, by_watch])
def test_of_two_layers_that_read_the_heads_none_is_taken_for_the_projection(measured: object) -> None:
    assert callable(measured)
    run = measured(outside("sdpa", 2), tokens())
    assert run.heads[WRITES].isna().all(axis=None)
    assert run.heads["bos_mass"].notna().all()


class Misnamed(nn.Module):
    """A plain model's attention whose value projection has the usual name of an output projection; `way`: what else
    reads the heads, or how."""

    def __init__(self, attention: nn.Module, way: str) -> None:
        super().__init__()
        self.way, (query, key, value) = way, attention.c_attn.weight.detach().chunk(3)
        biases = attention.c_attn.bias.detach().chunk(3)
        for name, weight, bias in zip(("q", "k", "proj"), (query, key, value), biases, strict=True):
            layer = nn.Linear(WIDTH, WIDTH)
            with torch.no_grad():
                layer.weight.copy_(weight)
                layer.bias.copy_(bias)
            self.add_module(name, layer)
        self.last = attention.c_proj if way != "none" else None
        self.weight = None if way != "none" else nn.Parameter(attention.c_proj.weight.detach())
        self.gate = nn.Sequential(nn.Linear(WIDTH, WIDTH)) if way == "gate" else None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for layer in (self.q, self.k, self.proj))
        heads = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        if self.last is None:
            return functional.linear(heads.flatten(2), self.weight)  # type: ignore[arg-type]
        heads = (heads.mT if self.way == "turned" else heads).flatten(2)
        written: Tensor = self.last(heads)
        return written if self.gate is None else written * self.gate(heads).sigmoid()


@pytest.mark.parametrize("measured", [by_scan, by_watch])
@pytest.mark.parametrize("way", ["", "gate", "turned", "none"])
def test_a_layer_before_attention_is_not_its_projection_whatever_its_name(way: str, measured: object) -> None:
    assert callable(measured)
    model, known = plain(), plain()
    for block in model.blocks:
        block.attn = Misnamed(block.attn, way)
    found = measured(model.eval(), tokens()).heads
    if way:
        assert found[WRITES].isna().all(axis=None)
    else:
        expected = measured(known, tokens()).heads
        np.testing.assert_allclose(found[WRITES], expected[WRITES], rtol=1e-5)


@pytest.mark.parametrize("measured", [by_scan, by_watch])
def test_a_gate_that_alone_reads_the_heads_is_not_the_projection(measured: object) -> None:
    """Its own module returns what it returns; the attending module does not."""
    assert callable(measured)

    class Gated(nn.Module):
        def __init__(self, attention: nn.Module) -> None:
            super().__init__()
            self.weight, attention.c_proj = nn.Parameter(attention.c_proj.weight.detach()), nn.Identity()
            self.attention, self.gate = attention, nn.Sequential(nn.Linear(WIDTH, WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            heads = self.attention(x)
            return functional.linear(heads, self.weight) * self.gate(heads).sigmoid()

    model = plain()
    for block in model.blocks:
        block.attn = Gated(block.attn)
    assert measured(model.eval(), tokens()).heads[WRITES].isna().all(axis=None)


class Scaled(nn.Linear):
    """A linear layer whose caller says what its result is multiplied by."""

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return scale * super().forward(x)


class Scales(nn.Module):
    """An attention that gives its projection this `scale`."""

    def __init__(self, attention: nn.Module, scale: float, named: bool) -> None:
        super().__init__()
        self.named = named
        self.c_proj = Scaled(WIDTH, WIDTH)
        self.c_proj.load_state_dict(attention.c_proj.state_dict())
        attention.c_proj = nn.Identity()
        self.attention, self.scale = attention, scale

    def forward(self, x: Tensor) -> Tensor:
        heads = self.attention(x)
        written: Tensor = self.c_proj(heads, scale=self.scale) if self.named else self.c_proj(heads, self.scale)
        return written


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("measured", [by_scan, by_watch])
def test_a_projection_that_is_given_more_than_heads_is_told_of(measured: object, named: bool) -> None:
    """Its weight alone does not tell what it adds. The default of a keyword changes nothing."""
    assert callable(measured)
    runs = {}
    for scale in (1.0, 3.0):
        model = plain("sdpa")
        for block in model.blocks:
            block.attn = Scales(block.attn, scale, named)
        runs[scale] = measured(model.eval(), tokens())
    known = measured(plain("sdpa"), tokens()).heads
    np.testing.assert_allclose(runs[1.0].heads[WRITES], known[WRITES], rtol=1e-5)
    assert not any("beside the heads" in warning for warning in runs[1.0].manifest.warnings)
    assert runs[3.0].heads[WRITES].isna().all(axis=None)
    assert any("given 'scale' beside the heads" in warning for warning in runs[3.0].manifest.warnings)
