"""Two statistics that libraries give slowly or inexactly, made exact and cheap: a median, a spectrum's entropy."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

HEAVY_TOKENS = 8


def median_abs(x: Float[Tensor, "batch element"]) -> Float[Tensor, " batch"]:
    """Median of |x| of each row, the mean of the two middle values for an even count (numpy's rule).

    The bits of a non-negative float32 order as integers do, so 31 counting passes find the middle element exactly,
    about four times faster than a selection and without its copy. NaN in a row gives NaN.
    """
    bits = x.float().contiguous().view(torch.int32) & 0x7FFFFFFF
    count = bits.shape[-1]
    rank = (count - 1) // 2
    low = torch.zeros(bits.shape[0], dtype=torch.int32, device=x.device)
    for bit in reversed(range(31)):
        trial = low | ((1 << bit) - 1)
        below = (bits <= trial[:, None]).sum(-1)
        low = torch.where(below > rank, low, low | (1 << bit))
    lower = low.view(torch.float32)
    if count % 2 == 0:
        enough = (bits <= low[:, None]).sum(-1) > rank + 1
        above = torch.where(bits > low[:, None], bits, torch.iinfo(torch.int32).max).amin(-1).view(torch.float32)
        lower = (lower + torch.where(enough, lower, above)) / 2
    return torch.where(torch.isnan(x).any(-1), torch.nan, lower)


def spectrum_entropy(x: Float[Tensor, "batch token channel"]) -> Float[Tensor, " batch"]:
    """Entropy in nats of the squared singular values of each x over their sum, from the smaller Gram matrix.

    Eigenvalues are taken in float64. Products are float32; the few tokens whose norm dwarfs the rest (massive
    activations, sinks) would drown the others' rounding, so the heaviest join the channel Gram matrix in float64.
    """
    tokens, channels = x.shape[1:]
    if tokens <= channels:
        gram = torch.bmm(x, x.mT).double()
    else:
        heavy = torch.linalg.vector_norm(x, dim=-1).topk(min(HEAVY_TOKENS, tokens), dim=-1).indices
        rows = torch.arange(len(x), device=x.device)[:, None]
        light = x.clone()
        light[rows, heavy] = 0.0
        outliers = x[rows, heavy].double()
        gram = torch.bmm(light.mT, light).double() + torch.bmm(outliers.mT, outliers)
    values = torch.linalg.eigvalsh(gram).clamp(min=0.0)
    share = values / values.sum(-1, keepdim=True)
    return torch.special.entr(share).sum(-1).to(x.dtype)
