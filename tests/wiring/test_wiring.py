"""Linear maps found by their values: modules that stand in the way are seen through, or the map is missing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import transformers
from models import random_ids, tiny
from packaging.version import Version
from pressed import attends
from tiers import slow_but
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaAttention
from watched import find

import sinkscope
from sinkscope.wiring.parts import find_parts
from sinkscope.wiring.trace import trace

WRITES = ["tr_bw", "rank_w", "verdict"]
ALL_MISSING = ["beta", "rank_qk", "cost_actual", *WRITES]
IDS = random_ids(1, 20)


def small(**settings: Any) -> Any:
    return tiny("llama", num_hidden_layers=2, **settings).double()


def smoothing(model: Any) -> pd.DataFrame:
    """The smoothing table, by layer."""
    run = sinkscope.scan(model, data=IDS, self_check=False, smoothing=True)
    assert run.smoothing is not None
    return run.smoothing.set_index("layer")


def same(found: pd.DataFrame, expected: pd.DataFrame) -> None:
    pd.testing.assert_frame_equal(found.drop(columns="module"), expected.drop(columns="module"), rtol=1e-6, atol=1e-9)


class Halves(nn.Module):
    """Every second token, as a module that compresses keys returns them."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return hidden_states[:, ::2]


class Twice(nn.Module):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return 2 * hidden_states


@pytest.mark.slow
def test_a_layer_that_only_points_the_same_way_is_not_taken_for_w_v() -> None:
    """v is twice what the linear layer inside returns, and the first module of all returns other tokens."""
    model, expected = small(), small()
    attention = model.layers[0].self_attn
    attention.v_proj = nn.Sequential(attention.v_proj, Twice()).eval()
    attention.pool = Halves().eval()

    def compress(module: nn.Module, args: Any) -> None:
        attention.pool(args[0])

    attention.q_proj.register_forward_pre_hook(compress)
    with torch.no_grad():
        expected.layers[0].self_attn.v_proj.weight.mul_(2)
    same(smoothing(model), smoothing(expected))


def test_a_residual_stream_of_odd_width() -> None:
    """The gain of the odd channel is tested by a second probe; against the gain that the norm holds."""
    model = small(hidden_size=45, head_dim=16, num_attention_heads=5, num_key_value_heads=5)
    forward, plan = find(model)
    found = trace(model, plan, lambda: forward.at_position_zero(random_ids(16, 4)))
    for site in plan.sites:
        norm = found[site.name].norm
        assert norm is not None
        weight = model.layers[site.layer].input_layernorm.weight
        torch.testing.assert_close(norm.gain, weight.detach(), rtol=1e-6, atol=1e-6)


