"""The widest float type that a device has, computing in full precision beside a model that does not, and what rounding
leaves between equal vectors."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def as_widest(tensor: Tensor) -> Tensor:
    """The tensor in float64 where the device has it (Apple's GPUs do not), else in float32. For sums whose terms nearly
    cancel."""
    return tensor.double() if has_float64(tensor.device) else tensor.float()


def as_float64(tensor: Tensor) -> Tensor:
    """The tensor in float64, moved to the CPU where the device has no float64. For steps rare enough to afford that."""
    return tensor.double() if has_float64(tensor.device) else tensor.cpu().double()


def like(tensor: Tensor, other: Tensor) -> Tensor:
    """The tensor in the other's dtype and on its device; it changes type before it moves, as a device without float64
    asks."""
    return tensor.to(other.dtype).to(other.device)


def has_float64(device: torch.device) -> bool:
    """Whether the device computes in float64; Apple's GPUs do not."""
    return device.type != "mps"


def undisturbing() -> AbstractContextManager[Any]:
    """Computes without gradients, without autocast and outside inference mode until the block ends: what is made in
    inference mode could not be added to outside it."""
    kinds = [kind for kind in ("cpu", "cuda", "mps") if torch.is_autocast_enabled(kind)]
    inference = torch.is_inference_mode_enabled()
    if not kinds and not inference:
        return torch.no_grad() if torch.is_grad_enabled() else nullcontext()
    stack = ExitStack()
    if inference:
        stack.enter_context(torch.inference_mode(False))
    stack.enter_context(torch.no_grad())
    for kind in kinds:
        stack.enter_context(torch.autocast(kind, enabled=False))
    return stack


EQUAL = 2.0**-36
"""Vectors are taken as equal where their mean square around their mean is at most this share of their mean square.
Rounding leaves 4e-13 of it between the tokens of one id, repeated, in Gemma-3-270M in float32; those of random ids have
2.5e-2 or more."""


def are_equal(spread: Float[Tensor, "*batch"], mean_square: Float[Tensor, "*batch"]) -> Bool[Tensor, "*batch"]:
    """Whether vectors are equal, as far as rounding tells. `spread`: their mean square around their mean, whose square
    is `mean_square`."""
    return spread <= EQUAL * (spread + mean_square)
