"""The streaming table: every column against whole float64 maps, closed forms, and what is missing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Refused, Scan
from exact import assert_close, table
from families import tiny_model
from models import random_ids, tiny
from reference import find_layers, projection_matrix, run_sequence
from tiers import slow_but
from transformers import AutoModel

import sinkscope
from sinkscope.capture.calls import AttentionCall
from sinkscope.capture.kernels.attend import attend_in_blocks
from sinkscope.capture.kernels.map_walk import AttentionMap, map_sums
from sinkscope.capture.kernels.per_query import Regions, group_masses, region_sums
from sinkscope.metrics import registered
from sinkscope.runs.request import make_request

NAMES = list(registered().names("streaming"))
T, WINDOW, SINKS = 40, 6, 3


def streaming(model: Any, data: Any, **options: Any) -> sinkscope.Run:
    asked = {"measure": "streaming", "window": WINDOW, "sinks": SINKS, "self_check": False} | options
    return sinkscope.scan(model, data=data, **asked)


def naive(model: Any, ids: torch.Tensor) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Every column [sequence, layer, head], and lazy_score [sequence, layer], from whole maps."""
    base = model.base_model
    layers = find_layers(base, ids[:1])
    heads = model.config.num_attention_heads
    found = {name: np.zeros((len(ids), len(layers), heads)) for name in NAMES}
    lazy = np.zeros((len(ids), len(layers)))
    i, j = np.mgrid[: ids.shape[1], : ids.shape[1]]
    recent = j > i - WINDOW
    kept = recent | (j < SINKS)
    for n in range(len(ids)):
        run_sequence(base, layers, ids[n : n + 1])
        for at, layer in enumerate(layers):
            call = layer.trace.call
            w_o = projection_matrix(layer.projection)
            width = call.value.shape[2]
            for h in range(heads):
                probs, value = call.probs[h], call.value[h * len(call.value) // heads]
                slice_ = w_o[:, h * width : (h + 1) * width]
                energy = [
                    ((((probs * mask)[1:] @ value) @ slice_.T) ** 2).sum() for mask in (~kept, np.ones_like(kept))
                ]
                found["window_mass"][n, at, h] = (probs * recent)[1:].sum(1).mean()
                found["streaming_mass"][n, at, h] = (probs * kept)[1:].sum(1).mean()
                found["distant_mass"][n, at, h] = (probs * ~kept)[1:].sum(1).mean()
                found["distant_write"][n, at, h] = energy[0] / energy[1]
            lazy[n, at] = (call.probs * kept)[:, -1].sum(1).mean()
    return found, lazy


@pytest.mark.parametrize("family", slow_but(["llama", "gpt2", "gemma2", "gemma3", "gpt_neox", "gpt_oss"], "llama"))
def test_every_column_against_whole_maps(family: str) -> None:
    """Groups, soft-caps, windows of the model's own and learned sinks among them."""
    model, ids = tiny(family), random_ids(2, T)
    run = streaming(model, ids)
    expected, lazy = naive(model, ids)
    ours = table(run, NAMES, heads=True)
    for name in NAMES:
        assert_close(ours[name], expected[name], name, 1e-4, 1e-5)
        assert run.measured["streaming"][name].to_numpy() == pytest.approx(expected[name].mean(0).ravel(), 1e-4, 1e-5)
    assert_close(table(run, ["lazy_score"], heads=False)["lazy_score"], lazy, "lazy_score", 1e-4, 1e-5)
    assert run.layers["lazy_score"].to_numpy() == pytest.approx(lazy.mean(0), rel=1e-4)


@pytest.mark.slow
def test_uniform_attention_has_its_closed_form() -> None:
    """A[i,j] = 1 / (i + 1), and all v alike: the distant share of query i is max(0, i + 1 - W - S) / (i + 1)."""
    model, ids = tiny("llama"), random_ids(1, T)
    with torch.no_grad():
        for layer in model.layers:
            layer.self_attn.q_proj.weight.zero_()
            layer.self_attn.v_proj.weight.zero_()
            layer.self_attn.v_proj.bias = torch.nn.Parameter(torch.ones(layer.self_attn.v_proj.out_features))
    found = streaming(model, ids).measured["streaming"]
    i = np.arange(1, T)
    share = np.maximum(0, i + 1 - WINDOW - SINKS) / (i + 1)
    assert found["distant_mass"].to_numpy() == pytest.approx(share.mean())
    assert found["streaming_mass"].to_numpy() == pytest.approx(1 - share.mean())
    assert found["window_mass"].to_numpy() == pytest.approx((np.minimum(i + 1, WINDOW) / (i + 1)).mean())
    assert found["distant_write"].to_numpy() == pytest.approx((share**2).mean(), rel=1e-4)


def call(length: int = 70, dtype: torch.dtype = torch.float64) -> AttentionCall:
    generator = torch.Generator().manual_seed(0)
    draw = [torch.randn(2, heads, length, 8, generator=generator, dtype=dtype) for heads in (4, 2, 2)]
    return AttentionCall(*draw, causal=True, scaling=0.5)


@pytest.mark.parametrize("score", ["softmax", "relu", "sigmoid"])
def test_the_regions_add_up_to_the_whole_call(score: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A window of T leaves nothing distant; without window and first keys all are distant, and o is their output."""
    asked = replace(call(), score=score)
    monkeypatch.setattr("sinkscope.capture.kernels.sums.BLOCK_BYTES", 1)  # blocks of 16 queries
    output, sums = attend_in_blocks(asked)
    total = torch.ones_like(sums.first) if sums.row_total is None else sums.row_total
    whole = region_sums(asked, Regions(0, 70))
    torch.testing.assert_close(whole.recent, total)
    assert not whole.distant.any()
    assert not whole.first.any()
    bare = region_sums(asked, Regions(0, 0))
    torch.testing.assert_close(bare.distant, total)
    torch.testing.assert_close(bare.distant_output, output)
    parts = region_sums(asked, Regions(5, 20))
    torch.testing.assert_close(parts.first + parts.recent + parts.distant, total)
    assert (parts.distant[..., :25] == 0).all()
    assert (parts.distant[..., 25:] > 0).any(-1).all()


def test_a_map_gives_the_sums_of_its_call() -> None:
    asked = call()
    logits = asked.query @ asked.key.repeat_interleave(2, 1).mT * asked.scaling
    logits = logits.masked_fill(torch.ones(70, 70, dtype=torch.bool).triu(1), -torch.inf)
    seen = AttentionMap(logits.softmax(-1), logits, value=asked.value)
    ours, expected = (region_sums(each, Regions(5, 20)) for each in (seen, asked))
    for name in ("first", "recent", "distant", "distant_output"):
        torch.testing.assert_close(getattr(ours, name), getattr(expected, name))
    torch.testing.assert_close(seen.probabilities, logits.softmax(-1))  # the model's own map stays as it is


def test_a_model_that_forms_its_own_maps() -> None:
    """Bloom multiplies its maps itself: their regions against the maps that it returns."""
    model, ids = tiny_model(AutoModel, "bloom"), random_ids(2, T) % 90
    found = streaming(model, ids).measured["streaming"]
    with torch.no_grad():
        maps = torch.stack(model(input_ids=ids, output_attentions=True).attentions).double()[..., 1:, :]
    i, j = torch.arange(1, T)[:, None], torch.arange(T)
    recent, first = j > i - WINDOW, j < SINKS
    for name, keys in (("window_mass", recent), ("streaming_mass", recent | first), ("distant_mass", ~recent & ~first)):
        expected = (maps * keys).sum(-1).mean((1, 3)).ravel()  # [layer, sequence, head, query, key]
        assert found[name].to_numpy() == pytest.approx(expected.numpy(), abs=1e-6), name
    assert found["distant_write"].between(0, 1).all()


def test_a_map_in_half_precision_is_recomputed_from_its_logits() -> None:
    """Rounded to 8 bits, the shares of a row of 70 keys would not add up to 1."""
    asked = call(dtype=torch.float32)
    logits = (asked.query @ asked.key.repeat_interleave(2, 1).mT * asked.scaling).bfloat16()
    later = torch.ones(70, 70, dtype=torch.bool).triu(1)
    exact = logits.double().masked_fill(later, -torch.inf).softmax(-1)
    logits = logits.masked_fill(later, -torch.inf)
    seen = AttentionMap(logits.softmax(-1), logits)
    ours = region_sums(seen, Regions(5, 20))
    torch.testing.assert_close(ours.first + ours.recent + ours.distant, torch.ones(2, 4, 70), atol=1e-5, rtol=0)
    torch.testing.assert_close(map_sums(seen).columns, exact.sum(-2).float())
    groups = torch.arange(70).remainder(3).expand(2, -1) - 1
    expected = torch.stack([exact[..., groups[0] == group].sum(-1) for group in (0, 1)], -1).float()
    torch.testing.assert_close(group_masses(seen, groups, 2), expected)
    whole = AttentionMap(exact, exact.log())
    torch.testing.assert_close(group_masses(whole, groups, 2), expected.double(), rtol=1e-6, atol=1e-6)
    causal = replace(asked, query=asked.query.double(), key=asked.key.double(), value=asked.value.double())
    scores = (causal.query @ causal.key.repeat_interleave(2, 1).mT * 0.5).masked_fill(later, -torch.inf)
    own = AttentionMap(scores.softmax(-1), scores)
    torch.testing.assert_close(group_masses(causal, groups, 2), group_masses(own, groups, 2))


@pytest.mark.slow
def test_padding_and_batches_change_nothing() -> None:
    model, ids = tiny("mistral"), random_ids(3, T)
    mask = torch.ones_like(ids)
    mask[1, 30:] = 0
    mask[2, WINDOW + SINKS :] = 0
    padded = table(streaming(model, {"input_ids": ids, "attention_mask": mask}), NAMES, heads=True)
    alone = table(streaming(model, ids[1:2, :30]), NAMES, heads=True)
    for name in NAMES:
        assert_close(padded[name][1], alone[name][0], name, 1e-3, 1e-5)
        assert np.isnan(padded[name][2]).all()  # no query of it has a distant key


@pytest.mark.slow
def test_a_gate_after_attention_leaves_distant_write_empty() -> None:
    """What the projection reads is not o_i, so no share of it belongs to distant keys; masses stay as they were."""
    model, ids = tiny("llama", num_hidden_layers=1), random_ids(1, T)
    plain = streaming(model, ids).measured["streaming"]
    model.layers[0].self_attn.o_proj.register_forward_pre_hook(lambda module, args: (args[0] * 0.5,), prepend=True)
    gated = streaming(model, ids).measured["streaming"]
    assert plain["distant_write"].notna().all()
    assert gated["distant_write"].isna().all()
    assert gated["distant_mass"].equals(plain["distant_mass"])


def test_a_cache_without_first_tokens_is_named_by_its_window() -> None:
    run = streaming(tiny("llama"), random_ids(1, T), sinks=0)
    [line] = [line for line in run.summary.streams["text"].in_words if line.startswith("Streaming")]
    assert line.endswith(f"from keys other than the last {WINDOW} tokens.")


@pytest.mark.slow
def test_what_keeps_no_cache_is_empty_and_says_so() -> None:
    short = streaming(tiny("llama"), random_ids(1, WINDOW + SINKS))
    assert short.measured["streaming"][NAMES].isna().all(axis=None)
    assert short.layers["lazy_score"].isna().all()
    [line] = [line for line in short.summary.streams["text"].in_words if line.startswith("Streaming")]
    assert f"no sequence is longer than the first {SINKS} tokens and the last {WINDOW}." in line
    assert "--" not in line, "a model card has this line, too"
    both = streaming(tiny("bert"), random_ids(1, T))
    assert both.measured["streaming"][NAMES].isna().all(axis=None)
    assert any("no causal self-attention" in line for line in both.summary.streams["text"].in_words)


@pytest.mark.slow
def test_a_plain_scan_reads_no_call_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sinkscope.questions.streaming.measure.region_sums", lambda *_: pytest.fail("it was asked for"))
    run = sinkscope.scan(tiny("llama"), data=random_ids(1, T), self_check=False)
    assert "lazy_score" not in run.layers
    assert not run.measured


def test_the_two_numbers_belong_to_the_request(refused: Refused, scan_cli: Scan, tiny_folder: Any) -> None:
    assert "belongs to --measure streaming" in refused(tiny_folder, "--window", 8)
    assert "--window 0: at least 1 is needed" in refused(tiny_folder, "--measure", "streaming", "--window", 0)
    assert "at most" in refused(tiny_folder, "--measure", "streaming", "--sinks", 2**30)
    words = ("--measure", "streaming", "--window", "8", "--sinks", "2", "--no-self-check", "--quiet")
    outcome = scan_cli(tiny_folder, *words)
    assert outcome.code == 0, outcome.stderr
    asked = outcome.json("manifest")["request"]
    assert (asked["window"], asked["sinks"]) == (8, 2)
    found = outcome.json("summary")["streams"]["text"]["measured"]["streaming"]
    assert found == {"window": 8, "sinks": 2, "heads": 8, "idle_heads": 0}
    of = make_request(model="a", measures="streaming", window=8, sinks=2).of_model("b")
    assert (of.window, of.sinks) == (8, 2)