def test_what_no_single_module_makes_of_x_leaves_the_layer_empty() -> None:
    """Something between the norm and the projections changes single channels."""
    model = small()
    bent = 1 + 0.3 * torch.randn(64, dtype=torch.float64)

    def bend(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, kwargs | {"hidden_states": kwargs["hidden_states"] * bent}

    model.layers[0].self_attn.register_forward_pre_hook(bend, with_kwargs=True)
    found = smoothing(model)
    assert found.loc[0, ALL_MISSING].isna().all(axis=None)
    assert found.loc[1, ["beta", "rank_qk", *WRITES]].notna().all(axis=None)


@pytest.mark.slow
def test_a_norm_that_centres_queries_leaves_their_map_empty() -> None:
    """A layer norm of each query subtracts a mean and adds a bias: its logits are no bilinear form of z."""
    model = tiny("qwen3", num_hidden_layers=2)
    torch.manual_seed(0)
    norm = nn.LayerNorm(24).eval()
    with torch.no_grad():
        norm.weight.add_(0.3 * torch.randn(24))
        norm.bias.add_(0.3 * torch.randn(24))
    model.layers[0].self_attn.q_norm = norm
    found = smoothing(model)
    assert found.loc[0, "rank_qk"].isna().all()
    assert found.loc[1, "rank_qk"].notna().all()
    assert found[WRITES].notna().all(axis=None)


@pytest.mark.slow
def test_queries_of_zeros_have_no_factor_and_no_cost() -> None:
    model = small()
    with torch.no_grad():
        model.layers[0].self_attn.q_proj.weight.zero_()
    found = smoothing(model)
    assert found.loc[0, ["rank_qk", "cost_actual"]].isna().all(axis=None)
    assert found.loc[1, ["rank_qk", "cost_actual"]].notna().all(axis=None)


@pytest.mark.slow
def test_an_input_under_another_keyword_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = LlamaAttention.forward
    before = smoothing(small())

    def renamed(self: Any, given: Any = None, **kwargs: Any) -> Any:
        return plain(self, hidden_states=given, **kwargs)

    monkeypatch.setattr(LlamaAttention, "forward", renamed)
    model = small()
    for layer in model.layers:
        layer.self_attn = Renaming(layer.self_attn).eval()
    after = smoothing(model)
    pd.testing.assert_frame_equal(after[WRITES], before[WRITES])


class Renaming(nn.Module):
    """Calls attention with the keyword `given` in place of `hidden_states`."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Any:
        return self.attention(given=hidden_states, **kwargs)


@pytest.mark.slow
def test_without_an_output_projection_what_heads_write_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """No name tells it, and attention returns something else than the layer that reads the heads."""
    monkeypatch.setattr("sinkscope.capture.output_projection.NAMES", ())
    model = small()
    for layer in model.layers:
        layer.self_attn.register_forward_hook(lambda module, args, output: (1.5 * output[0], *output[1:]))
    found = smoothing(model)
    assert found[WRITES].isna().all(axis=None)
    assert found[["beta", "rank_qk", "cost_actual"]].notna().all(axis=None)


@pytest.mark.slow
def test_an_output_projection_without_a_name_is_found_by_what_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    known = smoothing(small())
    monkeypatch.setattr("sinkscope.capture.output_projection.NAMES", ())
    pd.testing.assert_frame_equal(smoothing(small())[WRITES], known[WRITES])


@pytest.mark.slow
def test_a_projection_beside_a_dropout_is_found() -> None:
    model, plain = small(), small()
    for layer in model.layers:
        layer.self_attn.o_proj = nn.Sequential(layer.self_attn.o_proj, nn.Dropout(0.5)).eval()
    _, plan = find(model)
    assert [site.projection for site in plan.sites] == [f"layers.{at}.self_attn.o_proj.0" for at in (0, 1)]
    ours, expected = (sinkscope.scan(each, data=IDS, self_check=False) for each in (model, plain))
    pd.testing.assert_frame_equal(ours.heads, expected.heads)


def test_the_first_of_two_layers_is_not_the_output_projection() -> None:
    """What heads write to the residual stream is what both make together."""
    model = small()
    attention = model.layers[0].self_attn
    attention.o_proj = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 64)).double().eval()
    heads = sinkscope.scan(model, data=IDS, self_check=False).heads.set_index("layer")
    assert heads.loc[0, "ov_drain"].isna().all()
    assert heads.loc[1, "ov_drain"].notna().all()


@pytest.mark.slow
def test_heads_that_write_to_another_width_are_not_added_to_the_stream() -> None:
    model = small()
    attention, up = model.layers[0].self_attn, torch.randn(64, 32, dtype=torch.float64)
    attention.o_proj = nn.Linear(64, 32, bias=False).double().eval()
    attention.o_proj.register_forward_hook(lambda module, args, output: output @ up.mT)
    found = smoothing(model)
    assert found.loc[0, [*WRITES, "avgcos_identity"]].isna().all(axis=None)
    assert found.loc[0, ["beta", "rank_qk", "avgcos_residual"]].notna().all(axis=None)
    assert found.loc[1, WRITES].notna().all(axis=None)


def test_blocks_of_several_residual_streams_have_no_parts() -> None:
    model = tiny("llama")
    first, second = (layer.forward for layer in model.layers[:2])
    model.layers[0].forward = lambda hidden, **kwargs: first(hidden, **kwargs)[None]
    model.layers[1].forward = lambda hidden, **kwargs: second(hidden[0], **kwargs)
    forward, plan = find(model)
    found = find_parts(model, plan, lambda: forward(random_ids(2, 12)))
    assert set(found) == {"layers.2"}
    assert found["layers.2"].attention == "layers.2.self_attn"


def by_torch(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **_: Any) -> Any:
    key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], 1) for each in (key, value))
    mixed = nn.functional.scaled_dot_product_attention(query, key, value, scale=scaling, is_causal=True)
    return mixed.transpose(1, 2), None


def by_hand(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **_: Any) -> Any:
    key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], 1) for each in (key, value))
    later = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).triu(1)
    maps = (query @ key.mT * scaling).masked_fill(later, -torch.inf).softmax(-1)
    return (maps @ value).transpose(1, 2), None


@pytest.mark.parametrize("attention", slow_but([by_torch, by_hand], by_hand))
def test_attention_in_a_model_s_own_code_has_the_same_wiring(attention: Any) -> None:
    """Also the scale of q.k, which a map that is formed by hand shows in its logits."""
    expected = smoothing(small())
    assert expected[["rank_w", "rank_qk", "cost_qk"]].notna().all(axis=None)
    model = small()
    with attends(model, attention):
        same(smoothing(model), expected)


def biased(by_content: bool) -> Any:
    """Attention by hand with a bias of positions, as ALiBi; `by_content`: times a number of each sequence's own."""
    places = torch.arange(20.0)

    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **_: Any
    ) -> Any:
        key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], 1) for each in (key, value))
        far = (places[: key.shape[2]] - places[: query.shape[2], None]).to(query.dtype)
        bias = far * query.square().mean((1, 2, 3), keepdim=True) if by_content else far
        maps = (query @ key.mT * scaling + bias).masked_fill(far > 0, -torch.inf).softmax(-1)
        return (maps @ value).transpose(1, 2), None

    return attention


