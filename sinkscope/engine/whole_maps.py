"""Forms whole attention maps in float64; the self-check compares the kernels' sums with them.

It shares no computation with the kernels of `sinkscope.capture`: it applies masks as they come and forms every map.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sinkscope.capture.calls import AttentionCall
from sinkscope.capture.kernels.map_walk import AttentionMap
from sinkscope.capture.precision import as_float64


def dense_map(seen: AttentionCall | AttentionMap) -> Tensor | None:
    """Returns A of one call, (B, H, Tq, Tk) in float64; None for a score that is not softmax.

    A map that the model formed itself is computed from its logits where these are known, else taken as it is.
    """
    if isinstance(seen, AttentionMap):
        if seen.logits is None:
            return as_float64(seen.probabilities)
        return as_float64(seen.logits).softmax(-1)[..., : seen.probabilities.shape[-1]]
    if seen.score != "softmax":
        return None
    key = as_float64(seen.key).repeat_interleave(seen.query.shape[1] // seen.key.shape[1], 1)
    logits = as_float64(seen.query) @ key.mT * seen.scaling
    if seen.softcap is not None:
        logits = (logits / seen.softcap).tanh() * seen.softcap
    if seen.bias is not None:
        logits = logits + as_float64(seen.bias)
    mask = None if seen.mask is None else seen.mask.to(logits.device)
    logits = _masked(logits, mask, seen.causal)
    if seen.sinks is not None:
        sinks = as_float64(seen.sinks)
        shape = (*logits.shape[:-1], sinks.shape[-1])
        logits = torch.cat([logits, sinks.expand(shape)], -1)
    probabilities = logits.softmax(-1)[..., : key.shape[-2]]
    return probabilities if mask is None else probabilities.masked_fill(_blind(mask, key.shape[-2]), 0.0)


def _blind(mask: Tensor, keys: int) -> Tensor:
    """Marks queries that see no key: they attend to nothing (softmax itself would give NaN, or equal weights)."""
    mask = mask[..., :keys]
    seen = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    return ~seen.any(-1, keepdim=True)


def _masked(logits: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    if mask is None:
        later = torch.ones_like(logits, dtype=torch.bool).triu(1)
        return logits.masked_fill(later, -torch.inf) if causal else logits
    mask = mask[..., : logits.shape[-1]]
    return logits.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else logits + as_float64(mask)
