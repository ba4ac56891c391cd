"""Arms against a plain implementation, what changes nothing, what is left behind, and the numbers of the table."""

from __future__ import annotations

import copy
import itertools
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pandas as pd
import pytest
import torch
from by_hand import attention_by_hand, causal, hidden, levels, losses, no_value, setting_of
from conftest import make_model
from families import tiny_model as tiny_model_of
from models import random_ids
from reference import alpha_scores, find_layers, peak_range, run_sequence
from tiers import slow_but
from torch import Tensor, nn
from transformers import AttentionInterface, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from typer.testing import CliRunner, Result
from watched import hooks

import sinkscope
from sinkscope.capture import calls
from sinkscope.capture.kernels.attend import read
from sinkscope.capture.masks import lazy
from sinkscope.experiments.arms.arm import Arm, Pass, Setting
from sinkscope.experiments.arms.changes import WHOLE, watched
from sinkscope.experiments.arms.engine import measure, run
from sinkscope.experiments.arms.experiment import expanded
from sinkscope.experiments.arms.finished import Finished, key_of
from sinkscope.experiments.arms.grammar import BUILT_IN, KINDS, READERS, listed, read_arm, told, written
from sinkscope.experiments.arms.kinds import massive
from sinkscope.experiments.arms.kinds.keys import HiddenKeys
from sinkscope.experiments.arms.positions import Positions
from sinkscope.experiments.arms.readings import Reference, SinkCount
from sinkscope.present.html.arms import arms_view
from sinkscope.present.numbers import MISSING
from sinkscope.present.terminal.progress import Pace
from sinkscope.runs.catalogue import table_columns
from sinkscope.runs.forecast import Time
from sinkscope.runs.saved.arms import in_words, load_arms
from sinkscope.runs.saved.arms_table import DESTROYED, MEASURES, ArmNumbers, loss_cells, table_of

LENGTH = 40
IDS = random_ids(2, LENGTH)
FULL_LAYER = {"llama": {0, 1, 2}, "gpt2": {0, 1, 2}, "gemma3": {1}}
"""The layers of the tiny models that have no window."""


def measured_loss(setting: Setting, arm: Arm | str, draw: int = 0) -> Tensor:
    """The losses under an arm, from one pass over all sequences."""
    ready = (read_arm(arm) if isinstance(arm, str) else arm).ready(setting).prepared(setting)
    one = Pass(setting, setting.ids, draw=draw, sinks=torch.zeros(setting.ids.shape, dtype=torch.bool))
    logits = run(one, ready, SinkCount(setting.epsilon))
    return Reference(logits, setting.ids).compare(logits)["loss"]


