"""Quantised checkpoints of any make: how they are loaded, and that their maps are what layers do to the identity."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from conftest import make_model, make_tokenizer
from libraries import library
from safetensors.torch import load_file, save_file
from tiers import slow_but
from torch import Tensor, nn
from transformers import LlamaForCausalLM, LlamaModel, Qwen3Config, Qwen3ForCausalLM

import sinkscope
from sinkscope.capture.output_projection import is_linear, projection_bias, projection_weight, quantiser, widths
from sinkscope.capture.private_doors import BITNET
from sinkscope.checkpoints import LoadOptions, classes, open_checkpoint
from sinkscope.checkpoints.checks import check_finite
from sinkscope.checkpoints.sources import Source
from sinkscope.engine.self_check import DENSE
from sinkscope.errors import SinkscopeError
from sinkscope.present.terminal.comparison import render_comparison
from sinkscope.present.terminal.run import render_run

RANKS = ["rank_w", "rank_qk", "cost_actual", "verdict"]


class PackedLinear(nn.Module):
    """A linear layer with 4-bit codes, two in a byte, and a scale for each row; it reads `inner` and may round it."""

    def __init__(self, plain: nn.Linear, inner: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.in_features, self.out_features, self._inner = plain.in_features, plain.out_features, inner
        weight = plain.weight.detach()
        scale = weight.abs().amax(1, keepdim=True) / 7
        codes = (weight / scale).round().to(torch.int8) + 8
        self.register_buffer("codes", codes[:, ::2] * 16 + codes[:, 1::2])
        self.register_buffer("scale", scale)

    def dequantised(self) -> Tensor:
        codes: Any = self.codes
        pairs = torch.stack([codes.view(torch.uint8) // 16, codes.view(torch.uint8) % 16], -1)
        return (pairs.flatten(1).float() - 8) * self.scale  # type: ignore[operator]

    def forward(self, x: Tensor) -> Tensor:
        read = self._inner(x)
        return (read @ self.dequantised().to(read.dtype).mT).to(x.dtype)


def as_it_is(x: Tensor) -> Tensor:
    return x


def in_eight_bits(x: Tensor) -> Tensor:
    """Each token's numbers as int8 times one scale, as LLM.int8 reads them."""
    scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-9) / 127
    return (x / scale).round() * scale


def in_four_bits(x: Tensor) -> Tensor:
    """MXFP4: 32 numbers share a power of 2, each is a float of 4 bits."""
    blocks = x.unflatten(-1, (-1, 32))
    scale = torch.exp2(blocks.abs().amax(-1, keepdim=True).clamp(min=1e-9).log2().floor() - 2)
    numbers = (blocks / scale).clamp(-6, 6)
    step = torch.exp2(numbers.abs().clamp(min=1).log2().floor() - 1)
    return ((numbers / step).round() * step * scale).flatten(-2)


def at_random(x: Tensor) -> Tensor:
    """Each number rounded up or down by chance: two passes never read the same."""
    return x * (1 + 1e-4 * torch.randn_like(x))


def by_its_size(x: Tensor) -> Tensor:
    """No number for a token of zeros."""
    size = x.abs().amax(-1, keepdim=True)
    return x / size * size


def in_bfloat16(x: Tensor) -> Tensor:
    return x.bfloat16()


def bfloat16_alone(x: Tensor) -> Tensor:
    """As a kernel that reads one dtype, though its scales have another."""
    if x.dtype != torch.bfloat16:
        raise RuntimeError("bfloat16 is needed")
    return x


def packed(inner: Callable[[Tensor], Tensor] = as_it_is) -> tuple[Any, Any]:
    """A model of packed layers, and one with the same weights in plain layers."""
    models: tuple[Any, Any] = (make_model(), make_model())
    for path, module in [*models[0].named_modules()]:
        if isinstance(module, nn.Linear) and path != "lm_head":
            layer = PackedLinear(module, inner).eval()
            models[0].set_submodule(path, layer)
            models[1].get_submodule(path).weight.data = layer.dequantised()
    return models


IDS = np.random.default_rng(0).integers(0, 500, (3, 24))


def measured(model: Any) -> Any:
    return sinkscope.scan(model, data=IDS, smoothing=True, self_check=False)


@pytest.mark.slow
def test_packed_layers_are_read_as_the_plain_ones() -> None:
    ours, theirs = map(measured, packed())
    for table in ("heads", "smoothing", "layers"):
        own, expected = getattr(ours, table), getattr(theirs, table)
        assert list(own) == list(expected)
        for column in own.select_dtypes("number"):
            np.testing.assert_allclose(own[column], expected[column], rtol=1e-5, atol=1e-5, err_msg=column)
    assert theirs.smoothing[RANKS].notna().all(axis=None)


