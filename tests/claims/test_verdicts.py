"""Every claim's rule comes out either way: on tables of closed form, and on models that are written down."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from models import random_ids, tiny
from tiers import slow_but
from trigger_models import relu_with_a_sink

import sinkscope
from sinkscope.claims.claim import (
    CLAIMS,
    FAILS,
    HOLDS,
    IN_PART,
    NOT_TESTED,
    Found,
    Number,
    Rule,
    chosen_claims,
    correlation,
    mean,
    number,
    ratio,
    share,
)
from sinkscope.claims.findings import judged
from sinkscope.claims.subject import Subject
from sinkscope.errors import SinkscopeError
from sinkscope.runs.run import Run
from sinkscope.runs.schema.summary import DomainSummary
from sinkscope.trigger import task
from sinkscope.trigger.explicit import explicit
from sinkscope.trigger.model import TriggerConfig, TriggerModel


@cache
def scanned() -> Run:
    """Two layers of four heads over 80 tokens, with every table that claims read."""
    return sinkscope.scan(
        tiny("llama", num_hidden_layers=2), data=random_ids(2, 80), self_check=False, measure=["switch", "smoothing"]
    )


def made(
    heads: dict[str, Any] | None = None, layers: dict[str, Any] | None = None, **tables: dict[str, Any]
) -> Subject:
    """The run with these columns: of heads and layers, a value or one for each, and of tables."""
    run = scanned()
    rows, is_head = run.sequences.copy(), run.sequences["head"].notna().to_numpy()
    place = (rows["layer"] * 4 + rows["head"]).where(is_head, rows["layer"]).astype(int).to_numpy()
    for there, columns in ((is_head, heads or {}), (~is_head, layers or {})):
        for name, value in columns.items():
            rows.loc[there, name] = np.resize(value, 8)[place[there]]
    measured = {name: table.copy() for name, table in run.measured.items()}
    for name, columns in tables.items():
        first = measured.get(name, run.heads[["stream", "layer", "head", "module"]])
        measured[name] = first.assign(**columns)
    return Subject("made", given=replace(run, sequences=rows, measured=measured))


def model(network: Any) -> Callable[[], Subject]:
    return lambda: Subject("a model", network, reading={"num_sequences": 20}, loading={"self_check": False})


def losing(first: float, other: float, alpha_0: float = 0.9) -> Subject:
    arms = ["keys:first1", "keys:random1", "value:first1", "value:random1"]
    table = pd.DataFrame({"arm": arms, "increase": [1.0, 0.0, first, other], "increase_sem": 0.01})
    subject = made({"sink_score": alpha_0})
    subject._kept["arms"] = SimpleNamespace(table=table)
    return subject


def scored(score: str, mass: float) -> Subject:
    """A language model of that score, whose heads give the first token `mass`."""
    subject = made({"bos_mass": mass}, first=FIRST)
    manifest = subject.given.manifest
    sites = [site.model_copy(update={"score": score}) for site in manifest.attention]
    run = replace(subject.given, manifest=manifest.model_copy(update={"attention": sites}))
    return Subject("made", given=run)


def long(heads: dict[str, Any], shortest: int | None = None, longest: int = 128) -> Subject:
    """A run over sequences of twice 64 tokens, or of as many as these."""
    run = made(heads).given
    update = {"seq_len": longest, "shortest": shortest}
    data = [each.model_copy(update=update) for each in run.manifest.data]
    return Subject("long", given=replace(run, manifest=run.manifest.model_copy(update={"data": data})))


def smoothing(verdict: list[str], change: list[float]) -> dict[str, Any]:
    return {"verdict": np.resize(verdict, 8), "uniform_minus_attention": np.resize(change, 8)}


SUNK = {"sink_rows": 0.5, "off_rate": 0.5, "sunk_not_off": 0.0, "off_not_sunk": 0.0}
SHORT_KEY = {"sink_score": 0.9, "qk_cos_other": 0.1, "k_norm_first": 1.0, "k_norm_other": 2.0}
FIRST = {"alpha_0_bos_first": 0.9, "alpha_0_other_first": 0.5, "alpha_bos_later": 0.5, "alpha_0_bos_later": 0.5}
COSTS = {"sink_margin_pairs": 1.0, "cost_sink_lower_qk": 0.1, "cost_sink_upper_qk": 1.0, "cost_sink_upper_value": 9.0,
         "cost_diagonal_lower_qk": 5.0, "cost_diagonal_lower_paper": 4.0, "token_span": 3.0}  # fmt: skip
CHEAPER = {"cheaper_qk": "sink", "cheaper_block": "undecided"}
CASES: dict[str, tuple[Callable[[], Subject], Callable[[], Subject]]] = {
    "softmax-needs-a-sink": (model(explicit("softmax")), model(explicit("softmax", heads=2))),
    "relu-needs-none": (model(explicit("relu")), model(relu_with_a_sink())),
    "off-rests-on-a-sink": (lambda: made(SUNK), lambda: made(SUNK | {"off_not_sunk": 0.5})),
    "heads-compensate": (
        lambda: made(layers={"compensation": 0.1, "compensation_unrelated": 0.5}),
        lambda: made(layers={"compensation": 0.5, "compensation_unrelated": 0.5}),
    ),
    "hard-switch": (lambda: made(SUNK), lambda: made(SUNK | {"sunk_not_off": 0.5, "off_rate": 0.0})),
    "alignment": (
        lambda: made({"sink_score": 0.9}, {"alignment_margin": 0.1, "alignment_margin_other": [0.1, 0.0]}),
        lambda: made({"sink_score": 0.9}, {"alignment_margin": 0.0, "alignment_margin_other": [0.1, 0.0]}),
    ),
    "cosines": (
        lambda: made({"sink_score": 0.9}, {"cos_first_input_min": 0.1}),
        lambda: made({"sink_score": 0.9}, {"cos_first_input_min": -0.1}),
    ),
    "sink-is-cheaper": (
        lambda: made(COSTS, smoothing=COSTS | {"cheaper_qk": "sink", "cheaper_block": "undecided"}),
        lambda: made(COSTS, smoothing=COSTS | {"cheaper_qk": "undecided", "cheaper_block": "undecided"}),
    ),
    "self-talk-is-an-mlp": (
        lambda: made({"self_mass": 0.9, "communication": 0.01, "from_self": 0.9}),
        lambda: made({"self_mass": 0.9, "communication": 0.9, "from_self": 0.9}),
    ),
    "dense-smooths-more": (
        lambda: made(smoothing=smoothing(["smooths", "sharpens"], [0.1, -0.1])),
        lambda: made(smoothing=smoothing(["smooths", "sharpens"], [-0.1, 0.1])),
    ),
    "first-token": (lambda: made({"sink_score_t64": 0.9}), lambda: made({"sink_score_t64": 0.1})),
    "falls-with-length": (
        lambda: long({"sink_score_t64": 0.9, "sink_score": [0.9, 0.1]}),
        lambda: long({"sink_score_t64": [0.9, 0.1], "sink_score": 0.9}),
    ),
    "stays-at-the-first-position": (
        lambda: made(first=FIRST | {"alpha_bos_later": 0.2}), lambda: made(first=FIRST | {"alpha_0_other_first": 0.2})
    ),
    "key-bias": (
        lambda: made(SHORT_KEY | {"qk_cos_first": 0.5}),
        lambda: made(SHORT_KEY | {"qk_cos_first": 0.0}),
    ),
    "value-is-not-needed": (lambda: losing(0.01, 0.02), lambda: losing(2.7, 0.02)),
    "needs-normalisation": (lambda: scored("sigmoid", 0.1), lambda: scored("sigmoid", 0.9)),
}  # fmt: skip


def test_every_claim_has_a_case_of_either_verdict() -> None:
    assert {name for name in CLAIMS if CLAIMS.ships(name)} == set(CASES)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("verdict", [HOLDS, FAILS])
def test_a_rule_comes_out_either_way(name: str, verdict: str) -> None:
    subject = CASES[name][verdict == FAILS]()
    found, numbers = judged(CLAIMS[name], subject)
    assert found == verdict, numbers
    assert CLAIMS[name].rule.verdict(numbers.deciding.value) == verdict
    if numbers.contrast is not None:
        assert isinstance(numbers.contrast, Number)


@pytest.mark.parametrize("name", sorted(set(CASES) - {"value-is-not-needed"}))
def test_a_run_that_lacks_the_tables_tests_nothing(name: str) -> None:
    """A scan without questions, of a softmax that is no model of the task."""
    kept = ["domain", "stream", "layer", "module", "head", "sequence", "bos_mass", "sink_score", "sink_score_t64"]
    plain = replace(scanned(), measured={}, sequences=scanned().sequences[kept])
    verdict, found = judged(CLAIMS[name], Subject("plain", given=plain))
    held = name == "first-token"  # it asks for no question's table
    assert (verdict == NOT_TESTED) == (not held), found
    assert bool(found.reason) == (not held)


def test_a_model_that_does_not_solve_the_task_tests_no_need() -> None:
    network = deepcopy(explicit("softmax"))
    with torch.no_grad():
        network.layers[0].self_attn.o_proj.weight.zero_()
    verdict, found = judged(CLAIMS["softmax-needs-a-sink"], model(network)())
    assert verdict == NOT_TESTED
    assert "does not solve the task" in found.reason
    assert found.figures["largest error"].value > 0.005


def test_a_model_too_large_to_be_evaluated_tests_no_need(monkeypatch: pytest.MonkeyPatch) -> None:
    """The maps of 1000 sequences; the claims that need no evaluation have their verdicts."""
    subject = model(explicit("softmax"))()
    with monkeypatch.context() as patch:
        patch.setattr("sinkscope.trigger.evaluation.LARGEST", 1000)
        verdict, told = judged(CLAIMS["softmax-needs-a-sink"], subject)
    assert verdict == NOT_TESTED
    assert "1000 sequences of length 16 in 1 heads have attention maps of" in told.reason
    assert judged(CLAIMS["hard-switch"], subject)[0] == HOLDS


def renamed(attention: str, of: Any) -> Any:
    """The model with another kind of attention, and the weights of `of`."""
    network = deepcopy(of)
    network.config.attention = attention
    return network


def test_a_normalised_score_that_is_no_softmax_tests_neither_claim() -> None:
    """relu-norm with ReLU's weights solves the task with all rows but the trigger's empty: neither a softmax without a
    sink nor ReLU that no sum divides."""
    subject = model(renamed("relu-norm", explicit("relu")))()
    for name, kind in (("softmax-needs-a-sink", "softmax"), ("relu-needs-none", "ReLU")):
        verdict, told = judged(CLAIMS[name], subject)
        assert (verdict, told.reason) == (NOT_TESTED, f"the claim is about {kind} attention, not relu-norm")
        assert told.figures["largest error"].value < 0.005


@pytest.mark.parametrize(
    "attention",
    slow_but(["exp-free", "sigmoid", "sigmoid-free", "relu-norm", "sigmoid-norm", "softmax"], "relu-norm"),
)
def test_only_relu_is_put_to_the_claim_about_relu(attention: str) -> None:
    """Whatever mass such a model puts on BOS, and whether it solves the task or not."""
    verdict, told = judged(CLAIMS["relu-needs-none"], model(renamed(attention, explicit("relu")))())
    assert (verdict, told.reason) == (NOT_TESTED, f"the claim is about ReLU attention, not {attention}")


@pytest.mark.parametrize("attention", slow_but(["softmax1", "learned-sink", "gated", "exp-free", "relu"], "gated"))
def test_only_a_plain_softmax_is_put_to_the_claim_about_softmax(attention: str) -> None:
    """An extra logit or a gate may rest without a sink, and the theorem does not speak of them."""
    network = explicit("relu") if attention == "relu" else TriggerModel(TriggerConfig(attention)).eval()
    verdict, told = judged(CLAIMS["softmax-needs-a-sink"], model(network)())
    assert (verdict, told.reason) == (NOT_TESTED, f"the claim is about softmax attention, not {attention}")


PAPERS_TASK = "the claim is about the mean at the trigger and 0 elsewhere"


def test_another_task_tests_neither_claim() -> None:
    """A constant where no trigger stands, or another target at it, is not the task that the theorems speak of."""
    constant = explicit("softmax", default=task.draw_default("constant", 16, 0))
    verdict, told = judged(CLAIMS["softmax-needs-a-sink"], model(constant)())
    assert (verdict, told.reason) == (NOT_TESTED, f"{PAPERS_TASK}, not --default constant")
    mark = deepcopy(explicit("relu"))
    mark.config.target = "mark"
    verdict, told = judged(CLAIMS["relu-needs-none"], model(mark)())
    assert (verdict, told.reason) == (NOT_TESTED, f"{PAPERS_TASK}, not --target mark")


@pytest.mark.parametrize("score", ["relu", "exp-free", "sigmoid-free", "relu-norm", "softmax"])
def test_only_sigmoid_is_put_to_the_claim_about_sigmoid(score: str) -> None:
    verdict, told = judged(CLAIMS["needs-normalisation"], scored(score, 0.9))
    reason = f"the claim is about sigmoid attention without normalisation, not {score}"
    assert (verdict, told.reason) == (NOT_TESTED, reason)


@pytest.mark.parametrize(
    "name",
    [
        "first-token",
        "falls-with-length",
        "stays-at-the-first-position",
        "key-bias",
        "alignment",
        "cosines",
        "hard-switch",
        "off-rests-on-a-sink",
        "self-talk-is-an-mlp",
    ],
)
def test_a_threshold_on_probabilities_is_put_to_no_raw_score(name: str) -> None:
    """An unnormalised weight has no common scale: 0.9 of it is no share of a row."""
    verdict, told = judged(CLAIMS[name], scored("sigmoid", 0.9))
    reason = "its attention is not normalised, and the threshold is one on probabilities"
    assert (verdict, told.reason) == (NOT_TESTED, reason)
    assert judged(CLAIMS[name], scored("relu-norm", 0.9))[1].reason != reason


@pytest.mark.parametrize("stream", ["vision", "audio"])
@pytest.mark.parametrize(("name", "score"), [("first-token", "softmax"), ("needs-normalisation", "sigmoid")])
def test_pictures_and_sound_are_no_language(stream: str, name: str, score: str) -> None:
    run = scored(score, 0.9).given
    sites = [site.model_copy(update={"stream": stream}) for site in run.manifest.attention]
    read = replace(run, manifest=run.manifest.model_copy(update={"attention": sites}))
    verdict, told = judged(CLAIMS[name], Subject("made", given=read))
    assert (verdict, told.reason) == (NOT_TESTED, "the claim is about language models")


def test_where_a_sink_goes_is_asked_at_the_claim_s_own_epsilon() -> None:
    """A run at epsilon 0.5 says `none` of a sink of 0.4 that stays; with the claim's 0.3 it stays."""
    columns = FIRST | {"alpha_0_other_first": 0.4, "alpha_bos_later": 0.0, "verdict": "none"}
    verdict, found = judged(CLAIMS["stays-at-the-first-position"], made(first=columns))
    assert (verdict, found.deciding.shown) == (HOLDS, "8 of 8")
    counts = [found.figures[f"of these: {name}"].shown for name in ("token", "position", "both", "none")]
    assert counts == ["0 of 8", "8 of 8", "0 of 8", "0 of 8"]


