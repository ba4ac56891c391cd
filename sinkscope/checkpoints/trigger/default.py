"""What the trigger task asks for in rows without a trigger: zero (as in the paper), a constant, or a map of x_i.

The paper's claim is about one default output, 0. A constant moves that point; `self` asks for a value that differs from
row to row, which no attention to one token can give (`sinkscope.experiments.trigger.theory` says what can).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from sinkscope.errors import SinkscopeError, did_you_mean

DEFAULTS = {"zero": 0, "constant": 1, "self": 2}
"""The kinds, and the axes of their values: none, c [d], G [d, d]."""

OFFSET = 2_000_003
"""Added to a training's seed, so that c and G repeat neither its batches nor its evaluation sequences."""


@dataclass(frozen=True)
class Default:
    """The target y_i at rows without a trigger, BOS's row 0 among them.

    Attributes:
        kind: `zero` y_i = 0; `constant` y_i = c; `self` y_i = G x_i.
        values: c [d] or G [output, input], float32; None for zero.
    """

    kind: str = "zero"
    values: Float[Tensor, ...] | None = None

    def rows(self, inputs: Float[Tensor, "batch token channel"]) -> Float[Tensor, "batch token channel"]:
        """Returns y_i for every position of x, a new tensor of x's type."""
        if self.values is None:
            return torch.zeros_like(inputs)
        values = self.values.to(inputs)
        return values.expand_as(inputs).clone() if self.kind == "constant" else inputs @ values.mT


ZERO = Default()


def check_default(kind: str) -> None:
    """Raises SinkscopeError for a kind that does not exist."""
    if kind not in DEFAULTS:
        raise SinkscopeError(f"unknown default {kind!r}: one of {', '.join(DEFAULTS)}{did_you_mean(kind, DEFAULTS)}")


def draw_default(kind: str, dim: int, seed: int) -> Default:
    """Draws c from Uniform(-1, 1), as the task draws numbers, or G from N(0, 1/d), which about keeps the size of x.

    Raises SinkscopeError for an unknown kind.
    """
    check_default(kind)
    generator = torch.Generator().manual_seed(seed + OFFSET)
    if kind == "constant":
        return Default(kind, torch.rand(dim, generator=generator).mul_(2).sub_(1))
    if kind == "self":
        return Default(kind, torch.randn(dim, dim, generator=generator) / math.sqrt(dim))
    return ZERO


def read_default(kind: str, values: Any, dim: int) -> Default:
    """Reads what a checkpoint's config.json says: the kind, and c or G as (nested) lists of numbers.

    Raises SinkscopeError for an unknown kind, and for values that are not d or d x d finite numbers.
    """
    check_default(kind)
    if kind == "zero":
        return ZERO
    shape = (dim,) * DEFAULTS[kind]
    try:
        read = torch.tensor(values, dtype=torch.float32)
    except (TypeError, ValueError, RuntimeError):
        read = torch.empty(0)
    if read.shape != shape or not read.isfinite().all():
        asked = " x ".join(map(str, shape))
        raise SinkscopeError(f"the config's default_values are not {asked} finite numbers, which {kind!r} needs")
    return Default(kind, read)
