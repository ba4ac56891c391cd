"""The modules table: every column against plain hooks, planted outliers, closed forms and what is left out."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import Scan, make_model
from families import tiny_config, tiny_model
from models import random_ids, tiny
from tiers import slow_but
from torch import nn
from transformers import AutoModel
from transformers.pytorch_utils import Conv1D
from watched import hooks

import sinkscope
from sinkscope.capture import loops
from sinkscope.capture.loops.inputs import read_inputs
from sinkscope.engine.measurement import refuse_spread
from sinkscope.errors import SinkscopeError
from sinkscope.questions.modules.columns import INPUT_COLUMNS, Sizes
from sinkscope.questions.modules.measure import Modules


def modules(model: Any, data: Any, **options: Any) -> Any:
    run = sinkscope.scan(model, data=data, measure="modules", self_check=False, **options)
    return run.measured["modules"].set_index("module")


def naive(x: np.ndarray) -> dict[str, float]:
    """Every column of one input [token, feature] by really rounding it."""
    size = np.abs(x)

    def rounded(scale: Any) -> np.ndarray:
        return (np.round(x / scale) == 0) & (x != 0)

    tensor, token = rounded(size.max() / 127), rounded(size.max(1, keepdims=True) / 127)
    return {
        "row_dispersion": size.max() / np.median(size.max(1)),
        "column_dispersion": size.max() / np.median(size.max(0)),
        "underflow_tensor": tensor.sum() / (x != 0).sum(),
        "underflow_token": token.sum() / (x != 0).sum(),
        "annihilated": np.mean([tensor[t].sum() > 0.9 * (x[t] != 0).sum() for t in range(len(x))]),
        "amax_first": size[0].max(),
        "amax_other": size[1:].max(),
    }


def inputs(model: Any, ids: torch.Tensor) -> dict[str, np.ndarray]:
    """The input of every linear module for one sequence, float64 [token, feature]."""
    seen: dict[str, np.ndarray] = {}
    handles = [
        module.register_forward_pre_hook(
            lambda m, args, name=name: seen.__setitem__(name, args[0].double().reshape(ids.shape[1], -1).numpy())
        )
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D)
    ]
    with torch.no_grad():
        model(input_ids=ids)
    for handle in handles:
        handle.remove()
    return seen


def loud(family: str) -> Any:
    """A model whose token 5 has one large entry in its embedding."""
    model = tiny(family)
    with torch.no_grad():
        model.get_input_embeddings().weight[5, 3] = 200.0
    return model


@pytest.mark.parametrize("family", slow_but(["llama", "gpt2", "gemma3", "gpt_neox", "deepseek_v3"], "deepseek_v3"))
def test_every_column_against_plain_hooks(family: str) -> None:
    """Conv1D among the modules, and latent attention, which holds [sequence, 1, token, rank]."""
    model, ids = loud(family), random_ids(3, 18)
    ids[ids == 5] = 6
    ids[:, 4] = 5
    run = sinkscope.scan(model, data=ids, measure="modules", self_check=False, batch_size=2)
    found = run.measured["modules"].set_index("module")
    assert run.manifest.warnings == []
    each = [inputs(model, one[None]) for one in ids]
    assert set(found.index) == set(each[0])
    for name in each[0]:
        expected = [naive(seen[name]) for seen in each]
        for column in INPUT_COLUMNS:
            values = [one[column] for one in expected]
            slack = 2e-3 if column in ("underflow_tensor", "underflow_token") else 1e-9  # one entry on the edge
            assert found.loc[name, column] == pytest.approx(np.mean(values), rel=1e-4, abs=slack), (name, column)
            error = np.std(values, ddof=1) / 3**0.5
            assert found.loc[name, f"{column}_sem"] == pytest.approx(error, rel=2e-2, abs=slack), (name, column)
    assert (found["underflow_token"] <= found["underflow_tensor"]).all()
    assert hooks(model) == 0


def test_a_planted_outlier_is_found(scan_cli: Scan, tiny_folder: Any) -> None:
    """GPT-2 without norms' help: its first MLP's output reads the outlier at position 4."""
    model, ids = tiny("gpt2"), random_ids(3, 18)
    ids[ids == 5] = 6
    ids[:, 4] = 5
    with torch.no_grad():
        model.wte.weight[5] = 50 * torch.randn(48, generator=torch.Generator().manual_seed(1))
        model.h[0].ln_2 = nn.Identity().eval()
    found = modules(model, ids).loc["h.0.mlp.c_fc"]
    assert found["amax_position"] == 4
    assert found["amax_other"] > 20 * found["amax_first"]
    assert found["underflow_tensor"] > 2 * found["underflow_token"]
    outcome = scan_cli(tiny_folder, "--measure", "modules", "--no-self-check", "--quiet")
    assert outcome.code == 0, outcome.stderr
    table = sinkscope.load_run(outcome.folder).measured["modules"]
    assert table["amax_token"].notna().all()
    assert table["stream"].eq("text").all()
    assert len(table) == 2 * 7


@pytest.mark.parametrize(("dtype", "least"), [(torch.float64, 0), (torch.float32, 0), (torch.float32, math.inf)])
def test_closed_forms(dtype: torch.dtype, least: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """One entry of 254 s among entries of s: exactly these sit on the edge and round to the even 0."""
    monkeypatch.setattr(loops, "LEAST", least)
    sizes = torch.ones(1, 5, 10, dtype=dtype)
    sizes[0, 2, 3] = 254.0
    sizes[0, 4, 0] = 0.0
    found = {name: float(column.compute(Sizes.of(sizes))) for name, column in INPUT_COLUMNS.items()}
    assert found == pytest.approx({
        "row_dispersion": 254, "column_dispersion": 254, "underflow_tensor": 48 / 49, "underflow_token": 9 / 49,
        "annihilated": 0.8, "amax_first": 1, "amax_other": 254,
    })  # fmt: skip
    nothing = Sizes.of(torch.zeros(1, 2, 3, dtype=dtype))
    quiet = {name: float(column.compute(nothing)) for name, column in INPUT_COLUMNS.items()}
    assert {name for name, value in quiet.items() if value == value} == {"amax_first", "amax_other"}
    alone = Sizes.of(torch.full((1, 1, 3), -2.0))
    assert INPUT_COLUMNS["amax_first"].compute(alone).tolist() == [2]
    assert INPUT_COLUMNS["amax_other"].compute(alone).isnan().tolist() == [True]


def odd_input() -> torch.Tensor:
    """Entries of every size, and sequences with a 0, a token of zeros, an infinite entry, and one that is no number."""
    x = torch.randn(5, 7, 37, generator=torch.Generator().manual_seed(0)) ** 5
    x[1, 2, 3], x[2, 4], x[3, 1, 0], x[4, 6, 5] = 0, 0, math.inf, math.nan
    return x


@pytest.mark.parametrize("least", [0, math.inf])
def test_an_input_is_counted_as_by_numpy(least: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loops, "LEAST", least)
    x = odd_input()
    found, size = Sizes.of(x), x.abs().numpy()
    whole, token = size.max((1, 2), keepdims=True) / np.float32(254), size.max(2, keepdims=True) / np.float32(254)
    np.testing.assert_array_equal(found.of_tokens, size.max(2))
    np.testing.assert_array_equal(found.of_features, size.max(1))
    np.testing.assert_array_equal(found.entries, (size > 0).sum(2))
    np.testing.assert_array_equal(found.lost_in_tensor, ((size > 0) & (size <= whole)).sum(2))
    np.testing.assert_array_equal(found.lost_in_token, ((size > 0) & (size <= token)).sum(2))


def test_the_loop_as_python_is_the_loop_as_compiled() -> None:
    x, found = odd_input().numpy(), []
    for loop in (read_inputs, read_inputs.py_func):
        largest = np.zeros((5, 7), np.float32), np.zeros((5, 37), np.float32)
        counts = np.zeros((3, 5, 7), np.int64)
        for turn in range(2):
            loop(x, np.float32(254), *largest, counts, turn, 2)
        found.append((*largest, counts))
    for compiled, plain in zip(*found, strict=True):
        np.testing.assert_array_equal(compiled, plain)


@pytest.mark.parametrize("family", slow_but(["llama", "deepseek_v3"], "deepseek_v3"))
def test_padding_changes_nothing(family: str) -> None:
    model, ids = loud(family), random_ids(2, 20)
    mask = torch.ones_like(ids)
    mask[0, :6] = 0
    padded = modules(model, {"input_ids": ids, "attention_mask": mask})
    halves = [modules(model, ids[:1, 6:]), modules(model, ids[1:])]
    for name in INPUT_COLUMNS:
        expected = (halves[0][name] + halves[1][name]) / 2
        assert padded[name].to_numpy() == pytest.approx(expected.to_numpy(), rel=1e-3, abs=2e-3)


class Flat(nn.Module):
    """Calls an MLP on all tokens of a batch in one row, as mixtures of experts do, and its input's count on the way."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.mlp = mlp
        self.counts = CountedTokens(1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.counts(torch.tensor(x.shape[:2]))
        return self.mlp(x.flatten(0, 1)).unflatten(0, x.shape[:2])


class CountedTokens(nn.Linear):
    """A linear module that reads whole numbers, as one on bytes of a quantised weight would."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return input * 2


@pytest.mark.slow
def test_tokens_in_one_row_are_those_of_the_sequences_and_whole_numbers_are_no_tokens() -> None:
    ids = random_ids(3, 18)
    expected = modules(loud("llama"), ids)
    model = loud("llama")
    for layer in model.layers:
        layer.mlp = Flat(layer.mlp).eval()
    found = modules(model, ids)
    found.index = found.index.str.replace(".mlp.mlp.", ".mlp.")
    assert set(found.index) == set(expected.index), "and none of the counts"
    for name in INPUT_COLUMNS:
        assert found[name].to_numpy() == pytest.approx(expected.loc[found.index, name].to_numpy(), rel=1e-9), name


@pytest.mark.slow
def test_rows_that_are_no_sequences_are_left_out_and_that_is_said() -> None:
    """XLNet's positions come first: a row of what its modules read is a position of all sequences."""
    run = sinkscope.scan(tiny_model(AutoModel, "xlnet"), data=random_ids(2, 20) % 90, measure="modules")
    assert len(run.measured["modules"]) == 0
    assert "Modules: no linear module reads this stream's tokens one by one." in run.summary.streams["text"].in_words
    assert any(text.startswith("--measure modules leaves out") for text in run.manifest.warnings)


@pytest.mark.parametrize("size", slow_but([2, 5], 2))
def test_positions_that_all_sequences_share_are_no_tokens(size: int) -> None:
    """DeBERTa's relative positions: [1, 2 T, width] in any batch, twice as many rows as one sequence has tokens, and as
    many as two have."""
    config, ids = tiny_config("deberta"), random_ids(5, 12) % 90
    config.relative_attention, config.pos_att_type = True, ["c2p", "p2c"]
    model = AutoModel.from_config(config).eval()
    found = [modules(model, ids, batch_size=size) for size in (1, size)]
    assert not found[0].index.str.contains("pos_").any()
    pd.testing.assert_frame_equal(found[1], found[0], rtol=1e-5)


def test_datasets_stand_in_the_order_of_the_data(tokenizer: Any) -> None:
    asked = {"data": ["prose", "code", "random"], "seq_len": 8, "num_sequences": 2, "measure": "modules"}
    run = sinkscope.scan(make_model(), tokenizer=tokenizer, self_check=False, **asked)
    assert list(run.measured["modules"]["domain"].unique()) == list(run.heads["domain"].unique()) == asked["data"]


def test_modules_that_are_left_out_are_named() -> None:
    """A pooler reads one token of each sequence; the table has no row of it, for any size of a batch."""
    model, ids = tiny("bert"), random_ids(3, 12)
    for one in model.encoder.layer[:2]:
        one.attention.output.dense = Aside(one.attention.output.dense).eval()
    for size in (1, 3):
        run = sinkscope.scan(model, data=ids, measure="modules", self_check=False, batch_size=size)
        assert not run.measured["modules"]["module"].str.contains(r"pooler|aside").any()
        warning = (
            "--measure modules leaves out 5 of 23 linear modules, as they do not read a row for each token: "
            "encoder.layer.0.attention.output.dense.aside, encoder.layer.0.attention.output.dense.first, "
            "encoder.layer.1.attention.output.dense.aside and 2 more"
        )
        assert run.manifest.warnings == run.summary.warnings
        assert run.summary.warnings[-1] == warning, "behind the line on output projections that are not found"


class Aside(nn.Module):
    """A linear module beside one that is never called and one that gets its tokens first."""

    def __init__(self, own: nn.Module) -> None:
        super().__init__()
        self.own, self.aside, self.first = own, nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.first(x.transpose(0, 1))
        return self.own(x)


def test_spread_features_are_refused() -> None:
    with pytest.raises(SinkscopeError, match="--tp with --measure modules"):
        refuse_spread([Modules])


def test_a_second_pass_of_another_measurement_is_not_read() -> None:
    """`spikes` reads each batch twice."""
    both = sinkscope.scan(
        tiny("gpt2"), data=random_ids(1, 12), measure=["modules", "spikes"], self_check=False
    ).measured["modules"]
    assert not both["module"].str.contains("[", regex=False).any()
