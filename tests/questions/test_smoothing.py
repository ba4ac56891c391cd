"""The smoothing table: every column against the naive reference, the paper's identities, and what is missing."""

from __future__ import annotations

import json
import math
import re
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import Scan
from exact import assert_close, table
from families import tiny_model
from models import random_ids, tiny
from smoothing_reference import average_cosine, measure_smoothing
from tiers import nightly, slow_but
from transformers import AutoModel
from typer.testing import CliRunner
from watched import hooks

import sinkscope
from sinkscope.capture import loops
from sinkscope.metrics import registered
from sinkscope.questions.smoothing import columns, measure
from sinkscope.questions.smoothing.tables import spread_path
from sinkscope.tables.columns import RUN_COLUMNS
from sinkscope.wiring.folded import FoldedHeads
from sinkscope.wiring.mixes import OutputWeights

FAMILIES = ("llama", "gpt2", "gemma2", "gemma3", "qwen3", "gpt_neox")
METRICS = registered().tables
NAMES = list(METRICS["smoothing"])
FLOAT32_NORMS = ("llama", "qwen3", "gemma2", "gemma3")  # their RMS norms compute in float32 whatever the model's dtype
COSTS = ("cost_sink_lower", "cost_sink_upper", "cost_diagonal_lower", "cost_diagonal_upper")


def with_sink(family: str) -> Any:
    """GPT-2 with a sink in head 0 of layer 0 (its queries lean towards k_0 of token 5), so that costs exist."""
    model = tiny(family)
    if family == "gpt2":
        block, width = model.h[0], model.config.n_embd // model.config.n_head
        with torch.no_grad():
            key = block.attn.c_attn(block.ln_1(model.wte.weight[5] + model.wpe.weight[0]))[model.config.n_embd :][
                :width
            ]
            block.attn.c_attn.bias[:width] += 12 * width**0.5 * key / key.square().sum()
    return model


def compare_tables(family: str, model: Any, relative: float, absolute: float) -> pd.DataFrame:
    ids = random_ids(3, 28)
    ids[:, 0] = 5
    run = sinkscope.scan(model, data=ids, self_check=False, smoothing=True)
    assert run.smoothing is not None
    expected, ranks = measure_smoothing(family, model, ids)
    assert set(expected) == set(NAMES)
    ours = table(run, NAMES, heads=True)
    for name, values in expected.items():
        assert_close(ours[name], values, name, relative, absolute)
        there = ~np.isnan(values)
        counts = there.sum(0)
        mean = np.where(counts > 0, np.nansum(values, 0) / np.maximum(counts, 1), np.nan)
        assert_close(run.smoothing[name].to_numpy(), mean.ravel(), f"mean {name}", relative, absolute)
        if there.all():
            errors = values.std(0, ddof=1).ravel() / np.sqrt(len(values))
            assert_close(run.smoothing[f"{name}_sem"].to_numpy(), errors, f"{name}_sem", 100 * relative, 100 * absolute)
    for name, values in ranks.items():
        assert_close(run.smoothing[name].to_numpy(), values.ravel(), name, relative, absolute)
    slope, square = expected["beta_tr_bw"].mean(0).ravel(), expected["tr_bwtw"].mean(0).ravel()
    names = ["smooths" if a > 0 else "sharpens" if a + b < 0 else "neither" for a, b in zip(slope, square, strict=True)]
    assert run.smoothing["verdict"].tolist() == names
    return run.smoothing


