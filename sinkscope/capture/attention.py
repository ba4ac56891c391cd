"""Who reads an attention call: Triton kernels where they can, the walk over blocks in torch everywhere else.

The walk is the reference; the kernels give the same sums within float32 rounding, without logits in memory.
"""

from __future__ import annotations

import functools
from importlib.util import find_spec

import torch
from accelerate.utils.memory import should_reduce_batch_size
from torch import Tensor

from sinkscope.capture import blocks, fused
from sinkscope.capture.sums import AttentionCall, AttentionSums

TRITON, TORCH = "triton", "torch blocks"
OLDEST = (8, 0)
"""The lowest compute capability that Triton compiles for."""

_failures: list[str] = []


def attend(call: AttentionCall) -> tuple[Tensor, AttentionSums]:
    """Attention output (B, Tq, H, dv) in the query's dtype, and the sums over its probabilities.

    Where Triton fails on this machine, this and all later calls are walked over in torch: slower, and as right.
    `failures` says so. Memory that has run out is no such failure: it is raised, and the batch halved.
    """
    if kernel_of(call) == TRITON:
        try:
            return fused.attend(call)
        except Exception as error:
            if should_reduce_batch_size(error):
                raise
            detail = " ".join(str(error).split())[:200]
            _failures.append(f"Triton failed, attention is read by torch: {type(error).__name__}: {detail}")
    return blocks.attend(call)


def kernel_of(call: AttentionCall) -> str:
    """What reads this call: `triton` on an NVIDIA GPU, for calls that `fused.supports`; else `torch blocks`."""
    can = not _failures and _compiles(call.query.device) and fused.supports(call)
    return TRITON if can else TORCH


def failures() -> list[str]:
    """Why Triton is no longer tried in this process: one line, or none."""
    return list(_failures)


@functools.cache
def _compiles(device: torch.device) -> bool:
    """Other makers' GPUs go by the name cuda too; the kernels were not compiled for them, so torch reads there."""
    if device.type != "cuda" or torch.version.cuda is None or find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(device) >= OLDEST
