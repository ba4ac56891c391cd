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

from sinkscope.capture.precision import float64
from sinkscope.capture.view import LayerView, Missing, inverse
from sinkscope.capture.wiring.trace import Wiring

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
    def centred_values(self) -> Mixed:
        """u_i - ubar."""
        values = self.need(self.values)
        return values - values.mean(1, keepdim=True)

    @cached_property
    def slices(self) -> Float[Tensor, "head vdim channel"]:
        """W_O^hT."""
        return self._weights.slices

    @cached_property
    def tokens_read(self) -> Mixed:
        """W_O^hT x_i."""
        return self.tokens @ self.slices.mT

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
        return self.average_cosine(self.need(self.values))

    @cached_property
    def cos_attention(self) -> Float[Tensor, " head"]:
        return self.average_cosine(self.need(self.attended))

    @cached_property
    def cos_uniform(self) -> Float[Tensor, " head"]:
        return self.average_cosine(self.need(self.uniform))

    @property
    def _weights(self) -> OutputWeights:
        if self.weights is None:
            raise Missing
        return self.weights

    def through_output(self, mixed: Mixed) -> Float[Tensor, "head token rank"]:
        """R_h y_i, which has the same norms as W_O^h y_i and the same angles between tokens."""
        return mixed @ self._weights.roots.mT

    def average_cosine(self, mixed: Mixed | None) -> Float[Tensor, " head"]:
        """Mean cosine over unordered pairs i != j of x_i + W_O^h y_i, where y is `mixed`; for None of x_i alone.

        It is (|sum of unit vectors|^2 - n) / (n (n - 1)); a zero vector has cosine 0 with every other.
        """
        squares = self.tokens.square().sum(-1).expand(self.heads, -1)
        if mixed is not None:
            squares = squares + 2 * (self.tokens_read * mixed).sum(-1) + self.through_output(mixed).square().sum(-1)
        weights = inverse(squares.clamp(min=0.0).sqrt())
        total = weights @ self.tokens
        if mixed is not None:
            total = total + torch.einsum("hn,hnv,hvd->hd", weights, mixed, self.slices)
        count = self.tokens.shape[0]
        if count < 2:
            return torch.full_like(total[:, 0], torch.nan)
        return (total.square().sum(-1) - (weights > 0).sum(-1)) / (count * (count - 1))


def fold(view: LayerView, wiring: Wiring, weights: OutputWeights | None, sequence: int) -> FoldedHeads:
    """Reads one sequence of a view. What the view or the wiring lacks stays None."""
    site = view.site
    folded = FoldedHeads(site.heads, margin=float64(view.attention.margin[sequence, :, 1:]), scale=wiring.scale)
    x, z = view.residual_in, view.attention_input
    if site.cross:  # W maps tokens of the other sequence, which is not z
        return folded
    if x is None or z is None or x.shape != z.shape or view.queries != view.keys or view.queries < 2:
        return folded
    folded.x = float64(x[sequence, 1:])
    if wiring.norm is not None:
        folded.z = wiring.norm.normalised(folded.x, float64(z[sequence, 1:]))
    if weights is None or weights.slices.shape[-1] != x.shape[-1]:
        return folded
    folded.weights = weights
    if view.raw_projected is not None:
        folded.written = _by_head(view.raw_projected[sequence])[:, 1:]
    if wiring.constant is not None and view.raw_value is not None:
        _add_mixes(folded, view, wiring.constant, sequence)
    return folded


def _add_mixes(folded: FoldedHeads, view: LayerView, constant: Float[Tensor, "group vdim"], sequence: int) -> None:
    repeat = view.site.heads // constant.shape[0]
    constant = constant.repeat_interleave(repeat, dim=0).unsqueeze(1)
    values = float64(view.value[sequence]).repeat_interleave(repeat, dim=0) - constant
    folded.values = values[:, 1:]
    if view.attention.causal:
        steps = torch.arange(1, view.keys + 1, device=values.device, dtype=values.dtype)
        folded.uniform = (values.cumsum(1) / steps[:, None])[:, 1:]
    else:
        folded.uniform = values.mean(1, keepdim=True).expand_as(values)[:, 1:]
    output = view.output
    plain = output is not None and view.raw_projected is not None and torch.equal(view.raw_projected, output)
    if output is not None and plain:  # with a gate or norm after attention, the head does not add W sum_j A_ij z_j
        sums = view.attention
        total = 1 - sums.learned_sink if sums.row_total is None else sums.row_total
        shares = float64(total[sequence]).unsqueeze(-1)
        folded.attended = (_by_head(output[sequence]) - shares * constant)[:, 1:]


def _by_head(rows: Float[Tensor, "token head vdim"]) -> Mixed:
    return float64(rows).transpose(0, 1)