@pytest.mark.slow
@pytest.mark.parametrize("inner", [in_eight_bits, in_bfloat16, in_four_bits])
def test_a_layer_that_rounds_what_it_reads_still_has_a_weight(inner: Any) -> None:
    """Its outputs are its weight's up to half a percent, or 11 in 4 bits; the identity is read without rounding."""
    ours, theirs = map(measured, packed(inner))
    tolerance = 1e-2 if inner is in_bfloat16 else 1e-5  # bfloat16 rounds the weights, too
    for column in ("rank_w", "rank_qk", "cost_actual"):
        np.testing.assert_allclose(ours.smoothing[column], theirs.smoothing[column], rtol=tolerance, err_msg=column)
    assert not any("is empty" in words for words in ours.summary.streams["text"].in_words)


def test_a_model_that_rounds_is_checked_against_its_own_calls() -> None:
    """What heads write is small here, so that the outputs agree where single probabilities do not."""
    torch.manual_seed(0)
    model, _ = packed(at_random)
    for layer in model.model.layers:
        layer.self_attn.q_proj.scale.data *= 12
        layer.self_attn.o_proj.scale.data *= 0.001
        layer.mlp.down_proj.scale.data *= 0.001
    ids = np.random.default_rng(0).integers(0, 500, (2, 100))
    run = sinkscope.scan(model, data=ids)
    assert run.manifest.model.quantization == __name__.partition(".")[0]  # the package of the layers' class
    checked = run.manifest.self_check
    assert checked.status == "passed"
    assert checked.reference == DENSE
    assert "the model is quantised" in str(checked.reason)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the compiler that BitNet's module imports
def test_bitnet_layers_that_keep_a_plain_weight_are_quantised() -> None:
    """They round their weight to three values and what they read to 8 bits, in each pass."""
    bitnet = importlib.import_module(BITNET)
    ours, theirs = make_model(), make_model()
    for path, module in [*ours.named_modules()]:
        if isinstance(module, nn.Linear) and path != "lm_head":
            layer = bitnet.AutoBitLinear(module.in_features, module.out_features, bias=False, online_quant=True).eval()
            layer.weight = module.weight
            ours.set_submodule(path, layer)
            with torch.compiler.set_stance("force_eager"):
                theirs.get_submodule(path).weight.data = bitnet.WeightQuant.apply(module.weight).detach()
    with torch.compiler.set_stance("force_eager"):  # which has nothing to compile
        own, expected = measured(ours).smoothing, measured(theirs).smoothing
    for column in ("rank_w", "rank_qk", "cost_actual"):
        np.testing.assert_allclose(own[column], expected[column], rtol=1e-5, err_msg=column)


@pytest.mark.slow
def test_quantised_queries_behind_a_wide_norm_have_no_cost() -> None:
    """The lengths of their many channels differ less among tokens than the outputs of layers that round."""
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 1, "hidden_size": 64, "num_attention_heads": 1, "intermediate_size": 32}
    model: Any = Qwen3ForCausalLM(Qwen3Config(vocab_size=500, head_dim=1024, num_key_value_heads=1, **sizes)).eval()
    for path, module in [*model.named_modules()]:
        if isinstance(module, nn.Linear) and path != "lm_head":
            model.set_submodule(path, PackedLinear(module, in_eight_bits).eval())
    smoothing = measured(model).smoothing
    assert smoothing.rank_qk.notna().all()
    assert smoothing.cost_actual.isna().all()


class Halved(nn.Linear):
    """A linear layer of one's own with a plain weight that rounds what it reads, and a mask of whole numbers."""

    def __init__(self, plain: nn.Linear) -> None:
        super().__init__(plain.in_features, plain.out_features, bias=False)
        self.weight = plain.weight
        self.register_buffer("kept", torch.ones(plain.in_features, dtype=torch.bool))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(at_random(x))


def test_a_plain_weight_is_not_quantised() -> None:
    model = make_model()
    assert quantiser(model) is None
    for layer in model.model.layers:
        layer.self_attn.q_proj = Halved(layer.self_attn.q_proj)
    assert quantiser(model) is None


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*deprecated")
def test_a_model_object_that_torch_quantised_names_it() -> None:
    """torch keeps the codes of such a layer outside of parameters and buffers."""
    model = make_model().eval()
    coded = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8).eval()
    run, plain = measured(coded), measured(make_model())
    assert run.manifest.model.quantization == "torch.ao"
    words = "float32 on cpu, quantised (torch.ao)"
    assert words in " ".join(render_run(run).split())
    compared = " ".join(render_comparison(sinkscope.compare(plain, run)).split())
    assert compared.count("float32 on cpu") == 2
    assert compared.count(words) == 1
    assert compared.index(words) > compared.index("B LlamaForCausalLM")
    assert run.manifest.model.parameters == plain.manifest.model.parameters
    for column in ("rank_w", "rank_qk"):
        np.testing.assert_allclose(run.smoothing[column], plain.smoothing[column], rtol=0.05)


