"""sinkscope.watch over kinds of attention that models from other packages bring."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from families import tiny_model
from models import random_ids
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForCausalLM, CanineConfig, CanineModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from watched import warnings_of

import sinkscope

WIDTH, HEADS, LENGTH = 32, 4, 12


class Attention(nn.Module):
    """Attention both ways through torch's function. `windows`: over windows of so many positions, which stand in an
    axis of their own, as in timm's Hiera and NesT. `mask` (..., T, T): True where a query sees a key."""

    def __init__(self, windows: int | None = None, mask: Tensor | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.windows, self.mask = windows, mask
        self.qkv, self.out_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def heads(self, x: Tensor) -> Tensor:
        """(B, T, ...) -> (B, H, T, d), or (B, H, windows, T, d)."""
        x = x if self.windows is None else x.unflatten(1, (-1, self.windows))
        return x.unflatten(-1, (HEADS, -1)).movedim(-2, 1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = map(self.heads, self.qkv(x).chunk(3, -1))
        out = functional.scaled_dot_product_attention(q, k, v, self.mask).movedim(1, -2).flatten(-2)
        return self.out_proj(out if self.windows is None else out.flatten(1, 2))  # type: ignore[no-any-return]

    def masses(self, x: Tensor) -> np.ndarray:
        """bos_mass of each head in float64, mean over sequences."""
        q, k, _ = (self.heads(part).double() for part in self.qkv(x).chunk(3, -1))
        logits = q @ k.mT * q.shape[-1] ** -0.5
        if self.mask is not None:
            logits = logits.masked_fill(~self.mask, -torch.inf)
        return np.asarray(logits.softmax(-1)[:, :, 1:, 0].mean((0, 2)).detach())


def vectors() -> Tensor:
    return torch.randn(2, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1))


def watched(model: nn.Module, x: Tensor) -> sinkscope.Watch:
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        alone = model(x)
        with sinkscope.watch(model) as seen:
            assert torch.allclose(model(x), alone, rtol=0.0, atol=0.0, equal_nan=True)
    return seen


def test_windows_in_an_axis_of_their_own_are_named_beside_what_is_read() -> None:
    model = nn.Sequential(Attention(windows=4), Attention()).eval()
    x = vectors()
    run = watched(model, x).run()
    assert warnings_of(run) == ["attention that is no map of queries and keys was not read: 0"]
    np.testing.assert_allclose(run.heads["bos_mass"], model[1].masses(model[0](x)), atol=1e-6)
    alone = watched(nn.Sequential(Attention(windows=4)).eval(), x)
    assert alone.left_out == ["attention that is no map of queries and keys was not read: 0"]


ALL = torch.ones(LENGTH, LENGTH, dtype=torch.bool)
LAST = ALL & (torch.arange(LENGTH) < LENGTH - 1)
FIRST = torch.zeros(LENGTH, LENGTH, dtype=torch.bool)
FIRST[0, 0] = True


@pytest.mark.parametrize(
    ("masks", "warned"),
    [
        ([LAST], "2 sequences have"),  # a model that looks for padding in its ids, as ESM-2
        ([torch.stack([ALL, LAST])[:, None]] * 2, "1 sequence has"),
        ([ALL.tril() & (torch.arange(LENGTH) < 10)], "2 sequences have"),
        ([ALL.tril()], None),
        ([ALL.tril(-1) | FIRST], None),  # a strict order: a query does not see its own key
        ([LAST, ALL], None),  # a layer that keeps a position to itself
    ],
)  # fmt: skip
def test_padding_that_nobody_told_of_is_warned_of(masks: list[Tensor], warned: str | None) -> None:
    x = vectors()
    model = nn.Sequential(*(Attention(mask=mask) for mask in masks)).eval()
    run = watched(model, x).run()
    expected = f"{warned} positions that no query may see, which count as text: if they are padding, give"
    assert [warning[: len(expected)] for warning in warnings_of(run)] == [expected] * (warned is not None)
    np.testing.assert_allclose(run.heads["bos_mass"][:HEADS], model[0].masses(x), atol=1e-6)


CHOSEN = torch.rand(LENGTH, LENGTH, generator=torch.Generator().manual_seed(0)) < 0.4
CHOSEN |= torch.eye(LENGTH, dtype=torch.bool)
CHOSEN[:, 7] = False


@pytest.mark.parametrize("mask", [CHOSEN, CHOSEN.tril()])
def test_a_position_that_no_query_chose_is_no_padding(mask: Tensor) -> None:
    """Each query sees keys of its own, and none sees the eighth."""
    run = watched(Attention(mask=mask).eval(), vectors()).run()
    assert warnings_of(run) == []


def test_keys_that_a_model_chooses_warn_of_no_padding() -> None:
    """DeepSeek-V3.2 attends to 4 keys of its choice. Tiny models leave some key out in all layers."""
    model, ids = tiny_model(AutoModelForCausalLM, "deepseek_v32"), random_ids(2, 48)
    with torch.no_grad(), sinkscope.watch(model) as seen:
        model(ids, use_cache=False)
    assert not [line for line in seen.run().summary.warnings if "no query may see" in line]


@pytest.mark.parametrize("calls", [1, 2])
def test_a_model_that_attends_itself_has_a_name_in_each_line(calls: int) -> None:
    """Its mask adds infinity to one logit, and torch's output is no number then."""

    class Itself(Attention):
        def forward(self, x: Tensor) -> Tensor:
            for _ in range(calls - 1):
                functional.scaled_dot_product_attention(*[self.heads(x)] * 3)
            return super().forward(x)

    mask = torch.zeros(LENGTH, LENGTH)
    mask[3, 3] = torch.inf
    (line,) = watched(Itself(mask=mask).eval(), vectors()).left_out
    name = "the model itself" if calls == 1 else "the model itself[1]"
    assert line == f"{name} gives NaN or infinity: the sequence was left out"


def test_logits_that_a_cache_dropped_with_their_bias_are_missing() -> None:
    """Inkling adds a bias of positions over a sliding cache; the largest negative number stood for what it dropped."""
    if "inkling_text" not in CONFIG_MAPPING:
        pytest.skip("this version of transformers has no Inkling")
    model = tiny_model(AutoModelForCausalLM, "inkling_text")
    model.generation_config.eos_token_id = None
    with torch.no_grad(), sinkscope.watch(model) as seen:
        written = model.generate(random_ids(1, 12), max_new_tokens=14, do_sample=False)
    found, whole = seen.run().heads, sinkscope.scan(model, data=written[:, :-1]).heads
    assert whole["kind"].str.startswith("sliding").all()
    assert found["logit_gap"].isna().all()
    for column in ("bos_mass", "entropy", "sink_margin", "qk_cos_first", "qk_cos_other"):
        np.testing.assert_allclose(found[column], whole[column], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("length", [32, 30])
def test_chunks_that_attend_in_calls_of_their_own_are_no_layers(length: int) -> None:
    """CANINE's first encoder attends among 4 characters at a time: each call counted as a layer."""
    config = CanineConfig(
        hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=HEADS, intermediate_size=48, num_hash_buckets=50,
        local_transformer_stride=4, max_position_embeddings=64, downsampling_rate=4,
    )  # fmt: skip
    model = CanineModel(config).eval()
    with torch.no_grad(), sinkscope.watch(model) as seen:
        model(input_ids=random_ids(2, length))
    run = seen.run()
    assert [module.partition(".")[0] for module in run.layers["module"]] == ["encoder", "encoder", "final_char_encoder"]
    assert "initial_char_encoder.layer.0.attention.self" in run.manifest.warnings[0]
