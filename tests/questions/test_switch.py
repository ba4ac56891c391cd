"""Is a sink a switch? Every column against whole maps in float64, closed forms, and what is missing."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import make_model
from exact import assert_close, table
from families import tiny_model
from models import random_ids, tiny
from switch_reference import measure_switch
from tiers import slow_but
from transformers import AutoModel

import sinkscope
from sinkscope.capture.kernels.sums import AttentionSums
from sinkscope.capture.sites import AttentionKind, Site
from sinkscope.capture.view import LayerView, Missing
from sinkscope.inputs import Corpus
from sinkscope.metrics import registered
from sinkscope.metrics.quantities import quantity_set
from sinkscope.questions.cosines.columns import COSINES
from sinkscope.questions.switch import columns as switch
from sinkscope.questions.switch.measure import TokenPlaces
from sinkscope.questions.switch.tables import (
    COUNTS,
    OPENED,
    SwitchRun,
    TokenTests,
    _needed,
    row_pattern,
    token_table,
    token_tests,
)
from sinkscope.questions.switch.words import _of_tokens
from sinkscope.runs.catalogue import catalogue, table_columns
from sinkscope.runs.questions import tables_of_questions
from sinkscope.runs.run import Run, load_run
from sinkscope.tables.values import Domain, SiteValues

METRICS = registered().tables
HEADS = list(METRICS["switch"])
LAYERS = [name for name, metric in METRICS["layers"].items() if metric.measure == "switch"]
FAMILIES = ("llama", "gpt2", "bert", "gemma3", "gpt_oss")


def measured(model: Any, ids: torch.Tensor, **options: Any) -> Run:
    return sinkscope.scan(model, data=ids, self_check=False, measure="switch", **options)


def compare(run: Run, model: Any, ids: torch.Tensor, relative: float, absolute: float) -> None:
    heads, layers, cosines = measure_switch(model, ids)
    assert set(heads) == set(HEADS)
    assert set(layers) == set(LAYERS)
    ours = table(run, HEADS, heads=True)
    for name, values in heads.items():
        assert_close(ours[name], values, name, relative, absolute)
    ours = table(run, LAYERS, heads=False)
    for name, values in layers.items():
        assert_close(ours[name], values, name, relative, absolute)
    shown = run.measured["alignment"]
    for name, values in cosines.items():
        assert_close(shown[name].to_numpy(), values.mean(0).ravel(), name, relative, absolute)
        error = values.std(0, ddof=1).ravel() / np.sqrt(len(values))
        assert_close(shown[f"{name}_sem"].to_numpy(), error, f"{name}_sem", 1e-3, 1e-4)


@pytest.mark.parametrize("family", slow_but(FAMILIES[:-1], "llama"))  # gpt_oss runs in 32 bits or fewer only
def test_every_column_in_float64(family: str) -> None:
    model, ids = tiny(family).double(), random_ids(3, 12)
    compare(measured(model, ids, batch_size=2), model, ids, 1e-6, 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("family", slow_but(FAMILIES, "gemma3"))
def test_every_column_in_float32(family: str) -> None:
    model, ids = tiny(family), random_ids(3, 24)
    compare(measured(model, ids), model, ids, 1e-4, 1e-5)


@pytest.mark.slow
def test_padding_and_batches_change_nothing() -> None:
    model, ids = tiny("llama"), random_ids(3, 24)
    mask = torch.ones_like(ids)
    mask[1, 20:] = 0
    run = measured(model, {"input_ids": ids, "attention_mask": mask})  # type: ignore[arg-type]
    alone = measured(model, ids[1:2, :20])
    for names, heads in ((HEADS, True), (LAYERS, False)):
        ours, expected = table(run, names, heads=heads), table(alone, names, heads=heads)
        for name in names:
            assert_close(ours[name][1], expected[name][0], name, 1e-4, 1e-5)
    assert set(run.measured["alignment"]["position"]) == set(range(24))


def tokens_told(run: Run, stream: str) -> bool:
    """Whether the summary says which tokens switch the stream's heads on, or that none does."""
    return any(
        "switches a head on" in line or "switch heads on" in line for line in run.summary.streams[stream].in_words
    )


