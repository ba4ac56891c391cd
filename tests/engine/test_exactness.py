"""Every column against the independent float64 reference, which shares no code with the package."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch
from exact import ABSOLUTE, RELATIVE, assert_close, compare, table
from models import FAMILIES, random_ids, tiny
from reference import measure
from tiers import slow_but

import sinkscope
from sinkscope.metrics import METRICS

EPSILON = 0.1
NO_FLOAT64 = ("gpt_oss",)  # its experts' grouped matrix product knows no float64 on a CPU


@pytest.mark.parametrize("family", slow_but([family for family in FAMILIES if family not in NO_FLOAT64], "gemma2"))
def test_every_column_in_float64(family: str) -> None:
    """A float64 model leaves no rounding to hide behind: a wrong formula cannot pass."""
    model, ids = tiny(family).double(), random_ids(2, 70)
    run = sinkscope.scan(model, data=ids, self_check=False, epsilon=EPSILON)
    compare(run, measure(model, ids, epsilon=EPSILON), 1e-6, 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("family", slow_but(FAMILIES, "gpt_oss"))
def test_every_column_in_float32(family: str) -> None:
    model, ids = tiny(family), random_ids(3, 100, seed=SEEDS.get(family, 0))
    run = sinkscope.scan(model, data=ids, self_check=False, epsilon=EPSILON)
    compare(run, measure(model, ids, epsilon=EPSILON), RELATIVE, ABSOLUTE)


SEEDS: dict[str, int] = {"bert": 9}
"""Another draw where a column happens to lie so near 0 that the two forward passes' own rounding shows in it."""


@pytest.mark.parametrize("family", slow_but(FAMILIES, "gpt_oss"))
def test_short_sequences(family: str) -> None:
    """T < 64: the t64 columns are missing, not 0, and everything else holds."""
    model, ids = tiny(family), random_ids(2, 12, seed=3)
    run = sinkscope.scan(model, data=ids, self_check=False, epsilon=EPSILON)
    compare(run, measure(model, ids, epsilon=EPSILON), 3e-5, 3e-6)
    assert run.heads[["sink_score_t64", "sink_rate_t64"]].isna().all(axis=None)
    assert run.positions["alpha_t64"].isna().all()


@pytest.mark.slow
@pytest.mark.parametrize("family", slow_but(["llama", "mistral", "gpt_oss", "bert"], "mistral"))
def test_sink_rate_is_gu_et_al_s_procedure(family: str) -> None:
    """Eager attentions, importance = column sum / (T - k), indicator per sequence, then the mean."""
    model, ids = tiny(family, attn_implementation="eager"), random_ids(8, 96)
    with torch.no_grad():
        maps = model(ids, output_attentions=True).attentions
    run = sinkscope.scan(model, data=ids, self_check=False, epsilon=EPSILON)
    indicators = torch.stack([(layer.sum(-2)[..., 0] / ids.shape[1] > EPSILON) for layer in maps], 1).numpy()
    assert (table(run, ["sink_rate"], heads=True)["sink_rate"] == indicators).all()
    percent = run.summary.streams["text"].sink_rate_percent[f"{EPSILON:g}"].T
    assert percent == pytest.approx(100 * indicators.mean())


@pytest.mark.slow
@pytest.mark.parametrize("family", slow_but(["llama", "mistral", "gemma3", "gpt_oss", "gpt2"], "gemma3"))
def test_t64_columns_are_those_of_a_t64_run(family: str) -> None:
    model, ids = tiny(family), random_ids(4, 256)
    whole = sinkscope.scan(model, data=ids, self_check=False, epsilon=EPSILON)
    short = sinkscope.scan(model, data=ids[:, :64], self_check=False, epsilon=EPSILON)
    assert_close(whole.heads["sink_score_t64"].to_numpy(), short.heads["sink_score"].to_numpy(), "score", 1e-5, 1e-6)
    assert (whole.heads["sink_rate_t64"] == short.heads["sink_rate"]).all()
    first = whole.length_curve[whole.length_curve["length"] == 64].reset_index(drop=True)
    assert_close(first["bos_mass"].to_numpy(), short.heads["bos_mass"].to_numpy(), "curve", 1e-5, 1e-6)
    early = whole.positions[whole.positions["position"] < 64]["alpha_t64"].to_numpy()
    assert_close(early, short.positions["alpha"].to_numpy(), "alpha_t64", 1e-5, 1e-6)


def test_length_curve_ends_at_the_tables_values() -> None:
    run = sinkscope.scan(tiny("llama"), data=random_ids(4, 200), self_check=False, epsilon=EPSILON)
    assert sorted(run.length_curve["length"].unique()) == [64, 128, 200]
    last = run.length_curve[run.length_curve["length"] == 200].reset_index(drop=True)
    for name in ("bos_mass", "sink_score", "sink_rate", "bos_mass_sem"):
        assert_close(last[name].to_numpy(), run.heads[name].to_numpy(), name, 1e-7, 1e-9)