class Rounding(nn.Linear):
    """As a layer of optimum-quanto before `freeze`: a plain weight, and the type that it is rounded to in each pass."""

    weight_qtype = "qint8"

    def forward(self, x: Tensor) -> Tensor:
        scale = self.weight.abs().max() / 127
        return nn.functional.linear(x, (self.weight / scale).round() * scale)


def test_a_weight_that_is_rounded_in_each_pass_is_quantised() -> None:
    model = make_model().eval()
    for layer in model.model.layers:
        layer.self_attn.o_proj.__class__ = Rounding
    assert measured(model).manifest.model.quantization == __name__.partition(".")[0]


@pytest.mark.parametrize("frozen", [False, True])
def test_a_model_object_that_quanto_quantised_names_it(frozen: bool) -> None:
    quanto = library("optimum.quanto")
    model = make_model().eval()
    quanto.quantize(model, weights=quanto.qint8)
    if frozen:
        quanto.freeze(model)
    run, plain = measured(model.eval()), measured(make_model())
    assert run.manifest.model.quantization == "quanto"
    assert run.manifest.model.parameters == plain.manifest.model.parameters


def test_a_model_object_that_torchao_quantised_names_it() -> None:
    coding = library("torchao.quantization")
    model = make_model().eval()
    coding.quantize_(model, coding.Int8WeightOnlyConfig())
    assert measured(model).manifest.model.quantization == "torchao"


def test_weights_in_eight_bit_floats_are_looked_at() -> None:
    model = nn.Module()
    model.codes = nn.Parameter(torch.tensor([1.0, 2.0]).to(torch.float8_e4m3fn), requires_grad=False)
    check_finite("it", model)
    model.codes = nn.Parameter(torch.tensor([1.0, torch.nan]).to(torch.float8_e4m3fn), requires_grad=False)
    with pytest.raises(SinkscopeError, match="the weights codes hold NaN or infinity"):
        check_finite("it", model)