@pytest.mark.parametrize(
    ("prepend", "names"),
    [
        ((0, 3), ["mean alpha_3, BOS at 3", "mean alpha_0, BOS at 3"]),
        ((0, 3, 5), ["mean alpha_k at BOS, BOS at k > 0", "mean alpha_0, BOS at k > 0"]),
    ],
)
def test_the_later_position_of_bos_is_the_run_s_own(prepend: tuple[int, ...], names: list[str]) -> None:
    """A saved run with BOS at position 3 was said to have it at 8."""
    run = made(first=FIRST).given
    request = run.manifest.request.model_copy(update={"prepend": prepend})
    saved = replace(run, manifest=run.manifest.model_copy(update={"request": request}))
    figures = judged(CLAIMS["stays-at-the-first-position"], Subject("saved", given=saved))[1].figures
    assert list(figures)[-2:] == names
    assert "8" not in CLAIMS["stays-at-the-first-position"].contrast


def test_a_text_of_fewer_than_64_tokens_has_no_sink_rate_at_64() -> None:
    """Of 6 tokens, uniform attention gives the first 0.41: above 0.3, and no sink."""
    run = sinkscope.scan(tiny("llama", num_hidden_layers=1), data=random_ids(2, 6), self_check=False)
    verdict, told = judged(CLAIMS["first-token"], Subject("short", given=run))
    assert (verdict, told.reason) == (NOT_TESTED, "the text has 6 tokens, and the claim is about the first 64")


