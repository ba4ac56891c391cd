"""The baseline of every sink score: what alpha_0 would be if each query attended alike to all keys it may see."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from sinkscope.capture.kernels.sums import EARLY
from sinkscope.capture.precision import as_widest
from sinkscope.capture.view import LayerView
from sinkscope.metrics import mass
from sinkscope.metrics.quantities import quantity


@quantity("sequence", "head", "coordinate", unit="probability", range="[0, 1]", internal=True)
def uniform_alpha_0(view: LayerView) -> Float[Tensor, "batch head 2"]:
    """alpha_0 of uniform attention over all queries, and over the first 64 (NaN where T < 64): the mean over queries i
    (0 included) of 1 / (number of keys that i may see), with 0 for a query that cannot see key 0.

    It is H_T / T (harmonic number) in a causal head, 1 / keys where every query sees all keys, and less under a window.
    """
    sums = view.attention
    shares = torch.where(sums.sees_first, as_widest(sums.visible).clamp(min=1).reciprocal(), 0.0)
    early = mass.mean_rows(shares[..., :EARLY])
    if view.queries < EARLY:
        early = torch.full_like(early, torch.nan)
    return torch.stack([mass.mean_rows(shares), early], -1).expand(view.batch, view.heads, 2)
