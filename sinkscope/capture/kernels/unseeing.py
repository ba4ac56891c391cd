"""The output of queries that see no key, as the model computes it.

Such a query gives no key any mass: no column counts it. But a model whose mask adds the dtype's most negative number
to every logit of a row goes on with the softmax of these: all keys alike. That is its output with us watching, too.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sinkscope.capture.calls import AttentionCall
from sinkscope.capture.masks.lazy import LazyMask
from sinkscope.capture.masks.visibility import ROWS


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
