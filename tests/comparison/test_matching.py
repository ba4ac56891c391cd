"""Rows of two runs are matched by their places, never by their order; what has no partner is named."""

from __future__ import annotations

import math
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from families import tiny_model
from models import VOCABULARY, random_ids, tiny
from transformers import AutoModel

import sinkscope
from sinkscope import Run, SinkscopeError, baseline_of, check, compare
from sinkscope.comparison.compare_runs import Comparison
from sinkscope.comparison.levels import head_changes
from sinkscope.experiments.training.trajectory import emergence
from sinkscope.present.html.report import render_report
from sinkscope.present.terminal.comparison import render_comparison
from sinkscope.present.terminal.table import as_text
from sinkscope.present.text import wrapped
from sinkscope.present.verdict import where
from sinkscope.runs.statistics import paired_difference, welch_difference


@cache
def bart(seed: int = 0) -> Any:
    model: Any = tiny_model(AutoModel, "bart")
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed)), alpha=0.05)
    return model


def watched(*conditions: tuple[str, str], seed: int = 0) -> Run:
    """The run of conditions (label, parts of the model that ran, separated by a blank), which tests may change."""
    return deepcopy(_watched(conditions, seed))


@cache
def _watched(conditions: tuple[tuple[str, str], ...], seed: int) -> Run:
    model = bart(seed)
    ids = random_ids(4, 24).clamp(max=VOCABULARY - 1)
    with torch.no_grad(), sinkscope.watch(model) as seen:
        for label, parts in conditions:
            seen.label(label)
            for part in parts.split():
                getattr(model, part)(input_ids=ids)
    return seen.run()


def mean_of(result: Comparison, stream: str) -> pd.Series:
    rows = result.summary[(result.summary["metric"] == "bos_mass") & (result.summary["stream"] == stream)]
    return rows.iloc[0]


def test_the_order_of_streams_says_nothing() -> None:
    a, b = watched(("x", "encoder decoder")), watched(("x", "decoder encoder"))
    result = compare(a, b)
    assert result.same_shape
    assert result.heads["difference"].abs().max() == 0
    assert mean_of(result, "encoder")["a"] != pytest.approx(mean_of(result, "decoder")["a"], rel=0.1)
    assert check(b, baseline_of(a)).passed


def test_heads_of_other_streams_are_no_partners() -> None:
    both = ("z", "encoder decoder")
    a, b = watched(both, ("x", "encoder")), watched(both, ("x", "decoder"))
    heads = sum(a.heads.loc[a.heads["domain"] == "x", "stream"].eq("encoder"))
    result = compare(a, b)
    assert set(result.heads["domain"]) == {"z"}
    (note,) = (text for text in result.notes if text.startswith("x: "))
    assert note == (
        f"x: A's {heads} heads of encoder and B's {heads} heads of decoder were not measured in the other run, so not "
        "compared"
    )
    told = rf"x: the run has other layers or heads .*\({heads} of decoder in [0-9]+ layers at level"
    with pytest.raises(SinkscopeError, match=told):
        check(b, baseline_of(a))


def test_runs_without_a_common_stream_are_refused() -> None:
    a, b = watched(("x", "encoder")), watched(("x", "decoder"))
    with pytest.raises(
        SinkscopeError, match="the runs share no stream that could be compared: A has encoder and B has"
    ):
        compare(a, b)


def test_conditions_of_one_run_alone_are_named() -> None:
    a, b = watched(("x", "encoder")), watched(("x", "encoder"), ("y", "decoder"))
    result = compare(a, b)
    assert result.notes == ["only B has y: not compared"]
    assert (result.b["data"], result.b["sequences"]) == (["x"], 4)
    assert "only B has y: not compared" in render_comparison(result)


def test_a_verdict_counts_heads_and_layers_once() -> None:
    """In each of two conditions every head moves: encoder and decoder have layers of the same numbers."""
    conditions = ("x", "encoder decoder"), ("y", "encoder decoder")
    before, now = watched(*conditions), watched(*conditions, seed=1)
    heads = now.heads.drop_duplicates(["stream", "layer", "head"])
    layers = heads.drop_duplicates(["stream", "layer"])
    first, _ = where(check(now, baseline_of(before)))
    assert f"{len(heads)} heads moved in {len(layers)} layers" in first
    assert first.startswith("first moved: layer 0 of encoder (")


def llama(seed: int, **options: Any) -> Run:
    return deepcopy(_llama(seed, **options))


@cache
def _llama(seed: int, **options: Any) -> Run:
    return sinkscope.scan(tiny("llama"), data=random_ids(4, 40), self_check=False, **options)


def with_values(run: Run, metric: str, values: Any) -> Run:
    """The run with other values of a metric of heads, by (layer, head)."""
    table = run.sequences.copy()
    is_head = table["head"].notna()
    table.loc[is_head, metric] = [values(row) for row in table[is_head].to_dict("records")]
    run.sequences = table
    return run


@pytest.fixture
def pair() -> tuple[Run, Run]:
    return llama(0), llama(0)


def endless(row: dict[Any, Any]) -> float:
    return math.inf if (row["layer"], row["head"]) == (0, 0) else 0.25


