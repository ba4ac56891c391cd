"""Modules that attend in the styles people write: a watch and a scan give the columns of their float64 maps, or say in
a line what they do not read."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from own_code import Attend, Attention, assert_float64, ids_of, maps_of, scanned, softmax, watched, writer
from torch import Tensor

from sinkscope import SinkscopeError

READ = [watched, scanned]


def in_half(module: Attention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attends in bfloat16; what the projection reads is cast back."""
    query, key, value = (each.bfloat16() for each in (query, key, value))
    maps = softmax(query, key)
    module.note(softmax(query.double(), key.double()))
    return (maps @ value).to(module.proj.weight.dtype)


def zeroed(module: Attention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Takes the attention to the first key away after the softmax."""
    maps = softmax(query, key)
    maps[..., 0] = 0
    return module.note(maps) @ value


@pytest.mark.parametrize("read", READ)
def test_an_output_that_is_cast_before_its_projection_is_read(read: type) -> None:
    model, ids = writer(in_half), ids_of()
    run = read(model, ids)
    assert run.heads["ov_drain"].notna().all()
    assert run.heads["honor"].notna().all()
    assert_float64(run, maps_of(model, ids), atol=2e-3)


def test_a_map_that_was_changed_after_its_softmax_passes_the_self_check() -> None:
    """The check computed it from the logits, which are no longer its own."""
    model, ids = writer(zeroed), ids_of()
    run = scanned(model, ids)
    assert run.manifest.self_check.status == "passed"
    assert (run.heads["bos_mass"] == 0).all()
    for layer, maps in enumerate(maps_of(model, ids)):
        own = maps.diagonal(0, -2, -1)[..., 1:].mean((0, 2))
        np.testing.assert_allclose(run.heads.query(f"layer == {layer}")["self_mass"], own, atol=1e-5)


def efficient(module: Attention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Linear attention: softmaxes over the channels of q and over the positions of k."""
    return query.softmax(-1) @ (key.softmax(-2).mT @ value)


def efficient_by_keys(module: Attention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The same, with the products as diffusion models write them."""
    context = torch.einsum("bhdn,bhne->bhde", key.mT.softmax(-1), value)
    return torch.einsum("bhde,bhdn->bhen", context, query.mT.softmax(-2)).mT


@pytest.mark.parametrize("attend", [efficient, efficient_by_keys])
@pytest.mark.parametrize("read", READ)
@pytest.mark.parametrize("length", [8, 48])
def test_a_softmax_over_channels_is_no_attention(attend: Attend, read: type, length: int) -> None:
    with pytest.raises(SinkscopeError, match=r"no attention of Writer|attention that is no map"):
        read(writer(attend), ids_of(3, length))
