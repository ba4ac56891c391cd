"""torch's own multi-head attention is read although its fused path and its single function call hide the map."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from exact import assert_close
from maps import columns
from modeling_torch import torch_model
from models import random_ids
from tiers import slow_but
from torch import Tensor

import sinkscope
from sinkscope.capture import Capture, plan
from sinkscope.checkpoints.forward import Forward

LENGTHS = (40, 23)
KINDS = [
    {"kind": kind, "batch_first": first, "causal": causal}
    for kind in ("weights", "no_weights", "encoder")
    for first in (True, False)
    for causal in (False, True)
    if not (causal and kind == "encoder")
]

FAST = (KINDS[1], KINDS[4], KINDS[8])
"""One of each kind, in either order and with or without a causal mask."""


def padded() -> dict[str, Tensor]:
    ids = random_ids(2, max(LENGTHS))
    mask = torch.ones_like(ids)
    ids[1, LENGTHS[1] :], mask[1, LENGTHS[1] :] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def words(settings: dict[str, Any]) -> str:
    order = "batch first" if settings["batch_first"] else "time first"
    return f"{settings['kind']} {order}{' causal' if settings['causal'] else ''}"


@pytest.mark.parametrize("settings", slow_but(KINDS, *FAST), ids=words)
def test_the_masses_are_those_of_the_weights_torch_returns(settings: dict[str, Any]) -> None:
    model, given = torch_model(**settings), padded()
    run = sinkscope.scan(model, data=given, batch_size=2)
    assert run.manifest.self_check.status == "passed"
    assert [site.path for site in run.manifest.attention] == ["inline", "inline"]
    assert {site.causal for site in run.manifest.attention} == {settings["causal"]}
    rows = run.sequences[run.sequences["head"].notna()]
    with torch.no_grad():
        maps = model.reference(**given)
    for site, both in zip(run.manifest.attention, maps, strict=True):
        for number, length in enumerate(LENGTHS):
            own = rows[(rows["module"] == site.module) & (rows["sequence"] == number)].sort_values("head")
            for name, expected in columns(both[number, :, :length, :length].double()).items():
                apart = np.abs(own[name].to_numpy(float) - expected.numpy()).max()
                assert apart < 1e-5, f"{site['module']} sequence {number} {name}"


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")  # torch's own, of its fused path
@pytest.mark.parametrize("settings", slow_but(KINDS, *FAST), ids=words)
def test_the_model_s_output_stays(settings: dict[str, Any]) -> None:
    """nn.TransformerEncoder leaves its fused path while it is watched; its output is the same up to rounding."""
    model, given = torch_model(**settings), padded()
    forward = Forward(model)
    found = plan(model, lambda: forward(given["input_ids"][:1, :16]))
    spans = [(0, length) for length in LENGTHS]
    with torch.no_grad():
        plain = forward(given["input_ids"], given["attention_mask"])[0]
        with Capture(model, found, lambda view, row: None, 0.3).watching(spans, max(LENGTHS)):
            watched = forward(given["input_ids"], given["attention_mask"])[0]
    for number, length in enumerate(LENGTHS):
        one, other = watched[number, :length], plain[number, :length]
        assert float((one - other).norm() / other.norm()) < 1e-6


def test_weights_asked_for_or_not_every_column_is_the_same() -> None:
    """torch has two code paths, one of which scales the queries first; all columns agree between them."""
    ids = random_ids(3, 30)
    runs = [sinkscope.scan(torch_model(kind=kind), data=ids) for kind in ("weights", "no_weights")]
    for name in runs[0].heads.select_dtypes("number"):
        ours, theirs = (run.heads[name].to_numpy(float) for run in runs)
        assert_close(ours, theirs, name, 1e-4, 1e-5)
    assert runs[0].heads[["honor", "q_norm", "residual_write", "value_drain"]].notna().all(axis=None)
    assert runs[0].layers["inf_norm"].notna().all()


def test_positions_first_the_residual_stream_is_read() -> None:
    """No batch of a scan has as many sequences as positions, so that sizes tell the axes apart."""
    first, second = (
        sinkscope.scan(torch_model(batch_first=order), data=random_ids(12, 12), batch_size=12)
        for order in (True, False)
    )
    for name in ("inf_norm", "cos_first_input", "cos_first_residual"):
        assert second.layers[name].notna().all()
        np.testing.assert_allclose(second.layers[name], first.layers[name], rtol=1e-5)
    np.testing.assert_allclose(second.heads["bos_mass"], first.heads["bos_mass"], atol=1e-6)
