"""Checks a checkpoint: its configuration against its weights before it takes memory, and then what was loaded: its
kind, its weights by name, shape, stored type and value, and whether they are at hand.

A config.json of some hundred bytes can ask for 10^12 layers. transformers first makes the model without numbers, on the
meta device; there every parameter is counted, and the first one past the bounds ends the loading."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules

from sinkscope.capture.private_doors import execution_devices, inner_tensors
from sinkscope.checkpoints.placement import held
from sinkscope.checkpoints.private_doors import loading_report
from sinkscope.checkpoints.sources import Source, weight_paths
from sinkscope.checkpoints.weight_files import damaged
from sinkscope.errors import SinkscopeError

TENSORS_EACH, NUMBERS_EACH = 16, 16
"""Parameters of the model for each tensor of the files, and their numbers for each byte of the files. Both leave room:
a layer with quantised weights is made twice, a weight takes two bits or more, and a model may have a head more."""

SPARE_TENSORS, SPARE_NUMBERS = 2_000, 2**27
"""What any model may have beyond that."""

PICKLED_TENSORS = 10_000
"""Stands for the number of tensors in pickled files, which is not known without opening them."""


class Bounds:
    """While the context lasts, a model that this thread makes on the meta device must not exceed the source's weights.

    Raises SinkscopeError, from within the model's constructor, where it does.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self._every = False
        self._thread = threading.get_ident()
        self._tensors = self._numbers = 0
        self._most: tuple[int, int] | None = None
        self._hooks = ExitStack()

    def __enter__(self) -> None:
        for register in (
            modules.register_module_parameter_registration_hook,
            modules.register_module_buffer_registration_hook,
        ):
            self._hooks.callback(register(self._count).remove)

    def __exit__(self, *_: object) -> None:
        self._hooks.close()

    def _count(self, module: nn.Module, name: str, tensor: Tensor | None) -> None:
        if tensor is None or not (self._every or tensor.is_meta) or threading.get_ident() != self._thread:
            return
        if self._most is None:  # the files of a hub id are there once its model is made
            self._most = _most(self._files())
        self._tensors += 1
        self._numbers += tensor.numel()
        if self._tensors > self._most[0] or self._numbers > self._most[1]:
            raise SinkscopeError(self._refusal())

    def _files(self) -> list[Path]:
        return weight_paths(self._source)

    def _refusal(self) -> str:
        teller = "metadata describe" if self._source.gguf else "config.json describes"
        return (
            f"{self._source.name}: its {teller} a model far larger than its weights: the two do not belong together; "
            "download it again"
        )


def _most(files: list[Path]) -> tuple[int, int]:
    """The largest number of parameters, and of numbers in them, that a model of these weights may have."""
    tensors = sum(_tensors(str(file)) for file in files)
    size = sum(file.stat().st_size for file in files)
    return TENSORS_EACH * tensors + SPARE_TENSORS, NUMBERS_EACH * size + SPARE_NUMBERS


def _tensors(file: str) -> int:
    from safetensors import safe_open

    if file.endswith(".safetensors"):
        try:
            with safe_open(file, framework="pt") as opened:
                return len(opened.keys())
        except Exception as error:
            raise damaged(file, error) from None
    if file.endswith(".gguf"):
        from gguf import GGUFReader

        return len(GGUFReader(file).tensors)
    return PICKLED_TENSORS


# Checks what was loaded: its kind, its weights by name, shape, stored type and value, and whether they are at hand.


BUFFERS = frozenset(
    {
        *("inv_freq", "cos_cached", "sin_cached", "position_ids", "masked_bias", "relative_position_index"),
        *("k_scale", "v_scale"),  # of a quantised KV cache
    }
)
"""Names of buffers that old checkpoints hold beside a layer's weights; the model computes or ignores them."""

LAYER = re.compile(r"blk\.(\d+)\.")
"""How a GGUF names the weights of a layer."""


