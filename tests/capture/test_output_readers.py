"""An output projection of any name is found by what it reads."""

from __future__ import annotations

import pytest
import torch
from plain_models import WAYS, WIDTH, Plain, plain, tokens
from torch import Tensor, nn

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
