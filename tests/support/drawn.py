"""Random masks and attention calls for the tests of the kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from sinkscope.capture.calls import AttentionCall


def make_mask(kind: str, batch: int, heads: int, length: int, generator: torch.Generator) -> Tensor | None:
    i, j = torch.arange(length)[:, None], torch.arange(length)[None]
    causal = j <= i
    if kind in ("causal", "full"):
        return None
    if kind == "window":
        return (causal & (i - j < max(2, length // 3)))[None, None].expand(batch, 1, -1, -1)
    if kind == "bool":
        keep = torch.rand(batch, heads, length, length, generator=generator) > 0.4
        return keep | torch.eye(length, dtype=torch.bool)
    if kind in ("holes", "late"):  # the first queries see no key, as in padding; "late": no query sees the first keys
        keep = causal.clone()
        keep[: length // 3] = False
        keep[:, : length // 4 if kind == "late" else 0] = False
        return keep[None, None].expand(batch, 1, -1, -1)
    if kind == "additive":
        return torch.where(causal, 0.0, torch.finfo(torch.float32).min)[None, None]
    slopes = torch.rand(1, heads, 1, 1, generator=generator)
    return torch.where(causal, -slopes * (i - j), -torch.inf)


def make_call(
    sizes: tuple[int, int, int, int, int], mask: str, score: str, seed: int = 0
) -> tuple[AttentionCall, torch.Tensor | None]:
    batch, heads, groups, length, dim = sizes
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(batch, heads, length, dim, generator=generator)
    key, value = (torch.randn(batch, groups, length, dim, generator=generator) for _ in range(2))
    seen = make_mask(mask, batch, heads, length, generator)
    return AttentionCall(query, key, value, seen, mask != "full", scaling=0.7, score=score), seen