def test_uniform_attention_has_its_closed_forms() -> None:
    """Zero queries: A[i,j] = 1/(i+1), so alpha_0 = H_T/T, entropy = mean log(i+1), and the baseline is exact."""
    model = tiny("llama")
    for layer in model.layers:
        torch.nn.init.zeros_(layer.self_attn.q_proj.weight)
    length = 80
    run = sinkscope.scan(model, data=random_ids(2, length), self_check=False)
    harmonic = sum(1 / n for n in range(1, length + 1))
    expected = {
        "sink_score": harmonic / length,
        "bos_mass": (harmonic - 1) / (length - 1),
        "entropy": np.log(np.arange(1, length + 1)).mean(),
        "uniformity": 1.0,
        "self_mass": (harmonic - 1) / (length - 1),
        "first_argmax": 1.0,
        "first_visible": 1.0,
        "learned_sink_mass": 0.0,
        "logit_gap": 0.0,
        "sink_margin": -np.log(np.arange(1, length)).mean(),
    }
    for name, value in expected.items():
        assert run.heads[name].to_numpy() == pytest.approx(value, rel=1e-6, abs=1e-7), name
    assert pytest.approx(harmonic / length) == run.summary.streams["text"].uniform_alpha_0.T
    assert set(run.heads["pattern"]) == {"uniform"}


def test_value_columns_are_equal_within_a_group() -> None:
    run = sinkscope.scan(tiny("llama"), data=random_ids(2, 40), self_check=False)
    assert run.heads["kv_group"].nunique() < run.heads["head"].nunique()
    for name in ("ftvvn", "avvn", "value_drain", "k_norm_first", "k_norm_other"):
        assert (run.heads.groupby(["layer", "kv_group"])[name].nunique() == 1).all(), name


def test_permuted_heads_permute_rows() -> None:
    model, ids = tiny("gpt2"), random_ids(2, 40)
    before = sinkscope.scan(model, data=ids, self_check=False).heads
    order = torch.tensor([2, 0, 3, 1])
    with torch.no_grad():
        for block in model.h:
            attention = block.attn
            width = attention.head_dim
            columns = (order[:, None] * width + torch.arange(width)).flatten()
            size = len(columns)
            triple = torch.cat([columns + part * size for part in range(3)])
            attention.c_attn.weight.copy_(attention.c_attn.weight[:, triple])
            attention.c_attn.bias.copy_(attention.c_attn.bias[triple])
            attention.c_proj.weight.copy_(attention.c_proj.weight[columns])
    after = sinkscope.scan(model, data=ids, self_check=False).heads
    names = [name for name in METRICS["heads"] if not name.endswith("t64")]
    expected = before.set_index(["layer", "head"])[names]
    moved = after.assign(head=after["head"].map(lambda head: int(order[head]))).set_index(["layer", "head"])[names]
    pd.testing.assert_frame_equal(moved.sort_index(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", slow_but(FAMILIES, "gpt2"))
def test_batch_size_changes_nothing(family: str) -> None:
    model, ids = tiny(family), random_ids(4, 70)
    one = sinkscope.scan(model, data=ids, batch_size=1, self_check=False)
    four = sinkscope.scan(model, data=ids, batch_size=4, self_check=False)
    numbers = one.heads.select_dtypes("number").columns
    for name in numbers:
        assert_close(four.heads[name].to_numpy(), one.heads[name].to_numpy(), name, 1e-5, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", slow_but([1, 3], 3))
def test_spectra_of_the_first_sequences_only(batch_size: int) -> None:
    """The others' matrix_entropy is missing, and so left out of the mean; no other column changes."""
    model, ids = tiny("llama"), random_ids(5, 40)
    whole = sinkscope.scan(model, data=ids, self_check=False)
    some = sinkscope.scan(model, data=ids, spectra=2, batch_size=batch_size, self_check=False)
    none = sinkscope.scan(model, data=ids, spectra=0, self_check=False)
    short = sinkscope.scan(model, data=ids[:2], self_check=False)
    of_sequence = some.sequences[some.sequences["head"].isna()].groupby("sequence")["matrix_entropy"]
    assert of_sequence.count().tolist() == [len(some.layers)] * 2 + [0] * 3
    columns = ["matrix_entropy", "matrix_entropy_sem"]
    pd.testing.assert_frame_equal(some.layers[columns], short.layers[columns], rtol=1e-6)
    assert none.layers[columns].isna().all(axis=None)
    measured = [run.manifest.spectra_measured for run in (whole, some, none)]
    assert measured == [{"token ids": 5}, {"token ids": 2}, {"token ids": 0}]
    others = whole.layers.columns.drop(columns)
    pd.testing.assert_frame_equal(some.layers[others], whole.layers[others], rtol=1e-4, atol=1e-5)


def test_spectra_of_the_first_sequences_whatever_their_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """The longest says how many: a short one behind them is not measured in a long one's place."""
    monkeypatch.setattr("sinkscope.metrics.spectra.SPECTRA_CUBES", 3 * 32**3)
    model, ids = tiny("llama"), random_ids(6, 40)
    mask = torch.ones_like(ids)
    mask[[0, 4, 5], 10:] = 0
    run = sinkscope.scan(model, data={"input_ids": ids, "attention_mask": mask}, self_check=False)
    of_sequence = run.sequences[run.sequences["head"].isna()].groupby("sequence")["matrix_entropy"]
    wanted = max(2, 3 * 32**3 // min(40, model.config.hidden_size) ** 3)
    assert wanted < 6
    assert (of_sequence.count() > 0).tolist() == [True] * wanted + [False] * (6 - wanted)


@pytest.mark.slow
def test_sequence_order_changes_no_mean() -> None:
    model, ids = tiny("llama"), random_ids(6, 70)
    forwards = sinkscope.scan(model, data=ids, self_check=False, batch_size=2).heads
    backwards = sinkscope.scan(model, data=ids.flip(0), self_check=False, batch_size=2).heads
    for name in METRICS["heads"]:
        assert_close(backwards[name].to_numpy(), forwards[name].to_numpy(), name, 1e-5, 1e-6)
