"""`export --heads streaming`: the folder is read as DuoAttention's own loader and kvpress' read theirs."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from conftest import make_model
from models import random_ids
from typer.testing import CliRunner

import sinkscope
from sinkscope.cli import app
from sinkscope.errors import SinkscopeError
from sinkscope.runs.selections import kv_scores, write_pattern

OPTIONS: dict[str, Any] = {"measure": "streaming", "window": 6, "sinks": 3, "self_check": False}


@pytest.fixture(scope="module")
def run(tiny_model: Any) -> sinkscope.Run:
    """A Llama with 2 layers, 4 query heads and 2 KV heads."""
    return sinkscope.scan(tiny_model, data=random_ids(2, 30), **OPTIONS)


def call(*words: object) -> Any:
    return CliRunner().invoke(app, ["export", *map(str, words)])


def test_the_folder_is_what_the_loaders_read(run: sinkscope.Run, tmp_path: Path) -> None:
    """Both take floats from a TSV without a header, and two numbers from JSON."""
    run.save(tmp_path / "run")
    result = call(tmp_path / "run", "--heads", "streaming", "--format", "duo", "-o", tmp_path / "duo")
    assert (result.exit_code, result.stdout) == (0, ""), result.stderr
    assert "warning" not in result.stderr
    assert sorted(path.name for path in (tmp_path / "duo").iterdir()) == ["config.json", "full_attention_heads.tsv"]
    scores = np.loadtxt(tmp_path / "duo" / "full_attention_heads.tsv", dtype=float, delimiter="\t")
    writes = run.measured["streaming"]["distant_write"].to_numpy().reshape(2, 2, 2)  # layer, KV head, its query heads
    assert scores == pytest.approx(writes.max(-1), rel=1e-6)  # the saved table has nine digits
    config = json.loads((tmp_path / "duo" / "config.json").read_text())
    assert (config["sink_size"], config["recent_size"]) == (3, 6)
    again = call(tmp_path / "run", "--heads", "streaming", "-o", tmp_path / "duo")
    assert again.exit_code == 0
    assert np.array_equal(np.loadtxt(tmp_path / "duo" / "full_attention_heads.tsv", delimiter="\t"), scores)


def test_scores_are_the_worst_domain_s_and_at_most_1(run: sinkscope.Run) -> None:
    table = run.measured["streaming"]
    other = table.assign(distant_write=table["distant_write"].to_numpy()[::-1] * 100)
    double = SimpleNamespace(
        measured={"streaming": pd.concat([table, other])}, heads=run.heads, summary=run.summary, manifest=run.manifest
    )
    assert (kv_scores(double) == 1).all()  # type: ignore[arg-type]


def test_what_cannot_be_written_is_refused(run: sinkscope.Run, tmp_path: Path, tiny_model: Any) -> None:
    run.save(tmp_path / "run")
    for words, reason in (
        (["--heads", "streaming"], "the folder with -o"),
        (["--heads", "streaming", "--format", "csv", "-o", "x"], "belong together"),
        (["--heads", "sink", "--format", "duo", "-o", "x"], "belong together"),
        (["--heads", "streaming", "--level", "head", "-o", "x"], "no --level or --metric"),
        ([tmp_path / "run", "--heads", "streaming", "-o", "x"], "name one run"),
        (["--heads", "streaming", "-o", tmp_path / "run"], "files that are not a DuoAttention pattern's"),
    ):
        result = call(tmp_path / "run", *words)
        assert result.exit_code == 2
        assert reason in result.stderr
    plain = sinkscope.scan(tiny_model, data=random_ids(1, 30), self_check=False)
    with pytest.raises(SinkscopeError, match="needs a run with --measure streaming"):
        write_pattern(plain, tmp_path / "duo")
    short = sinkscope.scan(tiny_model, data=random_ids(1, 9), **OPTIONS)
    with pytest.raises(SinkscopeError, match=r"head 0.0 has no distant_write, .* 8 of 8 heads"):
        write_pattern(short, tmp_path / "duo")
    assert not (tmp_path / "duo").exists()


def test_attention_that_the_format_cannot_hold_is_refused(run: sinkscope.Run) -> None:
    """A second stream, a layer without attention, layers of different numbers of KV heads."""
    table, heads = run.measured["streaming"], run.heads

    def refused(table: pd.DataFrame, heads: pd.DataFrame, not_softmax: list[str]) -> str:
        summary = SimpleNamespace(not_softmax=not_softmax)
        double: Any = SimpleNamespace(measured={"streaming": table}, heads=heads, summary=summary)
        with pytest.raises(SinkscopeError) as told:
            kv_scores(double)
        return str(told.value)

    both = [pd.concat([each, each.assign(stream="cross")]) for each in (table, heads)]
    assert refused(*both, []).endswith("the format holds one stream of attention, not cross, text")
    everywhere = "the format needs attention in every layer of the model"
    assert refused(table, heads, ["layers.2"]).endswith(everywhere)
    late = [each.assign(layer=each["layer"] + 1) for each in (table, heads)]
    assert refused(*late, []).endswith(everywhere)
    fewer = [each[(each["layer"] == 0) | (each["head"] < 2)] for each in (table, heads)]
    assert refused(*fewer, []).endswith("the format needs the same number of KV heads in every layer")


@pytest.mark.slow
def test_one_kv_head_is_warned_about(tmp_path: Path) -> None:
    run = sinkscope.scan(make_model(num_key_value_heads=1), data=random_ids(1, 30), **OPTIONS)
    [warning] = write_pattern(run, tmp_path / "duo")
    assert "reshape it to (layers, KV heads)" in warning
    assert np.loadtxt(tmp_path / "duo" / "full_attention_heads.tsv", delimiter="\t").shape == (2,)


@pytest.mark.slow
def test_kvpress_takes_the_mask(run: sinkscope.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """kvpress fetches patterns from DuoAttention's repository; here its fetch gets the folder's files."""
    press = pytest.importorskip("kvpress.presses.duo_attention_press")
    write_pattern(run, tmp_path / "duo")

    def get(url: str) -> Any:
        text = (tmp_path / "duo" / url.rpartition("/")[2]).read_text()
        return SimpleNamespace(text=text, json=lambda: json.loads(text))

    monkeypatch.setattr(press.requests, "get", get)
    monkeypatch.setitem(press.PATTERNS_DICT, "ours", "ours")
    model = SimpleNamespace(config=SimpleNamespace(name_or_path="ours"), device="cpu")
    half = press.DuoAttentionPress(head_compression_ratio=0.5)
    half.post_init_from_model(model)
    assert (half.sink_size, half.recent_size) == (3, 6)
    scores = np.loadtxt(StringIO((tmp_path / "duo" / "full_attention_heads.tsv").read_text()), delimiter="\t")
    assert half.streaming_mask.shape == (2, 2)
    assert half.streaming_mask.numpy().ravel().tolist() == (scores.ravel() < np.median(scores)).tolist()
