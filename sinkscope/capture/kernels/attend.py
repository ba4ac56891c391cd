"""Chooses what computes an attention call: the Triton kernels where they can, else torch, block by block.

The torch code is the reference. The kernels give the same sums within float32 rounding, without logits in memory.

A query that sees no key gives no key any mass: no column counts it. But a model whose mask adds the dtype's most
negative number to every logit of a row goes on with the softmax of these: all keys alike. That is its output with us
watching, too.
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
from sinkscope.capture.kernels.walk import UnnormalisedWalk, Walk, walk_of
from sinkscope.capture.masks.lazy import LazyMask
from sinkscope.capture.masks.visibility import ROWS
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


def with_unseeing(call: AttentionCall, output: Tensor) -> Tensor:
    """The output of a call (B, Tq, H, dv), in which queries that see no key are 0, with what the model's own softmax
    makes of these. It stays 0 where the mask hides keys by True and False, or by -inf, as in torch's sdpa."""
    mask, visible = call.mask, call.visible
    plain = mask is not None and mask.dtype != torch.bool and not isinstance(mask, LazyMask)
    if mask is None or not plain or not visible.has_empty_rows or call.score != "softmax":
        return output
    unseeing = (visible.counts == 0).transpose(1, 2)
    for start in range(0, call.query.shape[2], ROWS):
        rows = slice(start, start + ROWS)
        blind = unseeing[:, rows, :, None]
        if bool(blind.any()):
            output[:, rows] = torch.where(blind, _rows(call, mask, rows).to(output.dtype), output[:, rows])
    return output


def _rows(call: AttentionCall, mask: Tensor, rows: slice) -> Tensor:
    """The attention output of some queries as whole rows of logits give it, (B, rows, H, dv)."""
    dtype = torch.float64 if call.query.dtype == torch.float64 else torch.float32
    repeat, keys = call.query.shape[1] // call.key.shape[1], call.key.shape[2]
    key, value = (tensor.to(dtype).repeat_interleave(repeat, 1) for tensor in (call.key, call.value))
    logits = call.query[:, :, rows].to(dtype) @ key.mT * call.scaling
    if call.softcap is not None:
        logits = call.softcap * torch.tanh(logits / call.softcap)
    added = (mask[..., :keys], call.bias)
    for terms in (each for each in added if each is not None):
        logits = logits + (terms if terms.shape[-2] == 1 else terms[:, :, rows]).to(dtype)
    if call.sinks is not None:
        sinks = call.sinks if call.sinks.shape[2] == 1 else call.sinks[:, :, rows]
        logits = torch.cat([logits, sinks.to(dtype).expand(*logits.shape[:-1], -1)], -1)
    weights = logits.softmax(-1)[..., :keys].nan_to_num(0.0)
    return (weights @ value).transpose(1, 2)