@pytest.mark.parametrize(
    "name", ["alignment", "cosines", "key-bias", "stays-at-the-first-position", "value-is-not-needed"]
)
def test_sequences_that_are_too_short_to_tell_a_sink_test_no_claim_about_sinks(name: str) -> None:
    """In 4 tokens uniform attention gives the first 0.52: every head counted as one with a sink."""
    subject = losing(0.01, 0.02) if name == "value-is-not-needed" else CASES[name][0]()
    run = subject.given
    text = run.summary.streams["text"]
    uniform = text.uniform_alpha_0.model_copy(update={"T": 0.52})
    streams = {"text": text.model_copy(update={"uniform_alpha_0": uniform})}
    short = replace(run, summary=run.summary.model_copy(update={"streams": streams}))
    verdict, told = judged(CLAIMS[name], replace(subject, given=short))
    reason = "in so short sequences uniform attention gives the first token more than 0.3, too"
    assert (verdict, told.reason) == (NOT_TESTED, reason)


def test_heads_of_a_stream_that_is_too_short_are_not_judged() -> None:
    """Of two streams, and of the claim's own dataset."""
    subject = CASES["key-bias"][0]()
    run = subject.given
    text = run.summary.streams["text"]
    low = text.model_copy(update={"uniform_alpha_0": text.uniform_alpha_0.model_copy(update={"T": 0.52})})
    rows = run.sequences.assign(stream=np.where(run.sequences["layer"] == 1, "decoder", "text"))
    measured = {"switch": run.measured["switch"].assign(stream=np.repeat(["text", "decoder"], 4))}
    own = DomainSummary(streams={"text": text, "decoder": low})
    summary = run.summary.model_copy(update={"domains": {run.manifest.data[0].domain: own}, "streams": {"text": low}})
    two = Subject("two streams", given=replace(run, sequences=rows, measured=measured, summary=summary))
    verdict, found = judged(CLAIMS["key-bias"], two)
    assert (verdict, found.deciding.shown) == (HOLDS, "4 of 4")