@pytest.mark.slow
def test_a_model_whose_output_projection_is_not_seen_has_no_tokens_that_switch(tmp_path: Path) -> None:
    """XLNet's is a matrix without a layer: nothing says which heads are on, so nothing is said of them."""
    run = measured(tiny_model(AutoModel, "xlnet"), random_ids(2, 20) % 90)
    assert run.measured["switch"]["off_rate"].isna().all()
    assert run.measured["switch"]["sink_rows"].notna().all(), "attention is seen all the same"
    assert not tokens_told(run, "text")
    run.save(tmp_path / "run")
    for name in ("switch_tokens", "alignment"):
        columns = [column.name for column in table_columns(tables_of_questions()[name]) if column.name != "domain"]
        for found in (run.measured[name], load_run(tmp_path / "run").measured[name]):
            assert list(found.columns) == columns
            assert len(found) == (0 if name == "switch_tokens" else 2 * 20), "a row for each layer and position"


@pytest.mark.slow
def test_tokens_that_switch_are_told_of_the_stream_that_reads_them() -> None:
    """T5's decoder reads its own text, shifted, and cross-attention has no tokens of its own at its queries."""
    run = measured(tiny_model(AutoModel, "t5"), random_ids(2, 20) % 90)
    assert {stream for stream in run.summary.streams if tokens_told(run, stream)} == {"encoder"}
    assert set(run.measured["switch"]["stream"]) == {"encoder", "decoder", "cross"}
    assert set(run.measured["switch_tokens"]["stream"]) <= {"encoder"}


# Closed forms: views made by hand, one sequence, T queries.


def view(probs: torch.Tensor, values: torch.Tensor, slices: torch.Tensor, **more: Any) -> LayerView:
    """A view of heads with these maps [H, T, T], values [H, T, dv] and slices W_O^h [H, D, dv]."""
    heads, length = probs.shape[:2]
    rows = torch.arange(length)
    first, shape = probs[None, :, :, 0], (1, heads, length)
    output = (probs @ values).transpose(0, 1)[None]
    sums = AttentionSums(
        first=first, diagonal=probs[None, :, rows, rows], previous=None, entropy=torch.zeros(shape),
        margin=(first / (1 - first)).log(), learned_sink=torch.zeros(shape), first_is_largest=torch.zeros(shape).bool(),
        logit_gap=torch.zeros(shape), columns=probs.sum(1)[None], early_columns=None,
        visible=(rows + 1)[None, None], sees_first=torch.ones(1, 1, length).bool(),
        sees_few=(rows + 1).clamp(max=4)[None, None],
        seen_by=(length - rows)[None, None], early_seen_by=None, causal=True,
    )  # fmt: skip
    site = Site("text", 0, "m", 0, AttentionKind("full"), heads, heads, 4, 4, True, "b", "p")
    written = torch.einsum("bthv,hdv->btd", output, slices)
    return LayerView(
        site, 0.3, sums, output, raw_value=values[None], raw_projected=output, raw_written=written,
        raw_factors=lambda: slices, layer_heads=heads, **more,
    )  # fmt: skip


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_a_head_that_attends_to_itself_is_an_mlp() -> None:
    seen = view(torch.eye(6, dtype=torch.float64)[None], drawn(1, 6, 4), drawn(1, 5, 4))
    assert float(switch.from_self(seen)) == pytest.approx(1)
    assert float(switch.communication(seen)) == pytest.approx(0, abs=1e-24)
    assert float(switch.from_sink(seen)) == 0


def test_rows_of_section_7_are_told_apart() -> None:
    """Rows 1 to 4: on the first token, on itself, on two others, on all alike."""
    maps = torch.zeros(1, 5, 5, dtype=torch.float64)
    maps[0, 0, 0] = maps[0, 1, 0] = maps[0, 2, 2] = 1
    maps[0, 3, 1:3] = 0.5
    maps[0, 4] = 0.2
    seen = view(maps, drawn(1, 5, 4), drawn(1, 5, 4))
    assert float(switch.sink_rows(seen)) == float(switch.self_rows(seen)) == float(switch.copy_rows(seen)) == 0.25


