"""Changes the attention that a model's configurations choose, and back; runs compiled modules uncompiled."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedConfig

from sinkscope.capture.private_doors import attention_name, has_sdpa, registry_of, set_attention_name
from sinkscope.capture.registries import READ, is_own


@contextmanager
def renamed(model: nn.Module, choose: Callable[[nn.Module, str | None], str | None]) -> Iterator[None]:
    """Sets the attention of every configuration of the model's modules for the block, then restores each.

    `choose` takes the outermost module that holds the configuration, and the name that it chooses now.
    """
    configs = _configs(model)
    before = [(config, attention_name(config)) for config, _ in configs]
    try:
        for (config, owner), (_, name) in zip(configs, before, strict=True):
            set_attention_name(config, choose(owner, name))
        yield
    finally:
        for config, name in before:
            set_attention_name(config, name)


@contextmanager
def readable(model: nn.Module) -> Iterator[None]:
    """Makes a model attend through a name that sinkscope reads for the block.

    Flex attention and the flash packages compute the same, but their masks cannot be read. A function that the user
    registered under another name may compute anything: its name stays, and its torch calls are watched.
    """

    def choose(owner: nn.Module, name: str | None) -> str | None:
        if name is None or name in READ or not is_own(registry_of(AttentionInterface).get(name)):
            return name
        return "sdpa" if has_sdpa(type(owner)) else "eager"

    with renamed(model, choose):
        yield


@contextmanager
def uncompiled(model: nn.Module | None = None) -> Iterator[None]:
    """Runs what torch.compile has compiled as plain Python until the block ends: compiled code calls no hooks.

    torch's flex_attention compiles itself where it is called; `model` is asked whether its code may call it.
    """
    # Whoever compiles loads torch._dynamo; loading it for nothing would take seconds.
    compiled = "torch._dynamo" in sys.modules or (model is not None and _calls_flex(model))
    with torch.compiler.set_stance("force_eager") if compiled else nullcontext():
        yield


def _calls_flex(model: nn.Module) -> bool:
    homes = {type(module).__module__ for module in model.modules()}
    homes = {home for home in homes if not home.startswith(("torch.", "transformers."))}
    return any("flex_attention" in vars(sys.modules[home]) for home in homes if home in sys.modules)


def _configs(model: nn.Module) -> list[tuple[PreTrainedConfig, nn.Module]]:
    found: dict[int, tuple[PreTrainedConfig, nn.Module]] = {}
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if isinstance(config, PreTrainedConfig):
            found.setdefault(id(config), (config, module))
    return list(found.values())