def window(size: int, sinks: int, layers: set[int] | None = None) -> Any:
    def change(layer: int, key: Tensor, value: Tensor, seen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if layers is not None and layer not in layers:
            return key, value, seen
        allowed = torch.zeros(LENGTH, LENGTH, dtype=torch.bool)
        for query in range(LENGTH):
            allowed[query, max(0, query - size + 1) : query + 1] = True
            allowed[query, :sinks] = True
        return key, value, seen & allowed

    return change


def rounded(bits: int, first: int) -> Any:
    kept = torch.zeros(2, LENGTH, dtype=torch.bool)
    kept[:, :first] = True

    def change(layer: int, key: Tensor, value: Tensor, seen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return levels(key.double(), bits, 2, kept), levels(value.double(), bits, 3, kept), seen

    return change


def same(layer: int, key: Tensor, value: Tensor, seen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return key, value, seen


def without_heads(layer: int, out: Tensor) -> Tensor:
    out = out.clone()
    if layer == 1:
        out[:, :, [0, 2]] = 0
    return out


# What each arm does, against attention over the whole matrix


@pytest.mark.parametrize("family", slow_but(["llama", "gemma3", "gpt2"], "gemma3"))
def test_the_loss_is_that_of_a_plain_implementation(family: str) -> None:
    model = causal(family)
    setting = setting_of(model, IDS)
    full = FULL_LAYER[family]
    plain: dict[str, tuple[Any, Any]] = {
        "heads:1.0+1.2": (same, without_heads),
        "keys:first1": (hidden(0), None),
        "keys:middle4": (hidden(18, 19, 20, 21), None),
        "keys:middle3": (hidden(18, 19, 20), None),
        "keys:recent4": (hidden(36, 37, 38, 39), None),
        "value:first2": (no_value, None),
        "window:8+2": (window(8, 2), None),
        "window:5+0/full": (window(5, 0, full), None),
        "kv:3": (rounded(3, 0), None),
        "kv:2+first3": (rounded(2, 3), None),
    }
    unablated = losses(model, IDS)
    for name, (change, output) in plain.items():
        with attention_by_hand(model, change, output):
            expected = losses(model, IDS)
        assert (expected - unablated).abs().min() > 1e-4, name
        torch.testing.assert_close(measured_loss(setting, name), expected, rtol=0, atol=2e-6, msg=name)


def scored_run(setting: Setting, **columns: list[float]) -> Any:
    """What a plan asks of a run: a score of each head, in a table that was measured beside heads.csv."""
    rows = [(site.stream, site.layer, site.name, head) for site in setting.sites for head in range(site.heads)]
    heads = pd.DataFrame(rows, columns=["stream", "layer", "module", "head"])
    return SimpleNamespace(heads=heads, measured={"streaming": heads.assign(**columns)})


@pytest.mark.parametrize("family", slow_but(["llama", "gemma3"], "gemma3"))
def test_a_plan_evicts_in_the_kv_heads_with_the_lowest_scores(family: str) -> None:
    """A KV head counts as much as the busiest of its query heads: here 0.0, 0.1 | 0.3, 0.2 | 0.0, 0.9."""
    model = causal(family)
    setting = setting_of(model, IDS)
    busy = [0.0, 0.0, 0.0, 0.1, 0.3, 0.0, 0.2, 0.0, 0.0, 0.0, 0.0, 0.9]
    setting.run = scored_run(setting, distant_write=busy)
    arm: Any = read_arm("window:8+2/distant_write:50%").ready(setting)
    assert arm.plan.heads == (("layers.0.self_attn", 0), ("layers.2.self_attn", 0), ("layers.0.self_attn", 1))

    def change(layer: int, key: Tensor, value: Tensor, seen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        seen = seen.expand(-1, 4, -1, -1).clone()
        heads = {0: [0, 1, 2, 3], 1: [], 2: [0, 1]}[layer]
        seen[:, heads] = window(8, 2)(layer, key, value, seen[:, heads])[2]
        return key, value, seen

    with attention_by_hand(model, change):
        expected = losses(model, IDS)
    assert (expected - losses(model, IDS)).abs().min() > 1e-4
    torch.testing.assert_close(measured_loss(setting, arm), expected, rtol=0, atol=2e-6)
    whole = measured_loss(setting, "window:8+2")
    assert (measured_loss(setting, "window:8+2/random6") == whole).all()
    assert (measured_loss(setting, "window:8+2/distant_write:100%") == whole).all()


def test_a_plan_is_held_against_random_ones_of_its_size() -> None:
    setting = setting_of(causal("gemma3").float(), IDS)
    setting.run = scored_run(setting, distant_write=[0.1 * place for place in range(12)])
    whole = expanded([read_arm("window:8+2/distant_write:50%")], setting)
    arms = whole.arms
    assert [arm.name for arm in arms] == ["window:8+2/distant_write:low50%", "window:8+2/random3"]
    assert whole.controls == {arms[0].name: arms[1].name}
    drawn: Any = arms[1]
    draws = [list(drawn.plan.chosen(Pass(setting, IDS, draw=draw))) for draw in range(6)]
    assert all(len(set(heads)) == 3 for heads in draws)
    assert len({tuple(heads) for heads in draws}) > 1
    assert drawn.plan.chosen(Pass(setting, IDS[1:], 1, 0)) == draws[0], "one plan for all sequences"
    full: Any = read_arm("window:8+2/full/distant_write:50%").ready(setting)
    assert full.plan.heads == (("layers.1.self_attn", 0),), "of the full layer's KV heads alone"
    with pytest.raises(sinkscope.SinkscopeError, match="distant_write:low5% of 6 KV heads is no head: give a larger"):
        expanded([read_arm("window:8+2/distant_write:5%")], setting)
    setting.run.measured["streaming"]["distant_write"] = np.nan
    with pytest.raises(sinkscope.SinkscopeError, match="only 0 of 6 KV heads have a value of distant_write"):
        expanded([read_arm("window:8+2/distant_write:50%")], setting)


def test_sink_tokens_are_those_of_the_run_wherever_they_stand() -> None:
    model = causal("llama")
    ids = IDS.clone()
    ids[:, 0], ids[0, 9], ids[1, 20:22], ids[1, 30] = 5, 7, 7, 5
    tokens = pd.DataFrame(
        [("attention", 5, True), ("attention", 7, False), ("massive", 9, False), ("attention", None, False)],
        columns=["kind", "id", "first"],
    ).astype({"id": "Int64"})
    setting = setting_of(
        model, ids, SimpleNamespace(tokens=tokens, path=Path("old"), manifest=SimpleNamespace(attention=[]))
    )
    kept = ids == 7
    kept[:, 0] = True
    one = Pass(setting, ids)
    assert torch.equal(Positions("sink-tokens").mask(one), kept)
    drawn = Positions("random-sink-tokens").mask(one)
    assert drawn.sum(1).tolist() == kept.sum(1).tolist()
    assert not drawn[:, 0].any()

    def change(layer: int, key: Tensor, value: Tensor, seen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return levels(key.double(), 3, 2, kept), levels(value.double(), 3, 3, kept), seen

    with attention_by_hand(model, change):
        expected = losses(model, ids)
    torch.testing.assert_close(measured_loss(setting, "kv:3+sink-tokens"), expected, rtol=0, atol=2e-6)
    setting.run.tokens = tokens[tokens["kind"] == "massive"]
    with pytest.raises(sinkscope.SinkscopeError, match=r"no token is an attention sink in tokens\.csv of old"):
        expanded([read_arm("keys:sink-tokens")], setting)
    setting.run.tokens = None
    with pytest.raises(sinkscope.SinkscopeError, match="old holds no tokens"):
        expanded([read_arm("keys:sink-tokens")], setting)


def on_rounded(original: Callable[[Tensor], Tensor], axes: tuple[int, ...], bits: int, first: int) -> Any:
    """A linear module's forward on its input, rounded but for the first tokens."""

    def forward(x: Tensor) -> Tensor:
        tokens = x[:, 0] if x.dim() == 4 else x  # latent attention holds [sequence, 1, token, rank]
        rest = tokens[:, first:]
        step = rest.abs().amax(axes, True) / (2 ** (bits - 1) - 1)
        rounded = torch.cat([tokens[:, :first], torch.round(rest / step) * step], 1)
        return original(rounded[:, None] if x.dim() == 4 else rounded)

    return forward


@pytest.mark.parametrize("family", slow_but(["llama", "gpt2", "deepseek_v3"], "gpt2", "deepseek_v3"))
def test_rounded_activations_are_rounded_inputs_of_linear_modules(family: str) -> None:
    model = causal(family)
    setting = setting_of(model, IDS)
    for name, axes, bits, first in (("acts:4/token", (2,), 4, 0), ("acts:5/tensor+first2", (1, 2), 5, 2)):
        ours = measured_loss(setting, name)
        with pytest.MonkeyPatch.context() as patch:
            for module in model.base_model.modules():
                if type(module).__name__ in ("Linear", "Conv1D"):
                    patch.setattr(module, "forward", on_rounded(module.forward, axes, bits, first))
            expected = losses(model, IDS)
        torch.testing.assert_close(ours, expected, rtol=0, atol=2e-6, msg=name)


def test_a_tower_that_reads_no_text_does_not_keep_activations_from_being_rounded() -> None:
    """Gemma-3 cuts pictures into patches by a convolution, which no pass over text calls."""
    done = sinkscope.arms(tiny_model_of(AutoModelForCausalLM, "gemma3"), "acts:4/token", data=IDS, draws=2)  # one alone
    assert abs(done.table["increase"][1]) > 1e-5


class TokensFirst(nn.Module):
    """A linear module that gets the tokens of all sequences before the sequences."""

    def __init__(self, own: nn.Module) -> None:
        super().__init__()
        self.own = own

    def forward(self, x: Tensor) -> Tensor:
        return self.own(x.transpose(0, 1)).transpose(0, 1)


@pytest.mark.parametrize("before", [[], ["map:0.1"]])
def test_inputs_that_cannot_be_rounded_are_refused_before_anything_is_measured(before: list[str]) -> None:
    """Also where another arm runs the model before all passes."""
    model, seen = causal("llama"), list[tuple[int, ...]]()
    model.model.layers[1].mlp.up_proj = TokensFirst(model.model.layers[1].mlp.up_proj).eval()
    model.model.layers[0].register_forward_pre_hook(lambda module, args: seen.append(tuple(args[0].shape[:2])))
    own = hooks(model)
    error = r"--arm acts:8/token\+first1: layers.1.mlp.up_proj.own does not read a row for each token"
    with pytest.raises(sinkscope.SinkscopeError, match=error):
        sinkscope.arms(model, [*before, "acts:8/token+first1"], data=IDS)
    assert seen
    assert all(tokens < LENGTH for _, tokens in seen), "short passes alone"
    assert hooks(model) == own


@pytest.mark.parametrize("family", slow_but(["llama", "gpt2"], "gpt2"))
def test_a_neuron_is_a_row_of_the_down_projection(family: str) -> None:
    model, by_hand = causal(family), causal(family)
    ours = measured_loss(setting_of(model, IDS), "neuron:1.7")
    block = by_hand.base_model.layers[1] if family == "llama" else by_hand.base_model.h[1]
    with torch.no_grad():
        if family == "llama":
            block.mlp.down_proj.weight[:, 7] = 0
        else:
            block.mlp.c_proj.weight[7] = 0
    torch.testing.assert_close(ours, losses(by_hand, IDS))
    assert (ours - losses(model, IDS)).abs().max() > 1e-5


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_an_mlp_may_have_as_many_neurons_as_the_stream_has_channels(family: str) -> None:
    overrides = {"intermediate_size": 48} if family == "llama" else {"n_inner": 48}
    model, by_hand = causal(family, **overrides), causal(family, **overrides)
    ours = measured_loss(setting_of(model, IDS), "neuron:1.7")
    with torch.no_grad():
        if family == "llama":
            by_hand.base_model.layers[1].mlp.down_proj.weight[:, 7] = 0
        else:
            by_hand.base_model.h[1].mlp.c_proj.weight[7] = 0
    torch.testing.assert_close(ours, losses(by_hand, IDS))
    assert (ours - losses(model, IDS)).abs().max() > 1e-6


def test_a_random_neuron_is_drawn_anew_in_each_draw() -> None:
    model = causal("llama")
    setting = setting_of(model, IDS)
    arm, control = expanded([read_arm("neuron:1.7")], setting).arms
    draws = [one.values["loss"] for one in measure(setting, [arm, control], 2, lambda *_: None)[2:]]
    weight = model.base_model.layers[1].mlp.down_proj.weight
    for draw, ours in enumerate(draws):
        neuron = int(np.random.default_rng([0, draw]).integers(96))
        whole = weight[:, neuron].clone()
        with torch.no_grad():
            weight[:, neuron] = 0
            np.testing.assert_allclose(ours, losses(model, IDS), rtol=1e-7)
            weight[:, neuron] = whole
    assert control.name == "neuron:1.random"
    assert (draws[0] != draws[1]).all()


def massive_run(elements: dict[int, list[int]]) -> Any:
    """What the arm asks of a run: channels, each with the layers in which it is massive."""
    channels = [SimpleNamespace(channel=channel, layers=layers) for channel, layers in elements.items()]
    return SimpleNamespace(
        summary=SimpleNamespace(
            streams={"text": SimpleNamespace(massive_activations=SimpleNamespace(channels=channels))}
        )
    )


@pytest.fixture
def loud(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A tiny Llama whose embedding has a large channel 5, in the scale that bounds of 3 and 10 call massive."""
    monkeypatch.setattr(massive, "MASSIVE_ABS", 3.0)
    monkeypatch.setattr(massive, "MASSIVE_RATIO", 10.0)
    model = causal("llama")
    with torch.no_grad():
        model.base_model.embed_tokens.weight[:, 5] = torch.where(torch.arange(97) % 3 == 0, 40.0, 0.1).double()
    return model


@pytest.mark.parametrize(
    ("where", "positions"), [("", slice(None)), ("/first", slice(0, 1)), ("/others", slice(1, None))]
)
def test_massive_elements_are_replaced_where_the_block_begins(loud: Any, where: str, positions: slice) -> None:
    ids = IDS.clone()
    ids[:, 0] = 6  # a token with the large channel
    setting = setting_of(loud, ids, massive_run({5: [0, 1, 2]}))
    ours = measured_loss(setting, f"massive:zero{where}")
    large = (ids % 3 == 0) & torch.zeros(2, LENGTH, dtype=torch.bool).index_fill(
        1, torch.arange(LENGTH)[positions], True
    )
    handle = loud.base_model.layers[0].register_forward_pre_hook(
        lambda module, args: (torch.where(large[..., None] & (torch.arange(64) == 5), 0.0, args[0]), *args[1:])
    )
    expected = losses(loud, ids)
    handle.remove()
    torch.testing.assert_close(ours, expected, rtol=0, atol=2e-6)
    assert (ours - losses(loud, ids)).abs().min() > 1e-5


def test_massive_elements_are_those_beyond_both_bounds_in_this_pass(loud: Any) -> None:
    """By the words alone: |x| > 3 and > 10 x the median abs of the sequence at the block's input; others stay."""
    ids = IDS.clone()
    ids[0] = torch.where(ids[0] % 3 == 0, ids[0] - 1, ids[0])
    ids[0, 7] = 6
    setting = setting_of(loud, ids, massive_run({5: [1]}))
    changed = []

    def replaced(module: Any, args: Any) -> Any:
        x = args[0].clone()
        for sequence in range(2):
            bound = max(3.0, 10 * np.median(np.abs(x[sequence].numpy())))
            for place in range(LENGTH):
                if abs(float(x[sequence, place, 5])) > bound:
                    x[sequence, place, 5] = 0
                    changed.append((sequence, place))
        return x, *args[1:]

    ours = measured_loss(setting, "massive:zero")
    handle = loud.base_model.layers[1].register_forward_pre_hook(replaced)
    expected = losses(loud, ids)
    handle.remove()
    assert 0 < len(changed) < 2 * LENGTH
    torch.testing.assert_close(ours, expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("family", slow_but(["gemma3", "llama"], "gemma3"))
def test_the_sinks_of_a_sequence_are_those_of_the_words(family: str) -> None:
    """alpha_k > epsilon in some head, among the keys that a quarter as many queries see as the most seen key."""
    model = causal(family)
    setting = replace(setting_of(model, IDS), epsilon=0.12)
    count = SinkCount(setting.epsilon)
    with torch.no_grad(), watched(Pass(setting, IDS), count):
        model(IDS)
    expected = torch.zeros(2, LENGTH, dtype=torch.bool)
    loose = expected.clone()
    layers = find_layers(model.base_model, IDS[:1])
    for row in range(2):
        run_sequence(model.base_model, layers, IDS[row : row + 1])
        for layer in layers:
            call = layer.trace.call
            assert call is not None
            for probs, visible in zip(call.probs, call.visible, strict=True):
                over = np.flatnonzero(alpha_scores(probs, visible) > 0.12)
                loose[row, over] = True
                expected[row, sorted({*over} & {*peak_range(visible)})] = True
    assert (count.keys == expected).all()
    assert 0 < expected.sum() < loose.sum(), "the rule on rows decides"


def compiled(model: Any) -> Any:
    """The model with compiled layers, which have run, so that their code calls no hook that comes later."""
    for layer in model.base_model.layers:
        layer.compile(backend="eager")
    with torch.no_grad():
        model(IDS)
    return model


@pytest.mark.slow
def test_what_is_measured_before_all_arms_is_that_of_the_uncompiled_model(loud: Any) -> None:
    """The means of massive elements and the maps of heads come from hooks, which compiled code does not call."""

    def found(model: Any, name: str) -> Tensor:
        setting = setting_of(model, IDS, massive_run({5: [0]}))
        setting.more_text = lambda count: random_ids(4, LENGTH, seed=1)
        return measured_loss(setting, name)

    with torch.no_grad():
        loud.base_model.embed_tokens.weight[::3, 5] *= torch.linspace(1, 2, 33)
    names = ("massive:mean", "map:1.0")
    expected = [found(loud, name) for name in names]
    assert all((losses(loud, IDS) - each).abs().max() > 1e-5 for each in expected)
    compiled(loud)
    assert all(torch.equal(found(loud, name), each) for name, each in zip(names, expected, strict=True))


def test_random_channels_of_several_blocks_differ() -> None:
    """As the massive ones do: else the control changes fewer channels, one of them at several blocks."""
    setting: Any = SimpleNamespace(seed=0)
    arm = massive.ReplacedElements("random", elements={"layers.0": [5, 3], "layers.2": [7]})
    drawn = []
    for draw in range(40):
        forward = Pass(setting, IDS, draw=draw)
        first, second = (arm._drawn(forward, path, 16).tolist() for path in arm.elements)
        assert (len(first), len(second)) == (2, 1)
        drawn.append((*first, *second))
    assert all(len(set(channels)) == 3 for channels in drawn)
    assert len(set(drawn)) > 30


def test_the_mean_of_massive_elements_is_that_of_the_other_sequences(loud: Any) -> None:
    """Where all sequences are one, every element is replaced by its own value."""
    ids = IDS[:1].clone()
    ids[:, 0] = 6
    twice = ids.expand(2, -1)
    setting = setting_of(loud, twice, massive_run({5: [0]}))
    assert (measured_loss(setting, "massive:mean/first") - losses(loud, twice)).abs().max() < 1e-6
    means = massive.measured_means(setting, {"layers.0": [5]})["layers.0"]
    count = int((ids[0, 1:] % 3 == 0).sum())
    assert means[:, :, :, 0].tolist() == [[[40.0, 40.0 * count]] * 2, [[1.0, count]] * 2]


def test_another_first_token_is_read_and_not_predicted(tiny_model: Any, tokenizer: Any) -> None:
    setting = setting_of(tiny_model, random_ids(2, 20) + 3)
    setting.checkpoint.tokenizer = tokenizer
    (id,) = tokenizer("e", add_special_tokens=False)["input_ids"]
    other = setting.ids.clone()
    other[:, 0] = id
    torch.testing.assert_close(measured_loss(setting, "first-token:e"), losses(tiny_model, other), rtol=1e-5, atol=1e-5)
    with pytest.raises(sinkscope.SinkscopeError, match="the text is 2 tokens, and one token is replaced"):
        read_arm("first-token:qz").ready(setting)


def test_a_first_token_that_stands_there_already_changes_nothing() -> None:
    setting = setting_of(causal("llama"), random_ids(256, 4))
    one = Pass(setting, setting.ids)
    with read_arm("first-token:random").ready(setting).applied(one):
        changed = (one.ids[:, 0] != setting.ids[:, 0]).tolist()
    assert not all(changed)  # 256 draws from 97 tokens
    assert one.size is not None
    assert one.size.tolist() == changed


@pytest.mark.slow
def test_dynamic_heads_are_those_whose_score_crosses_the_quantile() -> None:
    model = causal("llama").float()
    read_by_run = sinkscope.scan(model, data=random_ids(6, LENGTH, seed=1), self_check=False)
    setting = setting_of(model, random_ids(4, LENGTH), read_by_run)
    arm: Any = read_arm("dynamic:bos_mass:25%").ready(setting).prepared(setting)
    own = sinkscope.scan(model, data=setting.ids, self_check=False).sequences
    scores = read_by_run.sequences[read_by_run.sequences["head"].notna()]["bos_mass"]
    low, high = np.sort(scores)[[53, 54]]  # 72 scores: three quarters of the way from the first to the last is 53.25
    bound = low + 0.25 * (high - low)
    for site in setting.sites:
        rows = own[(own["module"] == site.name) & own["head"].notna()].pivot(
            index="sequence", columns="head", values="bos_mass"
        )
        assert (arm.chosen[site.name].numpy() == (rows >= bound).to_numpy()).all()
    sizes = torch.cat(list(arm.chosen.values()), 1).sum(1)
    assert 0 < sizes.sum() < sizes.numel() * 12
    one = Pass(setting, setting.ids[2:], start=2)
    with torch.no_grad(), arm.applied(one):
        ours = model(setting.ids[2:]).logits
    for row in range(2, 4):
        chosen = {name: mask[row].nonzero().flatten().tolist() for name, mask in arm.chosen.items()}
        from sinkscope.experiments.arms.changes import zeroed

        with torch.no_grad(), zeroed(model.base_model, setting.sites, chosen):
            alone = model(setting.ids[row : row + 1]).logits
        torch.testing.assert_close(ours[row - 2 : row - 1], alone, rtol=1e-4, atol=1e-5)
    control: Any = arm.control()
    with control.applied(one):
        assert one.size is not None
        assert one.size.tolist() == sizes[2:].tolist()


@pytest.fixture(scope="module")
def read_run(tiny_model: Any, tokenizer: Any) -> Any:
    """A run of `tiny_model`, with a metric of a user's own. Shared: leave it as it is."""

    def twice_bos_mass(view: sinkscope.LayerView) -> Tensor:
        """Twice the mean of A[i,0]."""
        return 2 * view.attention.first.mean(-1)

    own = sinkscope.head_metric(unit="probability", range="[0, 2]")(twice_bos_mass)
    return sinkscope.scan(tiny_model, tokenizer=tokenizer, seq_len=24, num_sequences=4, self_check=False, metrics=[own])


def test_heads_by_a_score_are_measured_as_ablate_measures_them(tiny_model: Any, tokenizer: Any, read_run: Any) -> None:
    """The same heads, the same random ones, the same numbers in every column."""
    ours = sinkscope.arms(tiny_model, ["heads:honor:25%"], run=read_run, tokenizer=tokenizer, **SMALL)
    ablation = sinkscope.ablate(tiny_model, read_run, fractions=[0.25], tokenizer=tokenizer, **SMALL)
    assert ours.table["arm"].tolist() == ["unablated", "heads:honor:low25%", "heads:random2"]
    pd.testing.assert_frame_equal(ours.table, ablation.arms, check_exact=True)


def test_the_control_of_dynamic_heads_zeroes_as_many_in_each_sequence(
    tiny_model: Any, tokenizer: Any, read_run: Any
) -> None:
    result = sinkscope.arms(tiny_model, ["dynamic:bos_mass:25%"], run=read_run, tokenizer=tokenizer, **SMALL)
    arm, control = result.table["arm"][1:]
    assert control == f"random as {arm}"
    rows = result.sequences.set_index("arm")
    sizes = rows.loc[arm, "size"].tolist()
    assert len(set(sizes)) > 1
    draws = rows.loc[control]
    assert [draws.loc[draws["draw"] == draw, "size"].tolist() for draw in (0, 1)] == [sizes, sizes]
    own, other = (draws.loc[draws["draw"] == draw, "loss"].to_numpy() for draw in (0, 1))
    assert (own != other).any()


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("dynamic:nonesuch:low5%", "dynamic:nonesuch: the run has no such score of each sequence"),
        ("dynamic:module:low5%", "dynamic:module: the run has no such score of each sequence"),
        ("dynamic:sink_rate_t64:5%", "dynamic:sink_rate_t64: no head of the run has a value"),
        ("dynamic:learned_sink_mass:5%", "dynamic:learned_sink_mass: 100% of the run's values are 0 or more"),
        ("dynamic:twice_bos_mass:high5%", "dynamic:twice_bos_mass: a scan of the model does not measure this score"),
        ("heads:nonesuch:low5%", "heads:nonesuch:low5%: 'nonesuch' is no score of the run's heads"),
        ("heads:honor:1%", "heads:honor:low1%: 0.01 of 8 heads is no head: give a larger share"),
    ],
)
def test_a_score_that_chooses_no_heads(name: str, error: str, tiny_model: Any, read_run: Any) -> None:
    setting = setting_of(tiny_model, random_ids(2, 24), read_run)
    with pytest.raises(sinkscope.SinkscopeError) as refused:
        expanded([read_arm(name)], setting)
    assert str(refused.value).startswith(f"--arm {error}")


def test_a_threshold_of_another_length_is_refused(tiny_model: Any, tokenizer: Any, read_run: Any) -> None:
    """Scores of shorter sequences lie elsewhere: `25%` zeroed half of all heads."""
    told = (
        r"--arm dynamic:bos_mass:high25%: its threshold is one of scores over 24 tokens, the run's, and scores change"
    )
    with pytest.raises(
        sinkscope.SinkscopeError, match=f"{told} .*: leave out --seq-len 12, or give a run of that length"
    ):
        sinkscope.arms(
            tiny_model, ["dynamic:bos_mass:25%"], run=read_run, tokenizer=tokenizer, **SMALL | {"seq_len": 12}
        )


def test_a_decoder_in_a_wrapper_has_the_heads_of_its_run() -> None:
    """BartForCausalLM calls its decoder through a wrapper; a scan measures the decoder, and its run was refused."""
    model = tiny_model_of(AutoModelForCausalLM, "bart")
    ids = IDS % model.config.vocab_size
    run = sinkscope.scan(model, data=ids, self_check=False)
    whole = sinkscope.ablate(model, run, data=ids.flip(1), fractions=[0.25], draws=2)
    assert whole.table["loss"].notna().all()


def test_a_model_that_reads_pictures_too_predicts_text(tmp_path: Path) -> None:
    model = tiny_model_of(AutoModelForImageTextToText, "llava")
    ids = IDS % model.config.text_config.vocab_size
    model.save_pretrained(tmp_path / "llava")
    for given in (model, str(tmp_path / "llava")):
        table = sinkscope.arms(given, ["heads:1.0"], data=ids, draws=2).table.set_index("arm")
        assert table.loc["unablated", "loss"] == pytest.approx(float(losses(model, ids).mean()), rel=1e-6)
        assert table.loc["heads:1.0", "loss"] != table.loc["unablated", "loss"]


def test_a_threshold_of_mixed_lengths_is_refused() -> None:
    """Its run was accepted for the one sequence that is as long as the text."""
    model, mask = causal("llama").float(), torch.ones_like(IDS)
    mask[1:, 6:] = 0
    run = sinkscope.scan(model, data={"input_ids": IDS, "attention_mask": mask}, self_check=False)
    told = "scores over 6 to 40 tokens.*give a run whose sequences all have 40 tokens"
    with pytest.raises(sinkscope.SinkscopeError, match=told):
        sinkscope.arms(model, ["dynamic:bos_mass:10%"], run=run, data=IDS.flip(1))


def test_hidden_keys_are_a_dense_mask_to_the_bit() -> None:
    """As `ablate --tokens first` hid key 0 before there were arms: by a mask of all queries and keys."""

    def without_first(call: calls.AttentionCall) -> calls.AttentionCall:
        queries, keys = call.lengths
        if call.mask is None:
            mask = torch.ones(1, 1, queries, keys, dtype=torch.bool).tril()
        else:
            mask = call.mask.expand(-1, -1, queries, -1).clone()
        mask[..., 1:, 0] = False if mask.dtype == torch.bool else torch.finfo(mask.dtype).min
        return replace(call, mask=mask)

    from sinkscope.capture.interface import shadowed

    for family in ("llama", "gemma3"):
        model = causal(family).float()
        setting = setting_of(model, IDS)
        with torch.no_grad(), shadowed(model, lambda module, call: read(without_first(call))[0]):
            dense = model(IDS, use_cache=False).logits
        ours = run(Pass(setting, IDS), read_arm("keys:first1"), SinkCount(0.3))
        assert torch.equal(ours, dense)


# What changes nothing


@pytest.mark.parametrize("family", slow_but(["llama", "gemma3", "gpt2"], "gemma3"))
def test_no_key_a_wide_window_and_16_bits_change_nothing(family: str) -> None:
    setting = setting_of(causal(family).float(), IDS)
    nothing = [HiddenKeys(Positions("first", 0))]
    named = [f"window:{LENGTH}+0", f"window:{LENGTH + 5}+3", "kv:16", "acts:16/tensor", "acts:16/token+first1"]
    found = measure(setting, [*nothing, *map(read_arm, named)], 2, lambda *_: None)
    for one in found[1:]:
        assert (one.values["loss"] == found[0].values["loss"]).all(), one.name
        assert (one.values["kl"] == 0).all(), one.name
        assert (one.values["top1"] == 1).all(), one.name


def test_large_masks_stay_strips(monkeypatch: pytest.MonkeyPatch) -> None:
    """No arm makes a mask of all queries and keys, and a mask in strips gives the same bits."""
    setting = setting_of(causal("gemma3").float(), IDS)
    names = (
        "window:8+2",
        "window:8+random2",
        "window:8+2/random3",
        "window:8+random2/random3",
        "keys:first1",
        "keys:random3",
        "window:5+1/full",
    )
    dense = [measured_loss(setting, name) for name in names]
    monkeypatch.setattr(lazy, "LARGE", 1)

    def refuse(*_: Any) -> Any:
        raise AssertionError("a whole mask was made")

    monkeypatch.setattr(lazy._Source, "materialise", refuse)
    for name, expected in zip(names, dense, strict=True):
        assert torch.equal(measured_loss(setting, name), expected), name


# What stays behind


EVERY_KIND = (
    "heads:1.0", "heads:random3", "value:first1", "keys:first1", "keys:random2", "window:8+2", "kv:3+first1",
    "acts:4/tensor", "first-token:random", "neuron:1.7", "massive:zero", "massive:random", "window:8+2/random3",
)  # fmt: skip


@pytest.mark.parametrize("name", EVERY_KIND)
def test_an_arm_is_taken_off_also_after_an_exception(name: str, loud: Any) -> None:
    setting = setting_of(loud, IDS, massive_run({5: [0]}))
    arm = read_arm(name).ready(setting).prepared(setting)
    weights = {key: value.clone() for key, value in loud.state_dict().items()}
    functions = dict(AttentionInterface._global_mapping)
    before, count, one = losses(loud, IDS), hooks(loud), Pass(setting, IDS)
    with pytest.raises(RuntimeError, match="stop"), watched(one, SinkCount(0.3)), arm.applied(one):
        raise RuntimeError("stop")
    assert hooks(loud) == count
    assert one.changes == []
    assert one.ids is IDS
    assert AttentionInterface._global_mapping == functions
    assert all(torch.equal(value, weights[key]) for key, value in loud.state_dict().items())
    assert torch.equal(losses(loud, IDS), before)


def test_a_random_arm_is_the_same_in_any_batch() -> None:
    setting = setting_of(causal("llama"), random_ids(3, 20))
    sinks = torch.zeros(3, 20, dtype=torch.bool)
    sinks[2, :4] = True
    for positions in (Positions("random", 5), Positions("random-sinks")):
        whole = positions.mask(Pass(setting, setting.ids, 0, 1, sinks))
        last = positions.mask(Pass(setting, setting.ids[2:], 2, 1, sinks[2:]))
        assert torch.equal(whole[2:], last)
        assert not whole[:, 0].any()
        assert whole.sum(1).tolist() == ([5, 5, 5] if positions.count else [0, 0, 4])
        assert not torch.equal(whole, positions.mask(Pass(setting, setting.ids, 0, 2, sinks)))


# The numbers


def test_the_numbers_of_two_distributions() -> None:
    torch.manual_seed(0)
    first, second, ids = torch.randn(2, 9, 30), torch.randn(2, 9, 30), torch.randint(0, 30, (2, 9))
    found = Reference(first, ids).compare(second)
    p, q = first.double().softmax(-1), second.double().softmax(-1)
    kl = (p * (p / q).log()).sum(-1)
    expected = {
        "loss": -q[:, :-1].gather(-1, ids[:, 1:, None]).log().mean((1, 2)),
        "kl": kl[:, :-1].mean(1),
        "kl_last": kl[:, -1],
        "top1": (p.argmax(-1) == q.argmax(-1))[:, :-1].double().mean(1),
        "top5": torch.tensor([
            np.mean([len({*a.topk(5).indices.tolist()} & {*b.topk(5).indices.tolist()}) / 5
                     for a, b in zip(p[row, :-1], q[row, :-1], strict=True)])
            for row in range(2)
        ]),
    }  # fmt: skip
    for name, values in expected.items():
        torch.testing.assert_close(found[name], values.double(), rtol=1e-5, atol=1e-6, msg=name)
    reference = Reference(first.clone(), ids)
    reference.normalise()
    assert reference.normalised
    assert all((reference.compare(second)[name] == found[name]).all() for name in found), "to the last bit"


def test_a_divergence_is_never_below_0() -> None:
    """Log-probabilities of float32 are off by some 1e-7, all of a position in one direction."""
    torch.manual_seed(0)
    logits, ids = 3 * torch.randn(4, 64, 5000), torch.randint(0, 5000, (4, 64))
    found = Reference(logits, ids).compare(logits * (1 + 1e-7))
    for name in ("kl", "kl_last"):
        assert (found[name] >= 0).all(), name
        assert (found[name] < 1e-6).all(), name
    assert Reference(logits, ids).compare(logits.roll(1, -1))["kl"].min() > 1


@pytest.mark.slow
def test_sink_rates_are_those_of_a_scan() -> None:
    model, ids = causal("llama").float(), random_ids(5, 70)
    scanned = sinkscope.scan(model, data=ids, self_check=False, epsilon=0.1)
    setting = replace(setting_of(model, ids), epsilon=0.1)
    (own,) = measure(setting, [], 2, lambda *_: None)
    rates = {name: own.values[name].mean() for name in ("sink_rate_first", "sink_rate_any")}
    assert 0 < rates["sink_rate_first"] < 1
    assert rates["sink_rate_first"] == pytest.approx(scanned.heads["sink_rate"].mean())
    rows = scanned.sequences[scanned.sequences["head"].notna()]
    assert rates["sink_rate_any"] == pytest.approx((rows["sinks_per_sequence"] > 0).mean())


def test_attention_that_is_no_softmax_has_no_sink_rate() -> None:
    """Each weight of a sigmoid may be near 1: all heads had a sink, and every position was one."""
    model = causal("llama").float()
    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(
            lambda module, args, kwargs: (args, kwargs | {"score": "sigmoid"}), with_kwargs=True
        )
    setting = setting_of(model, IDS)
    for one in measure(setting, [read_arm("keys:first1").ready(setting)], 2, lambda *_: None):
        assert np.isfinite(one.values["loss"]).all()
        assert np.isnan([one.values[name] for name in ("sink_rate_first", "sink_rate_any")]).all()
    with pytest.raises(sinkscope.SinkscopeError, match="sinks: the model's attention is no softmax, so no threshold"):
        expanded([read_arm("kv:3+sinks")], setting)
    [warning] = expanded([read_arm("acts:6/token")], setting).missing
    assert warning.startswith("acts:6/token is measured without acts:6/token+sinks (sinks: the model's attention is no")
    read_by_run = sinkscope.scan(model, data=random_ids(4, LENGTH, seed=1), self_check=False)
    ablation = sinkscope.ablate(model, read_by_run, fractions=[0.25], tokens="first", data=IDS, draws=2)
    hidden_row = ablation.table.iloc[-1]
    assert ablation.words[-1] == (
        f"First token hidden from later queries: loss {hidden_row['increase']:+.4f} ± {hidden_row['increase_sem']:.4f}."
    )


def test_keys_that_are_no_tokens_are_no_sinks() -> None:
    """BLT attends to patches of the text, which are fewer than its tokens."""
    model = tiny_model_of(AutoModelForCausalLM, "blt")
    done = sinkscope.arms(model, ["first-token:random"], data=random_ids(2, 20), draws=2)
    assert np.isfinite(done.table["loss"]).all()
    assert done.table[["sink_rate_first", "sink_rate_any"]].isna().all(axis=None)
    with pytest.raises(sinkscope.SinkscopeError, match="sinks: the model attends from one sequence to another, so a"):
        Positions("sinks").check(setting_of(model, IDS), "acts:8/token+sinks")


@pytest.mark.parametrize("family", slow_but(["bert", "xlnet", "cpmant"], "bert"))
def test_a_model_whose_queries_see_later_tokens_is_refused(family: str) -> None:
    """The token that is to be predicted is among what it reads."""
    model = tiny_model_of(AutoModelForCausalLM, family)
    with pytest.raises(sinkscope.SinkscopeError, match=r"is not a causal language model: queries of .* see later"):
        sinkscope.arms(model, ["first-token:random"], data=random_ids(2, 20), draws=2)


def made(
    name: str, shift: Any, family: str | None = None, kept: int | None = None, draw: int | None = None
) -> ArmNumbers:
    base = np.linspace(2.0, 3.0, 8)
    values = {measure: np.zeros(8) for measure in MEASURES} | {"loss": base + shift, "size": np.ones(8)}
    return ArmNumbers(name, family, kept, draw, values)


def test_the_knee_is_the_least_number_within_an_error_of_the_best() -> None:
    noise = np.array([1, -1] * 4) * 0.1
    error = 0.1 / math.sqrt(7)
    shifts = {0: 2.0, 1: 0.5 + 1.1 * error, 2: 0.5 + 0.9 * error, 4: 0.5, 8: 0.6}
    rows = [made("unablated", 0.0), *(made(f"w+{n}", shift + noise, "w", n) for n, shift in shifts.items())]
    whole, _ = table_of([*rows, made("alone", 1.0, "v", 1)], {})
    table = whole.set_index("arm")
    assert table.loc["w+4", "increase_sem"] == pytest.approx(error)
    assert table["knee"].fillna(False).to_dict() == {name: name == "w+2" for name in table.index}
    assert table["knee"].isna().sum() == 2
    assert in_words(whole, {}) == [
        "w: with 2 tokens kept the loss is within one standard error of the lowest (+0.5340; +0.5000 with 4). With "
        "fewer it is not."
    ]
    least, _ = table_of([rows[0], rows[3], rows[4]], {})  # 2 and 4 kept
    (said,) = in_words(least, {})
    assert said.endswith("(+0.5340; +0.5000 with 4).")
    best, _ = table_of([rows[0], rows[1], rows[4]], {})  # 0 and 4 kept
    assert in_words(best, {}) == ["w: the loss is lowest with 4 tokens kept (+0.5000)."]


def test_p_is_what_the_words_say() -> None:
    """1 where no sequence's loss moves, or by rounding alone, 0 where all move alike, else of t; empty for one."""
    base = np.array([3.0, 2.5, 4.0])
    uneven = np.array([0.1, 0.2, 0.4])
    t = uneven.mean() / (uneven.std(ddof=1) / 3**0.5)
    of_t = 1 - t / (2 + t * t) ** 0.5  # two-sided, two degrees of freedom
    for change, expected in ((np.zeros(3), 1), (np.full(3, 1e-7), 1), (np.full(3, 0.25), 0), (uneven, of_t)):
        found = loss_cells((base + change)[None], base)["increase_p"]
        assert found == pytest.approx(expected, abs=1e-12)
    assert math.isnan(loss_cells(base[None, :1], base[:1])["increase_p"])


def test_what_sinks_cost_and_what_is_destroyed() -> None:
    gap = np.linspace(0.1, 0.5, 8)
    rows = [made("unablated", 0.0), made("acts:8/tensor", DESTROYED + 0.01), made("acts:8/tensor+sinks", 2.0 - gap)]
    table, _ = table_of([*rows, *(made("r", 0.3 * draw, draw=draw) for draw in range(3))], {"acts:8/tensor+sinks": "r"})
    row, kept = table.iloc[1], table.iloc[2]
    assert row["d_sink"] == pytest.approx(DESTROYED + 0.01 - 2.0 + gap.mean())
    assert row["d_sink_sem"] == pytest.approx(gap.std(ddof=1) / math.sqrt(8))
    assert row["d_sink_low"] < row["d_sink"] < row["d_sink_high"]
    assert (bool(row["destroyed"]), bool(kept["destroyed"])) == (True, False)
    assert kept["versus_random"] == pytest.approx(2.0 - gap.mean() - 0.3)
    assert table.iloc[3]["draws"] == 3
    assert table.iloc[3]["increase"] == pytest.approx(0.3)


def test_what_no_sequence_has_is_compared_with_nothing() -> None:
    """Without a sink, the sinks in 16 bits and as many random tokens are the arm itself. A difference of 0 with p = 1
    would say that sinks cost nothing."""
    arms = ["acts:8/tensor", "keys:sinks", "keys:first1"]
    result = sinkscope.arms(causal("llama"), arms, data=IDS, draws=2, cosines=True)
    table = result.table.set_index("arm")
    assert table.loc["unablated", "sink_rate_any"] == 0
    gap = [name for name in table if name.startswith(("versus_random", "d_sink"))]
    assert table.loc[["acts:8/tensor", "acts:8/tensor+sinks", "keys:sinks"], gap].isna().all(axis=None)
    assert np.isfinite(table.loc["keys:first1", "versus_random"])
    assert table.loc["keys:sinks", "control"] == "keys:random-sinks"
    reason = "because no sequence has what the arm names"
    assert f"keys:sinks: loss +0.0000; not compared with keys:random-sinks, {reason}." in result.words
    assert [sentence.split(": ")[0] for sentence in result.words if reason in sentence] == [
        "acts:8/tensor+sinks",
        "keys:sinks",
    ]
    assert not any("16 bits" in sentence for sentence in result.words)
    assert result.cosines is not None
    assert result.cosines.groupby("arm")["versus_random"].count()[["keys:sinks", "keys:first1"]].tolist() == [0, 3]
    similar = [sentence for sentence in result.words if "tokens are more similar" in sentence]
    assert [sentence.split(": ")[0] for sentence in similar] == ["keys:first1"]


# The grammar


@pytest.mark.parametrize(
    "text",
    [
        "heads:honor:low5%", "heads:3.1+4.0", "heads:random7", "dynamic:bos_mass:high2.5%", "value:first1",
        "keys:sinks", "keys:recent4", "window:256+4", "window:256+0/full", "window:8+random2/full", "kv:4",
        "kv:4+first1", "kv:2+sinks", "acts:8/tensor", "acts:4/token+random3", "massive:zero", "massive:mean/first",
        "first-token:<pad>", "first-token:random", "neuron:2.31", "neuron:2.random", "window:8+2/distant_write:low50%",
        "window:8+0/full/random3", "window:8+random2/honor:high5%", "kv:4+sink-tokens", "keys:random-sink-tokens",
        "map:3.1", "map:0.1+3.0", "map:layer2", "map:layer0/ridge0.01",
    ],
)  # fmt: skip
def test_an_arm_is_named_as_it_is_written(text: str) -> None:
    assert read_arm(text).name == text
    assert repr(read_arm(text)) == repr(read_arm(text))  # which is one of NaN, too


def test_short_forms() -> None:
    assert read_arm("heads:honor:5%").name == "heads:honor:low5%"
    assert read_arm("heads:honor:high:5%").name == "heads:honor:high5%"
    assert read_arm("value:first").name == "value:first1"


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("head:3.1", "no such kind of arm; choose one of "), ("key:first1", "; did you mean keys?"),
        ("", "no such kind of arm"), ("heads:3", "names no heads"),
        ("heads:honor:0%", "names no heads"), ("heads:honor:500%", "names no heads"),
        ("heads:qk_cos_first:5%", "are heads dormant where it is low"),
        ("keys:last4", "names no positions; write keys:POSITIONS"),
        ("keys:first0", "from 1 to"), ("window:0+4", "the window '0' is no whole number from 1"),
        ("window:256", "is no window"), ("window:256+4/half", "names no heads; write window:W+S"),
        ("window:256+4/random0", "the number of KV heads"), ("kv:4+", "names no positions"),
        ("window:8+random0", "from 1 to"), ("kv:0", "BITS '0'"),
        ("kv:17", "from 1 to 16"),
        ("kv:4+all", "names no positions"), ("acts:1/tensor", "from 2 to 16"), ("acts:8", "rounds nothing"),
        ("massive:one", "replaces nothing"), ("first-token:", "no token is named"), ("neuron:1", "names no neuron"),
        ("first-token:\udcff", "no token is named"),
        ("window:99999999999999999999+4", "is no whole number"), ("keys:first²", "names no positions"),
    ],
)  # fmt: skip
def test_what_the_grammar_refuses(text: str, error: str) -> None:
    with pytest.raises(sinkscope.SinkscopeError) as refused:
        read_arm(text)
    assert error in str(refused.value)
    assert "\n" not in str(refused.value)


NEED_A_RUN = ("massive:zero", "heads:honor:25%", "dynamic:honor:25%", "window:8+1/honor:50%", "kv:4+sink-tokens")


@pytest.mark.parametrize("text", NEED_A_RUN)
def test_an_arm_without_its_run_is_refused_before_the_model_is_loaded(text: str) -> None:
    with pytest.raises(sinkscope.SinkscopeError, match="give --run"):
        sinkscope.arms("/nowhere/model", [text])


@pytest.mark.parametrize(
    ("family", "text", "error"),
    [
        ("mistral", "window:8+1/full", "the model has no full layer; leave out /full (evict: --layers all)"),
        ("llama", "massive:zero", "give --run"), ("llama", "heads:honor:25%", "give --run"),
        ("llama", "dynamic:honor:25%", "give --run"), ("llama", "heads:1.4", "no head 4 in layer 1"),
        ("llama", "heads:random13", "only 12 heads"), ("llama", "neuron:3.1", "no layer 3"),
        ("llama", "neuron:1.96", "only 96 neurons"),
        ("llama", "keys:first41", "--arm keys:first41: first41: sequences of 40 tokens have only 40 such positions; a"),
        ("llama", "window:8+41/full", "--arm window:8+41/full: first41: sequences of 40 tokens have only 40 such"),
        ("llama", "window:8+1/random7", "there are only 6 KV heads"),
        ("llama", "window:8+1/honor:50%", "a score of a run chooses these heads: give --run"),
        ("llama", "kv:4+sink-tokens", "sink-tokens: tokens.csv of a run names these tokens: give --run"),
        ("llama", "keys:random40", "only 39 such positions"), ("llama", "first-token:e", "has no tokenizer"),
        ("gpt_oss", "acts:8/tensor", "multiplies by a matrix outside of linear modules"),
        ("gpt_oss", "neuron:1.1", "0 projections from neurons"),
    ],
)  # fmt: skip
def test_an_arm_that_cannot_apply_is_refused_before_anything_runs(family: str, text: str, error: str) -> None:
    setting = setting_of(causal(family).float(), IDS)
    with pytest.raises(sinkscope.SinkscopeError) as refused:
        expanded([read_arm(text)], setting)
    assert error in str(refused.value)


@pytest.mark.parametrize(
    ("family", "text", "error"),
    [
        ("bloom", "heads:0.1", "computes attention in its own way: its heads cannot be zeroed safely"),
        ("bloom", "keys:first1", "computes attention in its own way: its keys and values are out of reach"),
        (
            "bloom",
            "acts:8/tensor+sinks",
            r"--arm acts:8/tensor\+sinks: sinks: the model computes attention in its own way, so its sinks are not",
        ),
        ("xlnet", "acts:8/tensor", "--arm acts:8/tensor: the model itself multiplies by a matrix outside of linear"),
        ("jetmoe", "heads:0.1", "no output projection of layers.0.self_attention was found"),
        ("diffllama", "heads:0.1", "layers.0.self_attn is called several times in a pass"),
        ("bert", "kv:4", "encoder.layer.0.attention.self is no causal self-attention"),
        ("qwen2_moe", "neuron:1.3", "layer 1 has experts, and only the one that all tokens share is in reach"),
    ],
)
def test_attention_that_an_arm_cannot_reach_is_refused(family: str, text: str, error: str) -> None:
    setting = setting_of(tiny_model_of(AutoModelForCausalLM, family), IDS)
    with pytest.raises(sinkscope.SinkscopeError, match=error):
        expanded([read_arm(text)], setting)


def shared(part: str) -> Any:
    """A tiny Llama whose layers 0 and 2 are the same, or share this part of theirs."""
    model = causal("llama")
    first, last = model.base_model.layers[0], model.base_model.layers[2]
    if part:
        last.get_submodule(part.rpartition(".")[0]).register_module(part.rpartition(".")[2], first.get_submodule(part))
    else:
        model.base_model.layers[2] = first
    return model


@pytest.mark.parametrize(
    ("part", "name", "error"),
    [
        ("self_attn.o_proj", "heads:0.1", "o_proj is called several times in a pass: heads cannot be zeroed apart"),
        ("self_attn.o_proj", "heads:random2", "o_proj is called several times in a pass: heads cannot be zeroed apart"),
        ("self_attn.o_proj", "map:0.1", "o_proj is called several times in a pass: heads cannot be zeroed apart"),
        ("mlp.down_proj", "neuron:2.7", "the MLP of layer 2 is called several times in a pass: its neurons cannot be"),
        ("mlp", "neuron:0.random", "the MLP of layer 0 is called several times in a pass: its neurons cannot be set"),
        ("", "massive:zero", "layers.0 is called several times in a pass: its inputs cannot be changed apart"),
    ],
)
def test_an_arm_does_not_change_other_layers_that_share_its_module(part: str, name: str, error: str) -> None:
    setting = setting_of(shared(part), IDS, massive_run({5: [0, 2]}))
    with pytest.raises(sinkscope.SinkscopeError, match=error):
        expanded([read_arm(name)], setting)
    if part == "mlp.down_proj":
        measured_loss(setting, "neuron:1.7")
        measured_loss(setting, "heads:0.1")


@pytest.mark.parametrize(
    ("elements", "error"),
    [({5: [7, 8]}, "the input of layer 7 was not found in the model"), ({}, "the run found no massive activations")],
)
def test_massive_elements_that_are_not_there(elements: dict[int, list[int]], error: str) -> None:
    setting = setting_of(causal("llama"), IDS, massive_run(elements))
    with pytest.raises(sinkscope.SinkscopeError, match=f"--arm massive:zero: {error}"):
        expanded([read_arm("massive:zero")], setting)


def test_a_token_without_an_embedding(tiny_model: Any, tokenizer: Any) -> None:
    setting = setting_of(tiny_model, IDS)
    setting.checkpoint.tokenizer = copy.deepcopy(tokenizer)
    setting.checkpoint.tokenizer.add_tokens(["<new>"])
    with pytest.raises(sinkscope.SinkscopeError, match="--arm first-token:<new>: the model has no embedding for token"):
        read_arm("first-token:<new>").ready(setting)


def test_what_is_random_has_no_control() -> None:
    names = ["window:8+random2", "window:8+2/random3", "heads:random3", "neuron:1.random"]
    whole = expanded([read_arm(name) for name in names], setting_of(causal("llama"), IDS))
    assert [arm.name for arm in whole.arms] == names
    assert (whole.controls, whole.missing) == ({}, [])


@pytest.mark.parametrize(
    ("family", "name", "absent", "reason"),
    [
        ("bloom", "acts:8/tensor", "acts:8/tensor+sinks", "sinks: the model computes attention in its own way, so its"),
        ("llama", "kv:2+first40", "its random control kv:2+random40", "random40: sequences of 40 tokens have only 39"),
        ("llama", "keys:first40", "its random control keys:random40", "random40: sequences of 40 tokens have only 39"),
        ("llama", "window:4+40", "its random control window:4+random40", "random40: sequences of 40 tokens have only"),
    ],
)
def test_a_companion_or_control_that_cannot_apply_is_left_out_and_named(
    family: str, name: str, absent: str, reason: str
) -> None:
    setting = setting_of(tiny_model_of(AutoModelForCausalLM, family), IDS)
    for only_counted in (False, True):
        whole = expanded([read_arm(name)], setting, only_counted)
        assert [arm.name for arm in whole.arms] == [name]
        assert whole.controls == {}
        [warning] = whole.missing
        assert warning.startswith(f"{name} is measured without {absent} ({reason}"), warning
    for written_too in ([name, absent.split()[-1]], [absent.split()[-1], name]):
        with pytest.raises(sinkscope.SinkscopeError, match=reason):
            expanded(list(map(read_arm, written_too)), setting)


@pytest.mark.parametrize("family", slow_but(["bloom", "gpt_neo", "falcon"], "bloom"))
def test_rounded_activations_without_sinks_that_can_be_seen(family: str) -> None:
    done = sinkscope.arms(tiny_model_of(AutoModelForCausalLM, family), ["acts:4/tensor", "acts:4/tensor+first1"],
                          data=IDS, draws=2)  # fmt: skip
    rows = done.table.set_index("arm")
    assert list(rows.index) == ["unablated", "acts:4/tensor", "acts:4/tensor+first1", "acts:4/tensor+random1"]
    assert rows[[name for name in rows if name.startswith("d_sink")]].isna().all(axis=None)
    assert rows.loc["acts:4/tensor+first1", "control"] == "acts:4/tensor+random1"
    assert np.isfinite(rows.loc["acts:4/tensor", ["loss", "increase"]].to_numpy(float)).all()
    [warning] = [text for text in done.warnings if "acts:4/tensor" in text]
    assert "is measured without acts:4/tensor+sinks" in warning


@pytest.mark.parametrize("name", ["heads:1.0", "heads:honor:25%"])
def test_an_arm_that_is_not_ready_says_so(name: str) -> None:
    """To the author of an arm that applies another one."""
    with pytest.raises(TypeError, match=f"{read_arm(name).name} is not ready"):
        read_arm(name).applied(Pass(setting_of(causal("llama"), IDS), IDS))


def test_every_kind_is_told_of_in_the_help() -> None:
    from sinkscope.cli import app

    text = " ".join(CliRunner().invoke(app, ["arms", "--kinds"]).stdout.split())
    brief = CliRunner(env={"COLUMNS": "80"}).invoke(app, ["arms", "--help"]).stdout
    for kind in BUILT_IN:
        assert kind.source
        assert f"{kind.grammar}: {kind.what}" in text
        assert re.search(rf"^  {re.escape(kind.example)} +{re.escape(kind.short)}$", brief, re.MULTILINE)
        assert read_arm(kind.example).name.startswith(f"{kind.name}:")
        assert "(" not in kind.name
        assert kind.grammar.startswith(f"{kind.name}:")
    assert "Example: sinkscope arms" in brief
    assert brief.index("Arguments:") < brief.index("\n" * 2 + "Options:") < 2000


def test_every_file_of_kinds_is_in_the_table() -> None:
    """Each kind has a file of its own, and its reader reads one of the forms that the table lists."""
    files = {path.stem for path in Path(massive.__file__).parent.glob("*.py")} - {"__init__"}
    assert {kind.reader.partition(":")[0] for kind in BUILT_IN} == files
    assert [kind.name for kind in BUILT_IN] == [name for name in READERS if READERS.ships(name)]
    for name in KINDS:
        with pytest.raises(sinkscope.SinkscopeError) as refused:
            read_arm(f"{name}:" + "\udcff" * (name == "first-token"))
        assert str(refused.value).endswith(f"; write {written(name)}")


def test_the_grammar_loads_no_torch() -> None:
    seen = "'neuron:11.1229' in arms.__doc__, 'torch' in sys.modules"
    code = f"import sys; from sinkscope.cli.arms import arms; print({seen})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True False\n"


# Models that call their modules in other ways


class ByKeyword(nn.Linear):
    """Is handed its input under a name."""

    def __call__(self, read: Tensor) -> Any:
        return super().__call__(input=read)


class NamedStream(LlamaDecoderLayer):  # type: ignore[misc] # transformers exports it untyped
    """Is handed its residual stream as `hidden_states`."""

    NAME = "hidden_states"

    def __call__(self, stream: Tensor, **rest: Any) -> Any:
        return nn.Module.__call__(self, **{self.NAME: stream}, **rest)


class OddlyNamedStream(NamedStream):
    """Is handed it under another name."""

    NAME = "stream"

    def forward(self, stream: Tensor, **rest: Any) -> Any:
        return super().forward(stream, **rest)


class Summarised(LlamaDecoderLayer):  # type: ignore[misc]
    """Attends from its first token alone, and adds what it finds to every token."""

    def forward(self, stream: Tensor, *, position_embeddings: Any, **rest: Any) -> Any:
        first = tuple(part[:, :1] for part in position_embeddings)
        summary, _ = self.self_attn(stream[:, :1], attention_mask=None, position_embeddings=first)
        return super().forward(stream + summary, position_embeddings=position_embeddings, **rest)


class TwiceWhereLong(LlamaDecoderLayer):  # type: ignore[misc]
    """Attends a second time in sequences longer than those of the dry run."""

    def forward(self, stream: Tensor, **rest: Any) -> Any:
        out = super().forward(stream, **rest)
        return super().forward(out, **rest) if stream.shape[1] > 30 else out


def with_layer(kind: type[LlamaDecoderLayer], model: Any = None) -> Any:
    """A tiny Llama whose layer 0 is of this kind."""
    model = model or causal("llama")
    model.base_model.layers[0].__class__ = kind
    return model


def test_heads_that_the_projection_does_not_read_side_by_side_are_refused() -> None:
    model = causal("llama")
    model.base_model.layers[1].self_attn.o_proj.__class__ = ByKeyword
    with pytest.raises(sinkscope.SinkscopeError, match=r"layers\.1\.self_attn\.o_proj does not read its heads side by"):
        measured_loss(setting_of(model, IDS), "heads:1.2")


def test_a_residual_stream_that_is_handed_over_by_name(loud: Any) -> None:
    ours = measured_loss(setting_of(loud, IDS, massive_run({5: [0]})), "massive:zero")
    assert (ours - losses(loud, IDS)).abs().min() > 1e-5
    named = setting_of(with_layer(NamedStream, loud), IDS, massive_run({5: [0]}))
    assert torch.equal(measured_loss(named, "massive:zero"), ours)
    odd = setting_of(with_layer(OddlyNamedStream, loud), IDS, massive_run({5: [0]}))
    with pytest.raises(
        sinkscope.SinkscopeError, match="OddlyNamedStream does not read the residual stream as its first"
    ):
        measured_loss(odd, "massive:zero")


def test_attention_of_a_single_query_stays_as_it_is() -> None:
    model = with_layer(Summarised)

    def change(layer: int, key: Tensor, value: Tensor, seen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return (key, value, seen) if key.shape[2] == 1 else hidden(0)(layer, key, value, seen)

    with attention_by_hand(model, change):
        expected = losses(model, IDS)
    assert (expected - losses(causal("llama"), IDS)).abs().min() > 1e-3
    torch.testing.assert_close(measured_loss(setting_of(model, IDS), "keys:first1"), expected, rtol=0, atol=2e-6)
    with pytest.raises(sinkscope.SinkscopeError, match=r"q_proj does not read a row for each token of the batch"):
        measured_loss(setting_of(model, IDS), "acts:8/tensor")


def test_a_call_that_the_dry_run_did_not_see_is_refused() -> None:
    """No arm would change it, and its sinks would be counted as another call's."""
    setting = setting_of(with_layer(TwiceWhereLong), IDS)
    with pytest.raises(sinkscope.SinkscopeError, match=r"'layers\.0\.self_attn' was called more often than in the dry"):
        measured_loss(setting, "keys:first1")


# Arms from outside the package


@dataclass(frozen=True)
class ScaledValues(Arm):
    """All values times a factor."""

    factor: float
    title: str = ""

    @property
    def name(self) -> str:
        return self.title or f"scaled:{self.factor:g}"

    @contextmanager
    def applied(self, forward: Pass) -> Iterator[None]:
        with forward.changed(lambda site, call: replace(call, value=self.factor * call.value)):
            yield


def test_an_arm_of_one_s_own(tiny_model: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an object, and by a name of the grammar."""
    monkeypatch.setattr("sinkscope.experiments.arms.grammar.KINDS", dict(KINDS))
    monkeypatch.setattr("sinkscope.experiments.arms.grammar.READERS", copy.deepcopy(READERS))

    @sinkscope.arm_kind("scaled", "scaled:FACTOR", "this test")
    def read_scaled(rest: str) -> Arm:
        """All values times a factor."""
        return ScaledValues(float(rest))

    assert "\n\nscaled:FACTOR: All values times a factor.\n\n" in told()
    with pytest.raises(sinkscope.SinkscopeError, match="is declared already"):
        sinkscope.arm_kind("scaled", "scaled:FACTOR", "this test")(read_scaled)
    options: dict[str, Any] = {"tokenizer": tokenizer, "num_sequences": 2, "seq_len": 24, "draws": 2}
    result = sinkscope.arms(tiny_model, [ScaledValues(1.0), "scaled:0.5"], **options)
    rows = result.table.set_index("arm")
    assert rows.loc["scaled:1", "increase"] == 0
    assert rows["size"].isna().tolist() == [False, True, True]  # the arm does not say
    assert rows.loc["scaled:0.5", "increase"] != 0


@pytest.mark.parametrize(
    ("arms", "name"),
    [
        ([ScaledValues(0.5, "scaled"), ScaledValues(0.1, "scaled")], "scaled"),
        ([ScaledValues(0.5, "keys:first1"), "keys:first1"], "keys:first1"),
        (["acts:4/tensor", ScaledValues(0.5, "acts:4/tensor+sinks")], "acts:4/tensor+sinks"),
        ([ScaledValues(0.5, "keys:random1"), "keys:first1"], "keys:random1"),
    ],
)
def test_two_arms_of_one_name_are_refused(arms: list[Any], name: str) -> None:
    """One would go unmeasured, or stand as another one's control."""
    setting = setting_of(causal("llama").float(), IDS)
    chosen = [read_arm(arm) if isinstance(arm, str) else arm for arm in arms]
    error = f"--arm {name}: two different arms have this name; give one of them another"
    with pytest.raises(sinkscope.SinkscopeError, match=f"^{re.escape(error)}$"):
        expanded(chosen, setting)
    named = [ScaledValues(0.5), ScaledValues(0.5), "keys:random1", "keys:first1", "acts:4/tensor+sinks"]
    whole = expanded([read_arm(arm) if isinstance(arm, str) else arm for arm in [*named, "acts:4/tensor"]], setting)
    assert [arm.name for arm in whole.arms][:5] == ["scaled:0.5", *named[2:], "acts:4/tensor"]


def read_packaged(rest: str) -> Any:
    if not rest:
        raise sinkscope.SinkscopeError("no factor")
    if rest == "nameless":
        return ScaledValues(1, cast(str, 7))
    return None if rest == "none" else ScaledValues(float(rest))


def test_an_arm_of_another_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """By an entry point, which `--help` names without loading it."""
    entry = EntryPoint("packaged", f"{__name__}:read_packaged", "sinkscope.arms")
    installed = {"sinkscope.arms": {"packaged": [entry]}}
    monkeypatch.setattr("sinkscope.lookup._entries", lambda group, paths: installed.get(group, {}))
    assert read_arm("packaged:2").name == "scaled:2"
    whose = f"from the package {entry.value}"  # an installed package has its name there
    assert f"\n\npackaged:REST: {whose}\n\n" in told()
    assert listed()[-1] == ("packaged:REST", whose)
    with pytest.raises(sinkscope.SinkscopeError, match="--arm 'packaged:': no factor; write packaged:REST"):
        read_arm("packaged:")
    with pytest.raises(
        sinkscope.SinkscopeError, match=r"choose one of heads, .*, map, packaged; did you mean packaged"
    ):
        read_arm("packed:2")
    with pytest.raises(sinkscope.SinkscopeError, match=r"'packaged:two': .*'s reader fails: could not convert"):
        read_arm("packaged:two")
    with pytest.raises(sinkscope.SinkscopeError, match=r"'packaged:nameless': .* returns an Arm whose name is no"):
        read_arm("packaged:nameless")
    with pytest.raises(sinkscope.SinkscopeError, match=r"'packaged:none': .*'s reader returns no Arm, but NoneType"):
        read_arm("packaged:none")


class Failing(ScaledValues):
    """Fails at one of its steps."""

    def __init__(self, at: str) -> None:
        super().__init__(1.0)
        self.at = at

    def ready(self, setting: Any) -> Any:
        return self._fail("ready") or self

    def tried(self, setting: Any) -> Any:
        return self._fail("tried") or self

    def prepared(self, setting: Any) -> Any:
        return self._fail("prepared") or self

    def applied(self, forward: Any) -> Any:
        self._fail("applied")
        forward.changes.append(lambda site, call: self._fail("in the pass") or call)
        return super().applied(forward)

    def _fail(self, at: str) -> None:
        if at == self.at:
            raise KeyError("factor")


@pytest.mark.parametrize("at", ["ready", "tried", "prepared", "applied", "in the pass"])
def test_an_arm_of_another_package_that_fails_is_named(at: str, tiny_model: Any, tokenizer: Any) -> None:
    options: dict[str, Any] = {"tokenizer": tokenizer, "num_sequences": 2, "seq_len": 24}
    with pytest.raises(sinkscope.SinkscopeError) as refused:
        sinkscope.arms(tiny_model, [Failing(at)], **options)
    assert str(refused.value) == f"--arm scaled:1: {__name__} fails: 'factor' is missing"


# The experiment and the commands


ARMS = ["keys:first1", "kv:2+first1", "window:8+2"]
SMALL: dict[str, Any] = {"num_sequences": 4, "seq_len": 24, "draws": 2}


@pytest.mark.slow
def test_an_interrupted_measurement_goes_on(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sinkscope.experiments.arms.engine.batch_size", lambda model, length: 1)
    options = SMALL | {"shards": tmp_path / "a", "resume": True}
    whole = sinkscope.arms(str(tiny_folder), ARMS, **SMALL)

    def stop(stage: str, done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sinkscope.arms(str(tiny_folder), ARMS, progress=stop, **options)
    kept = sorted(path.name for path in (tmp_path / "a" / "shards").iterdir())
    assert kept == ["00000000.json", "00000001.json", "key.json"]
    with pytest.raises(sinkscope.SinkscopeError, match="unfinished measurement with another arms"):
        sinkscope.arms(str(tiny_folder), ARMS[:1], **options)
    with pytest.raises(sinkscope.SinkscopeError, match="unfinished measurement with another data"):
        sinkscope.arms(str(tiny_folder), ARMS, seed=1, **options)
    damaged = tmp_path / "a" / "shards" / "00000001.json"
    damaged.write_text(damaged.read_text().replace("0.", "1.", 1))
    seen: list[int] = []
    result = sinkscope.arms(str(tiny_folder), ARMS, progress=lambda stage, done, total: seen.append(done), **options)
    jobs = 1 + 3 + 2 * 3
    assert sum(0 < done <= jobs for done in seen) == 1, "the first batch was taken, not measured"
    assert sum(jobs < done <= 2 * jobs for done in seen) > jobs, "the damaged one was measured again"
    pd.testing.assert_frame_equal(result.sequences, whole.sequences, check_exact=True)
    result.save(tmp_path / "a", resume=True)
    assert {path.name for path in (tmp_path / "a").iterdir()} == {"arms.csv", "arm_sequences.csv", "arms.json"}


def kept_batch(folder: Path) -> tuple[Path, np.ndarray]:
    """One finished batch on disk, and its numbers."""
    values = np.arange(6.0).reshape(1, 2, 3)
    Finished(folder, {"seed": 0}, resume=False).write(0, values)
    return folder / "shards", values


@pytest.mark.parametrize("content", ["[" * 100_000, "[]", "", "\xff", '{"values": [[[', "{}"])
def test_a_damaged_batch_is_measured_again(content: str, tmp_path: Path) -> None:
    shards, values = kept_batch(tmp_path)
    (shards / "00000000.json").write_text(content, "latin-1")
    found = Finished(tmp_path, {"seed": 0}, resume=True)
    assert found.read(0, values.shape) is None
    with pytest.raises(KeyboardInterrupt), found.kept():
        raise KeyboardInterrupt


@pytest.mark.parametrize("number", ["1" * 400, '"many"', "null", "[1]", "1" * 5000])
def test_a_number_that_no_batch_holds(number: str, tmp_path: Path) -> None:
    shards, values = kept_batch(tmp_path)
    path = shards / "00000000.json"
    path.write_text(path.read_text().replace("5.0", number))
    assert Finished(tmp_path, {"seed": 0}, resume=True).read(0, values.shape) is None


@pytest.mark.parametrize("content", ["[" * 100_000, "[]", "", "nonsense", '{"seed": ' + "1" * 5000 + "}"])
def test_a_damaged_key_is_told_of(content: str, tmp_path: Path) -> None:
    shards, _ = kept_batch(tmp_path)
    (shards / "key.json").write_text(content)
    with pytest.raises(sinkscope.SinkscopeError, match=r"shards/key\.json is damaged: start anew with --force"):
        Finished(tmp_path, {"seed": 0}, resume=True)
    Finished(tmp_path, {"seed": 0}, resume=False)
    assert json.loads((shards / "key.json").read_text()) == {"seed": 0}


def test_a_key_with_a_large_number_is_another_measurement(tmp_path: Path) -> None:
    shards, _ = kept_batch(tmp_path)
    (shards / "key.json").write_text('{"seed": ' + "1" * 400 + "}")
    told = r"an unfinished measurement with another seed \(1{18}\.{3}1{18} there, 0 now\); give another --out"
    with pytest.raises(sinkscope.SinkscopeError, match=told):
        Finished(tmp_path, {"seed": 0}, resume=True)


@pytest.mark.parametrize("name", ["00000000.json", "key.json"])
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
@pytest.mark.usefixtures("in_time")
def test_a_pipe_in_the_place_of_a_batch_is_refused(make: Callable[[Path], None], name: str, tmp_path: Path) -> None:
    """Nobody writes into it: who reads it waits for ever."""
    shards, values = kept_batch(tmp_path)
    (shards / name).unlink()
    make(shards / name)
    with pytest.raises(sinkscope.SinkscopeError, match=f"shards/{name} is no file: remove it, or start anew with"):
        Finished(tmp_path, {"seed": 0}, resume=True).read(0, values.shape)
    Finished(tmp_path, {"seed": 0}, resume=False)
    assert sorted(path.name for path in shards.iterdir()) == ["key.json"]


def test_another_run_is_another_measurement() -> None:
    """Also one of the same text, whose scores were measured in another way."""
    setting = setting_of(causal("llama").float(), IDS)
    facts: dict[str, Any] = dict.fromkeys(("model", "data", "arms", "draws", "seed", "cosines"))
    keys = []
    for digest in ("a", "b", "b"):
        setting.run = SimpleNamespace(manifest=SimpleNamespace(files={"streaming.csv": digest}))  # type: ignore[assignment]
        keys.append(key_of(facts | {"run": {"data": ["the same"]}}, setting))
    assert keys[0] != keys[1] == keys[2]


@pytest.mark.parametrize(
    ("arms", "options", "error"),
    [
        ([], {}, "nothing to measure: at least one arm is needed"),
        (3, {}, "arms: a name, an Arm or a list of them is needed, not int"),
        ([3], {}, "arms: a name or an Arm is needed, not int"),
        ([ScaledValues(2.0, "unablated")], {}, "--arm unablated: the unablated model is always measured"),
        (["kv:4"], {"seed": -1}, "--seed -1: 0 or more is needed"),
        (["kv:4"], {"seq_len": 1}, "--seq-len 1: at least 2 tokens are needed"),
    ],
)
def test_a_measurement_that_cannot_be(
    arms: Any, options: dict[str, int], error: str, tiny_model: Any, tokenizer: Any
) -> None:
    with pytest.raises(sinkscope.SinkscopeError, match=error):
        sinkscope.arms(tiny_model, arms, tokenizer=tokenizer, **SMALL | options)


def test_a_run_of_a_model_with_other_heads(tokenizer: Any, read_run: Any) -> None:
    """No hash tells two models in memory apart: their heads do."""
    with pytest.raises(sinkscope.SinkscopeError, match="the run's heads are not those of LlamaForCausalLM: scan this"):
        sinkscope.arms(make_model(num_hidden_layers=3), ["kv:4"], run=read_run, tokenizer=tokenizer, **SMALL)


def other_numbers() -> Any:
    """`tiny_model` with one number of one weight changed."""
    model = make_model()
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[0, 0] += 1
    return model


def interrupted(model: Any, arms: list[Any], shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One batch of the measurement is kept, and no more."""
    write = Finished.write

    def dying(self: Finished, *args: Any) -> None:
        write(self, *args)
        raise KeyboardInterrupt

    with monkeypatch.context() as stopping, pytest.raises(KeyboardInterrupt):
        stopping.setattr(Finished, "write", dying)
        sinkscope.arms(model, arms, data=IDS, draws=2, shards=shards)


def test_another_model_object_does_not_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name, its type and its sizes are the same."""
    interrupted(make_model(), ["kv:4"], tmp_path, monkeypatch)
    with pytest.raises(sinkscope.SinkscopeError, match=r"unfinished measurement with another model\.tensors_sha256"):
        sinkscope.arms(other_numbers(), ["kv:4"], data=IDS, draws=2, shards=tmp_path, resume=True)
    whole = sinkscope.arms(make_model(), ["kv:4"], data=IDS, draws=2)
    ours = sinkscope.arms(make_model(), ["kv:4"], data=IDS, draws=2, shards=tmp_path, resume=True)
    pd.testing.assert_frame_equal(ours.table, whole.table, check_exact=True)


def test_other_code_does_not_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither other code of sinkscope's, nor other code of an arm of one's own under the same name."""

    def resumed() -> None:
        sinkscope.arms(make_model(), [ScaledValues(0.5)], data=IDS, draws=2, shards=tmp_path, resume=True)

    interrupted(make_model(), [ScaledValues(0.5)], tmp_path, monkeypatch)
    with monkeypatch.context() as changed:
        changed.setattr("sinkscope.engine.shards.MEASURING", ("capture", "metrics"))
        with pytest.raises(sinkscope.SinkscopeError, match="unfinished measurement with another measuring_code"):
            resumed()
    with monkeypatch.context() as changed:
        changed.setattr("sinkscope.experiments.arms.finished.code_sha256", lambda function: "0" * 64)
        with pytest.raises(sinkscope.SinkscopeError, match=r"another arms_code\..*ScaledValues \("):
            resumed()
    resumed()


def test_a_run_of_a_model_object_of_other_numbers(tmp_path: Path) -> None:
    """A scan that kept its batches has the hash of its model's numbers."""
    run = sinkscope.scan(make_model(), data=random_ids(4, 20), shards=tmp_path, self_check=False)
    sinkscope.arms(make_model(), ["kv:4"], data=IDS, draws=2, run=run)
    with pytest.raises(sinkscope.SinkscopeError, match="weights are not those of LlamaForCausalLM: scan this model"):
        sinkscope.arms(other_numbers(), ["kv:4"], data=IDS, draws=2, run=run)


def test_shards_that_cannot_be_written(tiny_model: Any, tokenizer: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(sinkscope.SinkscopeError, match=r"cannot write .*file/shards: Not a directory"):
        sinkscope.arms(tiny_model, ["kv:4"], tokenizer=tokenizer, shards=tmp_path / "file", **SMALL)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_loss_that_overflows_names_the_arm() -> None:
    model = causal("llama").float()
    setting = setting_of(model, IDS)
    arm = ScaledValues(1e38)
    with pytest.raises(
        sinkscope.SinkscopeError, match=r"scaled:1e\+38 is NaN or infinite: float32 overflows; try --dtype float64"
    ):
        measure(setting, [arm], 2, lambda *_: None)


def test_nothing_is_left_of_a_measurement_that_failed_at_once(tiny_folder: Path, tmp_path: Path) -> None:
    def stop(stage: str, done: int, total: int) -> None:
        if total:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sinkscope.arms(str(tiny_folder), ARMS, progress=stop, shards=tmp_path / "a", **SMALL)
    assert not (tmp_path / "a").exists()


@pytest.fixture
def cli(tmp_path: Path, tiny_folder: Path) -> Callable[..., Result]:
    def invoke(command: str, *args: object, model: object = tiny_folder) -> Result:
        from sinkscope.cli import app

        words = [command, str(model), "--num-sequences", "3", "--seq-len", "24", "--draws", "2"]
        words += ["--out", str(tmp_path / command), *map(str, args)]
        return CliRunner().invoke(app, words)

    return invoke


@pytest.mark.parametrize(
    ("command", "words", "arms", "shown"),
    [
        pytest.param(
            "arms",
            ["--arm", "keys:first1", "--arm", "first-token:<pad>"],
            ["keys:first1", "first-token:<pad>"],
            ["keys:random1 (2 draws)", "first-token:<pad>"],
            marks=pytest.mark.slow,
        ),
        (
            "evict",
            ["--window", "4", "--sinks", "0,1"],
            ["window:4+0/full", "window:4+1/full"],
            [
                "window:4/full",
                "  random",
                "0 sinks",
                "1 sink\n",
                " *",
                "sinks: first tokens that every query still sees",
            ],
        ),
        pytest.param(
            "quant",
            ["--bits", "3,4", "--kept", "0,1", "--acts", "8"],
            [
                *("kv:3", "kv:3+first1", "kv:4", "kv:4+first1"),
                *("acts:8/tensor", "acts:8/tensor+sinks", "acts:8/token", "acts:8/token+sinks"),
            ],
            ["kv:3", "acts:8/token+sinks", "loss minus that with"],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_command_writes_its_folder(
    command: str, words: list[str], arms: list[str], shown: list[str], cli: Callable[..., Result], tmp_path: Path
) -> None:
    from sinkscope.runs.schema.other_tables import ARMS_TABLES

    done = cli(command, *words)
    assert done.exit_code == 0, done.stderr
    folder = tmp_path / command
    files = {"arms.csv", "arm_sequences.csv", "arms.json", "arms.png", "arms.svg"}
    assert {path.name for path in folder.iterdir()} == files
    assert all(part in done.stdout for part in shown), done.stdout
    open_squares = (folder / "arms.svg").read_text().count("fill: #ffffff; stroke: ")
    assert bool(open_squares) == (command != "arms"), "a control of one point looks like its arm"
    assert max(map(len, done.stdout.splitlines())) <= 80, "long names stand above their numbers"
    for name in sorted(ARMS_TABLES.keys() - {"arm_cosines"}):
        table = pd.read_csv(folder / f"{name}.csv")
        assert list(table.columns) == [column.name for column in table_columns(ARMS_TABLES[name])]
    saved = json.loads((folder / "arms.json").read_text())
    assert [row["arm"] for row in saved["table"] if "random" not in row["arm"]] == ["unablated", *arms]
    assert 0 < done.stdout.index(saved["in_words"][0][:20]) < done.stdout.index(" increase"), "the answer stands on top"
    assert "holds a finished measurement of arms: --force" in cli(command, *words).stderr
    first = {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix != ".json"}
    assert json.loads(cli(command, *words, "--force", "--json").stdout)["table"] == saved["table"]
    assert {name: (folder / name).read_bytes() for name in first} == first


@pytest.mark.parametrize(
    ("command", "words", "arm"),
    slow_but(
        [
            ("arms", ("kv:2+first24", "--cosines"), "kv:2+first24"),
            ("evict", ("--window", "4", "--sinks", "1,24"), "window:4+24/full"),
            ("quant", ("--bits", "2", "--kept", "24", "--cosines"), "kv:2+first24"),
        ],
        ("quant", ("--bits", "2", "--kept", "24", "--cosines"), "kv:2+first24"),
    ),
)
def test_a_control_that_is_missing_leaves_its_cells_empty(
    command: str, words: tuple[str, ...], arm: str, cli: Callable[..., Result], tmp_path: Path
) -> None:
    """In the tables, on the screen, in the figure and in the page."""
    done = cli(command, *words)
    assert done.exit_code == 0, done.stderr
    assert f"{arm} is measured without its random control" in " ".join(done.stderr.split())
    assert "nan" not in done.stdout
    assert {"arms.png", "arms.svg"} <= {path.name for path in (tmp_path / command).iterdir()}
    saved = load_arms(tmp_path / command)
    row = saved.table.set_index("arm").loc[arm]
    assert row[["control", "versus_random", "versus_random_sem", "versus_random_p"]].isna().all()
    assert np.isfinite(row[["loss", "increase"]].to_numpy(float)).all()
    [shown] = [shown for shown in arms_view(saved)["rows"] if shown["arm"] == arm]
    assert (shown["control"], shown["random"], shown["against"]) == ("", MISSING, MISSING)


@pytest.mark.slow
def test_without_matplotlib_a_command_writes_its_tables(
    cli: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sinkscope.present.figures.canvas.available", lambda: False)
    done = cli("quant", "--bits", "3", "--kept", "0", "--acts", "8")
    assert done.exit_code == 0, done.stderr
    assert "no figure: it needs matplotlib (pip install 'sinkscope[figures]')" in done.stderr
    assert {path.name for path in (tmp_path / "quant").iterdir()} == {"arms.csv", "arm_sequences.csv", "arms.json"}


def test_force_replaces_the_ablation_of_the_model_s_own_folder(
    tmp_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without --out: --force means the folder that is there, not a new one beside it."""
    from sinkscope.cli import app

    monkeypatch.chdir(tmp_path)
    there = tmp_path / "runs" / f"{tiny_folder.name}-ablation"
    there.mkdir(parents=True)
    (there / "notes.txt").write_text("mine", "utf-8")
    done = CliRunner().invoke(app, ["ablate", str(tiny_folder), "--run", "none", "--force"])
    assert done.exit_code == 2
    told = f"{there.relative_to(tmp_path)} holds files that are not an ablation's (notes.txt): give another --out"
    assert told in done.stderr
    assert (there / "notes.txt").read_text("utf-8") == "mine"


@pytest.mark.parametrize(
    ("command", "words", "error"),
    [
        ("arms", ["--arm", "nonesuch"], "no such kind of arm"),
        ("arms", ["--arm", "massive:zero"], "give --run"),
        ("arms", ["--arm", "keys:first99"], "only 24 such positions"),
        ("evict", ["--window", "x"], "give whole numbers of at least 1"),
        ("evict", ["--window", "0"], "give whole numbers of at least 1, such as 64,256"),
        ("evict", ["--layers", "some"], "one of full, all"),
        ("quant", ["--bits", "32"], f"--bits '32': give whole numbers from 1 to {WHOLE}, such as 3,4"),
        ("quant", ["--acts", "17"], f"--acts '17': give whole numbers from 2 to {WHOLE}, such as 4,8"),
        ("quant", ["--draws", "1"], "needs at least 2 draws"),
    ],
)
def test_bad_input_is_one_line(
    command: str, words: list[str], error: str, cli: Callable[..., Result], tmp_path: Path
) -> None:
    done = cli(command, *words)
    assert done.exit_code == 2, done
    assert done.stdout == ""
    assert error in done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert not (tmp_path / command).exists()


def test_numbers_that_fit_no_measurement_are_refused_before_torch_is_asked(
    cli: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sinkscope.engine.launch.start_processes", lambda *_: pytest.fail("torch was loaded"))
    assert "needs at least 2 draws" in cli("quant", "--draws", "1").stderr


def test_arms_without_an_arm_are_refused(cli: Callable[..., Result]) -> None:
    refused = cli("arms")
    assert refused.exit_code == 2
    assert "name at least one arm" in refused.stderr


def test_arms_are_positional_and_their_passes_are_told_before_the_first(cli: Callable[..., Result]) -> None:
    """Unablated, two interventions, and two draws of the one control of each: 7 trials, 3 sequences each."""
    done = cli("arms", "keys:first1", "--arm", "value:first1")
    assert done.exit_code == 0, done.stderr
    assert "keys:first1" in done.stdout
    assert "value:first1" in done.stdout
    (told,) = [line for line in done.stderr.splitlines() if "forward passes" in line]
    assert told == "sinkscope: arms: 21 forward passes of one sequence each"
    assert "left" not in done.stderr


@pytest.mark.slow
def test_the_time_that_passes_take_is_told_after_the_first(
    cli: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it is a minute or more: here each look at the clock is a minute and a half after the one before."""
    now = itertools.count(step=90.0)
    monkeypatch.setattr("sinkscope.present.terminal.progress.Pace", partial(Pace, lambda: next(now)))
    done = cli("arms", "keys:first1")
    assert done.exit_code == 0, done.stderr
    (told,) = [line for line in done.stderr.splitlines() if " left: " in line]
    assert re.fullmatch(r"sinkscope: arms: about (1 minute|\d+ minutes) left: the first \d+ took \d+\.0 s", told), told


@pytest.mark.parametrize("fails", [False, True])
def test_the_time_is_estimated_before_the_model_is_loaded(
    cli: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """An estimate that fails is none: what is wrong, the measurement says."""

    def forecast(*_: object, **__: object) -> SimpleNamespace:
        if fails:
            raise RuntimeError("no shapes for this model")
        return SimpleNamespace(time=Time("this machine (cpu)", 1e9, 0.6, True, 270.0, 3.0))

    monkeypatch.setattr("sinkscope.experiments.arms.forecast.dry_run_arms", forecast)
    done = cli("arms", "keys:first1")
    assert done.exit_code == 0, done.stderr
    said = (
        "sinkscope: arms: about 4.5 min on this machine (cpu), without loading; it may be off by a factor of 3 "
        "(--dry-run says more)"
    )
    assert [line for line in done.stderr.splitlines() if "without loading" in line] == ([] if fails else [said])
    assert fails or done.stderr.startswith(said)


def test_a_model_that_does_not_predict_the_next_token(cli: Callable[..., Result]) -> None:
    done = cli("evict", model="example:trigger-softmax")
    assert done.exit_code == 2
    assert "is not a causal language model" in done.stderr


def test_a_window_as_long_as_the_text_is_warned_of(cli: Callable[..., Result]) -> None:
    """It hides nothing, and its loss is the unablated model's to the last digit. The text has 24 tokens."""
    wide = cli("arms", "window:24+1", "window:99+1")
    assert "sinkscope: warning: a window of 24, 99 keys hides nothing: sequences have 24 tokens" in wide.stderr
    assert "hides nothing" not in cli("arms", "window:23+0", "--force").stderr
