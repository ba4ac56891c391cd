"""Tests of the brute-force reference itself: against eager attention, closed forms and cases worked by hand."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from models import EAGER_ONLY, FAMILIES, WINDOW, random_ids, tiny
from reference import (
    Reference,
    add_layer_normalised,
    alpha_scores,
    attend,
    attention_replaced,
    counted_range,
    find_layers,
    geometry_columns,
    is_causal,
    layer_columns,
    mass_columns,
    measure,
    peak_range,
    projection_matrix,
    run_layer_columns,
    sink_margin,
    value_columns,
)
from tiers import slow_but
from transformers import AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

HEAD_COLUMNS = {
    "bos_mass",
    "sink_score",
    "sink_rate",
    "sinks_per_sequence",
    "first_argmax",
    "sink_margin",
    "self_mass",
    "previous_mass",
    "entropy",
    "uniformity",
    "learned_sink_mass",
    "tail_mass",
    "first_visible",
    "qk_cos_first",
    "qk_cos_other",
    "q_norm",
    "k_norm_first",
    "k_norm_other",
    "logit_gap",
    "awft",
    "awft_ln",
    "aeqd",
    "aeqd_ln",
    "ftvvn",
    "ftvvn_ln",
    "avvn",
    "avvn_ln",
    "lthon",
    "lthon_ln",
    "lthon_hn",
    "ahon",
    "honor",
    "residual_write",
    "residual_write_ln",
    "value_drain",
    "ov_drain",
    "gate_open",
    "first4_mass",
    "first4_boost",
    "sink_elsewhere",
}
T64_COLUMNS = {"sink_score_t64", "sink_rate_t64"}
LAYER_COLUMNS = {
    "cos_first_residual",
    "cos_first_input",
    "avg_cos_residual",
    "avg_cos_input",
    "avg_cos_output",
    "norm_first",
    "norm_other",
    "norm_ratio",
    "inf_norm",
    "max_over_token_median",
    "max_over_layer_median",
    "massive_tokens",
    "kurtosis_first",
    "kurtosis_other",
    "matrix_entropy",
}
RUN_COLUMNS = {"max_abs", "max_abs_token", "max_abs_dim", "first_constancy"}
LENGTH = 40


@pytest.fixture(scope="module")
def references() -> dict[str, Reference]:
    """One measurement per family, 2 sequences of 40 tokens."""
    return {family: measure(tiny(family), random_ids(2, LENGTH)) for family in FAMILIES}


# Against the models themselves


@pytest.mark.parametrize("family", slow_but(FAMILIES, "gpt_oss"))
def test_attentions_and_states_match_the_models_own(family: str, references: dict[str, Reference]) -> None:
    reference, ids = references[family], random_ids(2, LENGTH)
    with torch.no_grad():
        plain = tiny(family)(ids, use_cache=False, output_hidden_states=True)
        eager = tiny(family, "eager")(ids, use_cache=False, output_attentions=True)
    assert len(reference.attentions) == len(eager.attentions) == 3
    for ours, theirs in zip(reference.attentions, eager.attentions, strict=True):
        np.testing.assert_allclose(ours, theirs.numpy(), atol=2e-5)
    np.testing.assert_allclose(reference.hidden, plain.last_hidden_state.numpy(), atol=1e-4)
    for index in range(3):
        x = plain.hidden_states[index].numpy()
        np.testing.assert_allclose(reference.layers["norm_first"][:, index], np.linalg.norm(x[:, 0], axis=1), rtol=1e-4)
        np.testing.assert_allclose(reference.layers["inf_norm"][:, index], np.abs(x).max(axis=(1, 2)), rtol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_shapes_and_columns(family: str, references: dict[str, Reference]) -> None:
    reference = references[family]
    assert set(reference.heads) == HEAD_COLUMNS
    assert set(reference.layers) == LAYER_COLUMNS
    assert set(reference.run_layers) == RUN_COLUMNS
    assert all(values.shape == (2, 3, 4) for values in reference.heads.values())
    assert all(values.shape == (2, 3) for values in reference.layers.values())
    assert all(values.shape == (3,) for values in reference.run_layers.values())
    assert reference.alpha.shape == (2, 3, 4, LENGTH)
    assert reference.alpha_t64 is None
    assert reference.peak_position.shape == reference.peak_score.shape == (3, 4)
    for values in [*reference.heads.values(), *reference.layers.values()]:
        assert np.isfinite(values).all()


@pytest.mark.slow
@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in EAGER_ONLY])
def test_bool_and_additive_masks_agree(family: str, references: dict[str, Reference]) -> None:
    """Models under sdpa pass None or bool masks, those under eager attention pass float masks."""
    eager = measure(tiny(family, "eager"), random_ids(2, LENGTH))
    for name, values in references[family].heads.items():
        np.testing.assert_allclose(eager.heads[name], values, atol=1e-12, rtol=1e-9, err_msg=name)


@pytest.mark.parametrize("family", FAMILIES)
def test_projection_matrix_reproduces_the_projection(family: str) -> None:
    model = tiny(family)
    for layer in find_layers(model, random_ids(1, 8)):
        matrix = projection_matrix(layer.projection)
        w = torch.randn(5, matrix.shape[1], generator=torch.Generator().manual_seed(1))
        bias = layer.projection.bias.detach().numpy() if layer.projection.bias is not None else 0.0
        with torch.no_grad():
            expected = layer.projection(w).numpy()
        np.testing.assert_allclose(w.numpy() @ matrix.T + bias, expected, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_modules_found_are_the_blocks_in_order(family: str) -> None:
    model = tiny(family)
    names = {module: name for name, module in model.named_modules()}
    stack = {"gpt2": "h", "bert": "encoder.layer"}.get(family, "layers")
    found = find_layers(model, random_ids(1, 8))
    assert [names[layer.block] for layer in found] == [f"{stack}.{index}" for index in range(3)]
    assert all(names[layer.projection].startswith(names[layer.block] + ".") for layer in found)


def test_model_with_a_head_equals_its_base_model() -> None:
    headed = AutoModelForCausalLM.from_config(tiny("llama").config).eval()
    headed.model.load_state_dict(tiny("llama").state_dict())
    one, other = measure(headed, random_ids(1, 12)), measure(tiny("llama"), random_ids(1, 12))
    for name, values in one.heads.items():
        np.testing.assert_array_equal(values, other.heads[name])


def test_attention_varies_and_is_far_from_uniform(references: dict[str, Reference]) -> None:
    for family, reference in references.items():
        assert reference.heads["uniformity"].mean() < 0.85, family
        assert np.ptp(reference.heads["sink_score"]) > 0.02, family


def test_learned_sink_takes_mass_only_in_gpt_oss(references: dict[str, Reference]) -> None:
    for family, reference in references.items():
        mass = reference.heads["learned_sink_mass"]
        if family == "gpt_oss":
            assert (mass > 1e-3).any()
            kept = np.stack([a.sum(axis=-1).mean(axis=-1) for a in reference.attentions], axis=1)
            np.testing.assert_allclose(mass, 1 - kept, atol=1e-12)
        else:
            np.testing.assert_allclose(mass, 0, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_margin_is_the_log_odds_of_key_0(family: str, references: dict[str, Reference]) -> None:
    reference = references[family]
    for index, a in enumerate(reference.attentions):
        later = a[:, :, 1:]
        sees = later[..., 0] > 0
        rest = later[..., 1:].sum(axis=-1)
        if family == "gpt_oss":
            rest += 1 - later.sum(axis=-1)
        odds = np.where(sees, np.log(np.where(sees, later[..., 0], 1.0) / rest), 0.0)
        expected = odds.sum(axis=2) / sees.sum(axis=2)
        np.testing.assert_allclose(reference.heads["sink_margin"][:, index], expected, atol=1e-9)


def test_windows_hide_the_first_key(references: dict[str, Reference]) -> None:
    for family, index in (("mistral", 0), ("gemma3", 0), ("gemma2", 0), ("gpt_oss", 0)):
        a = references[family].attentions[index]
        assert (a[:, :, WINDOW:, 0] == 0).all(), family
        assert (a[:, :, WINDOW - 1, 0] > 0).all(), family
    assert (references["gemma3"].attentions[1][:, :, WINDOW:, 0] > 0).any()


def test_bert_attends_both_ways(references: dict[str, Reference]) -> None:
    a = references["bert"].attentions[0]
    assert np.triu(a[0, 0], 1).any()
    np.testing.assert_allclose(references["bert"].alpha[:, 0], a.mean(axis=2), rtol=1e-12)


# The first 64 queries


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "mistral", "gpt_oss"])
def test_t64_of_a_causal_model_is_a_run_of_64(family: str) -> None:
    ids = random_ids(2, 72)
    long, short = measure(tiny(family), ids), measure(tiny(family), ids[:, :64])
    assert set(long.heads) == HEAD_COLUMNS | T64_COLUMNS
    np.testing.assert_allclose(long.alpha_t64, short.alpha, atol=1e-5)
    np.testing.assert_allclose(short.alpha_t64, short.alpha, atol=1e-12)
    np.testing.assert_allclose(long.heads["sink_score_t64"], short.heads["sink_score"], atol=1e-5)
    assert not np.allclose(long.heads["sink_score"], short.heads["sink_score"], atol=1e-5)


def test_t64_of_bert_divides_by_64() -> None:
    reference = measure(tiny("bert"), random_ids(1, 70))
    early = reference.attentions[1][:, :, :64, :64].sum(axis=2) / 64
    np.testing.assert_allclose(reference.alpha_t64[:, 1], early, rtol=1e-12)


# Closed forms


@pytest.mark.slow
def test_zero_queries_give_uniform_attention() -> None:
    model = tiny("llama")
    with torch.no_grad():
        for block in model.layers:
            block.self_attn.q_proj.weight.zero_()
    reference = measure(model, random_ids(2, LENGTH))
    harmonic = sum(1 / i for i in range(1, LENGTH + 1))
    heads = reference.heads
    for name, value in {
        "sink_score": harmonic / LENGTH,
        "bos_mass": (harmonic - 1) / (LENGTH - 1),
        "tail_mass": (harmonic - 1) / (LENGTH - 1),
        "self_mass": (harmonic - 1) / (LENGTH - 1),
        "previous_mass": (harmonic - 1) / (LENGTH - 1),
        "entropy": np.mean([math.log(i + 1) for i in range(LENGTH)]),
        "uniformity": 1.0,
        "sink_margin": -np.mean([math.log(i) for i in range(1, LENGTH)]),
        "first_argmax": 1.0,
        "first_visible": 1.0,
        "sink_rate": 0.0,
        "sinks_per_sequence": 0.0,
        "logit_gap": 0.0,
        "q_norm": 0.0,
        "awft_ln": 1.0,
        "aeqd_ln": 1.0,
    }.items():
        np.testing.assert_allclose(heads[name], value, atol=1e-12, err_msg=name)
    assert (reference.peak_position == 0).all()
    np.testing.assert_allclose(reference.peak_score, harmonic / LENGTH, rtol=1e-12)
    expected = [sum(1 / (i + 1) for i in range(k, LENGTH)) / (LENGTH - k) for k in range(LENGTH)]
    np.testing.assert_allclose(reference.alpha[0, 0, 0], expected, rtol=1e-12)
    assert measure(model, random_ids(1, LENGTH), epsilon=0.1).heads["sink_rate"].all()


def test_one_token_repeated_copies_its_value() -> None:
    """Equal tokens: every value is v_0, so each output has its norm whatever the attention."""
    heads = measure(tiny("llama"), torch.full((1, 12), 7)).heads
    for name in ("value_drain", "ov_drain", "gate_open", "lthon_hn"):
        np.testing.assert_allclose(heads[name], 1.0, rtol=1e-4, err_msg=name)
    for over, under in (("ahon", "avvn"), ("ftvvn", "avvn"), ("lthon", "ahon")):
        np.testing.assert_allclose(heads[over], heads[under], rtol=1e-4)


def test_norms_over_the_layer_average_one(references: dict[str, Reference]) -> None:
    for reference in references.values():
        for name in ("awft_ln", "aeqd_ln", "ftvvn_ln", "avvn_ln", "honor", "residual_write_ln"):
            np.testing.assert_allclose(reference.heads[name].mean(axis=2), 1.0, rtol=1e-12)


def test_columns_of_a_group_share_its_values(references: dict[str, Reference]) -> None:
    for name in ("ftvvn", "avvn", "k_norm_first", "value_drain"):
        values = references["llama"].heads[name]
        np.testing.assert_array_equal(values[..., 0], values[..., 1])
        assert (values[..., 1] != values[..., 2]).all()


def test_a_spike_is_found() -> None:
    model = tiny("llama")
    with torch.no_grad():
        model.get_input_embeddings().weight[1, 5] = -4000.0
    ids = random_ids(3, 12)
    ids[:, 0] = 1
    ids[2, 4] = 1
    reference = measure(model, ids)
    assert reference.run_layers["max_abs"][0] == 4000.0
    assert reference.run_layers["max_abs_token"][0] == 0  # of the four equal ones, the first
    assert (reference.run_layers["max_abs_dim"] == 5).all()
    np.testing.assert_allclose(reference.run_layers["first_constancy"], 1.0, rtol=1e-6)
    np.testing.assert_array_equal(reference.layers["massive_tokens"][:, 0], [1, 1, 2])


# Cases worked by hand

HAND = np.array([[1.0, 0.0, 0.0], [0.75, 0.25, 0.0], [0.5, 0.125, 0.375]])
CAUSAL = np.tril(np.ones((3, 3), dtype=bool))


def test_hand_made_map() -> None:
    second = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    third = -(0.5 * math.log(0.5) + 0.125 * math.log(0.125) + 0.375 * math.log(0.375))
    columns = mass_columns(HAND, CAUSAL)
    expected = {
        "bos_mass": 0.625,
        "sink_score": 0.75,
        "awft": 0.75,
        "sink_rate": 1.0,
        "sinks_per_sequence": 2.0,  # alpha = 0.75, 0.1875, 0.375
        "first_argmax": 1.0,
        "self_mass": 0.3125,
        "previous_mass": 0.4375,
        "entropy": (second + third) / 3,
        "aeqd": (second + third) / 3,
        "uniformity": (second / math.log(2) + third / math.log(3)) / 2,
        "learned_sink_mass": 0.0,
        "tail_mass": 0.625,
        "first_visible": 1.0,
        "first4_mass": 1.0,
        "first4_boost": 1.0,
        "sink_elsewhere": math.nan,  # three rows are too few
    }
    assert columns.keys() == expected.keys()
    for name, value in expected.items():
        assert columns[name] == pytest.approx(value, abs=1e-15, nan_ok=True), name
    np.testing.assert_allclose(alpha_scores(HAND, CAUSAL), [0.75, 0.1875, 0.375])
    np.testing.assert_allclose(alpha_scores(HAND, np.ones((3, 3), bool)), [0.75, 0.125, 0.125])
    window = np.tril(CAUSAL) & ~np.tril(CAUSAL, -2)
    np.testing.assert_allclose(alpha_scores(HAND, window), [0.875, 0.1875, 0.375])
    assert mass_columns(HAND, CAUSAL, epsilon=0.75)["sink_rate"] == 0.0


def test_hand_made_window_of_two() -> None:
    probs = np.array([[1.0, 0.0, 0.0], [0.5, 0.5, 0.0], [0.0, 0.5, 0.5]])
    visible = CAUSAL.copy()
    visible[2, 0] = False
    columns = mass_columns(probs, visible)
    assert columns["uniformity"] == pytest.approx(1.0)
    assert columns["first_argmax"] == 0.5
    assert columns["first_visible"] == 0.5
    assert columns["bos_mass"] == 0.25
    logits = np.array([[9.0, 9.0, 9.0], [2.0, 1.0, 9.0], [50.0, 0.0, 0.0]])
    assert sink_margin(logits, visible) == pytest.approx(1.0)
    assert sink_margin(logits, visible, 1.0) == pytest.approx(1.0 - math.log(2))
    assert sink_margin(logits, CAUSAL) == pytest.approx((1.0 + 50.0 - math.log(2)) / 2)


def test_margin_without_a_query_that_sees_the_first_key() -> None:
    assert math.isnan(sink_margin(np.zeros((3, 3)), np.eye(3, dtype=bool)))
    assert math.isnan(mass_columns(np.eye(3), np.eye(3, dtype=bool))["uniformity"])


def test_hand_made_geometry() -> None:
    query = np.array([[5.0, 0.0], [3.0, 4.0], [0.0, 2.0]])
    key = np.array([[2.0, 0.0], [0.0, 1.0], [3.0, 0.0]])
    logits = query @ key.T  # rows: 10 0 15 | 6 4 9 | 0 2 0
    columns = geometry_columns(query, key, logits, causal=True)
    expected = {
        "qk_cos_first": 0.3,
        "qk_cos_other": (0.8 + 1.0 + 0.0) / 3,
        "q_norm": 4.0,
        "k_norm_first": 2.0,
        "k_norm_other": 2.0,
        "logit_gap": ((6 - 5) + (0 - 2 / 3)) / 2,
    }
    assert columns == pytest.approx(expected)
    both = geometry_columns(query, key, logits, causal=False)
    assert both["qk_cos_other"] == pytest.approx((0.8 + 0.6 + 1.0 + 0.0) / 4)
    assert both["logit_gap"] == pytest.approx(((6 - 19 / 3) + (0 - 2 / 3)) / 2)


def test_hand_made_values() -> None:
    value = np.array([[1.0, 0.0], [3.0, 4.0], [0.0, 5.0]])
    output = np.array([[1.0, 0.0], [0.0, 2.0], [6.0, 0.0]])
    w = np.array([[2.0, 0.0], [0.0, 4.0], [0.0, 3.0]])
    w_o = np.array([[1.0, 0.0], [0.0, 2.0], [0.0, 0.0]])
    columns = value_columns(value, output, w, w_o)
    expected = {
        "ftvvn": 1.0,
        "avvn": 11 / 3,
        "lthon": 3.0,
        "lthon_hn": 1.0,
        "ahon": 3.0,
        "residual_write": (2 + 8 + 6) / 3,
        "value_drain": 0.2,
        "ov_drain": 1 / ((math.sqrt(9 + 64) + 10) / 2),
        "gate_open": 3.0 / 5.0,
    }
    assert columns == pytest.approx(expected)


def test_layer_normalisation() -> None:
    names = ("awft", "aeqd", "ftvvn", "avvn", "residual_write", "lthon", "ahon")
    heads = {name: np.array([[[1.0, 3.0]], [[2.0, 2.0]]]) for name in names}
    heads["ahon"] = np.array([[[4.0, 6.0]], [[1.0, 3.0]]])
    add_layer_normalised(heads)
    np.testing.assert_allclose(heads["awft_ln"], [[[0.5, 1.5]], [[1.0, 1.0]]])
    np.testing.assert_allclose(heads["lthon_ln"], [[[0.2, 0.6]], [[1.0, 1.0]]])
    np.testing.assert_allclose(heads["honor"], [[[0.8, 1.2]], [[0.5, 1.5]]])


def test_peak_range() -> None:
    def causal(length: int, window: int = 100) -> np.ndarray:
        return np.tril(np.ones((length, length), bool)) & ~np.tril(np.ones((length, length), bool), -window)

    assert peak_range(causal(8)) == [0, 1, 2, 3, 4, 5, 6]
    assert peak_range(causal(10)) == [0, 1, 2, 3, 4, 5, 6, 7]
    assert peak_range(causal(10, 4)) == list(range(10))
    assert peak_range(causal(12, 8)) == list(range(11))
    assert peak_range(np.ones((4, 4), bool)) == [0, 1, 2, 3]
    assert counted_range(causal(40, 20)) == list(range(25))
    assert counted_range(causal(40, 15)) == []
    assert is_causal(CAUSAL)
    assert not is_causal(CAUSAL.T)


def test_hand_made_layer() -> None:
    x = np.array([[2.0, 0.0, 0.0, 0.0], [0.0, 2.0, 0.0, 0.0], [0.0, 0.0, 2.0, 0.0], [0.0, 0.0, 0.0, -2.0]])
    z = np.array([[1.0, 0.0], [1.0, 1.0], [0.0, 3.0], [-1.0, 0.0]])
    e = np.array([[9.0, 9.0], [1.0, 0.0], [2.0, 0.0], [0.0, 5.0]])
    columns = layer_columns(x, z, e)
    root = math.sqrt(0.5)
    # one 2 among three 0: centred 1.5, -0.5 (3x); second moment 0.75, fourth 1.3125
    kurtosis = 1.3125 / 0.75**2 - 3
    expected = {
        "cos_first_residual": 0.0,
        "cos_first_input": (root + 0.0 - 1.0) / 3,
        "avg_cos_residual": 0.0,
        "avg_cos_input": (root - root + 0.0) / 3,
        "avg_cos_output": 1 / 3,
        "norm_first": 2.0,
        "norm_other": 2.0,
        "norm_ratio": 1.0,
        "inf_norm": 2.0,
        "max_over_token_median": math.inf,
        "max_over_layer_median": math.inf,
        "massive_tokens": 0.0,
        "kurtosis_first": kurtosis,
        "kurtosis_other": kurtosis,
        "matrix_entropy": math.log(4),
    }
    assert columns == pytest.approx(expected, abs=1e-14)


def test_hand_made_massive_activation() -> None:
    x = np.full((3, 4), 0.1)
    x[1] = [500.0, 1.0, 3.0, 1.0]
    x[2, 3] = -101.0
    columns = layer_columns(x, x, x)
    assert columns["inf_norm"] == 500.0
    assert columns["max_over_token_median"] == pytest.approx(500.0 / 2.0)
    assert columns["max_over_layer_median"] == pytest.approx(500.0 / 0.1)
    assert columns["massive_tokens"] == 2.0
    assert layer_columns(x / 2, x, x)["massive_tokens"] == 1.0
    assert layer_columns(np.ones((3, 4)), x, x)["matrix_entropy"] == pytest.approx(0.0, abs=1e-12)
    run = run_layer_columns(np.stack([x * 0.5, x]))
    assert run == pytest.approx({"max_abs": 500.0, "max_abs_token": 1, "max_abs_dim": 0, "first_constancy": 1.0})
    assert math.isnan(run_layer_columns(x[None])["first_constancy"])


# One call by hand


def unit_call(length: int = 3) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Two query heads, one key/value head, width 1: logits are s_ij = 2 k_j in head 0, -2 k_j in head 1."""
    query = torch.tensor([2.0, -2.0]).view(1, 2, 1, 1).expand(1, 2, length, 1)
    key = torch.log(torch.arange(1.0, length + 1)).view(1, 1, length, 1)
    return query, key, torch.arange(1.0, length + 1).view(1, 1, length, 1)


