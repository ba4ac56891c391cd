"""Switches a model to its own eager attention, and back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from sinkscope.capture.attention_names import renamed, uncompiled


@contextmanager
def eager(model: nn.Module) -> Iterator[None]:
    """Sets every configuration of the model's modules to `eager` attention for the block, then restores each."""
    with uncompiled(), renamed(model, lambda owner, name: "eager"):
        yield
