"""Who may see each key, under windows, chunks, prefixes and padding, and what alpha_k and the sinks become by it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from exact import assert_close
from families import tiny_model
from models import WINDOW, random_ids, tiny
from reference import alpha_scores, counted_range, measure, peak_range, seeing
from tiers import slow_but
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

import sinkscope
from sinkscope.capture.calls import AttentionCall
from sinkscope.capture.kernels import attend
from sinkscope.capture.kernels.map_walk import AttentionMap, map_sums
from sinkscope.capture.kernels.sums import AttentionSums
from sinkscope.capture.masks.visibility import read_mask
from sinkscope.engine.self_check import dense_map
from sinkscope.metrics.events import counted
from sinkscope.metrics.mass import ranked, received

LENGTH = 140
"""So long that a CPU reads plain calls with the compiled loop, and more than 64."""

Sees = Callable[[int, int], bool]
MASKS: dict[str, Sees] = {
    "causal": lambda i, k: k <= i,
    "both ways": lambda i, k: True,
    "window": lambda i, k: i - 24 < k <= i,
    "window both ways": lambda i, k: abs(i - k) <= 12,
    "chunks": lambda i, k: k <= i and i // 48 == k // 48,
    "prefix": lambda i, k: k <= i or (i < 30 and k < 30),
    "first keys and a window": lambda i, k: k <= i and (k < 4 or i - 24 < k),
    "chosen keys": lambda i, k: k == i or (k < i and (7 * i + 3 * k) % 10 < 3),
    "nobody sees the last keys": lambda i, k: k <= i and k < 100,
}


def seen_under(name: str) -> np.ndarray:
    return np.array([[MASKS[name](i, k) for k in range(LENGTH)] for i in range(LENGTH)])


def a_call(visible: np.ndarray, kind: str, sinks: Tensor | None = None) -> AttentionCall:
    """Two sequences, six heads over three groups, under this mask as bool, as a float, or as one of each head's own."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, heads, LENGTH, 16, generator=generator) for heads in (6, 3, 3))
    mask = torch.from_numpy(visible)[None, None]
    if kind != "bool":
        mask = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    if kind == "bias of each head":
        slopes = torch.arange(1.0, 7)[None, :, None, None] / 64
        places = torch.arange(LENGTH)
        mask = (mask - slopes * (places[:, None] - places).abs()).clamp(min=torch.finfo(torch.float32).min)
    return AttentionCall(query, key, value, mask=mask, scaling=0.25, sinks=sinks)


@pytest.mark.parametrize("kind", ["bool", "float", "bias of each head"])
@pytest.mark.parametrize("name", MASKS)
def test_who_sees_a_key_is_counted_in_every_mask(name: str, kind: str) -> None:
    visible = seen_under(name)
    found = read_mask(a_call(visible, kind).mask, False, LENGTH, LENGTH, torch.device("cpu"))
    early = found.seen_by_first(64)
    assert early is not None
    for counts, part in ((found.seen_by, visible), (early, visible[:64, :64])):
        assert (counts == torch.tensor(seeing(part))).all(), name
    assert found.seen_by_first(LENGTH + 1) is None
    assert (found.sees_few == torch.tensor(visible[:, :4].sum(1))).all(), name
    assert [int(k) for k in ranked(found.seen_by)[0, -1].nonzero()] == peak_range(visible)
    assert [int(k) for k in counted(found.seen_by)[0, -1].nonzero()] == counted_range(visible)


def test_without_a_mask_the_order_tells() -> None:
    for causal, expected in ((True, list(range(9, 0, -1))), (False, [9] * 9)):
        assert read_mask(None, causal, 9, 9, torch.device("cpu")).seen_by[0, 0].tolist() == expected