def test_call_grouped_and_scaled() -> None:
    query, key, value = unit_call()
    call = attend(query, key, value, None, causal=True, scaling=0.5)  # weights j+1 in head 0
    np.testing.assert_allclose(call.probs[0], [[1, 0, 0], [1 / 3, 2 / 3, 0], [1 / 6, 2 / 6, 3 / 6]], rtol=1e-6)
    np.testing.assert_allclose(call.probs[1][2], np.array([6, 3, 2]) / 11, rtol=1e-6)
    np.testing.assert_allclose(call.output[0][:, 0], [1, 5 / 3, 14 / 6], rtol=1e-6)
    unscaled = attend(query, key, value, None, causal=False)  # width 1: the default scaling is 1
    np.testing.assert_allclose(unscaled.probs[0], np.tile(np.array([1, 4, 9]) / 14, (3, 1)), rtol=1e-6)


def test_call_learned_sink_and_softcap() -> None:
    query, key, value = unit_call()
    call = attend(query, key, value, None, True, scaling=0.5, sink_logits=torch.tensor([math.log(4.0), 0.0]))
    np.testing.assert_allclose(call.probs[0][2], np.array([1, 2, 3]) / 10, rtol=1e-6)
    np.testing.assert_allclose(call.probs[0].sum(axis=1), [1 / 5, 3 / 7, 6 / 10], rtol=1e-6)
    capped = attend(query, key, value, None, True, softcap=0.5)
    np.testing.assert_allclose(capped.logits[0][0], np.tanh(4 * np.log([1, 2, 3])) / 2, rtol=1e-6)