@pytest.mark.filterwarnings("error")
def test_an_infinite_value_is_shown(pair: tuple[Run, Run]) -> None:
    a, b = pair
    with_values(b, "honor", endless)
    result = compare(a, b, metrics=["honor"])
    row = result.heads[(result.heads["layer"] == 0) & (result.heads["head"] == 0)].iloc[0]
    assert row["difference"] == math.inf
    assert "+inf" in render_comparison(result)
    assert render_report([a, b], result)
    same = compare(b, b, metrics=["honor"])
    assert same.heads["difference"].dropna().eq(0).all()
    assert same.heads["difference"].isna().sum() == 1
    with_values(a, "honor", lambda row: 0.25)
    assert "infinite in one run in 1 heads, no difference in the others" in render_comparison(
        compare(a, b, metrics=["honor"])
    )


@pytest.mark.filterwarnings("error")
def test_infinity_on_both_sides_has_no_difference() -> None:
    a, b = np.array([[np.inf, 1.0], [2.0, np.inf]]), np.array([[np.inf, 2.0], [2.5, np.inf]])
    assert paired_difference(a, b).difference.tolist() == [0.5, 1.0]
    assert np.isnan(welch_difference(a, a).difference).all()


@pytest.mark.filterwarnings("error")
def test_infinity_on_both_sides_leaves_the_other_sequences_test_alone() -> None:
    """An infinite mean made every difference as small as rounding: p was 1."""
    generator = np.random.default_rng(0)
    a = generator.normal(size=(8, 3))
    b = a + generator.normal(2, 0.1, size=(8, 3))
    alone = paired_difference(a[1:], b[1:])
    a[0] = b[0] = np.inf
    found = paired_difference(a, b)
    for name in ("a", "b", "difference", "sem", "low", "high", "p", "freedom"):
        assert getattr(found, name) == pytest.approx(getattr(alone, name))
    assert (found.p < 0.001).all()


@pytest.mark.filterwarnings("error")
def test_infinity_on_one_side_has_no_test() -> None:
    a, b = np.arange(8.0)[:, None].repeat(3, 1), np.ones((8, 3))
    a[0, 0], b[0, 1], a[0, 2], b[1, 2] = (np.inf,) * 4
    for found in (paired_difference(a, b), welch_difference(a, b)):
        assert found.difference[:2].tolist() == [-np.inf, np.inf]
        assert np.isnan(found.difference[2])
        assert np.isnan([found.p, found.low, found.high]).all()


def test_what_neither_run_measured_has_no_verdict(pair: tuple[Run, Run]) -> None:
    a, b = (with_values(run, "honor", lambda row: math.nan if row["layer"] else 0.5) for run in pair)
    heads = len(a.heads)
    text = render_comparison(compare(a, b, metrics=["honor"]))
    assert f"no difference in any of the {heads - sum(a.heads['layer'] > 0)} heads with a value in both runs" in text
    for run in (a, b):
        run.sequences["sink_score_t64"] = np.nan
    result = compare(a, b, metrics=["bos_mass"])
    result.heads["difference"] = np.nan
    assert "bos_mass: no head has a value in both runs" in render_comparison(result)


def test_no_threshold_judges_weights_that_are_no_shares(pair: tuple[Run, Run]) -> None:
    a, b = pair
    with_values(b, "sink_score", lambda row: 0.9)
    pairs = [(a.manifest.data[0].domain, b.manifest.data[0].domain, None)]
    assert len(head_changes(a, b, pairs, True).held["gained_sink"]) == len(a.heads)
    for site in b.manifest.attention:
        site.score = "relu"
    changes = head_changes(a, b, pairs, True)
    assert changes.held["gained_sink"] == changes.within_noise["gained_sink"] == []
    assert changes.notes == ["B has relu in softmax's place: its sinks are not judged by a threshold"]


@pytest.mark.parametrize(
    ("scores", "shape", "gain"),
    [
        ([0.9, 0.1, 0.5], "returned", None),
        ([0.5, 0.1, 0.5], "returned", None),
        ([0.4, 0.1, 0.9], "returned", None),
        ([0.9, 0.8, 0.5], "start", None),
        ([0.1, np.nan, 0.5], None, None),
        ([0.5, np.nan, 0.5], None, None),
        ([0.1, 0.2, 0.5], "ramp", 0.75),
        ([0.1, 0.1, 0.5], "jump", 1.0),
    ],
)
def test_a_sink_that_came_back_did_not_rise(scores: list[float], shape: str | None, gain: float | None) -> None:
    rows = pd.DataFrame({
        "domain": "d", "stream": "text", "level": "head", "layer": 0, "head": 0, "metric": "sink_score",
        "step": range(len(scores)), "value": scores,
    })  # fmt: skip
    row = emergence(rows, 0.3).iloc[0]
    assert (row["shape"] if isinstance(row["shape"], str) else None) == shape
    assert row["largest_gain"] == pytest.approx(gain) if gain else pd.isna(row["largest_gain"])
    assert pd.notna(row["half_rise"]) == (gain is not None)


@pytest.mark.parametrize("name", ["", "  ", "\ud800"])
def test_a_condition_needs_a_name(name: str) -> None:
    with sinkscope.watch(tiny("llama")) as seen, pytest.raises(SinkscopeError, match="a name that a table can show"):
        seen.label(name)


def test_a_break_makes_no_command_of_a_text(tmp_path: Path) -> None:
    """GitHub and Azure take a line that begins so for an order."""
    assert wrapped("a model of mine ::error::owned", 16) == ["a model of mine", "\\x3a:error::owned"]
    assert as_text(["acme/model ::error::owned"], 12, None).splitlines()[1].startswith("\\x3a:")
