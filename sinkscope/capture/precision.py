"""The widest float type that a device has."""

from __future__ import annotations

import torch
from torch import Tensor


def wide(tensor: Tensor) -> Tensor:
    """Float64 where the device has it (Apple's GPUs do not), else float32: for sums whose terms nearly cancel."""
    return tensor.double() if has_float64(tensor.device) else tensor.float()


def float64(tensor: Tensor) -> Tensor:
    """Float64; on the CPU where the device has none: for what is rare enough to be moved."""
    return tensor.double() if has_float64(tensor.device) else tensor.cpu().double()


def has_float64(device: torch.device) -> bool:
    return device.type != "mps"