@pytest.mark.parametrize("how", ["loop", "walk", "map"])
@pytest.mark.parametrize("name", MASKS)
def test_every_path_gives_alpha_of_the_queries_that_see_the_key(name: str, how: str) -> None:
    """The compiled loop, the walk in torch (float64, with learned sinks), and maps that a model formed itself."""
    visible = seen_under(name)
    call = a_call(visible, "bool")
    if how == "walk":
        query, key, value = (each.double() for each in (call.query, call.key, call.value))
        call = AttentionCall(query, key, value, mask=call.mask, scaling=0.25, sinks=torch.ones(1, 6, 1, 1).double())
    maps = dense_map(call)
    assert maps is not None
    sums = attend.attend_in_blocks(call)[1] if how != "map" else _of_map(call, maps)
    expected = np.array([[alpha_scores(head, visible) for head in row] for row in maps.numpy()])
    early = np.array([[alpha_scores(head[:64, :64], visible[:64, :64]) for head in row] for row in maps.numpy()])
    assert_close(received(sums.columns, sums.seen_by).numpy(), expected, name, 1e-4, 1e-6)
    assert (sums.sees_few == torch.tensor(visible[:, :4].sum(1))).all(), name
    assert sums.early_columns is not None
    assert sums.early_seen_by is not None
    assert_close(received(sums.early_columns, sums.early_seen_by).numpy(), early, f"{name}, first 64", 1e-4, 1e-6)


def _of_map(call: AttentionCall, maps: Tensor) -> AttentionSums:
    assert call.mask is not None
    logits = (call.query @ call.key.repeat_interleave(2, 1).mT * 0.25).masked_fill(~call.mask, -1e9)
    return map_sums(AttentionMap(maps.float(), logits))


def test_a_query_that_sees_key_0_alone_has_a_margin_over_a_learned_sink() -> None:
    """The margin is that over all else in the softmax; where nothing else is, there is none. It counts for a key that
    is largest only where it is seen."""
    visible = np.zeros((LENGTH, LENGTH), dtype=bool)
    visible[:70, 0], visible[70:, 1] = True, True
    for sinks in (None, torch.full((1, 6, 1, 1), 0.5)):
        call = a_call(visible, "bool", sinks)
        sums = attend.attend_in_blocks(call)[1]
        logits = (call.query @ call.key.repeat_interleave(2, 1)[:, :, :1].mT * 0.25)[..., 0]
        if sinks is None:
            assert sums.margin.isnan().all()
        else:
            torch.testing.assert_close(sums.margin[..., :70], logits[..., :70] - 0.5, rtol=1e-5, atol=1e-5)
            assert sums.margin[..., 70:].isnan().all()
        assert sums.first_is_largest[..., :70].all()
        assert not sums.first_is_largest[..., 70:].any()


def test_a_map_without_logits_is_read_by_its_order() -> None:
    """An attention of 0 may be a key that is seen: a rectifier gives many."""
    maps = torch.zeros(1, 1, 80, 80)
    maps[..., 3] = torch.tril(torch.ones(80, 80))[:, 3]
    assert map_sums(AttentionMap(maps, None)).seen_by[0, 0].tolist() == list(range(80, 0, -1))
    maps[..., 0, 79] = 1
    assert map_sums(AttentionMap(maps, None)).seen_by[0, 0].tolist() == [80] * 80


@pytest.mark.slow
@pytest.mark.parametrize("family", slow_but(["gemma3", "gpt_oss", "mistral"], "gemma3"))
def test_a_window_is_measured_as_the_reference_does(family: str) -> None:
    """float32, so long that layers without learned sinks are read by the compiled loop."""
    model, ids = tiny(family), random_ids(2, LENGTH)
    run, expected = sinkscope.scan(model, data=ids, self_check=False), measure(model, ids)
    alpha = run.positions["alpha"].to_numpy().reshape(expected.alpha.shape[1:])
    assert_close(alpha, expected.alpha.mean(0), "alpha", 1e-4, 1e-6)
    assert (run.heads["peak_position"] == expected.peak_position.ravel()).all()
    sinks, found = run.sinks, [each for each in expected.sinks if each[2] == "attention"]
    assert sinks is not None
    ours = sinks[sinks["kind"] == "attention"]
    assert {(*row,) for row in ours[["sequence", "layer", "head", "position"]].to_numpy(int).tolist()} == {
        (n, layer, int(head), place) for n, layer, _, head, place, *_ in found
    }


