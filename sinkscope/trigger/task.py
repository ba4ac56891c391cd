"""Data and targets of the trigger-conditional task (Ran-Milo 2603.11487): a mean at the trigger, a default elsewhere.

Real vectors x_0 .. x_{L-1} of width d, no vocabulary. Coordinate 0: 1 at BOS (position 0) only; BOS is that unit
vector. Coordinate 1: 1 at the trigger only. Coordinates 2 .. d-2: independent Uniform(-1, 1) at every position but 0,
the trigger included. Coordinate d-1: 1 on ordinary tokens, 0 on BOS and trigger.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sinkscope.errors import SinkscopeError, did_you_mean

BOS, TRIGGER = 0, 1
"""Coordinates that mark the first token and the trigger; the last coordinate marks ordinary tokens."""

TARGETS = {
    "mean": "the mean of x_1 .. x_j, the paper's",
    "own": "x_j, the trigger's own token",
    "mark": "the unit vector of the trigger's mark, whatever the data",
}
"""What the trigger's row j asks for."""

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
        raise SinkscopeError(
            f"unknown default {kind!r}: choose one of {', '.join(DEFAULTS)}{did_you_mean(kind, DEFAULTS)}"
        )


def check_target(kind: str) -> None:
    """Raises SinkscopeError for a target that does not exist."""
    if kind not in TARGETS:
        raise SinkscopeError(
            f"unknown target {kind!r}: choose one of {', '.join(TARGETS)}{did_you_mean(kind, TARGETS)}"
        )


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
        size = " x ".join(map(str, shape))
        raise SinkscopeError(f"the config's default_values are not {size} finite numbers, which {kind!r} needs")
    return Default(kind, read)


EVALUATION_TRIGGER = 7
EVALUATION_SEQUENCES = 1000
SMALLEST, LARGEST = 4, 1024
"""Bounds of the dimension and of the length. The paper's models have 16 of each; larger ones only fill the memory."""
EVALUATION_OFFSET = 1_000_003
SEEDS = 2**62
"""Seeds are below this, so that a seed with EVALUATION_OFFSET added fits into 64 bits."""


@dataclass(frozen=True)
class Draw:
    """Sequences of the task: inputs x (B, L, d) and the trigger's position j of each (B)."""

    inputs: Float[Tensor, "batch token channel"]
    trigger: Int[Tensor, " batch"]


def check_sizes(dim: int, length: int) -> None:
    """Raises SinkscopeError where the task does not exist: d < 4 leaves no data coordinate, L < 4 no ordinary token.

    Also where a size is past LARGEST.
    """
    if dim < SMALLEST:
        raise SinkscopeError(f"dimension {dim}: the task needs at least {SMALLEST} (three marks and one number)")
    if length < SMALLEST:
        raise SinkscopeError(
            f"length {length}: the task needs at least {SMALLEST} positions (BOS, a token, two triggers)"
        )
    for name, size in (("dimension", dim), ("length", length)):
        if size > LARGEST:
            raise SinkscopeError(f"{name} {size}: at most {LARGEST} is possible")


def check_seed(seed: int) -> None:
    """Raises SinkscopeError where no generator takes the seed."""
    if not 0 <= seed < SEEDS:
        raise SinkscopeError(f"seed {seed}: one of 0 to 2**62 - 1 is needed")


def draw(count: int, length: int, dim: int, generator: torch.Generator, trigger: int | None = None) -> Draw:
    """Draws `count` sequences. The trigger stands at `trigger`, or is drawn uniformly from 2 .. L-1 as in training."""
    check_sizes(dim, length)
    if trigger is not None and not 1 <= trigger < length:
        raise SinkscopeError(f"trigger position {trigger}: one of 1 .. {length - 1} is needed")
    rows = torch.arange(count)
    if trigger is None:
        place = torch.randint(2, length, (count,), generator=generator)
    else:
        place = torch.full((count,), trigger)
    x = torch.rand(count, length, dim, generator=generator).mul_(2).sub_(1)
    x[..., BOS] = x[..., TRIGGER] = 0
    x[..., -1] = 1
    x[rows, place, TRIGGER] = 1
    x[rows, place, -1] = 0
    x[:, 0] = 0
    x[:, 0, BOS] = 1
    return Draw(x, place)


def evaluation(count: int, length: int, dim: int, seed: int, trigger: int | None = None) -> Draw:
    """Draws the evaluation sequences with `seed`: the trigger stands at position 7, or at L-1 where L < 8.

    Another `trigger` moves it; the numbers drawn stay the same.
    They differ from the training sequences of the same seed.
    """
    check_seed(seed)
    generator = torch.Generator().manual_seed(seed + EVALUATION_OFFSET)
    return draw(count, length, dim, generator, evaluation_trigger(length) if trigger is None else trigger)


def evaluation_trigger(length: int) -> int:
    """The position of the trigger in evaluation sequences of this length, before its end."""
    return min(EVALUATION_TRIGGER, length - 1)


def targets(
    data: Draw, residual: bool, default: Default = ZERO, target: str = "mean"
) -> Float[Tensor, "batch token channel"]:
    """Returns y: `target` (one of TARGETS) at the trigger j, the default elsewhere. With `residual`, x plus that."""
    x, rows = data.inputs, torch.arange(len(data.inputs), device=data.inputs.device)
    y = default.rows(x)
    y[rows, data.trigger] = _asked(data, target)
    return x + y if residual else y


def _asked(data: Draw, target: str) -> Float[Tensor, "batch channel"]:
    """What the trigger's row of each sequence asks for."""
    x, rows = data.inputs, torch.arange(len(data.inputs), device=data.inputs.device)
    if target == "own":
        return x[rows, data.trigger]
    if target == "mark":
        return torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)[TRIGGER].expand(len(x), -1)
    return x[:, 1:].cumsum(1)[rows, data.trigger - 1] / data.trigger[:, None]