def test_a_cross_attention_s_sink_is_not_held_against_the_decoder_s_first_token() -> None:
    run = made({"sink_score": 0.9}, {"cos_first_input_min": [0.1, -0.1]}).given
    second = run.sequences["layer"] == 1
    crossed = replace(run, sequences=run.sequences.assign(stream=np.where(second, "cross", "text")))
    verdict, found = judged(CLAIMS["cosines"], Subject("crossed", given=crossed))
    assert (verdict, found.deciding.shown) == (HOLDS, "1 of 1")


def test_a_rank_correlation_needs_values_that_vary() -> None:
    """Of 1, 2, 3 and 1, 3, 2 it is 1 - 6 (0 + 1 + 1) / 24 = 0.5."""
    assert correlation([1, 2, 3], [1, 3, 2]).shown == "0.50"
    assert correlation([1, 1, 1], [1, 3, 2]).shown == correlation([1, 2], [1, 2]).shown == "-"


def test_a_number_that_counts_nothing_has_no_n() -> None:
    assert [one.n for one in (share([True, False, False]), share([]), mean([1.0, np.nan, 3.0]))] == [3, 0, 2]
    assert np.isnan([number(0.5).n, mean([]).n, correlation([1, 2, 3], [1, 3, 2]).n]).all()


def test_a_deciding_number_without_a_value_is_a_reason() -> None:
    claim = replace(CLAIMS["first-token"], find=lambda run, subject: Found(share([]), share([]), {"kept": number(1.0)}))
    verdict, told = judged(claim, made())
    assert (verdict, told.reason, told.deciding) == (NOT_TESTED, "the deciding number has no value", None)
    assert list(told.figures) == ["kept"]


