"""Switches a model to its own eager attention, and back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

from sinkscope.capture.private_doors import attention_name, set_attention_name


@contextmanager
def eager(model: nn.Module) -> Iterator[None]:
    """Sets every configuration of the model's modules to `eager` attention for the block, then restores each."""
    configs = {id(config): config for config in _configs(model)}.values()
    before = [(config, attention_name(config)) for config in configs]
    try:
        for config in configs:
            set_attention_name(config, "eager")
        yield
    finally:
        for config, name in before:
            set_attention_name(config, name)


def _configs(model: nn.Module) -> Iterator[PreTrainedConfig]:
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if isinstance(config, PreTrainedConfig):
            yield config
