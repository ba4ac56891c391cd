"""--tp without a launch: what becomes of attention whose heads are not spread over the processes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from models import tiny
from watched import find

from sinkscope import SinkscopeError
from sinkscope.checkpoints.placement import Placement
from sinkscope.engine.tensor_parallel import spread


def test_attention_that_each_process_has_whole_stays_as_it_is() -> None:
    """As a vision tower whose language model is spread."""
    model = tiny("llama")
    _, found = find(model)
    plan, heads = spread(model, found, 2)
    assert plan.sites == found.sites
    assert heads.sites == frozenset()
    assert heads.whole_sites(plan.sites) == found.sites
    mean = torch.tensor([0.5])
    assert heads.mean(plan.sites[0], mean) is mean


def test_attention_without_an_output_projection_is_refused() -> None:
    model = tiny("llama")
    _, found = find(model)
    unclear = replace(found, sites=[*found.sites[:-1], replace(found.sites[-1], projection=None)])
    with pytest.raises(SinkscopeError, match=r"which heads of layers\.2\.self_attn each process holds"):
        spread(model, unclear, 2)


def test_a_model_that_every_process_would_hold_whole_is_refused() -> None:
    with pytest.raises(SinkscopeError, match="transformers has no plan to spread this kind of model over processes"):
        Placement(None, 2).settle(tiny("llama"))
