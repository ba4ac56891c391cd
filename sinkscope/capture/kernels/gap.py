"""The logit gap of plain scaled dot products, from mean keys: no logits are formed."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from sinkscope.capture.calls import AttentionCall
from sinkscope.capture.precision import as_widest

ROWS = 64
"""Queries taken at a time on a CPU: their tensors stay in its caches, which is two to three times as fast as memory."""


def linear_gap(call: AttentionCall, dtype: torch.dtype) -> Float[Tensor, "batch head query"]:
    """s_i0 - mean_j s_ij for plain scaled dot products: the mean of the logits is the logit of the mean key.

    Where keys are similar, k_0 - mean k nearly cancels, so it is computed in float64. Its products with q are in
    `dtype`.
    """
    batch, heads, queries, _ = call.query.shape
    groups, device = call.key.shape[1], call.query.device
    gap = torch.empty(batch, groups, heads // groups, queries, dtype=dtype, device=device)
    grouped_query = call.query.unflatten(1, (groups, -1))
    running = call.visible.causal and call.square
    first = as_widest(call.key[:, :, :1])
    total = torch.zeros_like(first) if running else as_widest(call.key).sub(first).mean(2, keepdim=True)
    step = ROWS if device.type == "cpu" else queries
    for start in range(0, queries, step):
        rows = slice(start, min(start + step, queries))
        mean = total
        if running:
            sums = (as_widest(call.key[:, :, rows]) - first).cumsum(2).add_(total)
            total = sums[:, :, -1:].clone()
            counts = torch.arange(rows.start + 1, rows.stop + 1, device=device, dtype=sums.dtype)
            mean = sums.div_(counts[:, None])
        products = grouped_query[..., rows, :].to(dtype) * mean.to(dtype).unsqueeze(2)
        torch.sum(products, -1, out=gap[..., rows])
    return gap.mul_(-call.scaling).flatten(1, 2)
