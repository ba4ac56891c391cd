"""Switches a model to its own eager attention, and back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from sinkscope.capture.attention_names import renamed, uncompiled
from sinkscope.capture.private_doors import capturing, forward_hooks, set_capturing


@contextmanager
def eager(model: nn.Module) -> Iterator[None]:
    """Sets every configuration of the model's modules to `eager` attention for the block, then restores each.

    The hooks by which transformers collects maps, once a pass asks for them, are removed again.
    """
    with uncompiled(), renamed(model, lambda owner, name: "eager"), _hooks_kept(model):
        yield


@contextmanager
def _hooks_kept(model: nn.Module) -> Iterator[None]:
    """Removes the hooks that transformers adds during the block. It adds them once, and by itself never removes one."""
    before = [(module, set(forward_hooks(module)), capturing(module)) for module in model.modules()]
    try:
        yield
    finally:
        for module, numbers, state in before:
            hooks = forward_hooks(module)
            for number, hook in list(hooks.items()):
                if number not in numbers and getattr(hook, "__module__", "").startswith("transformers."):
                    del hooks[number]
            if capturing(module) != state:
                set_capturing(module, state)
