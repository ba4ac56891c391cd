"""Models inside wrappers, compiled, quantised, or loaded with another attention: measured as they are, or refused."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import torch
from models import random_ids, tiny
from tiers import slow_but
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from transformers import AttentionInterface, LlamaForCausalLM, modeling_utils
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

import sinkscope
from sinkscope.checkpoints import wrap_model

IDS = random_ids(2, 30)
Make = Callable[[], Any]


def scan(model: Any, **settings: Any) -> sinkscope.Run:
    return sinkscope.scan(model, data=IDS, **settings)


@cache
def plain_heads() -> pd.DataFrame:
    return scan(tiny("llama")).heads


def assert_as(found: pd.DataFrame, expected: pd.DataFrame) -> None:
    """All columns are equal but the module's path, which has a part more where the module is compiled."""
    found, expected = (heads.drop(columns="module") for heads in (found, expected))
    pd.testing.assert_frame_equal(found, expected, rtol=1e-4, atol=1e-5)


def refused(model: Any, **settings: Any) -> str:
    with pytest.raises(sinkscope.SinkscopeError) as error:
        scan(model, **settings)
    return str(error.value)


def with_head() -> Any:
    base = tiny("llama")
    whole = LlamaForCausalLM(base.config).eval()
    whole.model = base
    return whole


# Wrappers


class Adapted(nn.Module):
    """A linear layer beside a low-rank one, laid out as PEFT's: `weight` is that of the base layer alone."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.in_features, self.out_features = base.in_features, base.out_features
        self.down, self.up = nn.Linear(base.in_features, 2, bias=False), nn.Linear(2, base.out_features, bias=False)

    @property
    def weight(self) -> Tensor:
        return self.base_layer.weight

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = self.up(self.down(x))
        return self.base_layer(x) + added


class Tuner(nn.Module):
    """What PEFT puts between its model and the one inside."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)


class Peft(nn.Module):
    """A wrapper with the attributes of PEFT's."""

    def __init__(self, model: nn.Module, **settings: Any) -> None:
        super().__init__()
        self.base_model = Tuner(model)
        self.peft_config = {"default": SimpleNamespace(**{"is_prompt_learning": False, **settings})}
        self.active_adapters = ["default"]

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("base_model").model, name)

    def get_base_model(self) -> nn.Module:
        return self.base_model.model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.get_base_model()(*args, **kwargs)


def adapted() -> Peft:
    model = with_head()
    for layer in model.model.layers:
        layer.self_attn.o_proj = Adapted(layer.self_attn.o_proj)
    return Peft(model).eval()


def merged(model: Peft) -> Any:
    whole = copy.deepcopy(model.get_base_model())
    for layer in whole.model.layers:  # type: ignore[union-attr]
        attention = layer.self_attn
        both, linear = attention.o_proj, attention.o_proj.base_layer
        linear.weight.data += both.up.weight.data @ both.down.weight.data
        attention.o_proj = linear
    return whole


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "DataParallel": nn.DataParallel,
    "averaged": AveragedModel,
    "compiled": lambda model: torch.compile(model, backend="eager"),
    "two of them": lambda model: nn.DataParallel(torch.compile(model, backend="eager")),
}


@pytest.mark.parametrize("name", slow_but(WRAPPERS, "DataParallel", "two of them"))
def test_the_model_inside_a_wrapper_is_measured(name: str) -> None:
    run = scan(WRAPPERS[name](tiny("llama")))
    assert_as(run.heads, plain_heads())
    assert (run.manifest.model.id, run.manifest.model.class_) == ("LlamaModel", "LlamaModel")


def test_adapters_are_measured_as_if_merged() -> None:
    torch.manual_seed(0)
    model = adapted()
    run = scan(nn.DataParallel(torch.compile(model, backend="eager")))
    assert run.manifest.model.id == "LlamaForCausalLM with default"
    assert_as(run.heads, scan(merged(model)).heads)
    assert not run.heads["residual_write"].equals(plain_heads()["residual_write"])
    assert wrap_model(model, head=True).model is model.get_base_model()


@pytest.mark.parametrize("setting", [{"is_prompt_learning": True}, {"alora_invocation_tokens": [3]}])
def test_adapters_that_act_on_the_input_are_refused(setting: dict[str, Any]) -> None:
    assert "the PEFT adapter 'default'" in refused(Peft(with_head(), **setting).eval())


def test_shards_are_refused() -> None:
    class FSDPModule(nn.Module):
        """By the name of torch's class, which needs a process group."""

    class Sharded(FSDPModule, LlamaForCausalLM):
        pass

    assert refused(Sharded(tiny("llama").config).eval()).startswith("FSDP has spread the model's weights")


def test_what_is_no_module_is_refused_by_its_class() -> None:
    assert "not function: where it holds one, give that" in refused(lambda ids: ids)


def test_a_module_that_only_holds_a_model_is_measured_as_any_module() -> None:
    ids = random_ids(2, 12)
    held, alone = (sinkscope.scan(model, data=ids) for model in (nn.Sequential(tiny("llama")).eval(), tiny("llama")))
    assert held.heads["bos_mass"].to_numpy() == pytest.approx(alone.heads["bos_mass"].to_numpy(), abs=1e-6)


# Modules that a scan cannot measure