def test_a_model_without_a_sink_says_nothing_of_the_sink_s_value() -> None:
    """The first token's value is then any token's, and a loss that does not rise would be no finding."""
    verdict, told = judged(CLAIMS["value-is-not-needed"], losing(0.01, 0.02, alpha_0=0.1))
    assert (verdict, told.reason) == (NOT_TESTED, "no head has a sink")
    assert told.figures["the first key hidden, increase"].value == 1.0


def test_a_text_that_is_nearly_its_own_first_64_tokens_says_nothing_of_length() -> None:
    verdict, told = judged(CLAIMS["falls-with-length"], made({"sink_score_t64": 0.9, "sink_score": 0.9}))
    assert (verdict, told.reason[:22]) == (NOT_TESTED, "the text has 80 tokens")


def test_every_sequence_is_long_enough_to_say_something_of_length() -> None:
    """One sequence of 300 tokens among such of 66 counted as `T = 300` with all of them."""
    verdict, told = judged(CLAIMS["falls-with-length"], long({"sink_score_t64": 0.9, "sink_score": 0.9}, 66, 300))
    assert (verdict, told.reason[:31]) == (NOT_TESTED, "the shortest text has 66 tokens")


def test_lengths_are_prefixes_of_the_same_sequences() -> None:
    """Not all sequences of 130 to 300 tokens have a prefix of 256; those of 64 and 128 are of all."""
    subject = long({"sink_score_t64": 0.9, "sink_score": [0.9, 0.1]}, 130, 300)
    run = subject.given
    points = [run.length_curve.iloc[:8].assign(length=length) for length in (64, 128, 256, 300)]
    ragged = Subject("ragged", given=replace(run, length_curve=pd.concat(points)))
    figures = judged(CLAIMS["falls-with-length"], ragged)[1].figures
    assert [name for name in figures if "alpha_0" in name] == ["mean alpha_0, T = 64", "mean alpha_0, T = 128"]
    assert [name for name in figures if name.startswith("sink rate")] == [
        "sink rate, T = 64", "sink rate, T = 130 to 300",
    ]  # fmt: skip


NAN = float("nan")
WITHOUT: dict[str, tuple[Callable[[], Subject], str]] = {
    "hard-switch": (lambda: made(SUNK | {"off_rate": [0.5, NAN], "sunk_not_off": [0.0, NAN]}), "4 of 4"),
    "off-rests-on-a-sink": (lambda: made(SUNK | {"off_rate": [0.5, NAN], "off_not_sunk": [0.0, NAN]}), "1.000"),
    "heads-compensate": (
        lambda: made(layers={"compensation": [0.1, 0.4], "compensation_unrelated": [NAN, 0.5]}), "0.800"
    ),
    "alignment": (lambda: made({"sink_score": 0.9}, {"alignment_margin": [0.1, NAN], "alignment_margin_other": 0.0}),
                  "1 of 1"),
    "cosines": (lambda: made({"sink_score": 0.9}, {"cos_first_input_min": [0.1, NAN]}), "1 of 1"),
    "self-talk-is-an-mlp": (
        lambda: made({"self_mass": 0.9, "communication": [0.01, NAN], "from_self": [0.9, NAN]}), "0.010"
    ),
    "dense-smooths-more": (lambda: made(smoothing=smoothing(["smooths"], [0.1, NAN])), "4 of 4"),
    "key-bias": (lambda: made(SHORT_KEY | {"qk_cos_first": 0.5, "k_norm_other": [2.0, NAN]}), "4 of 4"),
}  # fmt: skip