def test_an_empty_row_copies_nothing() -> None:
    """A score that no sum divides may leave a row at 0; that its first token has none is not enough."""
    seen = view(torch.zeros(1, 5, 5, dtype=torch.float64), drawn(1, 5, 4), drawn(1, 5, 4))
    raw = replace(
        seen.attention,
        row_total=torch.zeros(1, 1, 5, dtype=torch.float64),
        learned_sink=torch.full((1, 1, 5), torch.nan),
    )
    assert float(switch.copy_rows(replace(seen, attention=raw))) == 0


def test_a_pattern_needs_both_kinds_of_rows() -> None:
    means = {
        "sink_rows": [0.9, 0.5, 0.0, 0.96, 0.5, math.nan], "self_rows": [0.0, 0.0, 0.8, 0.0, 0.0, 0.0],
        "copy_rows": [0.08, 0.5, 0.2, 0.04, 0.3, 0.5],
    }  # fmt: skip
    found = row_pattern(SwitchRun({name: np.array(values) for name, values in means.items()}))
    assert found.tolist() == ["sink+copy", "sink+copy", "diagonal+copy", "other", "other", None]


def test_dose_and_response_of_alignment() -> None:
    """Every row reads itself alone, and values are the longer the better aligned their token is, then the shorter."""
    cosines = torch.linspace(0.1, 0.9, 5, dtype=torch.float64)
    z = torch.cat([torch.tensor([[1.0, 0.0]]), torch.stack([cosines, (1 - cosines**2).sqrt()], 1)]).double()[None]
    for lengths, expected in ((cosines, 1.0), (2 - cosines, -1.0)):
        values = torch.cat([torch.ones(1).double(), lengths])[None, :, None] * torch.tensor([1.0, 0.0]).double()
        seen = view(torch.eye(6).double()[None], values, torch.eye(2).double()[None], attention_input=z)
        assert float(switch.alignment_openness(seen)) == pytest.approx(expected)
    alike = view(
        torch.eye(6).double()[None], values, torch.eye(2).double()[None], attention_input=z[:, :1].expand(1, 6, 2)
    )
    assert switch.alignment_openness(alike).isnan().all(), "no token is better aligned than another"


def test_a_head_that_attends_to_a_first_token_without_value_is_off() -> None:
    maps, values = torch.zeros(1, 6, 6, dtype=torch.float64), drawn(1, 6, 4)
    maps[..., 0], values[:, 0] = 1, 0
    seen = view(maps, values, drawn(1, 5, 4))
    assert float(switch.off_rate(seen)) == float(switch.sink_rows(seen)) == 1
    assert switch.switch_phi(seen).isnan().all(), "neither ever varies"
    assert switch.communication(seen).isnan().all(), "a share of nothing"
    assert float(switch.open_q90(seen)) == 0


def test_a_head_that_copies_the_first_token_everywhere_writes_a_constant() -> None:
    maps = torch.zeros(1, 6, 6, dtype=torch.float64)
    maps[..., 0] = 1
    seen = view(maps, drawn(1, 6, 4), drawn(1, 5, 4))
    for column in (switch.constant_share, switch.from_sink, switch.sunk_not_off):
        assert float(column(seen)) == pytest.approx(1)


def test_opposite_heads_cancel_and_equal_ones_add_up() -> None:
    maps = torch.tril(torch.ones(2, 6, 6, dtype=torch.float64))
    maps /= maps.sum(-1, keepdim=True)
    values, slices = drawn(1, 6, 4).expand(2, -1, -1), drawn(1, 5, 4)
    assert float(switch.compensation(view(maps, values, torch.cat([slices, -slices])))) == pytest.approx(0, abs=1e-12)
    same = view(maps, values, torch.cat([slices, slices]))
    assert float(switch.compensation(same)) == pytest.approx(1)
    assert float(switch.compensation_unrelated(same)) == pytest.approx(2**-0.5)


def test_a_bias_of_the_first_key_is_a_pure_key_bias() -> None:
    """All logits are 0 but those of key 0. The margin falls with log i all the same; key_bias does not."""
    maps = torch.tril(torch.ones(1, 9, 9, dtype=torch.float64))
    maps[..., 0] = torch.e**2
    maps /= maps.sum(-1, keepdim=True)
    seen = view(maps, drawn(1, 9, 4), drawn(1, 5, 4))
    assert float(switch.key_bias(seen)) == pytest.approx(0, abs=1e-12)
    assert float(seen.attention.margin[0, 0, 1:].std()) > 0.5


