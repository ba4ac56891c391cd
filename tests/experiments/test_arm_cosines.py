"""How alike arms make the tokens behind each layer: against float64, closed forms, and what a command shows."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from arm_folders import SEQUENCES
from by_hand import attention_by_hand, causal, hidden, no_value, setting_of
from models import random_ids
from reference import pairwise_cosine
from scipy import stats
from tiers import slow_but
from typer.testing import CliRunner

import sinkscope
from sinkscope.capture.hooks import hooked
from sinkscope.cli import app
from sinkscope.experiments.arms.arm import Setting
from sinkscope.experiments.arms.engine import measure
from sinkscope.experiments.arms.grammar import read_arm
from sinkscope.experiments.arms.readings import Cosines, layers_of
from sinkscope.runs.catalogue import table_columns
from sinkscope.runs.saved.arms_table import MEASURES, ArmNumbers, compared_layers, cosine_table, in_words
from sinkscope.runs.schema.other_tables import ARMS_TABLES

IDS = random_ids(2, 40)


def naive(model: Any, ids: torch.Tensor) -> np.ndarray:
    """The mean cosine of pairs of tokens >= 1 behind each layer, [sequence, layer], by hooks and a table of cosines."""
    states: list[np.ndarray] = []
    layers = model.base_model.layers if hasattr(model.base_model, "layers") else model.base_model.h

    def keep(module: Any, args: Any, output: Any) -> None:
        states.append((output[0] if isinstance(output, tuple) else output).double().numpy())

    with torch.no_grad(), ExitStack() as stack:
        for layer in layers:
            stack.enter_context(hooked(layer, post=keep))
        model(ids, use_cache=False)
    return np.array([[pairwise_cosine(state[row, 1:]) for state in states] for row in range(len(ids))])


def found(setting: Setting, name: str) -> np.ndarray:
    (unablated, arm) = measure(setting, [read_arm(name).ready(setting)], 2, lambda *_: None, cosines=True)
    assert list(unablated.cosines) == [0, 1, 2]
    return np.stack([np.stack(list(each.cosines.values()), 1) for each in (unablated, arm)])


@pytest.mark.parametrize("family", slow_but(["llama", "gpt2", "gemma3"], "gemma3"))
def test_the_cosines_under_an_arm_are_those_of_a_plain_implementation(family: str) -> None:
    model = causal(family)
    setting = setting_of(model, IDS)
    for name, change in {"keys:first1": hidden(0), "value:first2": no_value}.items():
        with attention_by_hand(model, change):
            expected = naive(model, IDS)
        unablated, under = found(setting, name)
        np.testing.assert_allclose(under, expected, rtol=0, atol=1e-9)
        np.testing.assert_allclose(unablated, naive(model, IDS), rtol=0, atol=1e-9)
        assert np.abs(under - unablated).min() > 1e-6


def test_layers_that_are_not_run_again_have_the_unablated_cosines() -> None:
    unablated, under = found(setting_of(causal("llama").float(), IDS), "heads:2.1")
    np.testing.assert_array_equal(under[:, :2], unablated[:, :2])
    assert (under[:, 2] != unablated[:, 2]).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_closed_forms(dtype: torch.dtype) -> None:
    """Tokens 1 to 4 point one way, at right angles, or two and two: a third of the six pairs are alike."""
    layer = torch.nn.Identity()
    states = torch.zeros(3, 5, 4, dtype=dtype)
    states[0, 1:, 0] = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=dtype)
    states[1, 1:] = torch.eye(4, dtype=dtype)
    states[2, 1:3, 1] = states[2, 3:, 2] = 7
    states[:, 0, 3] = 100  # the first token is left out
    cosines = Cosines({0: layer})
    with cosines.watched():
        layer(states)
    torch.testing.assert_close(cosines.values[:, 0], torch.tensor([1, 0, 1 / 3], dtype=torch.float64))


def test_a_layer_that_returns_no_stream_is_refused() -> None:
    cosines = Cosines({0: torch.nn.Identity()})
    with pytest.raises(sinkscope.SinkscopeError, match="Identity returns no single residual stream"), cosines.watched():
        cosines._layers[0](torch.zeros(2, 3))
    setting = setting_of(causal("llama"), IDS)
    setting.plan.sites[0] = replace(setting.plan.sites[0], block=None)
    with pytest.raises(sinkscope.SinkscopeError, match=r"--cosines: the layer around .* was not found"):
        layers_of(setting)


def test_a_layer_that_is_called_twice_is_refused() -> None:
    """It returns two streams, and both its numbers had the first one's cosines."""
    model = causal("llama")
    model.base_model.layers[2] = model.base_model.layers[0]
    with pytest.raises(sinkscope.SinkscopeError, match=r"--cosines: layers\.0 is called several times in a pass: it"):
        layers_of(setting_of(model, IDS))