@pytest.mark.parametrize("shape", [(1, 1, 3, 3), (1, 2, 3, 3), (1, 1, 1, 3)])
def test_call_masks(shape: tuple[int, ...]) -> None:
    query, key, value = unit_call()
    allowed = torch.tensor([True, False, True]).expand(shape)
    lowest = torch.finfo(torch.float32).min
    by_bool = attend(query, key, value, allowed, causal=True, scaling=0.5)
    by_lowest = attend(query, key, value, torch.where(allowed, 0.0, lowest), causal=True, scaling=0.5)
    by_infinity = attend(query, key, value, torch.where(allowed, 0.0, -math.inf), causal=True, scaling=0.5)
    np.testing.assert_allclose(by_bool.probs[0], np.tile([0.25, 0, 0.75], (3, 1)), rtol=1e-6)
    for call in (by_lowest, by_infinity):
        np.testing.assert_array_equal(call.probs, by_bool.probs)
        np.testing.assert_array_equal(call.logits, by_bool.logits)
    biased = attend(query, key, value, torch.where(allowed, 1.5, lowest), causal=True, scaling=0.5)
    np.testing.assert_allclose(biased.probs, by_bool.probs, rtol=1e-12)
    np.testing.assert_allclose(biased.logits[:, 0, 0], by_bool.logits[:, 0, 0] + 1.5)


# Leaving no trace


def test_the_attention_table_and_the_hooks_are_restored() -> None:
    local = dict(ALL_ATTENTION_FUNCTIONS._local_mapping)
    shared = copy.copy(ALL_ATTENTION_FUNCTIONS._global_mapping)
    model = tiny("gemma2")
    measure(model, random_ids(1, 8))
    with pytest.raises(RuntimeError, match="stop"), attention_replaced(lambda module, call: None):
        assert "eager" in ALL_ATTENTION_FUNCTIONS
        raise RuntimeError("stop")
    assert ALL_ATTENTION_FUNCTIONS._local_mapping == local
    assert ALL_ATTENTION_FUNCTIONS._global_mapping == shared
    assert "eager" not in ALL_ATTENTION_FUNCTIONS
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_what_is_there_already_comes_back() -> None:
    def mine() -> None: ...

    ALL_ATTENTION_FUNCTIONS["eager"] = mine
    try:
        measure(tiny("gemma2"), random_ids(1, 8))
        assert ALL_ATTENTION_FUNCTIONS["eager"] is mine
    finally:
        del ALL_ATTENTION_FUNCTIONS["eager"]


def test_training_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="eval mode"):
        measure(tiny("gpt2").train(), random_ids(1, 8))