@pytest.mark.parametrize("name", WITHOUT)
def test_a_missing_value_counts_neither_for_a_claim_nor_against_it(name: str) -> None:
    """A head whose values are 0 is neither on nor off, and layers may lack what could not be found in them."""
    made_with_gaps, shown = WITHOUT[name]
    found = judged(CLAIMS[name], made_with_gaps())[1]
    assert found.deciding is not None
    assert found.deciding.shown == shown


def test_values_that_no_layer_has_together_test_nothing() -> None:
    subject = made(layers={"compensation": [0.5, NAN], "compensation_unrelated": [NAN, 0.5]})
    verdict, told = judged(CLAIMS["heads-compensate"], subject)
    reason = "compensation and compensation_unrelated were not measured together in this model"
    assert (verdict, told.reason) == (NOT_TESTED, reason)


def test_a_margin_is_asked_of_every_sequence() -> None:
    """The mean over sequences is above 0 where one of them has a margin; necessary it is for the sink in each."""
    run = made({"sink_score": 0.9}, {"alignment_margin": 0.2, "alignment_margin_other": [0.2, 0.0]}).given
    rows = run.sequences.copy()
    rows.loc[rows["head"].isna() & (rows["sequence"] == 1) & (rows["layer"] == 0), "alignment_margin"] = 0.0
    verdict, found = judged(CLAIMS["alignment"], Subject("made", given=replace(run, sequences=rows)))
    assert (verdict, found.deciding.shown) == (FAILS, "1 of 2")


def test_the_dose_and_response_of_alignment_is_counted_apart_for_sink_heads() -> None:
    columns = {"sink_score": 0.9, "sink_rows": [0.5, 0.0], "off_rate": 0.1, "sunk_not_off": 0.0,
               "alignment_openness": [-0.5, 0.5]}  # fmt: skip
    figures = judged(CLAIMS["cosines"], made(columns, {"cos_first_input_min": 0.1}))[1].figures
    words = "in which better aligned rows write less (`alignment_openness` < 0)"
    assert figures[f"heads with sink rows {words}"].shown == "4 of 4"
    assert figures[f"other heads {words}"].shown == "0 of 4"
    assert figures["median `alignment_openness` of heads with sink rows"].shown == "-0.500"


def test_the_walk_is_judged_by_the_condition_of_each_head() -> None:
    """Of the made run's heads every second one should smooth, the others sharpen."""
    columns = smoothing(["smooths", "sharpens"], [0.1, -0.1]) | {
        "spread_path": np.resize(["falls", "falls", "turns", "rises"], 8),
        "avgcos_identity": np.resize([0.1, 0.3], 8), "avgcos_half": 0.2,
        "avgcos_uniform": np.resize([0.3, 0.1, 0.15, 0.1], 8),
    }  # fmt: skip
    figures = judged(CLAIMS["dense-smooths-more"], made(smoothing=columns))[1].figures
    walk = "from each token's own value to uniform attention the spread"
    assert figures[f"{walk} falls all along, of heads that should smooth"].shown == "2 of 4"
    assert figures[f"{walk} rises all along, of heads that should sharpen"].shown == "2 of 4"
    assert figures[f"{walk} falls, then rises, of heads that meet neither condition"].shown == "0 of 0"
    assert figures["there the mean cosine rises in both halves, of heads that should smooth"].shown == "2 of 4"
    assert figures["there the mean cosine falls in both halves, of heads that should sharpen"].shown == "4 of 4"


def test_without_a_margin_there_is_no_cost_and_the_margin_is_the_reason() -> None:
    margins, costs = COSTS | {"sink_margin_pairs": -1.0}, dict.fromkeys((name for name in COSTS if "cost" in name), NAN)
    verdict, told = judged(CLAIMS["sink-is-cheaper"], made(margins | costs, smoothing=margins | costs | CHEAPER))
    assert (verdict, told.reason) == (NOT_TESTED, "no head's first token leads every other key")
    assert told.figures["heads whose first token leads every other key, on average"].shown == "0 of 8"


def test_clusters_have_a_share_of_their_own() -> None:
    columns = COSTS | CHEAPER | {"token_groups": np.resize([1.0, 7.5], 8)}
    columns |= {"cheaper_groups": np.resize(["sink", "undecided"], 8)}
    found = judged(CLAIMS["sink-is-cheaper"], made(COSTS, smoothing=columns))[1]
    assert found.deciding is not None
    assert found.deciding.shown == "8 of 8"
    assert found.figures["the deciding share with C as clusters (`token_groups`)"].shown == "4 of 8"
    assert found.figures["largest `token_groups`, mean of a layer"].shown == "7.5"


