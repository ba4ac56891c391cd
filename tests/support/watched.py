"""Helpers for the tests of capture: a model's plan, and how many hooks a model has."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch

from sinkscope.capture import Plan, plan
from sinkscope.checkpoints.forward import Forward


def find(model: Any) -> tuple[Forward, Plan]:
    forward = Forward(model)
    return forward, plan(model, lambda: forward(torch.arange(3, 19)[None]))


def hooks(model: torch.nn.Module) -> int:
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_forward_hooks_with_kwargs")
    return sum(len(getattr(module, kind, OrderedDict())) for module in model.modules() for kind in kinds)


def warnings_of(run: Any) -> list[str]:
    """A run's warnings, without the one that its attention stands in no blocks."""
    return [warning for warning in run.manifest.warnings if not warning.startswith("no block that the residual stream")]
