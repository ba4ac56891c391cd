"""Networks whose blocks the model never calls, beside the same network with blocks that it does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from own_code import READ, ids_of, watched
from plain_models import HEADS, VOCABULARY, WIDTH
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import OpenAIGPTConfig, OpenAIGPTModel
from watched import hooks

import sinkscope

LAYERS = 3
Read = Callable[[nn.Module, Tensor], Any]


class Attention(nn.Module):
    """Causal attention. `normed`: behind a norm of its own."""

    def __init__(self, normed: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH) if normed else nn.Identity()
        self.heads, self.qkv, self.out = HEADS, nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            each.unflatten(2, (self.heads, -1)).transpose(1, 2) for each in self.qkv(self.norm(x)).split(WIDTH, 2)
        )
        mixed = scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(x.shape))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Attention and MLP with a residual stream around each, which `steps` has in their order."""

    def __init__(self, normed: bool = True) -> None:
        super().__init__()
        self.norm = nn.Identity() if normed else nn.LayerNorm(WIDTH)
        self.attention = Attention(normed)
        self.mlp = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.mlp(x)  # type: ignore[no-any-return]


class Network(nn.Module):
    """`blocks` in the form that `arrange` gives them, which `step(model, x, number)` runs one by one."""

    def __init__(
        self, arrange: Callable[[nn.Module, list[Block]], None], step: Callable[[Any, Tensor, int], Tensor],
        normed: bool = True, rounds: int = 1,
    ) -> None:  # fmt: skip
        super().__init__()
        self.step, self.rounds = step, rounds
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.tokens, self.last = nn.Embedding(VOCABULARY, WIDTH), nn.LayerNorm(WIDTH)
            blocks = [Block(normed) for _ in range(LAYERS)]
            for parameter in [*self.parameters(), *(own for block in blocks for own in block.parameters())]:
                nn.init.normal_(parameter, std=0.3)
        arrange(self, blocks)
        self.eval()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for _ in range(self.rounds):
            for number in range(LAYERS):
                x = self.step(self, x, number)
        return self.last(x)  # type: ignore[no-any-return]


def _listed(model: Any, blocks: list[Block]) -> None:
    model.layers = nn.ModuleList(blocks)


def _pairs(model: Any, blocks: list[Block]) -> None:
    model.layers = nn.ModuleList(nn.ModuleList([block.attention, block.mlp]) for block in blocks)


def _with_norms(model: Any, blocks: list[Block]) -> None:
    model.layers = nn.ModuleList(
        nn.ModuleDict({"norms": nn.ModuleList([block.norm]), "attend": block.attention, "mlp": block.mlp})
        for block in blocks
    )


def _named(model: Any, blocks: list[Block]) -> None:
    model.layers = nn.ModuleDict({f"layer_{number}": block for number, block in enumerate(blocks)})


def _attributes(model: Any, blocks: list[Block]) -> None:
    for number, block in enumerate(blocks):
        setattr(model, f"block{number + 1}", block)


def _in_two_lists(model: Any, blocks: list[Block]) -> None:
    model.attentions = nn.ModuleList(block.attention for block in blocks)
    model.mlps = nn.ModuleList(block.mlp for block in blocks)


def _call(model: Any, x: Tensor, number: int) -> Tensor:
    return model.layers[number](x)  # type: ignore[no-any-return]


def _call_pair(model: Any, x: Tensor, number: int) -> Tensor:
    attention, mlp = model.layers[number]
    x = x + attention(x)
    return x + mlp(x)  # type: ignore[no-any-return]


def _call_with_norms(model: Any, x: Tensor, number: int) -> Tensor:
    layer = model.layers[number]
    x = x + layer["attend"](layer["norms"][0](x))
    return x + layer["mlp"](x)  # type: ignore[no-any-return]


def _call_two(model: Any, x: Tensor, number: int) -> Tensor:
    x = x + model.attentions[number](x)
    return x + model.mlps[number](x)  # type: ignore[no-any-return]


ARRANGED = {
    "pairs": (_pairs, _call_pair, True),
    "norms": (_with_norms, _call_with_norms, False),
    "named": (_named, lambda model, x, number: model.layers[f"layer_{number}"](x), True),
    "attributes": (_attributes, lambda model, x, number: getattr(model, f"block{number + 1}")(x), True),
}


