"""Heads replaced by maps of single tokens: closed forms, numpy's least squares, and the text of the fit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from by_hand import causal, setting_of
from models import random_ids
from tiers import slow_but
from torch import Tensor
from watched import hooks

import sinkscope
from sinkscope.checkpoints import LoadOptions
from sinkscope.experiments.arms.arm import Arm, Pass, Setting
from sinkscope.experiments.arms.engine import measure, run
from sinkscope.experiments.arms.experiment import opened
from sinkscope.experiments.arms.grammar import read_arm
from sinkscope.experiments.arms.kinds import per_token
from sinkscope.experiments.arms.kinds.per_token import Sums, groups_of
from sinkscope.experiments.arms.readings import Reference, SinkCount
from sinkscope.experiments.arms.replay import Layers
from sinkscope.experiments.arms.text import Text
from sinkscope.inputs.handed import loss_data

PROSE = ("water", "stone", "paper", "glass", "iron", "wood", "sand", "clay", "wool", "silk", "salt", "chalk")
IDS, FURTHER = random_ids(2, 40), random_ids(24, 40, seed=9)


def mapped(setting: Setting, name: str) -> Any:
    return read_arm(name).ready(setting).prepared(setting)


def losses(setting: Setting, arm: Arm) -> Tensor:
    logits = run(Pass(setting, setting.ids), arm, SinkCount(0.3))
    return Reference(logits, setting.ids).compare(logits)["loss"]


def unablated(setting: Setting) -> Tensor:
    with torch.no_grad():
        logits = setting.model(setting.ids, use_cache=False).logits
    return Reference(logits, setting.ids).compare(logits)["loss"]


def with_text(model: Any) -> Setting:
    setting = setting_of(model, IDS)
    setting.more_text = lambda count: FURTHER[:count]
    return setting


@pytest.mark.parametrize("name", ["map:1.2", "map:layer1", "map:0.0+2.3"])
def test_heads_that_attend_to_themselves_lose_nothing(name: str) -> None:
    """Under a window of one token a head writes the value of the token alone, which is linear in it."""
    setting = with_text(causal("mistral", sliding_window=1))
    arm = mapped(setting, name)
    assert all(own.r2 == pytest.approx(1, abs=1e-12) for own in arm.maps.values())
    torch.testing.assert_close(losses(setting, arm), unablated(setting), rtol=0, atol=1e-9)


def test_a_head_that_averages_loses() -> None:
    """A head whose logits are all 0 writes the mean of the values before it: of that one token tells a part."""
    model = causal("llama")
    with torch.no_grad():
        model.base_model.layers[1].self_attn.q_proj.weight.zero_()
    setting = with_text(model)
    arm = mapped(setting, "map:layer1")
    (found,) = arm.maps.values()
    assert 0 < found.r2 < 0.8
    assert (losses(setting, arm) - unablated(setting)).abs().min() > 1e-3


@pytest.mark.parametrize("family", slow_but(["llama", "gpt2", "gemma3"], "gpt2"))
def test_a_map_is_that_of_numpy(family: str) -> None:
    setting = with_text(causal(family))
    arm = mapped(setting, "map:1.1+1.3")
    (found,), site = arm.maps.values(), setting.sites[1]
    tokens: list[tuple[Tensor, Tensor]] = []
    with torch.no_grad(), per_token.read_and_written(setting, site, lambda x, y: tokens.append((x, y)) or y):
        setting.base(FURTHER, use_cache=False)
    x, y = (part.double().numpy() for part in tokens[0])
    width = site.value_dim or 0
    y = y[:, [*range(width, 2 * width), *range(3 * width, 4 * width)]]
    expected, _, rank, _ = np.linalg.lstsq(x - x.mean(0), y - y.mean(0), rcond=1e-7)
    np.testing.assert_allclose(found.weight, expected, rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(found.offset, y.mean(0) - x.mean(0) @ expected, rtol=1e-6, atol=1e-9)
    rest = y - y.mean(0) - (x - x.mean(0)) @ expected
    assert found.r2 == pytest.approx(1 - (rest**2).sum() / ((y - y.mean(0)) ** 2).sum(), abs=1e-9)
    assert found.rank == rank == x.shape[1] - (family == "gpt2"), "a layer norm takes one direction away"
    assert found.tokens == FURTHER.numel()


def test_the_heads_are_replaced_by_what_the_map_gives() -> None:
    setting = with_text(causal("llama"))
    arm = mapped(setting, "map:1.2")
    (found,), site = arm.maps.values(), setting.sites[1]
    width = site.value_dim or 0
    before: list[tuple[Tensor, Tensor]] = []
    after: list[Tensor] = []
    projection = setting.base.get_submodule(site.projection or "")
    with torch.no_grad():
        with per_token.read_and_written(setting, site, lambda x, y: before.append((x, y)) or y):
            setting.base(IDS, use_cache=False)
        with arm.applied(Pass(setting, IDS)):
            handle = projection.register_forward_pre_hook(lambda module, args: after.append(args[0]))
            setting.base(IDS, use_cache=False)
            handle.remove()
    (x, y), changed = before[0], after[0].flatten(0, 1)
    own = slice(2 * width, 3 * width)
    expected = (x.double() @ found.weight + found.offset).to(changed)
    torch.testing.assert_close(changed[:, own], expected, rtol=1e-9, atol=1e-9)
    assert (changed[:, : 2 * width] == y[:, : 2 * width]).all()
    assert (changed[:, 3 * width :] == y[:, 3 * width :]).all()


def test_tokens_are_added_in_any_pieces_and_the_smallest_map_is_taken() -> None:
    """Three of ten directions are empty, and one stands twice: as numpy's pseudo-inverse, of centred tokens."""
    random = np.random.default_rng(0)
    x = random.normal(size=(60, 10)) + 5
    x[:, 4:7] = 2.0
    x[:, 8] = x[:, 9]
    y = random.normal(size=(60, 3)) + x[:, :3]
    whole, pieces = Sums(10, 3), Sums(10, 3)
    whole.add(torch.from_numpy(x), torch.from_numpy(y))
    for part in np.array_split(np.arange(60), 7):
        pieces.add(torch.from_numpy(x[part]), torch.from_numpy(y[part]))
    expected = np.linalg.pinv(x - x.mean(0), rcond=1e-7) @ (y - y.mean(0))
    for sums in (whole, pieces):
        found = sums.solved(torch.arange(3), 0.0)
        np.testing.assert_allclose(found.weight, expected, atol=1e-10)
        np.testing.assert_allclose(found.offset, y.mean(0) - x.mean(0) @ expected, atol=1e-9)
        assert (found.rank, found.tokens) == (6, 60)
    few = Sums(10, 3)
    few.add(torch.from_numpy(x[:4]), torch.from_numpy(y[:4]))
    assert few.solved(torch.arange(3), 0.0).r2 == pytest.approx(1), "fewer tokens than directions fit exactly"
    assert few.solved(torch.arange(3), 0.0).rank == 3