def test_a_bias_of_positions_in_the_logits_is_no_part_of_their_scale() -> None:
    """It is the same in every sequence. Of another bias the scale stays unknown, and with it every cost."""
    expected, model = smoothing(small()), small()
    with attends(model, biased(by_content=False)):
        found = smoothing(model)
    pd.testing.assert_series_equal(found["cost_qk"], expected["cost_qk"], rtol=1e-6)
    assert found["cost_sink_lower_qk"].notna().equals(found["sink_margin_pairs"] > 0)
    with attends(model, biased(by_content=True)):
        found = smoothing(model)
    if Version(transformers.__version__) >= Version("5.24"):  # before, rotary products stood in this bias
        assert found[["rank_w", "rank_qk"]].notna().all(axis=None)
    assert found[["cost_qk", "cost_sink_lower_qk"]].isna().all(axis=None)


def test_a_norm_that_queries_and_keys_share_is_found_for_both() -> None:
    """As in Llama 4, whose one norm has no gain. The second call must not hide the first."""
    model = tiny("qwen3", num_hidden_layers=2)
    for layer in model.layers:
        layer.self_attn.k_norm.load_state_dict(layer.self_attn.q_norm.state_dict())
    same_gain = smoothing(model)["rank_qk"]
    for layer in model.layers:
        layer.self_attn.k_norm = layer.self_attn.q_norm
    pd.testing.assert_series_equal(smoothing(model)["rank_qk"], same_gain)
    assert same_gain.notna().all()


def test_another_softmax_in_the_module_is_not_taken_for_its_attention() -> None:
    """It mixes what the heads wrote, as one head, behind the call of transformers' interface."""
    expected, model = smoothing(small()), small()

    def mixing(attend: Any) -> Any:
        def forward(*args: Any, **given: Any) -> Any:
            written, *rest = attend(*args, **given)
            rows = written[:, None]
            mixed = (rows @ rows.mT).softmax(-1) @ rows
            return (written + 0 * mixed[:, 0], *rest)

        return forward

    for layer in model.layers:
        layer.self_attn.forward = mixing(layer.self_attn.forward)
    same(smoothing(model), expected)


class Scaled(nn.Module):
    """A layer whose outputs are multiplied by a number each, as an IA3 adapter does."""

    def __init__(self, base_layer: nn.Linear, factors: Tensor) -> None:
        super().__init__()
        self.base_layer, self.factors = base_layer, nn.Parameter(factors)

    def forward(self, x: Tensor) -> Tensor:
        scaled: Tensor = self.base_layer(x) * self.factors
        return scaled


def test_numbers_behind_a_projection_are_a_part_of_it() -> None:
    """rank_qk was that of the layer alone."""
    model, merged = small(), small()
    for layer, twin in zip(model.layers, merged.layers, strict=True):
        keys: nn.Linear = layer.self_attn.k_proj
        factors = torch.exp(torch.randn(keys.out_features, dtype=keys.weight.dtype))
        layer.self_attn.k_proj = Scaled(keys, factors).eval()
        with torch.no_grad():
            twin.self_attn.k_proj.weight.mul_(factors[:, None])
            if twin.self_attn.k_proj.bias is not None:
                twin.self_attn.k_proj.bias.mul_(factors)
    np.testing.assert_allclose(smoothing(model)["rank_qk"], smoothing(merged)["rank_qk"], rtol=1e-5)