def made(name: str, *draws: np.ndarray) -> list[ArmNumbers]:
    rest = dict.fromkeys(MEASURES, np.ones(SEQUENCES))
    return [
        ArmNumbers(name, None, None, draw if len(draws) > 1 else None, rest, dict(enumerate(values.T)))
        for draw, values in enumerate(draws)
    ]


def test_the_table_is_that_of_paired_tests() -> None:
    random = np.random.default_rng(0)
    base = random.normal(0.4, 0.1, (SEQUENCES, 3))
    arm = base + np.array([0.2, 0.0, -0.1]) + random.normal(0, 0.01, base.shape)
    draws = [base + random.normal(0, 0.01, base.shape) for _ in range(3)]
    measured = made("unablated", base) + made("keys:first1", arm) + made("keys:random1", *draws)
    table = cosine_table(measured, {"keys:first1": "keys:random1"})
    own = table[table["arm"] == "keys:first1"]
    test = stats.ttest_rel(arm, base)
    np.testing.assert_allclose(own["change"], (arm - base).mean(0), rtol=1e-9)
    np.testing.assert_allclose(own["change_p"], test.pvalue, rtol=1e-6)
    np.testing.assert_allclose(own["avg_cos_output"], arm.mean(0), rtol=1e-9)
    gaps = arm - np.mean(draws, 0)
    spread = np.std(np.mean(draws, 1), axis=0, ddof=1) / 3**0.5
    error = gaps.std(0, ddof=1) / SEQUENCES**0.5
    np.testing.assert_allclose(own["versus_random"], gaps.mean(0), rtol=1e-9)
    np.testing.assert_allclose(own["versus_random_sem"], np.hypot(spread, error), rtol=1e-9)
    assert table.loc[table["arm"] == "keys:random1", "draws"].tolist() == [3] * 3
    (row,) = compared_layers(table).to_dict("records")
    assert (row["more"], row["less"], row["layer"]) == (1, 1, 0)
    (sentence,) = in_words(table)
    assert "after 1 of 3 layers and less similar after 1" in sentence


@pytest.mark.slow
def test_a_command_writes_and_shows_them(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["arms", str(tiny_folder), "keys:first1", "--cosines", "--out", "found", "--seq-len", "32"]
    done = CliRunner().invoke(app, [*words, "--num-sequences", "3", "--draws", "2"])
    assert done.exit_code == 0, done.stderr
    table = pd.read_csv(tmp_path / "found" / "arm_cosines.csv")
    assert list(table.columns) == [column.name for column in table_columns(ARMS_TABLES["arm_cosines"])]
    assert list(zip(table["arm"], table["layer"], strict=True)) == [
        (arm, layer) for arm in ("unablated", "keys:first1", "keys:random1") for layer in (0, 1)
    ]
    assert (table.loc[table["arm"] == "unablated", "change"] == 0).all()
    assert "keys:first1: tokens are more similar than in the unablated model after" in " ".join(done.stdout.split())
    assert "cosine of tokens" in done.stdout
    assert "arm_cosines.csv" in json.loads((tmp_path / "found" / "arms.json").read_text())["files"]