def test_a_ridge_makes_the_map_smaller() -> None:
    random = np.random.default_rng(1)
    x, y = random.normal(size=(50, 4)), random.normal(size=(50, 2))
    sums = Sums(4, 2)
    sums.add(torch.from_numpy(x), torch.from_numpy(y))
    centred = x - x.mean(0)
    expected = np.linalg.solve(centred.T @ centred + 0.5 * 50 * np.eye(4), centred.T @ (y - y.mean(0)))
    found = sums.solved(torch.arange(2), 0.5)
    np.testing.assert_allclose(found.weight, expected, atol=1e-12)
    rest = y - y.mean(0) - centred @ expected
    assert found.r2 == pytest.approx(1 - (rest**2).sum() / ((y - y.mean(0)) ** 2).sum(), abs=1e-12)
    assert found.r2 < sums.solved(torch.arange(2), 0.0).r2
    constant = Sums(4, 2)
    constant.add(torch.from_numpy(x), torch.ones(50, 2))
    assert np.isnan(constant.solved(torch.arange(2), 0.0).r2)


def test_layers_are_read_together_as_memory_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    setting = with_text(causal("llama"))
    names = [site.name for site in setting.sites]
    assert [len(group) for group in groups_of(setting, names)] == [3]
    whole = [mapped(setting, name) for name in ("map:0.1", "map:2.1")]
    monkeypatch.setattr(per_token, "SUM_BYTES", 2 * 8 * 64 * 128)
    assert [len(group) for group in groups_of(setting, names)] == [2, 1]
    assert groups_of(setting, []) == []
    monkeypatch.setattr(per_token, "SUM_BYTES", 1)
    other = with_text(setting.model)
    for name, arm in zip(("map:0.1", "map:2.1"), whole, strict=True):
        (own,), (expected,) = mapped(other, name).maps.values(), arm.maps.values()
        torch.testing.assert_close(own.weight, expected.weight, rtol=1e-9, atol=1e-12)


