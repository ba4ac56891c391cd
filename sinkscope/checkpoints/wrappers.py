"""Finds the transformers model inside what training libraries wrap around it."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from sinkscope.capture.private_doors import compiled_from
from sinkscope.checkpoints.private_doors import is_fsdp, is_zero3, puts_tokens_before
from sinkscope.errors import SinkscopeError


def inner_model(model: nn.Module) -> nn.Module:
    """Returns the model inside torch.compile's, DataParallel's, averaging and PEFT's wrappers, one in another.

    PEFT puts its adapters into the layers of the model that it wraps, so they are measured. Raises SinkscopeError where
    a wrapper does more than run the model inside it.
    """
    while True:
        _refuse_shards(model)
        inner = _inside(model)
        if inner is None:
            return model
        model = inner


def wrapped_name(model: nn.Module) -> str:
    """The name of a model object: its configuration's or its class's, with the adapters that PEFT has made active."""
    adapters: list[str] = []
    while (inner := _inside(model)) is not None:
        if _is_peft(model):
            active: Any = getattr(model, "active_adapters", None) or getattr(model, "active_adapter", [])
            adapters += [active] if isinstance(active, str) else list(active)
        model = inner
    config = getattr(model, "config", None)
    told = getattr(config, "name_or_path", None) if isinstance(config, PreTrainedConfig) else None
    name = told or type(model).__name__
    return f"{name} with {' and '.join(adapters)}" if adapters else str(name)


def _inside(model: nn.Module) -> nn.Module | None:
    """The model that this wrapper holds; None where it is no wrapper."""
    compiled = compiled_from(model)
    if compiled is not None:
        return compiled
    if _is_peft(model):
        _refuse_inputs_of_adapters(model)
        return model.get_base_model()  # type: ignore[operator]
    # DataParallel, DistributedDataParallel, AveragedModel, DeepSpeed's engine
    held = None if isinstance(model, PreTrainedModel) else getattr(model, "module", None)
    return held if isinstance(held, nn.Module) else None


def _is_peft(model: nn.Module) -> bool:
    if isinstance(model, PreTrainedModel) or compiled_from(model) is not None:  # torch.compile's passes attributes on
        return False
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def _refuse_inputs_of_adapters(model: nn.Module) -> None:
    """Raises SinkscopeError for adapters that act on the input of the whole model, which the model inside lacks."""
    configs: Any = getattr(model, "peft_config", None)
    for name, config in configs.items() if isinstance(configs, dict) else ():
        prompts = puts_tokens_before(config)
        if prompts or getattr(config, "alora_invocation_tokens", None):
            what = "puts tokens of its own before the text" if prompts else "starts at a token of the text"
            raise SinkscopeError(
                f"the PEFT adapter {name!r} ({type(config).__name__}) {what}, which sinkscope does not measure: give "
                "the model without it (model.get_base_model())"
            )


def is_sharded(model: nn.Module) -> bool:
    """Whether FSDP has spread the weights over processes (FullyShardedDataParallel or fully_shard)."""
    return any(map(is_fsdp, model.modules()))


def _refuse_shards(model: nn.Module) -> None:
    zero3 = any(map(is_zero3, model.parameters()))
    if zero3 or is_sharded(model):
        raise SinkscopeError(
            f"{'DeepSpeed' if zero3 else 'FSDP'} has spread the model's weights over processes: save the whole model "
            "and scan its folder, or spread it over GPUs with sinkscope's own --tp or --device-map"
        )