def test_a_key_late_in_a_window_is_a_sink() -> None:
    """Divided by T - k, no key before the last W/0.3 could be one."""
    model = tiny("mistral", num_hidden_layers=1)
    model.layers[0].self_attn.q_proj.weight.data.zero_()
    model.layers[0].self_attn.k_proj.weight.data.zero_()
    run = sinkscope.scan(model, data=random_ids(2, 96), self_check=False, epsilon=0.05)
    alpha = run.positions.pivot_table(index="position", values="alpha").to_numpy().ravel()
    harmonic = sum(1 / n for n in range(1, WINDOW + 1))
    early = [(sum(1 / n for n in range(k + 1, WINDOW + 1)) + k / WINDOW) / WINDOW for k in range(WINDOW)]
    late = [1 / WINDOW] * (96 - WINDOW)
    assert alpha == pytest.approx([*early, *late], rel=1e-5)
    assert run.heads["sink_score"].to_numpy() == pytest.approx(harmonic / 96)
    assert run.heads["peak_position"].tolist() == [0] * 4
    assert run.heads["peak_score"].to_numpy() == pytest.approx(harmonic / WINDOW)
    assert run.sinks is not None
    assert sorted(run.sinks["position"].unique()) == list(range(96 - WINDOW + 1)), "those that 16 queries see"


CHUNKED: dict[str, Any] = {
    "vocab_size": 97, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1, "hidden_size": 16,
    "intermediate_size": 24, "intermediate_size_mlp": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "num_local_experts": 2, "attention_chunk_size": 32, "floor_scale": 4,
    "layer_types": ["chunked_attention", "full_attention"], "no_rope_layers": [1, 0],
}  # fmt: skip
BOTH_WAYS: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "local_attention": 32, "global_attn_every_n_layers": 2, "pad_token_id": 0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "sizes", "layer", "visible"),
    [
        ("llama4_text", CHUNKED, 0, lambda i, k: k <= i and i // 32 == k // 32),
        ("modernbert", BOTH_WAYS, 1, lambda i, k: abs(i - k) <= 16),
    ],
)
def test_chunks_padding_and_windows_both_ways(family: str, sizes: dict[str, Any], layer: int, visible: Sees) -> None:
    """Attention of zero logits gives each key 1 / (keys that the query sees), in padded rows of unequal length."""
    torch.manual_seed(0)
    model = AutoModel.from_config(AutoConfig.for_model(family, initializer_range=0.3, **sizes)).eval()
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name.endswith(("q_proj", "Wqkv")):
            module.weight.data[: module.weight.shape[0] if name.endswith("q_proj") else 16] = 0
    ids, mask = random_ids(2, 100), torch.ones(2, 100, dtype=torch.long)
    mask[1, 70:] = 0
    run = sinkscope.scan(
        model, data={"input_ids": ids, "attention_mask": mask}, batch_size=2, self_check=False, epsilon=0.04
    )
    rows = []
    for number, length in enumerate((100, 70)):
        seen = np.array([[visible(i, k) for k in range(length)] for i in range(length)])
        alpha = alpha_scores(seen / seen.sum(1, keepdims=True), seen)
        rows += [(number, k) for k in counted_range(seen) if alpha[k] > 0.04]
        one = run.sequences.query("sequence == @number and layer == @layer").dropna(subset="head")
        assert one["first4_boost"].to_numpy() == pytest.approx(1, rel=1e-5)
        assert (one["sinks_per_sequence"] == sum(alpha[k] > 0.04 for k in peak_range(seen))).all()
    assert run.sinks is not None
    found = run.sinks.query("kind == 'attention' and layer == @layer and head == 0")
    pd.testing.assert_frame_equal(
        found[["sequence", "position"]].reset_index(drop=True),
        pd.DataFrame(rows, columns=["sequence", "position"]), check_dtype=False,
    )  # fmt: skip
    attended = run.manifest.attention[layer]
    assert attended.hides is True
    assert run.tokens is not None
    assert (run.tokens["sinks"] <= run.tokens["occurrences"]).all()