def check_keys(name: str, model: nn.Module, report: dict[str, Any]) -> list[str]:
    """Reads transformers' loading report. Returns a warning where weights of layers have no place in the model.

    Raises SinkscopeError for weights of a forward pass that the checkpoint lacks or holds in another shape: they would
    be random numbers. Heads (of a language model, a classifier, a pooler) may be missing or left over.
    """
    missing, mismatched, unexpected = loading_report(report)
    for key, shape, needed in mismatched:
        raise SinkscopeError(f"{name}: {key} has shape {tuple(shape)}, its config.json asks for {tuple(needed)}")
    harmful = [key for key in missing if "pooler" not in key.lower()]
    if harmful:
        raise SinkscopeError(f"{name} lacks weights that {type(model).__name__} needs: {_first_of(harmful)}")
    return _left_over(name, model, "config.json", _of_layers(model, unexpected))


def check_gguf_layers(name: str, model: nn.Module, file: Path) -> list[str]:
    """Returns a warning where a GGUF holds layers past the number that its header gives, which transformers skips."""
    from gguf import GGUFReader

    layers: Any = getattr(getattr(model, "config", None), "num_hidden_layers", None)
    keys = [str(tensor.name) for tensor in GGUFReader(file).tensors]
    places = {key: LAYER.match(key) for key in keys}
    past = [key for key, place in places.items() if place and isinstance(layers, int) and int(place[1]) >= layers]
    return _left_over(name, model, "header", past)


def _left_over(name: str, model: nn.Module, teller: str, left_over: list[str]) -> list[str]:
    if not left_over:
        return []
    kind = type(model).__name__
    return [
        f"{name} holds weights of layers that {kind} has no place for, as its {teller} describes it: "
        f"{_first_of(left_over)}; they are not measured"
    ]