def test_a_run_without_the_newer_columns_is_read() -> None:
    run = made(COSTS, smoothing=smoothing(["smooths", "sharpens"], [0.1, -0.1]) | COSTS | CHEAPER).given
    gone = ["spread_path", "cheaper_groups"]
    old = replace(run, measured=run.measured | {"smoothing": run.measured["smoothing"].drop(columns=gone)})
    for name in ("dense-smooths-more", "sink-is-cheaper"):
        verdict, found = judged(CLAIMS[name], Subject("old", given=old))
        assert verdict == HOLDS
        assert not [each for each in found.figures if "walk" in each or "clusters" in each or "spread" in each]


@pytest.mark.parametrize(("claim", "attention"), [("needs-normalisation", "sigmoid"), ("first-token", "softmax")])
def test_a_model_of_the_task_is_no_language_model(claim: str, attention: str) -> None:
    verdict, told = judged(CLAIMS[claim], model(renamed(attention, explicit("relu")))())
    assert (verdict, told.reason) == (NOT_TESTED, "the claim is about language models")


@pytest.mark.slow
def test_an_encoder_and_a_model_without_bos_need_no_case_of_their_own() -> None:
    """BERT is not causal; token ids have no openings, and no loss without a head. Nothing is an error."""
    subject = Subject("bert", tiny("bert"), reading={"data": random_ids(2, 40)}, loading={"self_check": False})
    verdicts = {each.name: judged(each, subject) for each in chosen_claims()}
    told = {name: found.reason for name, (verdict, found) in verdicts.items() if verdict == NOT_TESTED}
    for name in ("softmax-needs-a-sink", "relu-needs-none", "value-is-not-needed"):
        assert told[name] == "the claim is about causal attention"
    assert "--first" in told["stays-at-the-first-position"]
    assert verdicts["heads-compensate"][0] != NOT_TESTED


# Rules and numbers


def test_a_rule_gives_every_number_one_verdict() -> None:
    more, less = Rule("a", 0.9, 0.1), Rule("b", 0.1, 0.9)
    values = [0.0, 0.1, 0.5, 0.9, 1.0, float("nan")]
    assert [more.verdict(value) for value in values] == [FAILS, FAILS, IN_PART, HOLDS, HOLDS, NOT_TESTED]
    assert [less.verdict(value) for value in values] == [HOLDS, HOLDS, IN_PART, FAILS, FAILS, NOT_TESTED]
    assert more.words == "a: holds at 0.9 or more, fails at 0.1 or less, holds in part between."
    assert less.words == "b: holds at 0.1 or less, fails at 0.9 or more, holds in part between."
    with pytest.raises(SinkscopeError, match="must differ"):
        Rule("c", 0.5, 0.5)


def test_a_mean_that_is_a_threshold_but_for_rounding_is_one() -> None:
    """Half of the heads have a sink: shares of nine, of sequences that have more and fewer."""
    rounded = mean([heads / 9 for heads in (3, 8, 2, 6, 1, 7)]).value
    assert 0 < 0.5 - rounded < 1e-15
    assert Rule("a", 0.5, 0.1).verdict(rounded) == HOLDS
    assert Rule("b", 0.1, 0.5).verdict(rounded) == FAILS
    assert Rule("a", 0.5, 0.1).verdict(0.499999) == IN_PART


def test_the_error_of_a_ratio_knows_both_means() -> None:
    """Rates that rise and fall together have a ratio that is known better than either; the jackknife agrees."""
    short = np.random.default_rng(0).uniform(0.3, 0.9, 200)
    for whole in (0.8 * short, 0.8 * short[::-1], 0.8 * short + np.linspace(0, 0.1, 200)):
        found = ratio(whole, short)
        left = [np.delete(whole, place).mean() / np.delete(short, place).mean() for place in range(200)]
        assert found.value == pytest.approx(whole.mean() / short.mean())
        assert found.sem == pytest.approx(np.std(left) * 199**0.5, rel=0.02, abs=1e-12)
    assert ratio([0.1, float("nan")], [0.2, 0.3]).shown == "0.500"
    assert ratio([0.1], [0.0]).shown == ratio([], []).shown == "-"


def test_numbers_have_their_errors() -> None:
    """Wilson's interval of 8 of 10 is 0.490 to 0.943."""
    eight = share([True] * 8 + [False] * 2)
    assert (eight.shown, eight.value, eight.n) == ("8 of 10", 0.8, 10)
    assert (eight.low, eight.high) == (pytest.approx(0.4902, abs=1e-4), pytest.approx(0.9433, abs=1e-4))
    assert eight.told == "8 of 10 (0.49 to 0.94)"
    assert (share([]).shown, np.isnan(share([]).value)) == ("0 of 0", True)
    assert mean([1.0, 3.0, float("nan")]).shown == "2.000 ± 1.000"
    assert number(float("nan")).shown == mean([]).shown == "-"


