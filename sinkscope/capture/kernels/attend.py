"""Chooses what computes an attention call: the Triton kernels where they can, else torch, block by block.

The torch code is the reference. The kernels give the same sums within float32 rounding, without logits in memory.
"""

from __future__ import annotations

import functools
import threading
from importlib.util import find_spec

import torch
from torch import Tensor

from sinkscope.capture.calls import AttentionCall
from sinkscope.capture.kernels import triton_call
from sinkscope.capture.kernels.compiled_walk import CompiledWalk, supports
from sinkscope.capture.kernels.sums import AttentionSums, block_edges
from sinkscope.capture.kernels.unseeing import with_unseeing
from sinkscope.capture.kernels.walk import UnnormalisedWalk, Walk, walk_of
from sinkscope.capture.private_doors import is_out_of_memory
from sinkscope.errors import all_lines

TRITON, TORCH = "triton", "torch blocks"
OLDEST = (8, 0)
"""The lowest compute capability that Triton compiles for."""

_triton_failed = threading.Event()
"""Set when Triton first fails: this process then does not try it again, in this scan or a later one."""


def read(call: AttentionCall, failures: list[str] | None = None) -> tuple[Tensor, AttentionSums]:
    """Returns the attention output (B, Tq, H, dv) in the query's dtype, and the sums over its probabilities.

    A query that sees no key has the output that its model computes, and gives no key any mass.

    Where Triton fails on this machine, this call and all later ones are computed in torch: slower, but as accurate.
    `failures` then gets a line that says why. An out-of-memory error does not count as such a failure: it is raised, so
    that the batch can be halved. Raises SinkscopeError for an unknown score.
    """
    output, sums = _read(call, failures)
    return with_unseeing(call, output), sums


def _read(call: AttentionCall, failures: list[str] | None) -> tuple[Tensor, AttentionSums]:
    if kernel_of(call) == TRITON:
        try:
            return triton_call.attend(call)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            _triton_failed.set()
            if failures is not None:
                failures.append(f"Triton failed, attention is read by torch: {all_lines(error)}")
    return attend_in_blocks(call)


def attend_in_blocks(call: AttentionCall, block_bytes: int | None = None) -> tuple[Tensor, AttentionSums]:
    """Returns what `read` returns, computed in torch block by block, on any device.

    Memory is O(B H rows Tk), with as many rows as `block_bytes` allows. For softmax the output equals that of attention
    over the whole matrix within float32 rounding; a query that sees no key returns 0. Raises SinkscopeError for an
    unknown score.
    """
    batch, heads, queries, _ = call.query.shape
    groups, keys = call.key.shape[1:3]
    kind = CompiledWalk if supports(call) else walk_of(call.score, Walk, UnnormalisedWalk)
    walk = kind(call, batch, groups, heads // groups, queries, keys)
    for start, stop in block_edges(queries, batch * heads * keys * 4, call.query.device, block_bytes):
        walk.block(start, stop)
    return walk.finish()


def kernel_of(call: AttentionCall) -> str:
    """What computes this call: `triton` on an NVIDIA GPU if `triton_call.supports` the call, else `torch blocks`."""
    can = not _triton_failed.is_set() and _compiles(call.query.device) and triton_call.supports(call)
    return TRITON if can else TORCH


@functools.cache
def _compiles(device: torch.device) -> bool:
    """Whether the kernels compile for a device. Other makers' GPUs are also called cuda, but the kernels were never
    compiled for them, so torch computes there."""
    if device.type != "cuda" or torch.version.cuda is None or find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(device) >= OLDEST