def _assert_same(table: pd.DataFrame, other: pd.DataFrame, emptier: dict[str, list[int]]) -> None:
    """The tables hold the same numbers but for `emptier`: columns with the rows that are empty in `table` alone."""
    assert list(table.columns) == list(other.columns)
    for name in table.select_dtypes("number"):
        ours, theirs = table[name].to_numpy(float), other[name].to_numpy(float).copy()
        rows = emptier.get(name.removesuffix("_sem"), [])
        assert not np.isnan(theirs[rows]).any()
        theirs[rows] = np.nan
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("read", READ)
@pytest.mark.parametrize("rounds", [1, 2])
@pytest.mark.parametrize("arranged", ARRANGED)
def test_blocks_in_any_form_have_the_columns_of_blocks_in_a_list(arranged: str, rounds: int, read: Read) -> None:
    arrange, step, normed = ARRANGED[arranged]
    ids = ids_of(2, 24)
    model = Network(arrange, step, normed, rounds)
    run, listed = read(model, ids), read(Network(_listed, _call, normed, rounds), ids)
    last = [LAYERS * rounds - 1] if arranged in ("pairs", "norms") else []  # what leaves the last one nobody is given
    _assert_same(run.layers, listed.layers, {"avg_cos_output": last})
    _assert_same(run.heads, listed.heads, {})
    assert run.manifest.warnings == []
    assert hooks(model) == 0


def test_one_block_that_goes_round_is_given_what_the_round_before_made() -> None:
    """No other block begins between its rounds."""
    ids = ids_of(2, 24)

    def one(arrange: Any, step: Any) -> Any:
        return Network(arrange, lambda model, x, number: step(model, x, 0))

    for read in READ:
        run, called = read(one(_pairs, _call_pair), ids), read(one(_listed, _call), ids)
        _assert_same(run.layers, called.layers, {"avg_cos_output": [LAYERS - 1]})


def test_wiring_is_that_of_blocks_in_a_list() -> None:
    for arranged in ("pairs", "norms"):
        arrange, step, normed = ARRANGED[arranged]
        run = sinkscope.scan(Network(arrange, step, normed), data=ids_of(2, 24), measure=["smoothing", "switch"])
        listed = sinkscope.scan(Network(_listed, _call, normed), data=ids_of(2, 24), measure=["smoothing", "switch"])
        assert run.smoothing["rank_w"].notna().all()
        _assert_same(run.heads, listed.heads, {})
        _assert_same(run.smoothing, listed.smoothing, {})


@pytest.mark.parametrize("read", READ)
def test_lists_of_attention_alone_tell_nothing_of_the_stream(read: Read) -> None:
    """What such a module returns is not the residual stream, nor need it be given it."""
    ids = ids_of(2, 24)
    run = read(Network(_in_two_lists, _call_two), ids)
    listed = read(Network(_listed, _call), ids)
    np.testing.assert_allclose(run.heads["bos_mass"], listed.heads["bos_mass"], atol=1e-6)
    np.testing.assert_allclose(run.layers["cos_first_input"], listed.layers["cos_first_input"], atol=1e-5)
    for name in ("avg_cos_output", "norm_first", "cos_first_residual"):
        assert run.layers[name].isna().all()
    assert run.layers["layer"].tolist() == [0, 1, 2]
    assert run.manifest.warnings == [
        "no block that the residual stream enters and leaves was found around 3 attention calls (the first is "
        "attentions.0): columns that need the stream are empty there"
    ]


def test_branches_side_by_side_are_no_blocks() -> None:
    """Each reads what enters the block, and returns a part of what leaves it."""

    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn = Attention(True)

        def forward(self, x: Tensor) -> Tensor:
            return self.attn(x)  # type: ignore[no-any-return]

    class Parallel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attns = nn.ModuleList([Branch(), Branch()])

        def forward(self, x: Tensor) -> Tensor:
            return x + sum(branch(x) for branch in self.attns)  # type: ignore[no-any-return]

    def parallel(model: Any, blocks: list[Block]) -> None:
        model.layers = nn.ModuleList(Parallel() for _ in blocks)

    ids, given = ids_of(2, 24), list[Tensor]()
    model = Network(parallel, _call)
    run = watched(model, ids)
    for layer in [*model.layers[1:], model.last]:
        layer.register_forward_pre_hook(lambda module, args: given.append(args[0].double()))
    with torch.no_grad():
        model(ids)
    units = [torch.nn.functional.normalize(stream[:, 1:], dim=-1) for stream in given]
    pairs = [(unit @ unit.mT).sum((1, 2)).sub(23).div(23 * 22).mean() for unit in units]
    np.testing.assert_allclose(run.layers["avg_cos_output"], np.repeat(pairs, 2), atol=1e-5)


@pytest.mark.parametrize("read", READ)
def test_a_block_may_return_a_list(read: Read) -> None:
    """As OpenAI GPT's: the stream first, attention maps behind it."""

    class States(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.inner = model

        def forward(self, ids: Tensor) -> Tensor:
            return self.inner(ids)[0]  # type: ignore[no-any-return]

    torch.manual_seed(0)
    model = OpenAIGPTModel(OpenAIGPTConfig(vocab_size=40, n_embd=16, n_layer=2, n_head=2, n_positions=32)).eval()
    ids = torch.randint(3, 40, (2, 12), generator=torch.Generator().manual_seed(0))
    layers = read(States(model).eval(), ids).layers
    assert layers["avg_cos_output"][0] == pytest.approx(layers["avg_cos_residual"][1], abs=1e-6)
    assert layers["avg_cos_output"].notna().all()