def of_domains(*specs: str, **heads: list[float]) -> Run:
    """The made run with a domain for each SPEC, whose heads have these values, one for each domain."""
    run = scanned()
    first = run.manifest.data[0]
    data = [first.model_copy(update={"domain": spec, "spec": spec}) for spec in specs]
    given = [{name: values[place] for name, values in heads.items()} for place in range(len(specs))]
    frames = [run.sequences.assign(domain=spec, **columns) for spec, columns in zip(specs, given, strict=True)]
    places = [run.positions.assign(domain=spec, bos_share=0.1 * place) for place, spec in enumerate(specs)]
    return replace(
        run,
        sequences=pd.concat(frames, ignore_index=True),
        positions=pd.concat(places, ignore_index=True),
        manifest=run.manifest.model_copy(update={"data": data}),
    )


def test_random_tokens_are_no_text_whatever_their_place() -> None:
    for specs in (("random", "prose", "repeated"), ("repeated", "random", "prose")):
        masses = [0.9 if spec == "prose" else 0.0 for spec in specs]
        run = of_domains(*specs, sink_score_t64=masses)
        assert Subject("several", given=run).evidence(run).data.spec == "prose"
        verdict, found = judged(CLAIMS["first-token"], Subject("several", given=run))
        assert (verdict, found.deciding.shown) == (HOLDS, "1.000 ± 0.000")


def test_random_tokens_alone_test_no_claim_about_text() -> None:
    run = of_domains("random", sink_score_t64=[0.9])
    reading = Subject("a model", object(), reading={"data": "random"})
    reading._kept["text"] = run
    for subject in (Subject("a run", given=run), reading):
        verdict, told = judged(CLAIMS["first-token"], subject)
        assert verdict == NOT_TESTED
        assert "no text" in told.reason


def test_the_contrast_of_normalisation_is_of_the_same_text() -> None:
    run = of_domains("prose", "code", bos_mass=[0.1, 0.9])
    sites = [site.model_copy(update={"score": "sigmoid"}) for site in run.manifest.attention]
    run = replace(run, manifest=run.manifest.model_copy(update={"attention": sites}))
    verdict, found = judged(CLAIMS["needs-normalisation"], Subject("several", given=run))
    assert (verdict, repr(found.contrast)) == (HOLDS, repr(number(0.0)))  # a NaN of it equals none


def test_the_margin_between_keys_is_not_that_of_another_domain() -> None:
    """Of a run with several texts the first is read."""
    run = sinkscope.scan(
        tiny("llama", num_hidden_layers=2), data=random_ids(2, 24), self_check=False, measure=["switch"]
    )
    other = run.sequences.assign(domain="other", sink_rows=0.9)
    both = replace(run, sequences=pd.concat([run.sequences, other], ignore_index=True))
    both.measured["switch"] = pd.concat(
        [run.measured["switch"].assign(domain=name) for name in (run.manifest.data[0].domain, "other")],
        ignore_index=True,
    )
    evidence = Subject("both", given=both).evidence(both)
    assert len(evidence.heads) == 8
    assert (evidence.heads["sink_rows"] < 0.9).all()


def test_the_odds_of_a_token_need_the_number_of_all_rows() -> None:
    """A head that is off in half of its 158 rows: on at 9 of 10 occurrences of the token, and so at 70 of 148 others.
    Of sequences of unequal lengths, a run tells only the longest and the shortest."""
    tokens = {"token_id": 5, "token": "x", "n": 10, "on_rate": 0.9, "lift": 1.8, "q": 0.001}
    run = made(SUNK | {"off_rate": 0.5}).given
    run.measured["switch_tokens"] = run.heads[["stream", "layer", "head", "module"]].assign(**tokens)
    name = "largest odds ratio of a token that switches such a head on"
    found = judged(CLAIMS["off-rests-on-a-sink"], Subject("made", given=run))[1].figures[name]
    odds, error = (9.5 * 78.5) / (1.5 * 70.5), (1 / 9.5 + 1 / 78.5 + 1 / 1.5 + 1 / 70.5) ** 0.5
    assert (found.shown, found.value) == ("7.05", pytest.approx(odds))
    assert (found.low, found.high) == (
        pytest.approx(odds * np.exp(-1.96 * error)),
        pytest.approx(odds * np.exp(1.96 * error)),
    )
    assert found.told == "7.05 (1.22 to 40.7)"
    data = [each.model_copy(update={"shortest": 40}) for each in run.manifest.data]
    ragged = replace(run, manifest=run.manifest.model_copy(update={"data": data}))
    assert judged(CLAIMS["off-rests-on-a-sink"], Subject("made", given=ragged))[1].figures[name].shown == "-"
    data = [each.model_copy(update={"sequences": 9}) for each in run.manifest.data]
    cut = replace(run, manifest=run.manifest.model_copy(update={"data": data, "complete": False}))
    told = judged(CLAIMS["off-rests-on-a-sink"], Subject("made", given=cut))[1].figures[name]
    assert told.value == pytest.approx((9.5 * 78.5) / (1.5 * 70.5)), "of the 2 that were measured"
