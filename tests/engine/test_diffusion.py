"""Diffusion language models: every token sees every other, and no column assumes causal attention."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from families import LENGTH, dense_maps, tiny_model
from maps import columns, compare_maps
from modeling_planted import planted
from models import random_ids
from transformers import CONFIG_MAPPING, AutoModel

import sinkscope
from sinkscope.checkpoints import wrap_model
from sinkscope.checkpoints.forward import Forward


@pytest.mark.parametrize("fused", [False, True])
def test_every_row_counts_where_every_token_sees_every_other(fused: bool) -> None:
    model, ids = planted(causal=False, fused=fused), random_ids(3, 70)
    run = sinkscope.scan(model, data=ids, batch_size=3)
    assert run.manifest.self_check.status == "passed"
    assert [site.causal for site in run.manifest.attention] == [False, False]
    with torch.no_grad():
        maps = planted(causal=False)(ids, output_attentions=True).attentions
    rows = run.sequences[run.sequences["head"].notna()]
    for site, probabilities in zip(run.manifest.attention, maps, strict=True):
        for number, one in enumerate(probabilities.double()):
            own = rows[(rows["module"] == site.module) & (rows["sequence"] == number)].sort_values("head")
            for name, expected in columns(one).items():
                assert np.abs(own[name].to_numpy(float) - expected.numpy()).max() < 1e-5, name
        positions = run.positions[run.positions["layer"] == site.layer]
        alpha = probabilities.double().mean(-2).mean(0).numpy()  # over all T queries, also for later keys
        assert np.allclose(positions["alpha"].to_numpy().reshape(alpha.shape), alpha, atol=1e-5)
    assert run.summary.streams["text"].uniform_alpha_0.as_dict() == pytest.approx({"T": 1 / 70, "t64": 1 / 70})


def test_causal_and_not_are_told_apart_by_the_masks_alone() -> None:
    ids = random_ids(2, 40)
    for fused in (False, True):
        causal = sinkscope.scan(planted(causal=True, fused=fused), data=ids)
        assert [site.causal for site in causal.manifest.attention] == [True, True]


@pytest.mark.slow
@pytest.mark.skipif("diffusion_gemma" not in CONFIG_MAPPING, reason="this transformers has no diffusion_gemma")
def test_a_canvas_is_denoised_beside_its_prompt() -> None:
    """DiffusionGemma: a causal encoder of the prompt; a canvas that sees the prompt and, on both sides, itself."""
    model = tiny_model(AutoModel, "diffusion_gemma")
    ids = torch.randint(3, 90, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    runs = [sinkscope.scan(model, data=ids, batch_size=2) for _ in range(2)]
    run = runs[0]
    assert run.manifest.self_check.status == "passed"
    assert run.manifest.decoder_input.startswith("a canvas of 12 tokens")
    assert [(site.stream, site.causal) for site in run.manifest.attention] == [
        ("text", True), ("text", True), ("cross", False),
    ]  # fmt: skip
    assert run.summary.warnings == [
        "attention that is no map of queries and keys was not read: decoder.layers.0.self_attn"
    ]  # it slides: of the prompt its keys hold the last 7 positions alone
    forward = Forward(wrap_model(model).model)
    maps = dense_maps(forward, ids, None)
    assert [tuple(each.shape[-2:]) for each in maps] == [(LENGTH, LENGTH)] * 2 + [(12, 7 + 12), (12, LENGTH + 12)]
    assert float(maps[3][..., LENGTH + 1 :].min()) > 0  # the canvas's first token sees its last
    compare_maps(run, [maps[0], maps[1], maps[3]], [LENGTH] * 2)
    assert runs[0].heads.equals(runs[1].heads)
    with pytest.raises(sinkscope.SinkscopeError, match="padding cannot be told from text"):
        sinkscope.scan(model, data=[ids[0].tolist(), ids[1, :20].tolist()], batch_size=2, self_check=False)
