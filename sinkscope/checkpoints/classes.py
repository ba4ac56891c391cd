"""Chooses the class that a checkpoint is loaded with: transformers' own, or one of the checkpoint's own Python code."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from sinkscope.capture.private_doors import base_class
from sinkscope.checkpoints.checks import Bounds, reads_pictures_too
from sinkscope.checkpoints.private_doors import loading_report
from sinkscope.checkpoints.sources import Source
from sinkscope.errors import SinkscopeError, all_lines


def of_class(source: Source, config: Any, head: bool, arguments: dict[str, Any]) -> tuple[nn.Module, dict[str, Any]]:
    """The model, without its head unless `head`, and transformers' report on its loading.

    Where transformers' headless class cannot be loaded, or lacks weights of a quantised checkpoint, it is the base of
    the class that the checkpoint names: some quantised weights are converted by the names that they have there. A
    checkpoint that brings code of its own, which may run, is loaded by that code or not at all: transformers' class of
    the same name would compute something else. Raises what the first class raised where none can be loaded.
    """
    from transformers import AutoModel

    failure: Exception | None = None
    lacking: tuple[nn.Module, dict[str, Any]] | None = None
    own = _own_classes(config) if arguments["trust_remote_code"] else {}
    for family in _families(source.name, config, head, own):
        try:
            with Bounds(source):
                # without its configuration, the attention implementation that config.json names would win
                model, report = family.from_pretrained(source.location, config=_read_by(family, config), **arguments)
        except (SinkscopeError, torch.OutOfMemoryError, MemoryError, ImportError):
            raise
        except Exception as error:  # a defect of the checkpoint, or of the class
            failure = failure or error.with_traceback(None)  # whose frames hold the weights
            continue
        whole = head or (family is AutoModel and not _runs_its_parts(type(model)))
        loaded = (model, report) if whole else _base_of(model, report)
        if not loading_report(loaded[1])[0] or getattr(config, "quantization_config", None) is None:
            return loaded
        lacking = lacking or loaded
    if lacking is not None:
        return lacking
    assert failure is not None  # there is at least one class
    if own and base_class(config) is not None:
        raise SinkscopeError(
            f"cannot load {source.name} by its own Python code: {all_lines(failure)}; without --trust-remote-code the "
            "model that transformers has for it is measured"
        ) from failure
    raise failure


def _read_by(family: Any, config: Any) -> Any:
    """The configuration that a class reads: the checkpoint's, or that of a part of it."""
    kind = getattr(family, "config_class", None)
    parts = [getattr(config, name, None) for name in getattr(type(config), "sub_configs", None) or {}]
    return next((part for part in parts if kind is not None and type(part) is kind), config)


def _own_classes(config: Any) -> dict[str, Any]:
    """The models of a checkpoint's own code: where it stands, by the class of transformers that stands for it."""
    mapped = getattr(config, "auto_map", None)
    models = ("AutoModel", "AutoModelForCausalLM")
    return {name: mapped[name] for name in models if name in mapped} if isinstance(mapped, dict) else {}


def _families(name: str, config: Any, head: bool, own: dict[str, Any]) -> list[Any]:
    """The classes to be tried, in order. `own`: the models of the checkpoint's code that may run.

    Raises SinkscopeError where this code has no model with a head, and one is needed.
    """
    from transformers import AutoModel

    if head and own and "AutoModelForCausalLM" not in own:
        raise SinkscopeError(
            f"{name}: its own Python code has a base model alone (auto_map in its config.json names no "
            "AutoModelForCausalLM), so what it predicts cannot be measured"
        )
    if head or (own and "AutoModel" not in own):
        return [with_head(config)]
    named = [] if own else _named_classes(config)
    return named if named and base_class(config) is None else [AutoModel, *named]


def with_head(config: Any) -> Any:
    """The automatic class that makes a model of this configuration with its next-token head."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText

    beside_pictures = reads_pictures_too(config)
    if beside_pictures is None:
        return AutoModelForCausalLM
    of_text_alone = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    named = beside_pictures.__name__ in (config.architectures or ())
    return AutoModelForCausalLM if of_text_alone and not named else AutoModelForImageTextToText


def _named_classes(config: Any) -> list[Any]:
    """The classes of transformers that a checkpoint names, but for the headless one; none for a configuration that is
    not transformers' own."""
    import transformers

    if not type(config).__module__.startswith("transformers."):
        return []
    names = [name for name in getattr(config, "architectures", None) or [] if isinstance(name, str)]
    classes = [getattr(transformers, name, None) for name in names]
    base = base_class(config)
    models = [cls for cls in classes if isinstance(cls, type) and issubclass(cls, nn.Module) and cls is not base]
    return [_first_part(config) or cls if _runs_its_parts(cls) else cls for cls in models]


def _first_part(config: Any) -> Any:
    """The class of the first of several models, which can be loaded alone where it reads text beside pictures."""
    from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    first = next(iter(type(config).sub_configs.values()), None)
    return MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING.get(first, None)


def code_left_out(name: str, model: Any) -> list[str]:
    """A warning where a checkpoint brings code of its own for its model, and transformers' class was loaded instead."""
    if not _own_classes(model.config):
        return []
    return [
        f"{name} carries Python code of its own, which was not run: {type(model).__name__} of transformers is measured "
        "instead; --trust-remote-code runs that code, if you trust it"
    ]


def _base_of(whole: Any, report: dict[str, Any]) -> tuple[nn.Module, dict[str, Any]]:
    """The model inside one with a head, and what the report says of it, by the names that its weights have there."""
    base = unwrapped(whole)
    path = next(name for name, module in whole.named_modules() if module is base)
    inside = f"{path or whole.base_model_prefix}."
    if hasattr(whole, "hf_device_map"):
        base.hf_device_map = whole.hf_device_map
    missing, mismatched, unexpected = loading_report(report)
    return base, {
        "missing_keys": [key.removeprefix(inside) for key in missing if key.startswith(inside)],
        "mismatched_keys": [(key.removeprefix(inside), *sizes) for key, *sizes in mismatched],
        "unexpected_keys": unexpected,
    }


def _runs_its_parts(model: type[nn.Module]) -> bool:
    """Whether a class has no forward of its own, as that of Qwen2.5-Omni, whose thinker, talker and vocoder run in
    turn."""
    return model.forward is nn.Module.forward


def unwrapped(model: nn.Module) -> nn.Module:
    """Returns the part of a model that reads its input and has no head.

    A decoder used alone has a wrapper around it whose forward only passes its arguments on: the decoder is returned.
    Where the base model does not take the main input, the whole model is returned. A model that runs its parts in
    turn stands for the first of them.
    """
    if _runs_its_parts(type(model)):
        parts = (child for child in model.children() if hasattr(child, "config"))
        return next((unwrapped(part) for part in parts), model)
    base = getattr(model, "base_model", model)
    parameters = inspect.signature(base.forward).parameters
    variable = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
    decoder = getattr(base, "decoder", None)
    passes_on = {parameter.kind for parameter in parameters.values()} <= variable
    if passes_on and isinstance(decoder, nn.Module) and hasattr(decoder, "config"):
        return decoder
    named = getattr(base, "main_input_name", "input_ids")
    return base if isinstance(named, str) and named in parameters else model