def test_a_submodule_in_training_mode_is_refused() -> None:
    model = tiny("gpt2")
    model.h[1].attn.train()
    assert refused(model).startswith("the module h.1.attn is in training mode (dropout on)")


def test_a_module_of_torch_jit_is_refused() -> None:
    model = tiny("llama")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated
        model.layers[1].mlp = torch.jit.trace(model.layers[1].mlp, torch.randn(1, 4, 64))
    assert "torch.jit has compiled the module layers.1.mlp" in refused(model)


def test_weights_without_numbers_are_refused() -> None:
    assert "embed_tokens.weight are on torch's meta device" in refused(tiny("llama").to("meta"))


# Compiled code


def compiled_layer(model: Any) -> None:
    model.layers[1] = torch.compile(model.layers[1], backend="eager")


def compiled_in_place(model: Any) -> None:
    model.layers[1].compile(backend="eager")


def compiled_method(model: Any) -> None:
    model.layers[1].self_attn.forward = torch.compile(model.layers[1].self_attn.forward, backend="eager")


@pytest.mark.slow
@pytest.mark.parametrize("change", [compiled_layer, compiled_in_place, compiled_method])
def test_a_compiled_layer_that_ran_before_is_measured(change: Callable[[Any], None]) -> None:
    model = tiny("llama")
    change(model)
    with torch.no_grad():
        before = model(IDS).last_hidden_state
        assert_as(scan(model).heads, plain_heads())
        torch.testing.assert_close(model(IDS).last_hidden_state, before)


# Quantised weights


class Codes(Tensor):
    """int8 codes with a float scale, of which only a matrix product is defined, as in torchao."""

    codes: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor) -> Codes:
        made: Codes = Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype)  # type: ignore[attr-defined]
        made.codes, made.scale = codes, scale
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None

    def dequantized(self) -> Tensor:
        return self.codes * self.scale

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is nn.functional.linear:
            return function(args[0], args[1].dequantized(), *args[2:], **(kwargs or {}))
        return super().__torch_function__(function, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.detach.default:
            return Codes(args[0].codes, args[0].scale)
        raise NotImplementedError(f"Codes has no {function}")


def quantised(whole: bool) -> Any:
    model = tiny("llama")
    for module in model.modules():
        if isinstance(module, nn.Linear):
            scale = module.weight.detach().abs().amax(1, keepdim=True) / 127
            weight = Codes((module.weight.detach() / scale).round().to(torch.int8), scale)
            module.weight = nn.Parameter(weight.dequantized() if whole else weight, requires_grad=False)
    return model


def test_quantised_tensors_are_measured_as_what_they_stand_for() -> None:
    assert_as(scan(quantised(whole=False)).heads, scan(quantised(whole=True)).heads)


def test_a_quantised_tensor_with_a_damaged_scale_is_refused_by_name() -> None:
    model = quantised(whole=False)
    model.layers[2].mlp.up_proj.weight.scale[3] = torch.nan
    assert "layers.2.mlp.up_proj.weight hold NaN" in refused(model)


# Attention functions


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_flex_attention_is_measured_as_sdpa(family: str) -> None:
    model = tiny(family, "flex_attention")
    run = scan(model)
    assert_as(run.heads, scan(tiny(family)).heads)
    assert run.manifest.self_check.status == "passed"
    assert model.config._attn_implementation == "flex_attention"


def mine(*args: Any, **kwargs: Any) -> Any:
    output, weights = sdpa_attention_forward(*args, **kwargs)
    return output * 0.5, weights


def my_mask(*args: Any, **kwargs: Any) -> Any:
    return sdpa_mask(*args, **kwargs)


@pytest.mark.parametrize("name", ["sdpa", "eager"])
def test_a_replaced_attention_function_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(AttentionInterface._global_mapping, name, mine)
    message = refused(tiny("llama"))
    assert f"attention function {name!r} was replaced by" in message
    assert "test_wrappers.mine" in message


def test_transformers_own_function_with_an_argument_bound_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It computes what the argument says, which nobody but its caller knows."""
    monkeypatch.setitem(AttentionInterface._global_mapping, "sdpa", partial(sdpa_attention_forward, dropout=0.0))
    assert "attention function 'sdpa' was replaced by functools.partial" in refused(tiny("llama"))


def test_an_attention_function_assigned_to_the_shared_registry_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(modeling_utils.ALL_ATTENTION_FUNCTIONS._local_mapping, "sdpa", mine)
    assert "attention function 'sdpa' was replaced by" in refused(tiny("llama"))


def test_a_replaced_mask_function_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(AttentionMaskInterface._global_mapping, "eager", my_mask)
    assert "mask function 'eager' was replaced by" in refused(tiny("llama"))


def test_a_function_under_another_name_is_read_through_its_torch_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(AttentionInterface._global_mapping, "halved", mine)
    monkeypatch.setitem(AttentionMaskInterface._global_mapping, "halved", sdpa_mask)
    model = tiny("llama", "halved")
    run = scan(model)
    first, plain = (heads[heads["layer"] == 0] for heads in (run.heads, plain_heads()))
    pd.testing.assert_series_equal(first["bos_mass"], plain["bos_mass"], rtol=1e-4)
    assert not run.heads["bos_mass"].equals(plain_heads()["bos_mass"])