def test_all_arms_are_fitted_in_one_reading() -> None:
    setting = with_text(causal("llama"))
    asked: list[int] = []
    setting.more_text = lambda count: (asked.append(count), FURTHER)[1]
    ready = [read_arm(name).ready(setting) for name in ("map:0.1", "map:layer1", "map:1.0/ridge0.1")]
    assert [len(arm.prepared(setting).maps) for arm in ready] == [1, 1, 1]  # type: ignore[attr-defined]
    assert asked == [per_token.SEQUENCES]


def test_the_text_of_the_fit_is_not_measured(tiny_model: Any, tokenizer: Any) -> None:
    setting, corpus = opened(tiny_model, None, tokenizer, LoadOptions(), Text("prose", 32, 6), lambda *_: None)
    assert setting.more_text is not None
    more = setting.more_text(40)
    measured = {tuple(row) for row in corpus.ids.tolist()}
    assert more.shape == (36, 32), "prose has 42 texts"
    assert not measured & {tuple(row) for row in more.tolist()}
    again, _ = opened(tiny_model, None, tokenizer, LoadOptions(), Text("prose", 32, 5000), lambda *_: None)
    assert again.more_text is not None
    with pytest.raises(sinkscope.SinkscopeError, match="nothing is left to fit a map on; give other --data"):
        again.more_text(4)


@pytest.mark.parametrize(
    "data",
    [
        "random",
        "repeated",
        [f"{word} and then {word} again, twice over." for word in PROSE],
        random_ids(12, 8),
    ],
    ids=["random", "repeated", "texts", "token ids"],
)
def test_a_map_is_fitted_on_more_of_any_kind_of_text(data: Any, tiny_model: Any, tokenizer: Any) -> None:
    text = Text(loss_data(data), 8, 6)
    setting, corpus = opened(tiny_model, None, tokenizer, LoadOptions(), text, lambda *_: None)
    assert setting.more_text is not None
    more = setting.more_text(5)
    assert more.shape == (5, 8)
    assert not {tuple(row) for row in corpus.ids.tolist()} & {tuple(row) for row in more.tolist()}


def test_the_fit_is_told(tiny_model: Any, tokenizer: Any) -> None:
    found = sinkscope.arms(
        tiny_model, ["map:0.1", "map:layer1/ridge0.5"], tokenizer=tokenizer, seq_len=32, num_sequences=3, draws=2
    )
    words = " ".join(found.words)
    assert "map:0.1: the map of 1 head of layers.0.self_attn has R2 0." in words
    assert f"on the {32 * per_token.SEQUENCES:,} tokens that it was fitted on" in words
    assert "map:layer1/ridge0.5: the map of 4 heads" in words
    assert found.table["control"].isna().all()


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("map:9.0", "map:9.0: the model has no layer 9"),
        ("map:0.99", "map:0.99: the model has no head 99 in layer 0"),
        ("map:layer7", "the model has no layer 7"),
        ("map:x", "names no heads to map; write map:3.1"),
        ("map:0.1/ridge0", "the ridge 0 is no number above 0"),
    ],
)
def test_what_cannot_be_mapped(name: str, error: str) -> None:
    with pytest.raises(sinkscope.SinkscopeError, match=error):
        mapped(with_text(causal("llama")), name)


def test_without_further_text_no_map_is_fitted() -> None:
    with pytest.raises(sinkscope.SinkscopeError, match="a map is fitted on further text"):
        mapped(setting_of(causal("llama"), IDS), "map:0.0")


def test_a_map_leaves_nothing_and_starts_at_its_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    setting = with_text(causal("llama").float())
    arm = mapped(setting, "map:2.1")
    before = hooks(setting.model)
    with pytest.raises(RuntimeError, match="stop"), arm.applied(Pass(setting, IDS)):
        assert hooks(setting.model) > before
        raise RuntimeError("stop")
    assert hooks(setting.model) == before
    assert Layers(setting).start(arm, Pass(setting, IDS)) == 2
    (_, found) = measure(setting, [arm], 2, lambda *_: None)
    monkeypatch.setattr(Layers, "start", lambda *_: 0)
    (_, whole) = measure(setting, [arm], 2, lambda *_: None)
    assert all((found.values[name] == whole.values[name]).all() for name in found.values)
