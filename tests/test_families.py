"""Every family transformers knows: scanned from a tiny random configuration, held against its own eager attention.

Each model reads a batch of two unequal sequences, padded on the right. What cannot be read is in a table with its
reason, and must be refused in words.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from families import LENGTH, VOCABULARY, dense_maps, eager_maps, tiny_model
from torch import Tensor
from transformers.models.auto import modeling_auto

import sinkscope
from sinkscope.capture import Capture, plan
from sinkscope.checkpoints import wrap_model
from sinkscope.forward import Forward

SHORT = 20
NO_SOFTMAX = "no attention of .* could be read"
CAUSAL = list(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)

UNREADABLE = {
    "mamba": NO_SOFTMAX,
    "mamba2": NO_SOFTMAX,
    "falcon_mamba": NO_SOFTMAX,
    "rwkv": NO_SOFTMAX,
    "xlstm": NO_SOFTMAX,
    "reformer": NO_SOFTMAX,
}
"""Refused, by these words. The first five have no softmax attention. Reformer takes exp(logits - logsumexp) over
chunks of hashed positions: no softmax is called, and no row is one query over all keys."""


def batch() -> tuple[Tensor, Tensor]:
    """Two sequences of 32 and 20 tokens, padded on the right, and their mask."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, VOCABULARY, (2, LENGTH), generator=generator)
    mask = torch.ones_like(ids)
    ids[1, SHORT:], mask[1, SHORT:] = 0, 0
    return ids, mask


def columns(probabilities: Tensor) -> dict[str, Tensor]:
    """The attention-mass columns of one sequence's maps (H, Tq, Tk), float64, by their written definitions."""
    first = probabilities[..., 0]
    shares = probabilities.clamp(min=1e-300)
    found = {
        "bos_mass": first[:, 1:].mean(-1),
        "sink_score": first.mean(-1),
        "tail_mass": first[:, 1:].mean(-1),
        "entropy": -(probabilities * shares.log()).sum(-1).mean(-1),
        "learned_sink_mass": (1 - probabilities.sum(-1)).mean(-1),
    }
    if probabilities.shape[-2] == probabilities.shape[-1]:
        found["self_mass"] = probabilities.diagonal(0, -2, -1)[:, 1:].mean(-1)
        found["previous_mass"] = probabilities.diagonal(-1, -2, -1).mean(-1)
    return found


def compare(run: Any, maps: list[Tensor]) -> None:
    """Every attention-mass column of every head of every sequence, within 1e-5."""
    rows = run.sequences[run.sequences["head"].notna()]
    for site, both in zip(run.manifest["attention"], maps, strict=True):
        for number, length in enumerate((LENGTH, SHORT)):
            valid = [slice(0, length) if size == LENGTH else slice(None) for size in both.shape[-2:]]
            expected = columns(both[number, :, valid[0], valid[1]].double())
            own = rows[(rows["module"] == site["module"]) & (rows["sequence"] == number)].sort_values("head")
            assert len(own) == site["heads"] == both.shape[1]
            for name, values in expected.items():
                ours = torch.tensor(own[name].to_numpy(float))
                assert float((ours - values).abs().max()) < 1e-5, f"{site['module']} sequence {number} {name}"


def check(auto: Any, family: str) -> Any:
    """Scans a tiny model of that type and compares; returns the run."""
    model = tiny_model(auto, family)
    ids, mask = batch()
    run = sinkscope.scan(model, data={"input_ids": ids, "attention_mask": mask}, batch_size=2, epsilon=0.1)
    assert run.manifest["self_check"]["status"] == "passed"
    base = wrap_model(model).model
    forward = Forward(base)
    found = plan(base, lambda: forward(ids[:1, :16]))
    with torch.no_grad():
        plain = forward(ids, mask)[0]
        with Capture(base, found, lambda view, row: None).watching([(0, LENGTH), (0, SHORT)], LENGTH):
            watched = forward(ids, mask)[0]
    for number, length in enumerate((LENGTH, SHORT)):
        scale = plain[number, :length].norm()
        assert float((watched - plain)[number, :length].norm() / scale) < 1e-6
    streams = [site["stream"] for site in run.manifest["attention"]]
    maps = eager_maps(model, forward, ids, mask, streams, plain)
    if maps is None:
        maps = dense_maps(forward, ids, mask)
    compare(run, maps)
    return run


@pytest.mark.parametrize("family", CAUSAL)
def test_causal_language_models(family: str) -> None:
    if family in UNREADABLE:
        with pytest.raises(sinkscope.SinkscopeError, match=UNREADABLE[family]):
            check(transformers.AutoModelForCausalLM, family)
    else:
        check(transformers.AutoModelForCausalLM, family)