def test_rows_of_a_score_beyond_one_and_values_of_zero_are_missing_not_zero() -> None:
    seen = view(torch.eye(4, dtype=torch.float64)[None], torch.zeros(1, 4, 4, dtype=torch.float64), drawn(1, 5, 4))
    for name, metric in METRICS["switch"].items():
        if name not in (
            "sink_rows",
            "self_rows",
            "copy_rows",
            "key_bias",
            "alignment_openness",
        ):  # the last reads inputs
            assert metric.compute(seen).isnan().all(), name


def test_cosines_of_what_a_layer_lacks_are_empty() -> None:
    z = drawn(1, 6, 5)
    seen = view(torch.eye(6, dtype=torch.float64)[None], drawn(1, 6, 4), drawn(1, 5, 4), attention_input=z)
    residual, squared, own, own_squared = switch.by_position(seen)[0]
    assert torch.stack([residual, squared]).isnan().all()
    expected = torch.cosine_similarity(z[0, :1], z[0], dim=-1)
    torch.testing.assert_close(own, expected)
    torch.testing.assert_close(own_squared, expected**2)


def test_cosines_of_a_block_whose_tokens_are_not_the_keys_are_missing() -> None:
    more = {"residual_in": drawn(1, 9, 5), "attention_input": drawn(1, 9, 5)}
    seen = view(torch.eye(6, dtype=torch.float64)[None], drawn(1, 6, 4), drawn(1, 5, 4), **more)
    early = [partial(cosine, length=4) for cosine in COSINES.values()]
    for column in (switch.by_position, switch.cos_peak_residual, switch.cos_peak_input, *early[:2]):
        with pytest.raises(Missing):
            column(seen)


@pytest.mark.slow
def test_a_gate_after_attention_changes_neither_rows_nor_heads() -> None:
    """Columns of o_i read it before the gate; half of every w_i has the shares that the whole has."""
    model, ids = tiny("llama", num_hidden_layers=1), random_ids(2, 24)
    plain = measured(model, ids)
    model.layers[0].self_attn.o_proj.register_forward_pre_hook(lambda module, args: (args[0] * 0.5,), prepend=True)
    gated = measured(model, ids)
    for names, heads in ((HEADS, True), (LAYERS, False)):
        ours, expected = table(gated, names, heads=heads), table(plain, names, heads=heads)
        for name in names:
            assert_close(ours[name], expected[name], name, 1e-5, 1e-6)


@pytest.mark.slow
def test_cross_attention_has_no_column_of_its_own_keys() -> None:
    run = measured(tiny_model(AutoModel, "t5"), random_ids(2, 12))
    heads = run.measured["switch"].set_index("stream")
    own = ["from_self", "communication", "self_rows", "copy_rows", "alignment_openness"]
    assert heads.loc["cross", own].isna().all(axis=None)
    assert heads.loc["cross", ["sink_rows", "off_rate", "from_sink"]].notna().all(axis=None)
    assert heads.loc["encoder", own].notna().all(axis=None)
    layers = run.layers.set_index("stream")
    assert layers.loc["cross", ["cos_peak_residual", "cos_peak_input"]].isna().all(axis=None)
    assert layers.loc["decoder", ["cos_peak_residual", "cos_peak_input"]].notna().all(axis=None)
    assert set(run.measured["alignment"].dropna()["stream"]) == {"encoder", "decoder"}


# The trigger models: what the papers say of them.


@pytest.fixture(scope="module")
def trigger_runs() -> dict[str, Run]:
    return {
        name: sinkscope.scan(f"example:trigger-{name}", num_sequences=40, measure="switch", self_check=False)
        for name in ("softmax", "relu")
    }