def test_alpha_at_a_position_is_a_mean_over_the_sequences_in_which_a_query_sees_the_key() -> None:
    """DeepSeek-V3.2 picks other keys in each sequence. Those that it picks in none have no alpha_k."""
    model, ids = tiny_model(AutoModelForCausalLM, "deepseek_v32"), random_ids(3, 96)
    alone = [sinkscope.scan(model, data=ids[row : row + 1], self_check=False).positions for row in range(3)]
    for size in (1, 2):
        run = sinkscope.scan(model, data=ids, self_check=False, batch_size=size)
        for column in ("alpha", "alpha_t64"):
            values = np.array([each[column].to_numpy() for each in alone])
            seen = ~np.isnan(values)
            assert (seen.any(0) & ~seen.all(0)).any() or column == "alpha_t64"
            expected = np.where(seen.any(0), np.nansum(values, 0) / seen.sum(0).clip(1), np.nan)
            np.testing.assert_allclose(run.positions[column].to_numpy(), expected, rtol=1e-5, atol=1e-7)


def test_a_key_that_no_query_of_some_sequence_sees_is_no_peak() -> None:
    """DeepSeek-V3.2 picks keys for each query: it has no alpha_k in a sequence whose queries all leave key k out."""
    model, ids = tiny_model(AutoModelForCausalLM, "deepseek_v32"), random_ids(3, 96)
    run = sinkscope.scan(model, data=ids, self_check=False)
    alpha = run.positions["alpha"].to_numpy().reshape(len(run.heads), 96)
    assert np.isnan(alpha).any()
    places = run.heads["peak_position"].to_numpy(int)
    scores = run.heads["peak_score"].to_numpy(float)
    assert (scores == alpha[np.arange(len(alpha)), places]).all()
    assert (scores >= alpha[:, 0]).all()
    top = run.summary.streams["text"].top_positions
    assert top
    assert all(np.isfinite(each.mean_alpha) for each in top)


class Masked(nn.Module):
    """Two layers of self-attention, each under a mask of its own."""

    def __init__(self, masks: tuple[Sees, ...], width: int = 16) -> None:
        super().__init__()
        self.masks = masks
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.tokens = nn.Embedding(97, width)
            self.layers = nn.ModuleList(nn.Linear(width, 3 * width) for _ in masks)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for layer, sees in zip(self.layers, self.masks, strict=True):
            mask = torch.tensor([[sees(i, k) for k in range(ids.shape[1])] for i in range(ids.shape[1])])
            query, key, value = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in layer(x).chunk(3, -1))
            mixed = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
            x = x + mixed.transpose(1, 2).flatten(2)
        return x


def test_layers_that_see_different_keys_have_no_strongest_position() -> None:
    """No key is seen by enough queries in every head: the scan has no top positions, and is not lost."""
    masks: tuple[Sees, ...] = (lambda i, k: k == i or k < min(4, i), lambda i, k: k == i or 4 <= k < i)
    run = sinkscope.scan(Masked(masks).eval(), data=random_ids(2, 40), self_check=False)
    (summary,) = run.summary.streams.values()
    assert summary.top_positions == []
    assert summary.in_words
    assert run.heads["peak_position"].notna().all(), "each head by itself has one"


def test_a_query_that_sees_no_key_attends_to_none() -> None:
    """Half of the queries see nothing. Their rows are 0, and no row of a head that copies."""
    run = sinkscope.scan(
        Masked((lambda i, k: i % 2 == 1 and k <= i,)).eval(), data=random_ids(2, 40), measure="switch", self_check=False
    )
    rates = run.measured["switch"]["copy_rows"]
    assert (rates > 0).all()
    assert (rates <= 20 / 39).all()
    assert (run.heads["learned_sink_mass"] == 0).all()
    assert run.heads["first_visible"].to_numpy() == pytest.approx(20 / 39)