def _of_layers(model: nn.Module, keys: Iterable[str]) -> list[str]:
    """Returns the keys of weights inside the model's lists of layers, including layers past a list's end."""
    prefix = f"{getattr(model, 'base_model_prefix', '')}."  # checkpoints are saved with and without their head
    lists = {path.removeprefix(prefix) for path, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    layer_keys = []
    for key in keys:
        parts = key.removeprefix(prefix).split(".")
        above = {".".join(parts[:depth]) for depth, part in enumerate(parts) if part.isdigit()}
        if above & lists and not _is_buffer(model, parts, prefix):
            layer_keys.append(key)
    return layer_keys


def _is_buffer(model: nn.Module, parts: list[str], prefix: str) -> bool:
    """Whether a key is one of BUFFERS, or the `bias` of a module that has submodules: GPT-2's causal mask."""
    if parts[-1] in BUFFERS:
        return True
    path = ".".join(parts[:-1])
    owners = [module for name, module in model.named_modules() if name.removeprefix(prefix) == path]
    return parts[-1] == "bias" and any(list(owner.children()) for owner in owners)


def _first_of(keys: list[str]) -> str:
    return keys[0] + (f" and {len(keys) - 1} more" if len(keys) > 1 else "")


class NotCausal(SinkscopeError):
    """The checkpoint is not a causal language model: it does not predict the next token."""


def need_causal(name: str, classes: list[str], config: Any) -> None:
    """Raises NotCausal unless one of the classes, of a model of this configuration, predicts the next token.

    transformers would load any other class with a random next-token head and report no error.
    """
    from sinkscope.capture.private_doors import causal_class_names

    causal = causal_class_names()
    beside_pictures = reads_pictures_too(config)
    if beside_pictures is not None and beside_pictures.__name__ in classes:
        return
    if not any(class_name in causal or class_name.endswith(("ForCausalLM", "LMHeadModel")) for class_name in classes):
        raise NotCausal(
            f"{name} is not a causal language model ({', '.join(classes) or 'no architecture named'}): without a "
            "next-token head it predicts no text"
        )


def reads_pictures_too(config: Any) -> type | None:
    """transformers' class with a next-token head, of a decoder that reads pictures beside text, such as LLaVA; None
    where it has none for this configuration."""
    from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    found: type | None = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING.get(type(config), None)
    parts = () if found is None else (config, config.get_text_config())
    return None if any(getattr(part, "is_encoder_decoder", False) for part in parts) else found


NUMBERS = {"F64", "F32", "F16", "BF16"}
"""safetensors' names of the types that hold weights as they are."""


def check_stored_types(name: str, model: nn.Module, files: Iterable[Path]) -> None:
    """Raises SinkscopeError where safetensors files hold weights of the model as integers or 8-bit floats.

    With a quantization_config transformers knows how to read them. Without one, as here, it takes the codes for the
    numbers.
    """
    ends = {_end(key) for key, weight in model.named_parameters() if weight.is_floating_point()}
    for file in files:
        if file.suffix != ".safetensors":
            continue
        coded = {key: kind for key, kind in _types(file).items() if kind not in NUMBERS}
        first = next((key for key in sorted(coded) if _end(key) in ends), None)
        if first is not None:
            raise SinkscopeError(
                f"{name}: the weights {first} are stored as {coded[first]}, and config.json has no quantization_config "
                "that says what the codes stand for: save the model again with it, or in a float type"
            )


def _end(key: str) -> str:
    """The last two parts of a weight's name, the same in the checkpoint and in the model whatever their prefixes."""
    return ".".join(key.split(".")[-2:])


def _types(file: Path) -> dict[str, str]:
    from safetensors import safe_open

    try:
        with safe_open(file, framework="pt") as opened:
            return {key: opened.get_slice(key).get_dtype() for key in opened.keys()}  # noqa: SIM118 - no mapping
    except Exception as error:
        raise damaged(file, error) from None


def check_object(model: nn.Module) -> None:
    """Raises SinkscopeError for a model object whose numbers would be random, absent or out of sight.

    These are a module in training mode, whose dropout draws at random; weights on torch's meta device; a module that
    torch.jit has compiled, which calls neither hooks nor the attention interface.
    """
    for path, module in model.named_modules():
        if module.training:
            where = f"the module {path} is" if path and not model.training else "the model is"
            raise SinkscopeError(f"{where} in training mode (dropout on): call model.eval() first")
        if isinstance(module, torch.jit.ScriptModule):
            raise SinkscopeError(f"torch.jit has compiled the module {path}: attention in it cannot be seen; undo that")
    absent = next((name for name, weight in model.named_parameters() if weight.is_meta), None)
    if absent is not None and not list(execution_devices(model)):
        raise SinkscopeError(f"the weights {absent} are on torch's meta device, without numbers: load the model first")


def check_experts(name: str, model: nn.Module) -> None:
    """Raises SinkscopeError where a router is to choose more experts for a token than there are."""
    for path, module in model.named_modules():
        chosen, experts = getattr(module, "top_k", None), getattr(module, "num_experts", None)
        if isinstance(chosen, int) and isinstance(experts, int) and chosen > experts:
            raise SinkscopeError(
                f"{name}: its configuration has {chosen} experts chosen for a token, of {experts} ({path}): it is "
                "damaged, download it again"
            )


def check_finite(name: str, model: nn.Module) -> None:
    """Raises SinkscopeError for weights that hold NaN or infinity: some would not show in any attention column."""
    for key, weight in held(model):
        for part in _plain_parts(weight):
            if part.is_floating_point() and not part.is_meta and part.numel():
                low, high = torch.aminmax(part if part.element_size() > 1 else part.bfloat16())  # 8 bits have none
                if not (torch.isfinite(low) and torch.isfinite(high)):
                    raise SinkscopeError(f"{name}: the weights {key} hold NaN or infinity; the checkpoint is damaged")


def _plain_parts(weight: Tensor) -> Iterator[Tensor]:
    """The plain tensors that a weight is made of: itself, or those inside a quantised tensor (codes, scales).

    A subclass that does not say what it is made of gives none: few functions are defined for it.
    """
    if type(weight) in (Tensor, nn.Parameter):
        yield weight.detach()
        return
    for part in inner_tensors(weight):
        yield from _plain_parts(part)
