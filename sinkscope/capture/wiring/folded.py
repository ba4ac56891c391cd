"""One layer of one sequence in the notation of Lampert et al.: tokens x, normalised tokens z, and W applied to mixes.

W z = W_O^h W_V^h diag(gain) z equals W_O^h applied to the value v without its constant part. The attention call's
values and output are therefore enough, and no T x D tensor of a head is formed. Biases (of the norm, of W_V, of W_O)
are left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from sinkscope.capture.view import Missing, inverse

Tokens = Float[Tensor, "token channel"]
Mixed = Float[Tensor, "head token vdim"]


@dataclass
class OutputWeights:
    """W_O^hT of every head, and what follows from it, computed once for all sequences of a batch."""

    slices: Float[Tensor, "head vdim channel"]

    @cached_property
    def roots(self) -> Float[Tensor, "head rank vdim"]:
        """R_h with |R_h y| = |W_O^h y|: gives norms and spectra after W_O without a T x D tensor."""
        return torch.linalg.qr(self.slices.mT, mode="r").R

    @cached_property
    def sums(self) -> Float[Tensor, "head 1 vdim"]:
        """W_O^hT of the vector of ones."""
        return self.slices.sum(-1).unsqueeze(1)


@dataclass
class FoldedHeads:
    """The tokens and heads of one layer and sequence, in float64.

    There are n = T - 1 tokens, i = 1..T-1; token 0 takes part in the mixes only. Below, u_j = W_V diag(gain) z_j.
    Any tensor may be None; `need` then raises Missing.

    Attributes:
        x, z: tokens and normalised tokens, (n, D).
        weights: the output projection.
        values: u_i, (H, n, dv).
        attended: sum_j A_ij u_j, (H, n, dv).
        uniform: the mean of u_j over j <= i (over all j in a bidirectional layer), (H, n, dv).
        written: w_i, what the output projection reads, biases included, (H, n, dv).
        margin: each head's sink margin, (H, n).
        scale: the factor s of the head's logits s z_i^T W_Q^T W_K z_j.
        affine: (a, b) with z_i = a_i (x_i - b_i), each (n, 1).
        first: u_0, (H, 1, dv), where `uniform` is the running mean from u_0 on.
        offset: written - attended, as its two factors, (H, n, 1) and (H, 1, dv).

    The last three save products: what W_O makes of z, `uniform` and `written` follows from what it makes of x, `values`
    and `attended`. They may be None beside any other tensor.
    """

    heads: int
    x: Tensor | None = None
    z: Tensor | None = None
    weights: OutputWeights | None = None
    values: Tensor | None = None
    attended: Tensor | None = None
    uniform: Tensor | None = None
    written: Tensor | None = None
    margin: Tensor | None = None
    scale: float | None = None
    affine: tuple[Tensor, Tensor] | None = None
    first: Tensor | None = None
    offset: tuple[Tensor, Tensor] | None = None

    def need(self, tensor: Tensor | None) -> Tensor:
        if tensor is None:
            raise Missing
        return tensor

    @cached_property
    def tokens(self) -> Tokens:
        return self.need(self.x)

    @cached_property
    def normalised(self) -> Tokens:
        return self.need(self.z)

    @cached_property
    def centred(self) -> Tokens:
        """z_i - zbar."""
        return self.normalised - self.normalised.mean(0)

    @cached_property
    def spread(self) -> Float[Tensor, ""]:
        """tr B = mean |z_i - zbar|^2; NaN where it is 0, since the metrics divide by it."""
        spread = self.centred.square().sum(-1).mean()
        return torch.where(spread > 0, spread, torch.nan)

    @cached_property
    def beta(self) -> Float[Tensor, ""]:
        """The least-squares slope of x on z."""
        return (self.centred_tokens * self.centred).sum(-1).mean() / self.spread

    @cached_property
    def centred_tokens(self) -> Tokens:
        """x_i - xbar."""
        return self.tokens - self.tokens.mean(0)

    @cached_property
    def tokens_spread(self) -> Float[Tensor, ""]:
        """tr Cov(x)."""
        return self.centred_tokens.square().sum(-1).mean()

    @cached_property
    def tr_bw(self) -> Float[Tensor, " head"]:
        """tr(B W) = mean (z_i - zbar).W_O^h (u_i - ubar)."""
        read, values = self.normalised_read, self.need(self.values)
        return ((read - read.mean(1, keepdim=True)) * values).sum(-1).mean(-1)

    @cached_property
    def tr_bwtw(self) -> Float[Tensor, " head"]:
        """tr(B W^T W) = mean |W_O^h (u_i - ubar)|^2."""
        return (self.values_out - self.values_out.mean(1, keepdim=True)).square().sum(-1).mean(-1)

    @cached_property
    def slices(self) -> Float[Tensor, "head vdim channel"]:
        """W_O^hT."""
        return self._weights.slices

    @cached_property
    def tokens_read(self) -> Mixed:
        """W_O^hT x_i."""
        return self.tokens @ self.slices.mT

    @cached_property
    def normalised_read(self) -> Mixed:
        """W_O^hT z_i."""
        if self.affine is None:
            return self.normalised @ self.slices.mT
        scale, shift = self.affine
        return scale * (self.tokens_read - shift * self._weights.sums)

    @cached_property
    def values_out(self) -> Mixed:
        """R_h u_i."""
        return self.through_output(self.need(self.values))

    @cached_property
    def attended_out(self) -> Mixed:
        """R_h sum_j A_ij u_j."""
        return self.through_output(self.need(self.attended))

    @cached_property
    def uniform_out(self) -> Mixed:
        """R_h of the uniform mix."""
        if self.first is None:
            return self.through_output(self.need(self.uniform))
        return running_mean(torch.cat([self.through_output(self.first), self.values_out], 1))[:, 1:]

    @cached_property
    def written_out(self) -> Mixed:
        """R_h w_i."""
        if self.offset is None:
            return self.through_output(self.need(self.written))
        shares, constant = self.offset
        return self.attended_out + shares * self.through_output(constant)

    @cached_property
    def token_top(self) -> Float[Tensor, ""]:
        """|B|_2, the largest eigenvalue of the tokens' covariance (1/n)."""
        count, width = self.centred.shape
        gram = self.centred @ self.centred.mT if count <= width else self.centred.mT @ self.centred
        return torch.linalg.eigvalsh(gram)[-1] / count

    @cached_property
    def token_rank(self) -> Float[Tensor, ""]:
        """Stable rank tr B / |B|_2 of the tokens around their mean."""
        return self.spread / self.token_top

    @cached_property
    def cos_identity(self) -> Float[Tensor, " head"]:
        return self.average_cosine(self.need(self.values), self.values_out)

    @cached_property
    def cos_attention(self) -> Float[Tensor, " head"]:
        return self.average_cosine(self.need(self.attended), self.attended_out)

    @cached_property
    def cos_uniform(self) -> Float[Tensor, " head"]:
        return self.average_cosine(self.need(self.uniform), self.uniform_out)

    @property
    def _weights(self) -> OutputWeights:
        if self.weights is None:
            raise Missing
        return self.weights

    def through_output(self, mixed: Mixed) -> Float[Tensor, "head token rank"]:
        """R_h y_i, which has the same norms as W_O^h y_i and the same angles between tokens."""
        return mixed @ self._weights.roots.mT

    def average_cosine(self, mixed: Mixed | None, out: Mixed | None = None) -> Float[Tensor, " head"]:
        """Mean cosine over unordered pairs i != j of x_i + W_O^h y_i, where y is `mixed` and R_h y is `out`; for None
        of x_i alone.

        It is (|sum of unit vectors|^2 - n) / (n (n - 1)); a zero vector has cosine 0 with every other.
        """
        squares = self.tokens.square().sum(-1).expand(self.heads, -1)
        if mixed is not None and out is not None:
            squares = squares + 2 * (self.tokens_read * mixed).sum(-1) + out.square().sum(-1)
        weights = inverse(squares.clamp(min=0.0).sqrt())
        total = weights @ self.tokens
        if mixed is not None:
            total = total + (weights.unsqueeze(1) @ mixed @ self.slices)[:, 0]
        count = self.tokens.shape[0]
        if count < 2:
            return torch.full_like(total[:, 0], torch.nan)
        return (total.square().sum(-1) - (weights > 0).sum(-1)) / (count * (count - 1))


def running_mean(rows: Mixed) -> Mixed:
    """The mean of each row and those before it."""
    steps = torch.arange(1, rows.shape[1] + 1, device=rows.device, dtype=rows.dtype)
    return rows.cumsum(1).div_(steps[:, None])