@pytest.mark.parametrize("family", slow_but(FAMILIES, "gemma3"))
def test_every_column_in_float64(family: str) -> None:
    compare_tables(family, with_sink(family).double(), 3e-6, 1e-6 if family in FLOAT32_NORMS else 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("least", [0, math.inf])
@pytest.mark.parametrize("family", slow_but(FAMILIES, "gpt2"))
def test_every_column_in_float32(family: str, least: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the compiled loops, and by torch."""
    monkeypatch.setattr(loops, "LEAST", least)
    compare_tables(family, with_sink(family), 3e-4, 3e-5)


@pytest.mark.parametrize("family", slow_but(["llama", "qwen3"]))
def test_heads_that_share_rows_have_every_column(family: str) -> None:
    """A head that is another's copy, as in upcycled models, one row of two heads, and rows that differ by a factor."""
    model = with_sink(family).double()
    attention = model.layers[1].self_attn
    width = attention.head_dim
    with torch.no_grad():
        query, key, value = (getattr(attention, f"{name}_proj").weight for name in "qkv")
        query[width : 2 * width] = query[:width]
        query[3 * width + 5] = query[2 * width + 7]
        query[3 * width + 6] = 2 * query[2 * width + 6]
        key[width:] = key[:width]
        value[width + 1] = value[3]
    found = compare_tables(family, model, 3e-6, 1e-6 if family in FLOAT32_NORMS else 1e-9)
    assert found[["rank_w", "rank_qk"]].notna().all(axis=None)


@pytest.mark.slow
def test_costs_are_there_where_a_head_has_a_sink_and_nowhere_else() -> None:
    found = compare_tables("gpt2", with_sink("gpt2").double(), 3e-6, 1e-9)
    sinks = found[found["cost_sink_lower"].notna()]
    assert 0 < len(sinks) < len(found)
    assert (sinks[list(COSTS)] > 0).all(axis=None)
    assert (sinks["cost_sink_upper"] > sinks["cost_sink_lower"]).all()
    assert sinks["cheaper"].isin(["sink", "diagonal", "undecided"]).all()
    assert found.loc[found["cost_sink_lower"].isna(), "cheaper"].isna().all()


@pytest.mark.parametrize("family", slow_but(["mistral", "bert", "gpt_oss"], "bert"))
def test_other_families_are_read_too(family: str) -> None:
    """Covers windows, learned sinks, and a model without an input norm (BERT: z is x, so beta is 1)."""
    run = sinkscope.scan(tiny(family), data=random_ids(2, 40), self_check=False, smoothing=True)
    assert run.smoothing is not None
    assert run.smoothing[["tr_bw", "avgcos_attention", "rank_w", "rank_qk", "verdict"]].notna().all(axis=None)
    if family == "bert":
        assert run.smoothing["beta"].to_numpy() == pytest.approx(1.0)


@pytest.mark.slow
@pytest.mark.parametrize("family", slow_but(["llama", "gpt_neox"], "llama"))
def test_padding_and_batches_change_nothing(family: str) -> None:
    model, ids = tiny(family), random_ids(4, 24)
    mask = torch.ones_like(ids)
    mask[1, 20:] = 0
    one = sinkscope.scan(model, data={"input_ids": ids, "attention_mask": mask}, self_check=False, smoothing=True)
    alone = sinkscope.scan(model, data=ids[1:2, :20], self_check=False, smoothing=True)
    ours, expected = table(one, NAMES, heads=True), table(alone, NAMES, heads=True)
    for name in NAMES:
        assert_close(ours[name][1], expected[name][0], name, 1e-3, 1e-4)


def synthetic(dim: int, count: int, whole: np.ndarray, slope: float, mean: float, seed: int = 0) -> FoldedHeads:
    """One head with W = `whole` and x = slope z on Gaussian tokens."""
    draw = np.random.default_rng(seed)
    z = draw.normal(size=(count, dim)) * np.linspace(0.5, 1.5, dim) + mean * draw.normal(size=dim)
    if not mean:
        z -= z.mean(0)
    tokens = torch.from_numpy(z)
    weights = OutputWeights(torch.from_numpy(whole.T.copy())[None])  # W_O = W, values = z
    values = torch.cat([torch.zeros(1, dim), tokens])[None]  # the first token's too
    return FoldedHeads(1, x=slope * tokens, z=tokens, weights=weights, values=values, written=tokens[None])


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("k", [2, 5, 40])
def test_the_derivative_of_the_interpolation(sign: float, k: int) -> None:
    """tr_bw and tr_bwtw give the slope in lam of D_k(lam) = E|Y_k|^2, for tokens drawn independently from the sample.

    The reference slope is a finite difference. D falls with lam (mixing shortens Y, which smooths) for one sign of W
    and grows for the other.
    """
    draw = np.random.default_rng(3)
    dim, slope = 12, 2.0
    whole = sign * (0.3 * np.eye(dim) + 0.05 * draw.normal(size=(dim, dim)))
    folded = synthetic(dim, 50, whole, slope, 0.0)
    z = folded.normalised.numpy()
    covariance = z.T @ z / len(z)

    def size(lam: float) -> float:
        own = slope * np.eye(dim) + (1 - lam + lam / k) * whole
        other = lam / k * whole
        return float(np.trace(own @ covariance @ own.T) + (k - 1) * np.trace(other @ covariance @ other.T))

    beta, tr_bw, tr_bwtw = (float(f(folded)[0]) for f in (columns.beta, columns.tr_bw, columns.tr_bwtw))
    assert beta == pytest.approx(slope)
    signs = set()
    for lam in (0.0, 0.3, 1.0):
        ours = -2 * (1 - 1 / k) * (beta * tr_bw + (1 - lam) * tr_bwtw)
        assert ours == pytest.approx((size(lam + 1e-3) - size(lam - 1e-3)) / 2e-3, rel=1e-8)
        signs.add(np.sign(ours))
    assert signs == {-sign}


@pytest.mark.parametrize(("share", "path"), [(0.5, "falls"), (-0.3, "rises"), (-2.5, "turns")])
def test_the_walk_has_the_slopes_of_the_derivation(share: float, path: str) -> None:
    """W = share x the slope of x on z. Where the mean of all tokens is 0, the walk to uniform attention has V'(0) = -2
    (beta tr(BW) + tr(BW^T W)) and V'(1) = -2 beta tr(BW) exactly; where token i sees i + 1 keys, independent tokens
    come near to it. x is 2 z, so that V(0) = (2 + 2 share)^2 tr B, and V'(0) = -8 share (1 + share) tr B."""
    folded = synthetic(12, 2000, 2 * share * np.eye(12), 2.0, 0.0)
    own, dense = -2 * share / (1 + share), -2 * share / (1 + share) ** 2
    for causal, exact in ((False, 1e-9), (True, 0.02)):
        walk = replace(folded, causal=causal)
        assert float(columns.path_slope_own(walk)[0]) == pytest.approx(own, rel=exact)
        assert float(columns.path_slope_dense(walk)[0]) == pytest.approx(dense, rel=exact)
    run = SimpleNamespace(means={"path_slope_own": np.array([own]), "path_slope_dense": np.array([dense])})
    assert list(spread_path(run)) == [path]  # type: ignore[arg-type]


def test_what_the_spread_does_on_the_walk() -> None:
    nan = np.nan
    means = {"path_slope_own": [-2, 1, -1, 1, nan], "path_slope_dense": [-1, 2, 1, nan, 1]}
    run = SimpleNamespace(means={name: np.array(values, float) for name, values in means.items()})
    assert list(spread_path(run)) == ["falls", "rises", "turns", None, None]  # type: ignore[arg-type]


def test_a_walk_from_nothing_has_no_slope() -> None:
    """x + Wz is 0 for every token."""
    folded = synthetic(9, 30, -0.5 * np.eye(9), 0.5, 0.0)
    folded.x = folded.x * 0
    folded.values = folded.values * 0
    assert columns.path_slope_own(folded).isnan().all()


def test_sum_trick_is_the_double_loop() -> None:
    draw = np.random.default_rng(1)
    for number in range(5):
        whole = draw.normal(size=(9, 9))
        folded = synthetic(9, 30, whole, 0.7, 1.0, number)
        x, z = folded.tokens.numpy(), folded.normalised.numpy()
        assert float(columns.avgcos_identity(folded)[0]) == pytest.approx(average_cosine(x + z @ whole.T), abs=1e-10)
        assert float(columns.avgcos_residual(folded)[0]) == pytest.approx(average_cosine(x), abs=1e-10)
        uniform = np.cumsum(np.vstack([0 * z[:1], z]), 0)[1:] / np.arange(2, len(z) + 2)[:, None]
        half = x + (z + uniform) / 2 @ whole.T
        assert float(columns.avgcos_half(folded)[0]) == pytest.approx(average_cosine(half), abs=1e-10)


def test_costs_need_the_factor_of_the_logits() -> None:
    folded = synthetic(9, 30, np.eye(9), 0.7, 1.0)
    folded.margin = torch.ones(1, 30)
    for name in COSTS:
        with pytest.raises(sinkscope.Missing):
            getattr(columns, name)(folded)
    folded.scale = 0.5
    top = np.linalg.eigvalsh(np.cov(folded.normalised.numpy().T))[-1]
    assert float(columns.cost_diagonal_lower(folded)[0]) == pytest.approx(1 / (0.5 * top), rel=1e-5)


@pytest.mark.parametrize("mean", [0.3, 1.0, 3.0])
def test_theory_is_experiment_on_gaussian_tokens(mean: float) -> None:
    draw = np.random.default_rng(2)
    dim = 400
    folded = synthetic(dim, 800, 0.5 * draw.normal(size=(dim, dim)) / np.sqrt(dim), 1.3, mean)
    for theory, experiment in (("theory_identity", "avgcos_identity"), ("theory_residual", "avgcos_residual")):
        expected = float(getattr(columns, theory)(folded)[0])
        assert float(getattr(columns, experiment)(folded)[0]) == pytest.approx(expected, abs=0.01)
    assert 0.02 < float(columns.theory_identity(folded)[0]) < 0.98


@pytest.mark.parametrize("width", [40, 400])
def test_tokens_that_only_rounding_keeps_apart_are_equal(width: int) -> None:
    """In plain torch and in the compiled loop, which reads large tensors alone."""
    model = tiny("llama", hidden_size=width, num_attention_heads=4, head_dim=width // 4)
    run = sinkscope.scan(model, data=torch.full((2, 60), 7), self_check=False, measure=("smoothing", "switch"))
    table = run.smoothing
    assert table is not None
    empty = [
        "beta", "beta_tr_bw", "theory_identity", "cost_sink_upper", "cost_diagonal_lower", "cost_diagonal_lower_qk",
        "cost_diagonal_lower_paper", "path_slope_own", "verdict", "cheaper", "spread_path",
    ]  # fmt: skip
    assert table[empty].isna().all(axis=None)
    assert (table["token_span"] == 0).all()
    assert (table["group_span"] == 0).all()
    assert (run.layers["alignment_margin"] == 0).all()
    stream = run.summary.streams["text"]
    assert stream.smoothing["equal"] == len(table)
    assert "Smoothing: the tokens behind the first are all equal, and cannot be made more similar." in stream.in_words


def test_one_other_token_keeps_its_numbers() -> None:
    ids = torch.full((1, 60), 7)
    ids[0, 30] = 9
    run = sinkscope.scan(tiny("llama"), data=ids, self_check=False, smoothing=True)
    assert run.smoothing is not None
    assert run.smoothing[["beta", "tr_bw", "verdict", "path_slope_own"]].notna().all(axis=None)
    assert (run.smoothing["token_span"] > 0).all()


def test_values_of_another_layer_s_making_are_missing_not_guessed() -> None:
    """A normalised v is no linear map of z: every column that needs W_V is empty, the others are not."""
    model = tiny("llama")
    project = model.layers[1].self_attn.v_proj
    project.register_forward_hook(lambda module, args, output: torch.nn.functional.normalize(output, dim=-1))
    run = sinkscope.scan(model, data=random_ids(2, 30), self_check=False, smoothing=True)
    assert run.smoothing is not None
    broken = run.smoothing[run.smoothing["layer"] == 1]
    assert broken[["tr_bw", "avgcos_identity", "theory_identity", "rank_w", "verdict"]].isna().all(axis=None)
    assert broken[["beta", "rank_qk", "rank_output", "avgcos_residual"]].notna().all(axis=None)
    assert run.smoothing[run.smoothing["layer"] != 1]["tr_bw"].notna().all()
    assert run.summary.streams["text"].smoothing["missing"] == 4


def test_latent_attention_is_missing_not_guessed() -> None:
    from transformers import AutoConfig, AutoModel

    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "deepseek_v3", vocab_size=97, hidden_size=32, intermediate_size=48, moe_intermediate_size=16,
        num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=4, q_lora_rank=12, kv_lora_rank=10,
        qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=8, n_routed_experts=2, num_experts_per_tok=1, n_group=1,
        topk_group=1, first_k_dense_replace=1, max_position_embeddings=64,
    )  # fmt: skip
    model = AutoModel.from_config(config, dtype=torch.float32, attn_implementation="sdpa").eval()
    run = sinkscope.scan(model, data=random_ids(2, 20), self_check=False, smoothing=True)
    assert run.smoothing is not None
    assert run.smoothing[["tr_bw", "rank_w", "rank_qk", "verdict"]].isna().all(axis=None)
    stream = run.summary.streams["text"]
    assert "Smoothing: no head's W_V could be read." in stream.in_words
    assert stream.ranks_missing == dict.fromkeys(("rank_w", "rank_qk"), stream.heads)
    assert stream.in_words[-1].startswith(f"rank_qk is empty in {stream.heads} of {stream.heads} heads: no single")


def test_a_gate_after_attention_leaves_avgcos_attention_empty() -> None:
    model = tiny("llama")
    model.layers[0].self_attn.o_proj.register_forward_pre_hook(lambda module, args: (args[0] * 0.5,), prepend=True)
    run = sinkscope.scan(model, data=random_ids(2, 20), self_check=False, smoothing=True)
    assert run.smoothing is not None
    first = run.smoothing[run.smoothing["layer"] == 0]
    assert first[["avgcos_attention", "relative_change"]].isna().all(axis=None)
    assert first[["avgcos_identity", "avgcos_uniform", "verdict"]].notna().all(axis=None)


def test_pruned_heads_have_no_rank_and_no_sign() -> None:
    model = tiny("llama")
    with torch.no_grad():
        model.layers[0].self_attn.v_proj.weight[:16] = 0.0  # the first group's two heads
    run = sinkscope.scan(model, data=random_ids(2, 20), self_check=False, smoothing=True)
    assert run.smoothing is not None
    pruned = run.smoothing[(run.smoothing["layer"] == 0) & (run.smoothing["head"] < 2)]
    assert pruned[["rank_w", "rank_output"]].isna().all(axis=None)
    assert (pruned["tr_bwtw"] == 0).all()
    assert (pruned["verdict"] == "neither").all()
    stream = run.summary.streams["text"]
    assert stream.ranks_missing == {"rank_w": 2}
    assert stream.in_words[-1].startswith("rank_w is empty in 2 of 12 heads: ")


@pytest.mark.slow
@pytest.mark.parametrize("family", slow_but(["qwen3", "gpt2"], "qwen3"))
def test_half_precision_moves_nothing_far(family: str) -> None:
    ids = random_ids(2, 40)
    exact = sinkscope.scan(tiny(family), data=ids, self_check=False, smoothing=True).smoothing
    half = sinkscope.scan(tiny(family).bfloat16(), data=ids, self_check=False, smoothing=True).smoothing
    assert exact is not None
    assert half is not None
    for name in ("beta", "tr_bw", "tr_bwtw", "avgcos_attention", "theory_identity", "rank_w", "rank_qk"):
        size = exact[name].abs().max()
        np.testing.assert_allclose(half[name], exact[name], atol=0.03 * size, rtol=0, err_msg=name)


def test_a_norm_on_q_whose_gain_is_zero_somewhere() -> None:
    """A feature with gain 0 carries no information and is skipped; the others are still matched."""
    model = tiny("qwen3")
    with torch.no_grad():
        model.layers[1].self_attn.q_norm.weight[3] = 0.0
    ids = random_ids(1, 20)
    run = sinkscope.scan(model, data=ids, self_check=False, smoothing=True)
    assert run.smoothing is not None
    _, ranks = measure_smoothing("qwen3", model, ids)
    np.testing.assert_allclose(run.smoothing["rank_qk"], ranks["rank_qk"].ravel(), rtol=1e-5)


def test_no_hook_and_no_change_stays() -> None:
    model, ids = tiny("gemma3"), random_ids(2, 20)
    before = hooks(model)
    plain = sinkscope.scan(model, data=ids, self_check=False)
    again = sinkscope.scan(model, data=ids, self_check=False, smoothing=True)
    assert hooks(model) == before
    pd.testing.assert_frame_equal(plain.heads, again.heads)
    assert plain.smoothing is None
    assert "smoothing" not in plain.summary.streams["text"]


@pytest.mark.slow
def test_written_and_read_again(tiny_folder: Any, scan_cli: Scan) -> None:
    outcome = scan_cli(tiny_folder, "--smoothing")
    assert outcome.code == 0, outcome.stderr
    run = sinkscope.load_run(outcome.folder)
    assert run.smoothing is not None
    assert list(run.smoothing["verdict"].unique())
    shown = ["stream", "layer", "head", "module", *(c for n in NAMES for c in (n, f"{n}_sem"))]
    assert list(run.smoothing.columns) == [*shown, *RUN_COLUMNS["smoothing"]]
    assert "Smoothing: " in outcome.stdout
    again = scan_cli(tiny_folder, "--force")
    assert again.code == 0, again.stderr
    assert not (outcome.folder / "smoothing.csv").exists()
    assert sinkscope.load_run(outcome.folder).smoothing is None


@pytest.mark.slow
def test_domains_have_rows_of_their_own(tiny_folder: Any, scan_cli: Scan) -> None:
    outcome = scan_cli(tiny_folder, "--smoothing", "--data", "prose", "--data", "code")
    assert outcome.code == 0, outcome.stderr
    run = sinkscope.load_run(outcome.folder)
    assert run.smoothing is not None
    assert run.smoothing.groupby("domain").size().tolist() == [8, 8]
    for name in ("prose", "code"):
        assert sum(run.summary.domains[name].streams["text"].smoothing.values()) == 8
    assert sum(run.summary.streams["text"].smoothing.values()) == 8


@pytest.mark.slow
@pytest.mark.real
@nightly
def test_gemma_every_column() -> None:
    """The real checkpoint: gains of exactly 0 in its norms on q, and norms of thousands in its residual stream."""
    from real import prose

    from sinkscope.checkpoints import open_checkpoint

    checkpoint = open_checkpoint("example:gemma-3-270m")
    ids = prose(checkpoint, 20, 1)
    run = sinkscope.scan(checkpoint.model, data=ids, self_check=False, smoothing=True)
    assert run.smoothing is not None
    layers = (0, 5, 16)  # every layer would take minutes
    expected, ranks = measure_smoothing("gemma3", checkpoint.model, ids, layers)
    ours = table(run, NAMES, heads=True)
    for name, values in expected.items():
        scale = np.nan_to_num(np.abs(values)).max(2, keepdims=True)  # a layer's largest: some tr_bw lie near 0
        scale[scale == 0] = 1.0
        assert_close(ours[name][:, layers] / scale, values / scale, name, 1e-3, 1e-3)
    for name, values in ranks.items():
        kept = run.smoothing[run.smoothing["layer"].isin(layers)]
        np.testing.assert_allclose(kept[name], values.ravel(), rtol=1e-6)


def test_metrics_command_tells_of_them() -> None:
    """`sinkscope metrics` shows each smoothing column with its declared source, under the heading of its table."""
    from sinkscope.cli import app

    every = {**METRICS["smoothing"], **RUN_COLUMNS["smoothing"]}
    shown = CliRunner().invoke(app, ["metrics", *every, "--json"])
    assert shown.exit_code == 0
    assert {one["name"]: (one["table"], one["source"]) for one in json.loads(shown.stdout)} == {
        name: ("smoothing", metric.source) for name, metric in every.items()
    }
    for name, metric in every.items():
        assert re.match(r"Lampert et al\. 2605\.08453|ours\b", metric.source), name
    for name in ("tr_bw", "verdict"):
        (heading, *lines) = CliRunner().invoke(app, ["metrics", name]).stdout.splitlines()
        assert heading == "smoothing.csv (scan --measure smoothing): one row per (stream, layer, head)"
        assert [line for line in lines if line.startswith(f"  {name}")]


def with_massive_activation(family: str) -> Any:
    """A model whose residual stream has one huge channel from its embeddings or its first layer on, in every token, so
    that normalised tokens have nearly one direction."""
    model = tiny(family, **({"mlp_bias": True} if family == "llama" else {}))
    with torch.no_grad():
        if family == "llama":
            model.layers[0].mlp.down_proj.bias[7] += 2e4
        elif family == "gpt2":
            model.h[0].mlp.c_proj.bias[7] += 2e4
        else:
            model.embed_tokens.weight[:, 7] += 2e4
    return model.eval()


@pytest.mark.parametrize("family", slow_but(["llama", "gpt2", "qwen3"], "gpt2"))
def test_maps_are_found_behind_a_massive_activation(family: str) -> None:
    model, ids = with_massive_activation(family).double(), random_ids(2, 12)
    run = sinkscope.scan(model, data=ids, self_check=False, smoothing=True)
    assert run.smoothing[["rank_qk", "rank_w", "tr_bw", "verdict"]].notna().all(axis=None)
    expected, ranks = measure_smoothing(family, model, ids)
    for name, values in ranks.items():
        assert_close(run.smoothing[name].to_numpy(), values.ravel(), name, 1e-7, 0.0)
    for name in ("tr_bw", "tr_bwtw", "rank_output"):
        assert_close(run.smoothing[name].to_numpy(), expected[name].mean(0).ravel(), name, 1e-3, 1e-6)


@pytest.mark.slow
def test_what_heads_write_has_a_rank_where_the_residual_stream_is_not_read() -> None:
    """Gemma 3n has several residual streams; the rank needs what W_O reads alone."""
    model, ids = tiny_model(AutoModel, "gemma3n_text").double(), random_ids(1, 12) % 90
    run = sinkscope.scan(model, data=ids, self_check=False, smoothing=True)
    assert run.smoothing.beta.isna().all()
    projection, read = model.layers[0].self_attn.o_proj, []
    handle = projection.register_forward_pre_hook(lambda module, args: read.append(args[0][0]))
    with torch.no_grad():
        model(input_ids=ids, use_cache=False)
    handle.remove()
    for head, rank in enumerate(run.smoothing.rank_output[:4]):
        own = slice(8 * head, 8 * head + 8)
        values = torch.linalg.svdvals(read[0][1:, own] @ projection.weight[:, own].detach().mT)
        assert rank == pytest.approx(float((values**2).sum() / values[0] ** 2), rel=1e-9)


def in_float64(folded: FoldedHeads) -> FoldedHeads:
    """The same tokens, values and weights in float64, and nothing that follows from them."""
    known = {each.name: getattr(folded, each.name) for each in fields(folded) if not each.name.endswith("_out")}
    wide = {name: value.double() for name, value in known.items() if isinstance(value, torch.Tensor)}
    if folded.affine is not None:
        a, b = folded.affine
        wide["affine"] = (a.double(), None if b is None else b.double())
    if folded.weights is not None:
        wide["weights"] = OutputWeights(folded.weights.slices.double())
    return FoldedHeads(**known | wide)


@pytest.mark.parametrize("family", slow_but(["gpt2", "qwen3", "massive", "massive later"], "massive", "massive later"))
def test_products_in_float32_are_as_exact_as_in_float64(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also behind a massive activation: normalised tokens have nearly one direction, and what is left is small.
    relative_change, which divides one column by another, has no bound where that is near 0."""
    model = (
        with_massive_activation("gpt2") if family == "massive" else with_sink(family.replace("massive later", "llama"))
    )
    ids = random_ids(2, 40)
    ids[:, 0] = 5
    if family == "massive later":  # in two tokens alone: their mean is far from all tokens
        ids[:, [20, 31]] = 6
        with torch.no_grad():
            model.embed_tokens.weight[6, 7] = -1e3
    ours = sinkscope.scan(model, data=ids, self_check=False, smoothing=True).smoothing
    fold = measure.fold
    monkeypatch.setattr(measure, "fold", lambda *read: map(in_float64, fold(*read)))
    exact = sinkscope.scan(model, data=ids, self_check=False, smoothing=True).smoothing
    for name in set(NAMES) - {"relative_change"}:
        size = exact[name].abs().max() if name in ("tr_bw", "beta_tr_bw") else 1.0  # a trace may lie near 0
        assert_close(ours[name].to_numpy() / size, exact[name].to_numpy() / size, name, 1e-5, 1e-6)
    for name in ("attention_minus_identity", "uniform_minus_attention"):  # small where a head adds little to x
        size = exact.groupby("layer")[name].transform(lambda values: values.abs().max())
        bound = np.maximum(1e-3 * size, 1e-10).to_numpy()
        assert_close(ours[name].to_numpy(), exact[name].to_numpy(), name, 0.0, bound)


@pytest.mark.slow
def test_spectra_are_measured_on_the_first_sequences_alone() -> None:
    """Whatever the batches and the padding; the costs are compared over these sequences, all other columns over all."""
    model, ids = with_sink("gpt2"), random_ids(5, 28)
    ids[:, 0] = 5
    mask = torch.ones_like(ids)
    mask[1, 20:] = 0
    data = {"input_ids": ids, "attention_mask": mask}
    for options in ({"batch_size": 2}, {}):
        run = sinkscope.scan(model, data=data, self_check=False, smoothing=True, spectra=3, **options)
        found = table(run, [*NAMES, "honor"], heads=True)
        for name in ("rank_output", "avgcos_attention", "beta", "honor"):
            there = ~np.isnan(found[name]).all((1, 2))
            assert there.tolist() == [name != "rank_output" or number < 3 for number in range(5)], name
        known = [~np.isnan(found[name]) for name in COSTS]
        assert known[0].any()
        assert not known[0][3:].any()
        assert all((each == known[0]).all() for each in known)
    parts = {name: ~np.isnan(found[name]) for name in NAMES if name.endswith(("_qk", "_value", "_paper"))}
    assert parts["cost_sink_lower_qk"].any()
    for name, there in parts.items():
        assert not there[3:].any(), name
        same = there == parts["cost_sink_lower_qk"]
        assert same.all() or name == "cost_diagonal_upper_qk", "it needs a gap above 0 besides"
    assert (~np.isnan(found["sink_margin_pairs"])).any((1, 2)).all()
    none = sinkscope.scan(model, data=data, self_check=False, smoothing=True, spectra=0).smoothing
    assert none[["rank_output", *COSTS, "cheaper"]].isna().all(axis=None)
    assert none[["verdict", "rank_w"]].notna().all(axis=None)