def test_a_layer_that_gives_nothing_for_zeros_is_asked_twice() -> None:
    plain = nn.Linear(8, 6)

    class Divides(PackedLinear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + plain.bias

    layer = Divides(plain, by_its_size)
    assert layer(torch.zeros(1, 8)).isnan().all()
    torch.testing.assert_close(projection_weight(layer, 8), layer.dequantised(), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(projection_bias(layer, 8), plain.bias.detach(), atol=1e-6, rtol=1e-6)


def test_a_layer_that_reads_another_dtype_than_its_scales_is_read_in_it() -> None:
    layer = PackedLinear(nn.Linear(8, 6), bfloat16_alone)
    expected = layer.dequantised().bfloat16()
    torch.testing.assert_close(projection_weight(layer, 8), expected, atol=0, rtol=0)
    assert not projection_bias(layer, 8).any()


def test_layers_of_a_class_of_their_own_are_linear_modules() -> None:
    """Their inputs are rounded and listed, and their neurons zeroed, as those of plain layers."""
    ids = np.random.default_rng(0).integers(0, 500, (3, 24))
    ours, theirs = packed()
    arms = ["acts:4/tensor", "neuron:1.5"]
    own, expected = (sinkscope.arms(model, arms, data=ids, draws=2).table for model in (ours, theirs))
    rounded = own[own.arm == "acts:4/tensor"]
    assert (rounded.increase.abs() > 0.01).all()
    np.testing.assert_allclose(own.increase, expected.increase, atol=1e-5)
    own, expected = (sinkscope.scan(model, data=ids, measure=("modules", "spikes")) for model in (ours, theirs))
    assert len(own.measured["modules"]) == 14
    assert own.manifest.model.parameters == expected.manifest.model.parameters
    for name, table in expected.measured.items():
        for column in table.select_dtypes("number"):
            np.testing.assert_allclose(own.measured[name][column], table[column], rtol=1e-4, atol=1e-5, err_msg=column)


def test_rows_by_which_a_layer_is_read_are_no_tokens() -> None:
    """The identity has as many rows here as a batch of 2 sequences has tokens."""
    ids = np.random.default_rng(0).integers(0, 500, (2, 32))
    model, _ = packed()
    run = sinkscope.scan(model, data=ids, measure=("modules", "smoothing"), batch_size=2)
    assert len(run.measured["modules"]) == 14
    one = sinkscope.scan(model, data=ids, measure=("modules", "smoothing"), batch_size=1)
    assert run.measured["modules"].module.equals(one.measured["modules"].module)


def test_a_layer_that_is_no_map_at_all_is_not_read() -> None:
    ours, _ = packed(lambda x: x * (1 + x.square().mean(-1, keepdim=True)))
    run = measured(ours)
    assert run.smoothing["rank_w"].isna().all()
    words = [words for words in run.summary.streams["text"].in_words if words.startswith("rank_w is empty")]
    assert "quantised" in words[0]


@pytest.fixture
def headless_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with torchao's tensors, which transformers converts by the names that they have in the whole model."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("issues during automatic conversion of the weights")

    monkeypatch.setattr(LlamaModel, "from_pretrained", refuse)


@pytest.mark.slow
@pytest.mark.usefixtures("headless_fails")
def test_where_the_headless_class_fails_the_named_one_is_loaded(tiny_folder: Path, tmp_path: Path) -> None:
    run = sinkscope.scan(str(tiny_folder), seq_len=24, num_sequences=2)
    whole = make_model()
    whole.load_state_dict(load_file(tiny_folder / "model.safetensors"), strict=False)
    expected = sinkscope.scan(whole, tokenizer=make_tokenizer(), seq_len=24, num_sequences=2, self_check=False)
    assert run.manifest.model.class_ == "LlamaModel"
    assert open_checkpoint(str(tiny_folder), LoadOptions(device_map={"": "cpu"})).facts["device"] == "cpu"
    np.testing.assert_allclose(run.heads["entropy"], expected.heads["entropy"], rtol=1e-6)
    folder = Path(shutil.copytree(tiny_folder, tmp_path / "less"))
    weights = load_file(folder / "model.safetensors")
    save_file({key: each for key, each in weights.items() if key != "lm_head.weight"}, folder / "model.safetensors")
    assert open_checkpoint(str(folder)).warnings == []
    absent = "model.layers.1.mlp.up_proj.weight"
    save_file({key: each for key, each in weights.items() if key != absent}, folder / "model.safetensors")
    with pytest.raises(SinkscopeError, match=r"lacks weights that LlamaModel needs: layers\.1\.mlp\.up_proj\.weight$"):
        open_checkpoint(str(folder))


@pytest.mark.parametrize(("quantised", "loaded"), [(True, 1), (False, 0)])
def test_where_one_class_lacks_weights_of_a_quantised_folder_the_next_is_loaded(
    quantised: bool, loaded: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AutoRound's layers have the names that they have in the whole model."""
    models = [nn.Linear(1, 1), nn.Linear(1, 1)]

    def family(place: int) -> Any:
        others = {"mismatched_keys": set[Any](), "unexpected_keys": set[Any]()}
        missing = {"layers.0.mlp.up_proj.qweight"} if place == 0 else set()
        return SimpleNamespace(from_pretrained=lambda *_, **__: (models[place], {"missing_keys": missing, **others}))

    monkeypatch.setattr(classes, "_families", lambda *_: [family(0), family(1)])
    config = SimpleNamespace(quantization_config={"quant_method": "auto-round"} if quantised else None)
    model, _ = classes.of_class(Source("it", "it"), config, True, {"trust_remote_code": False})
    assert model is models[loaded]


def test_a_quantised_weight_that_knows_its_numbers_is_asked_for_them() -> None:
    """An identity does not lie in the range that a calibration set for what the layer reads."""

    class Coded(Tensor):
        def dequantize(self) -> Tensor:
            return self.as_subclass(Tensor) / 16

    class Layer(nn.Linear):
        weight_qtype = "int8"

        def forward(self, x: Tensor) -> Tensor:
            return x.clamp(-0.25, 0.25) @ self.weight.dequantize().mT

    layer, numbers = Layer(4, 3, bias=False), torch.arange(12.0).view(3, 4)
    layer.weight = nn.Parameter(numbers.as_subclass(Coded), requires_grad=False)
    assert torch.equal(projection_weight(layer, 4), numbers / 16)


def test_a_weight_that_a_forward_of_the_layer_itself_rounds_is_read_as_rounded() -> None:
    """compressed-tensors puts a forward into the layer, and rounds a plain weight and what the layer reads in it."""

    class Scheme(SimpleNamespace):
        def model_copy(self, update: dict[str, Any]) -> Scheme:
            return Scheme(**(vars(self) | update))

    def rounded(self: Any, x: Tensor) -> Tensor:
        read = x.clamp(-0.25, 0.25) if self.quantization_scheme.input_activations else x
        out = nn.functional.linear(read, self.weight.round())
        return out.clamp(-1, 1) if self.quantization_scheme.output_activations else out

    layer: Any = nn.Linear(4, 3, bias=False).requires_grad_(False)
    layer.weight.copy_(torch.linspace(-5, 5, 12).view(3, 4))
    layer.quantization_scheme = Scheme(input_activations="int8", output_activations="int8")
    layer.forward = rounded.__get__(layer)
    assert torch.equal(projection_weight(layer, 4), layer.weight.round())
    assert layer.quantization_scheme.input_activations == "int8"
    assert quantiser(nn.Sequential(layer)) == "compressed-tensors"


@pytest.mark.parametrize("hooked", [False, True])
def test_a_fixed_scale_for_what_a_layer_reads_does_not_cut_its_weight(hooked: bool) -> None:
    """modelopt's layers hold a module that cuts what they read to the range of a calibration set."""

    class Cut(nn.Module):
        is_enabled = True

        def disable(self) -> None:
            self.is_enabled = False

        def enable(self) -> None:
            self.is_enabled = True

        def forward(self, x: Tensor) -> Tensor:
            return x.clamp(-0.25, 0.25) if self.is_enabled else x

    class Layer(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 3)
            self.input_quantizer, self.output_quantizer = Cut(), Cut()

        def forward(self, x: Tensor) -> Tensor:
            return self.output_quantizer(nn.functional.linear(self.input_quantizer(x), self.weight.round(), self.bias))

    layer = Layer().requires_grad_(False)
    layer.weight.copy_(torch.linspace(-5, 5, 12).view(3, 4))
    torch.testing.assert_close(projection_weight(layer, 4), layer.weight.round())
    torch.testing.assert_close(projection_bias(layer, 4), layer.bias)
    if hooked:
        add_hook_to_module(layer, AlignDevicesHook(execution_device="cpu"))  # which keeps it from being copied
        torch.testing.assert_close(projection_weight(layer, 4), layer.weight.round())
    assert layer.input_quantizer.is_enabled
    assert quantiser(nn.Sequential(layer)) == "modelopt"


def test_features_without_an_underscore_are_those_of_a_linear_layer() -> None:
    class Layer(nn.Module):
        infeatures, outfeatures = 4, 3

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("codes", torch.zeros(3, 4, dtype=torch.int8))

    assert is_linear(Layer())
    assert widths(Layer()) == (4, 3)


@pytest.mark.usefixtures("headless_fails")
def test_where_the_named_class_fails_too_the_first_failure_is_told(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise KeyError("other")

    monkeypatch.setattr(LlamaForCausalLM, "from_pretrained", refuse)
    with pytest.raises(SinkscopeError, match="issues during automatic conversion of the weights"):
        open_checkpoint(str(tiny_folder))


@pytest.mark.parametrize(
    ("name", "tolerance"),
    [("Int8WeightOnlyConfig", 0.05), ("Int8DynamicActivationInt8WeightConfig", 0.05), ("Float8WeightOnlyConfig", 0.1)],
)
def test_torchao(name: str, tolerance: float, tmp_path: Path) -> None:
    """Codes of 8 bits, integers and floats; the second rounds what each layer reads, too."""
    coding = library("torchao.quantization")
    from transformers import TorchAoConfig

    make_model().save_pretrained(tmp_path / "plain")
    config = TorchAoConfig(getattr(coding, name)())
    model = LlamaForCausalLM.from_pretrained(tmp_path / "plain", quantization_config=config)
    model.save_pretrained(tmp_path / "coded")
    make_tokenizer().save_pretrained(tmp_path / "coded")
    run = sinkscope.scan(str(tmp_path / "coded"), smoothing=True, seq_len=24, num_sequences=2)
    plain = sinkscope.scan(make_model(), tokenizer=make_tokenizer(), smoothing=True, seq_len=24, num_sequences=2)
    assert run.manifest.model.quantization == "torchao"
    assert run.manifest.model.parameters == plain.manifest.model.parameters
    for column in ("rank_w", "rank_qk"):
        np.testing.assert_allclose(run.smoothing[column], plain.smoothing[column], rtol=tolerance)


@pytest.mark.parametrize(("bits", "tolerance"), [("int8", 0.05), ("int4", 0.5)])
def test_quanto(bits: str, tolerance: float, tmp_path: Path) -> None:
    """A model that its package cannot save is scanned as an object."""
    library("optimum.quanto")
    from transformers import QuantoConfig

    make_model().save_pretrained(tmp_path / "plain")
    model = LlamaForCausalLM.from_pretrained(tmp_path / "plain", quantization_config=QuantoConfig(weights=bits)).eval()
    run = measured(model)
    plain = measured(make_model())
    assert run.manifest.model.quantization == "quanto"
    assert run.manifest.model.parameters == plain.manifest.model.parameters
    for column in ("rank_w", "rank_qk"):
        np.testing.assert_allclose(run.smoothing[column], plain.smoothing[column], rtol=tolerance)


@pytest.mark.parametrize("bits", [4, 8])
def test_bitsandbytes(bits: int, tmp_path: Path) -> None:
    """Codes of 4 bits, of which the layer makes bfloat16 numbers, and of 8 bits, whose layer rounds what it reads."""
    library("bitsandbytes")
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    make_model(intermediate_size=128).save_pretrained(tmp_path / "plain")
    asked: Any = {4: {"load_in_4bit": True, "bnb_4bit_compute_dtype": torch.bfloat16}, 8: {"load_in_8bit": True}}[bits]
    config = BitsAndBytesConfig(**asked)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", quantization_config=config, device_map="cpu")
    model.save_pretrained(tmp_path / "coded")
    make_tokenizer().save_pretrained(tmp_path / "coded")
    run = sinkscope.scan(str(tmp_path / "coded"), smoothing=True, seq_len=24, num_sequences=2)
    plain = sinkscope.scan(
        make_model(intermediate_size=128), tokenizer=make_tokenizer(), smoothing=True, seq_len=24, num_sequences=2
    )
    assert run.manifest.model.quantization == "bitsandbytes"
    assert run.manifest.model.parameters == plain.manifest.model.parameters
    for column in ("rank_w", "rank_qk"):
        np.testing.assert_allclose(run.smoothing[column], plain.smoothing[column], rtol={4: 0.5, 8: 0.05}[bits])


@pytest.mark.parametrize(("bits", "tolerance"), [(8, 0.05), (4, 0.5)])
def test_compressed_tensors(bits: int, tolerance: float, tmp_path: Path) -> None:
    """A folder and an object: the package unpacks weights in the first pass of the outermost module."""
    library("compressed_tensors")
    shape = {"hidden_size": 64, "intermediate_size": 128}
    make_model(**shape).save_pretrained(tmp_path / "plain")
    make_tokenizer().save_pretrained(tmp_path / "plain")
    compress(tmp_path / "plain", tmp_path / "coded", bits)
    run = sinkscope.scan(str(tmp_path / "coded"), smoothing=True, seq_len=24, num_sequences=2)
    plain = sinkscope.scan(str(tmp_path / "plain"), smoothing=True, seq_len=24, num_sequences=2)
    assert run.manifest.model.quantization == "compressed-tensors"
    assert run.manifest.model.parameters == plain.manifest.model.parameters
    assert run.manifest.self_check.status == "passed"
    for column in ("rank_w", "rank_qk"):
        np.testing.assert_allclose(run.smoothing[column], plain.smoothing[column], rtol=tolerance)
    model = LlamaForCausalLM.from_pretrained(tmp_path / "coded").eval()
    own = sinkscope.scan(model, tokenizer=make_tokenizer(), smoothing=True, seq_len=24, num_sequences=2)
    assert own.heads.equals(run.heads)


@pytest.mark.parametrize("preset", ["FP8_DYNAMIC", "W8A8"])
def test_compressed_tensors_that_round_what_layers_read(preset: str, tmp_path: Path) -> None:
    """The package turns codes into plain weights when it loads them; what a layer reads is rounded for each token."""
    coding = library("compressed_tensors.quantization")
    from compressed_tensors import ModelCompressor
    from compressed_tensors.quantization.utils import calculate_qparams

    model = make_model()
    scheme = coding.preset_name_to_scheme(preset, ["Linear"])
    settings = coding.QuantizationConfig(config_groups={"all": scheme}, ignore=["lm_head"])
    coding.apply_quantization_config(model, settings)
    for layer in model.modules():
        if hasattr(layer, "quantization_scheme"):
            rows = layer.weight.detach()
            least, most = rows.amin(1, keepdim=True), rows.amax(1, keepdim=True)
            layer.weight_scale.data = calculate_qparams(least, most, layer.quantization_scheme.weights)[0]
            layer.quantization_status = coding.QuantizationStatus.FROZEN
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(tmp_path)
    compressor.update_config(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    run = sinkscope.scan(str(tmp_path), smoothing=True, seq_len=24, num_sequences=2)
    plain = sinkscope.scan(make_model(), tokenizer=make_tokenizer(), smoothing=True, seq_len=24, num_sequences=2)
    assert run.manifest.self_check.status == "passed"
    assert run.manifest.model.parameters == plain.manifest.model.parameters
    for column in ("rank_w", "rank_qk"):
        np.testing.assert_allclose(run.smoothing[column], plain.smoothing[column], rtol=0.1)


def test_compressed_tensors_that_round_a_plain_weight_in_each_pass() -> None:
    """As a model object is right after a calibration, before it is saved: here in 4 bits."""
    coding = library("compressed_tensors.quantization")
    from compressed_tensors.quantization.utils import calculate_qparams

    model, rounded = make_model(), make_model()
    args = {"num_bits": 4, "type": "int", "symmetric": True}
    scheme = {"targets": ["Linear"], "weights": {**args, "strategy": "channel"}}
    scheme["input_activations"] = {**args, "num_bits": 8, "strategy": "tensor"}  # type: ignore[dict-item]
    settings = coding.QuantizationConfig(config_groups={"all": scheme}, ignore=["lm_head"])
    coding.apply_quantization_config(model, settings)
    for path, layer in model.named_modules():
        if hasattr(layer, "quantization_scheme"):
            rows = layer.weight.detach()
            least, most = rows.amin(1, keepdim=True), rows.amax(1, keepdim=True)
            layer.weight_scale.data = calculate_qparams(least, most, layer.quantization_scheme.weights)[0]
            layer.input_scale.data.fill_(1e-3)  # which cuts an identity at 0.127
            layer.quantization_status = coding.QuantizationStatus.FROZEN
            codes = (rows / layer.weight_scale).round().clamp(-8, 7)
            rounded.get_submodule(path).weight.data = codes * layer.weight_scale
    for path, layer in model.named_modules():
        if path.endswith("o_proj"):
            expected = rounded.get_submodule(path).weight
            torch.testing.assert_close(projection_weight(layer, expected.shape[1]), expected, atol=1e-6, rtol=1e-5)
    assert quantiser(model) == "compressed-tensors"


def compress(place: Path, target: Path, bits: int) -> None:
    example().compress(str(place), str(target), bits)
    make_tokenizer().save_pretrained(target)


def example() -> Any:
    """examples/quantised.py, which users copy."""
    spec = importlib.util.spec_from_file_location("quantised", Path(__file__).parents[2] / "examples" / "quantised.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_gptqmodel(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes of 4 bits in groups, which a calibration on text has chosen; transformers loads both with GPTQModel."""
    monkeypatch.chdir(tmp_path)  # GPTQModel writes a folder of logs where it runs
    plain, coded = tmp_path / "plain", tmp_path / "coded"
    make_model(hidden_size=128, intermediate_size=256).save_pretrained(plain)
    make_tokenizer().save_pretrained(plain)
    methods = example()
    os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")  # as the example does: GPTQModel reads it once
    library("gptqmodel")
    if method == "awq":
        if torch.version.cuda and not torch.cuda.is_available():
            pytest.skip("GPTQModel quantises to AWQ on a GPU alone where torch was built for one")
        methods.awq(str(plain), str(coded))
    else:
        library("optimum.gptq")
        config = methods.gptq(str(plain))
        LlamaForCausalLM.from_pretrained(plain, quantization_config=config, device_map="cpu").save_pretrained(coded)
    make_tokenizer().save_pretrained(coded)
    run, before = (
        sinkscope.scan(str(each), smoothing=True, seq_len=24, num_sequences=2) for each in (coded, plain)
    )  # fmt: skip
    assert run.manifest.model.quantization == method
    assert run.manifest.model.parameters == before.manifest.model.parameters
    assert run.manifest.self_check.status == "passed"
    assert not run.heads.bos_mass.equals(before.heads.bos_mass)
    for column in ("rank_w", "rank_qk"):
        np.testing.assert_allclose(run.smoothing[column], before.smoothing[column], rtol=0.2)


def save_coded(folder: Path, weights: dict[str, Tensor], coding: dict[str, Any]) -> None:
    """Puts coded weights, and how they are coded, into the folder of a model that transformers saved."""
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": coding}))
    make_tokenizer().save_pretrained(folder)


FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def mxfp4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes of four bits (two in a byte), the exponents of each 32 of a row, and the weights that they stand for, for
    (expert, in, out), which transformers stores as (expert, out, in)."""
    rows = weight.mT.unflatten(2, (-1, 32))
    scale = 2.0 ** (rows.abs().amax(-1).log2().floor() - 2)
    codes = (rows / scale[..., None]).unsqueeze(-1).sub(FP4).abs().argmin(-1)
    blocks = (codes[..., ::2] + 16 * codes[..., 1::2]).to(torch.uint8)
    return blocks, (scale.log2() + 127).to(torch.uint8), (FP4[codes] * scale[..., None]).flatten(2).mT


def save_stored(folder: Path, model: Any, stored: torch.dtype) -> dict[str, Tensor]:
    """Rounds the weights of a float32 model to `stored` and saves them so; returns what the folder holds. It is no
    `model.to(stored)`, which rounds rotary frequencies, too."""
    for weight in model.parameters():
        weight.data = weight.data.to(stored)
    model.save_pretrained(folder)
    model.float()
    return load_file(folder / "model.safetensors")


def save_mxfp4(folder: Path, stored: torch.dtype) -> Any:
    """Saves a folder as gpt-oss is published, with other weights in `stored`; returns the float32 model it means."""
    from transformers import GptOssConfig, GptOssForCausalLM

    torch.manual_seed(0)
    model = GptOssForCausalLM(GptOssConfig(
        vocab_size=512, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=128,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
    )).eval()  # fmt: skip
    weights = save_stored(folder, model, stored)
    for name in [name for name in weights if name.endswith(("gate_up_proj", "down_proj"))]:
        codes = mxfp4(weights.pop(name).float())
        weights[f"{name}_blocks"], weights[f"{name}_scales"], model.get_parameter(name).data = codes
    whole = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    save_coded(folder, weights, {"quant_method": "mxfp4", "modules_to_not_convert": whole})
    return model


def save_fp8(folder: Path, stored: torch.dtype) -> Any:
    """The same as DeepSeek-V3 is published: floats of 8 bits, with a scale for each 128 x 128 of them."""
    model = make_model(hidden_size=256, intermediate_size=256)
    weights = save_stored(folder, model, stored)
    for name in [name for name in weights if name.endswith("_proj.weight")]:
        blocks = weights[name].float().unflatten(0, (-1, 128)).unflatten(2, (-1, 128))
        scale = blocks.abs().amax((1, 3), keepdim=True) / 448
        codes = (blocks / scale).to(torch.float8_e4m3fn)
        model.get_parameter(name).data = (codes.float() * scale).flatten(2).flatten(0, 1)
        weights[name] = codes.flatten(2).flatten(0, 1)
        weights[f"{name}_scale_inv"] = scale[:, 0, :, 0].clone()
    save_coded(folder, weights, {
        "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head"],
    })  # fmt: skip
    return model


CODED = {"mxfp4": save_mxfp4, "fp8": save_fp8}


@pytest.mark.slow
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("method", CODED)
def test_a_folder_of_codes_is_read_without_a_gpu(method: str, stored: torch.dtype, tmp_path: Path) -> None:
    """transformers turns the codes into plain weights; the numbers are those of a model with the weights that they
    stand for."""
    model = CODED[method](tmp_path / "coded", stored)
    run = sinkscope.scan(str(tmp_path / "coded"), seq_len=24, num_sequences=2, dtype="float32", smoothing=True)
    expected = sinkscope.scan(model, tokenizer=make_tokenizer(), seq_len=24, num_sequences=2, smoothing=True)
    assert run.manifest.model.quantization == method
    assert run.manifest.model.dtype == "float32"
    assert run.manifest.model.parameters == expected.manifest.model.parameters
    assert run.manifest.self_check.status == "passed"
    for column in ("bos_mass", "learned_sink_mass", "honor"):
        np.testing.assert_allclose(run.heads[column], expected.heads[column], rtol=1e-4)
    np.testing.assert_allclose(run.smoothing["rank_w"], expected.smoothing["rank_w"], rtol=1e-4)


@pytest.mark.parametrize("asked", slow_but(["auto", "float32", "float16", "bfloat16"], "float32"))
@pytest.mark.parametrize("method", slow_but(CODED, "mxfp4"))
def test_weights_that_were_codes_have_the_dtype_that_is_asked_for(method: str, asked: str, tmp_path: Path) -> None:
    CODED[method](tmp_path, torch.bfloat16)
    opened = open_checkpoint(str(tmp_path), LoadOptions(dtype=asked, device="cpu"))
    found = {name: weight.dtype for name, weight in opened.model.named_parameters()}
    norms = {name for name in found if "norm" in name and method == "mxfp4" and asked == "float16"}
    assert {found.pop(name) for name in norms} <= {torch.float32}, "gpt-oss's norms overflow in 16 bits"
    assert {*found.values()} == {getattr(torch, "bfloat16" if asked == "auto" else asked)}
    assert opened.facts["dtype"] == ("bfloat16" if asked == "auto" else asked)


def test_hqq() -> None:
    """Codes of 4 bits in layers that the package puts in place of a loaded model's own."""
    library("hqq.core.quantize")
    shape = {"hidden_size": 64, "intermediate_size": 128}
    model, plain = make_model(**shape), make_model(**shape)
    example().hqq(model)
    model.eval()
    for path, layer in model.named_modules():
        if hasattr(layer, "W_q"):
            plain.get_submodule(path).weight.data = layer.dequantize()
    run, expected = (sinkscope.scan(each, data=IDS, smoothing=True) for each in (model, plain))
    assert run.manifest.model.quantization == "hqq"
    assert run.manifest.model.parameters == expected.manifest.model.parameters
    assert run.manifest.self_check.status == "passed"
    for table, columns in (("heads", ["bos_mass", "value_drain", "honor"]), ("smoothing", ["rank_w", "rank_qk"])):
        own, known = getattr(run, table)[columns], getattr(expected, table)[columns]
        np.testing.assert_allclose(own, known, rtol=1e-4, atol=1e-6)


def test_a_hook_that_unpacks_weights_runs_before_the_base_alone() -> None:
    """As compressed-tensors hangs one on the outermost module, whose base is what a scan runs."""
    model, expected = make_model(), measured(make_model())
    layer = model.model.layers[0].mlp.up_proj
    weight = layer.weight
    del layer.weight

    def unpack(outermost: nn.Module, args: Any) -> None:
        layer.weight = weight
        outermost.ct_decompress_hook.remove()

    model.ct_decompress_hook = model.register_forward_pre_hook(unpack)
    assert measured(model).heads.equals(expected.heads)