def test_the_softmax_sink_of_the_trigger_task_is_a_switch(trigger_runs: dict[str, Run]) -> None:
    """In every row without a trigger the head has a sink and is off; at the trigger it is on."""
    run = trigger_runs["softmax"]
    [head] = run.measured["switch"].to_dict("records")
    assert head["sink_rows"] == head["off_rate"] == pytest.approx(14 / 15)
    assert head["copy_rows"] == pytest.approx(1 / 15), "the trigger's row reads what stands before it"
    assert head["row_pattern"] == "sink+copy"
    assert head["switch_phi"] == pytest.approx(1)
    assert head["off_when_sunk"] == 1
    assert head["off_not_sunk"] == head["sunk_not_off"] == 0
    tokens = run.measured["switch_tokens"].set_index("token")
    assert tokens["on_rate"].to_dict() == {"trigger": 1, "ordinary": 0}
    assert tokens["n"].to_dict() == {"trigger": 40, "ordinary": 560}
    assert tokens.loc["trigger", "lift"] == pytest.approx(15)
    assert (tokens["q"] < 1e-8).all()
    words = " ".join(run.summary.streams["text"].in_words)
    assert "1 of 1 head has sink rows" in words
    assert "Tokens that switch heads on: 'trigger' (1)." in words
    assert "Heads cancel" not in words, "there is one head"


def test_the_relu_head_of_the_trigger_task_is_off_without_a_sink(trigger_runs: dict[str, Run]) -> None:
    [head] = trigger_runs["relu"].measured["switch"].to_dict("records")
    assert head["off_rate"] == head["off_not_sunk"] == pytest.approx(14 / 15)
    assert head["sink_rows"] == head["self_rows"] == 0
    assert head["row_pattern"] == "other", "its rows are empty but the trigger's"
    assert "none of 1 head has sink rows" in " ".join(trigger_runs["relu"].summary.streams["text"].in_words)


def test_tokens_are_counted_the_same_whatever_the_batches(trigger_runs: dict[str, Run]) -> None:
    again = sinkscope.scan(
        "example:trigger-softmax", num_sequences=40, batch_size=7, measure="switch", self_check=False
    )
    pd.testing.assert_frame_equal(again.measured["switch_tokens"], trigger_runs["softmax"].measured["switch_tokens"])


def test_the_tests_of_tokens_are_those_of_the_words() -> None:
    """z, p and Benjamini-Hochberg's q, one head and token after the other. Head 0 follows token 3, head 1 is on at
    random, head 2 always and head 3 in whole sequences: neither of these is a test."""
    draw = np.random.default_rng(0)
    ids = draw.integers(3, 11, (14, 40))
    ids[5:, 20:30][ids[5:, 20:30] == 10] = 3
    on = draw.random((14, 39, 4)) < 0.3
    on[..., 0] |= ids[:, 1:] == 3
    on[..., 2] = True
    on[..., 3] = (np.arange(14) % 2)[:, None]
    p = {}
    for head, token in product(range(4), range(3, 11)):
        here = ids[:, 1:] == token
        held = here.any(1)
        d = (on[..., head] & here).sum(1)[held] - here.sum(1)[held] * on[held, :, head].mean(1)
        if here.sum() >= 10 and (np.abs(d) > 1e-9).any():
            p[head, token] = math.erfc(abs(d.sum()) / np.sqrt((d**2).sum()) / math.sqrt(2))
    assert {head for head, _ in p} == {0, 1}
    order = sorted(p, key=lambda pair: p[pair])
    least = {pair: [p[other] * len(p) / (n + 1) for n, other in enumerate(order)] for pair in p}
    expected = {pair: min(every[order.index(pair) :]) for pair, every in least.items()}
    counted = TokenPlaces.of(ids[:, 1:]).count(torch.from_numpy(on.astype(float)))
    arrays = {COUNTS: counted.counts.numpy(), OPENED: counted.opened.numpy()}
    site = Site("text", 0, "m", 0, AttentionKind("full"), 4, 4, 4, 4, True, "b", "p")
    values = SiteValues(quantity_set(), arrays, [40], 14, True, 40, 40)
    domain = Domain(Corpus("drawn", ids, [("",)] * 14), {"m": values})
    table = token_table([domain], [site], None)
    found = dict(zip(zip(table["head"], table["token_id"], strict=True), table["q"], strict=True))
    assert found == pytest.approx({pair: q for pair, q in expected.items() if q < 0.05})
    assert (0, 3) in found
    rates = table.set_index(["head", "token_id"]).loc[(0, 3)]
    assert rates["lift"] == pytest.approx(1 / on[..., 0].mean())
    tests = token_tests([domain], [site])["drawn", "text"]
    most = max(int((ids[:, 1:] == token).any(1).sum()) for token in range(3, 11))
    assert (tests.tests, tests.sequences, tests.frequent) == (len(p), most, True)


