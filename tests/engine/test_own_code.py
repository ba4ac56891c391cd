"""Modules that attend in the styles people write: a watch and a scan give the columns of their float64 maps, or say in
a line what they do not read."""

from __future__ import annotations

import pytest
from own_code import Attention, assert_float64, ids_of, maps_of, scanned, softmax, watched, writer
from torch import Tensor

READ = [watched, scanned]


def in_half(module: Attention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attends in bfloat16; what the projection reads is cast back."""
    query, key, value = (each.bfloat16() for each in (query, key, value))
    maps = softmax(query, key)
    module.note(softmax(query.double(), key.double()))
    return (maps @ value).to(module.proj.weight.dtype)


@pytest.mark.parametrize("read", READ)
def test_an_output_that_is_cast_before_its_projection_is_read(read: type) -> None:
    model, ids = writer(in_half), ids_of()
    run = read(model, ids)
    assert run.heads["ov_drain"].notna().all()
    assert run.heads["honor"].notna().all()
    assert_float64(run, maps_of(model, ids), atol=2e-3)
