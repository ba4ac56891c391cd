"""Mixes of value vectors, what W_O makes of them, and float64 sums over tokens and channels."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from sinkscope.capture.precision import as_float64

Tokens = Float[Tensor, "token channel"]
Mixed = Float[Tensor, "group token vdim"]
Written = Float[Tensor, "head token rank"]
Rows = Float[Tensor, "head token"]
"""Numbers of each head and token, float64."""

BLOCK = 16
"""Rows that are summed at once."""


@dataclass
class OutputWeights:
    """W_O^hT of every head, and what follows from it, computed once for all sequences of a view.

    `factors`: R_h with |R_h y| = |W_O^h y|, where they are known.
    """

    slices: Float[Tensor, "head vdim channel"]
    factors: Float[Tensor, "head rank vdim"] | None = None

    @cached_property
    def roots(self) -> Float[Tensor, "head rank vdim"]:
        """R_h: gives norms and spectra after W_O without a T x D tensor."""
        return torch.linalg.qr(self.slices.mT, mode="r").R if self.factors is None else self.factors

    @cached_property
    def sums(self) -> Float[Tensor, "head vdim"]:
        """W_O^hT of the vector of ones."""
        return self.slices.sum(-1)

    def read(self, tokens: Float[Tensor, "*batch token channel"]) -> Float[Tensor, "*batch head token vdim"]:
        """W_O^hT t of every token t."""
        heads = self.slices.shape[0]
        return (tokens @ self.slices.flatten(0, 1).mT).unflatten(-1, (heads, -1)).transpose(-3, -2)

    def through(self, mixed: Mixed) -> Written:
        """R_h y_i, which has the same norms as W_O^h y_i and the same angles between tokens."""
        return (mixed.unsqueeze(1) @ self.roots.unflatten(0, (len(mixed), -1)).mT).flatten(0, 1)


def squares(rows: Float[Tensor, "*rows channel"]) -> Float[Tensor, "*rows"]:
    """The squared norm of each row, float64."""
    return as_float64(torch.linalg.vector_norm(rows, dim=-1)).square()


def dots(left: Float[Tensor, "head token vdim"], right: Mixed) -> Rows:
    """l_i.r_i of every head and token; the heads of a group share its rows."""
    return as_float64((left.unflatten(0, (len(right), -1)) * right.unsqueeze(1)).sum(-1)).flatten(0, 1)


def share(vectors: Float[Tensor, "head vdim"], mixed: Mixed) -> Float[Tensor, "head token"]:
    """v.y_i of every head's vector v and its group's rows y."""
    return (vectors.unflatten(0, (len(mixed), -1)) @ mixed.mT).flatten(0, 1)


def running_mean(rows: Mixed) -> Mixed:
    """The mean of each row and those before it.

    Sums go block by block: torch's own cumsum walks down each column apart, which takes a CPU three times as long.
    """
    count = rows.shape[1]
    blocks = pad(rows, (0, 0, 0, -count % BLOCK)).unflatten(1, (-1, BLOCK))
    sums = rows.new_ones(BLOCK, BLOCK).tril() @ blocks
    sums[:, 1:] += sums[:, :-1, -1:].cumsum(1)
    steps = torch.arange(1, count + 1, device=rows.device, dtype=rows.dtype)
    return sums.flatten(1, 2)[:, :count].div_(steps[:, None])