def test_too_few_sequences_are_told() -> None:
    """|z| is at most the root of the sequences that hold a token: 276 tests need 15 of them, however clear they are."""
    assert [_needed(tests) for tests in (1, 92, 276)] == [4, 12, 15]
    for tests in (1, 92, 276):
        found = TokenTests(True, tests, _needed(tests) - 1, _needed(tests))
        assert (
            math.erfc(math.sqrt(found.sequences / 2)) * tests >= 0.05 > math.erfc(math.sqrt(found.needed / 2)) * tests
        )
        assert _of_tokens([], False, [found]) == (
            f"Too few sequences to tell which tokens switch heads on: with {tests} test{'s' * (tests > 1)}, q < 0.05 "
            f"needs a token that occurs in {found.needed} sequences; the most frequent one occurs in {found.sequences}."
        )
        assert _of_tokens([], True, [found]).startswith("No token switches a head on")
        enough = replace(found, sequences=found.needed)
        assert _of_tokens([], False, [found, enough]).startswith("No token switches a head on")
    rare = TokenTests(False, 0, 0, 4)
    assert _of_tokens([], False, [rare]).startswith("Too little text to tell")
    always_on = TokenTests(True, 0, 0, 4)
    assert _of_tokens([], False, [always_on]).startswith("No token switches a head on")


@pytest.mark.slow
def test_the_answer_over_several_datasets_is_that_over_all_their_sequences(tmp_path: Path, tokenizer: Any) -> None:
    """The means of datasets of 1 and 4 sequences are no mean over the 5."""
    data = [str(tmp_path / f"{count}.jsonl") + "#input_ids" for count in (1, 4)]
    for spec, count in zip(data, (1, 4), strict=True):
        rows = [json.dumps({"input_ids": ids}) for ids in random_ids(count, 30, seed=count).tolist()]
        Path(spec.removesuffix("#input_ids")).write_text("\n".join(rows), "utf-8")
    asked: dict[str, Any] = {"data": data, "seq_len": 30, "measure": "switch", "self_check": False}
    run = sinkscope.scan(make_model(), tokenizer=tokenizer, **asked)
    found = run.summary.streams["text"].measured["switch"]
    rows = run.sequences
    of_layers = rows[rows["head"].isna()].groupby("layer")[["compensation", "compensation_unrelated"]].mean()
    for name, value in of_layers.mean().items():
        assert found[name] == pytest.approx(value, rel=1e-9)
    assert (found["layers"], found["heads"]) == (len(of_layers), len(run.heads) // 2)
    of_heads = rows[rows["head"].notna()].groupby(["layer", "head"])[["sink_rows", "communication"]].mean()
    assert found["with_sink_rows"] == (of_heads["sink_rows"] >= 0.05).sum()
    assert found["silent"] == (of_heads["communication"] < 0.05).sum()
    [_, many] = run.summary.domains.values()
    own = run.layers[run.layers["domain"] == data[1]]["compensation"].mean()
    assert many.streams["text"].measured["switch"]["compensation"] == pytest.approx(own, rel=1e-9)


def test_a_run_without_such_tokens_is_saved_and_read(tmp_path: Any) -> None:
    """Two short sequences: no token is seen often enough."""
    run = measured(tiny("llama", num_hidden_layers=1), random_ids(2, 12))
    run.save(tmp_path / "run")
    read = load_run(tmp_path / "run")
    assert read.measured["switch_tokens"].empty
    for name, own in run.measured.items():
        pd.testing.assert_frame_equal(read.measured[name], own, rtol=1e-8)


def test_energies_over_the_energy_of_the_whole_are_ratios_that_may_exceed_1() -> None:
    """A share would be drawn on a scale from 0 to 1, and communication reaches 1.04."""
    found = {column.name: column for column in catalogue() if column.table == "switch"}
    for name in ("from_sink", "from_self", "communication"):
        assert (found[name].unit, found[name].range) == ("ratio", "[0, inf)")
