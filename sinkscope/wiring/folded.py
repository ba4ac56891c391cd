"""One layer of one sequence in the notation of Lampert et al.: tokens x, normalised tokens z, and W applied to mixes.

W z = W_O^h W_V^h diag(gain) z equals W_O^h applied to the value v without its constant part. The attention call's
values and output are therefore enough, and no T x D tensor of a head is formed. Biases (of the norm, of W_V, of W_O)
are left out.

Tensors of tokens and channels stay in the view's dtype, float32 or wider: one number comes from one sum of a few
hundred products, whose rounding is some 1e-7 of its terms. What nearly cancels is centred before it is multiplied (x
around its mean, u around its mean). Norms and sums of the tokens themselves are float64, so that what a head adds is
not lost beside a large x, and so is every sum over tokens of single numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from sinkscope.capture.precision import are_equal, as_float64
from sinkscope.capture.token_sums import inverse
from sinkscope.capture.view import Missing
from sinkscope.wiring.added import ATTENTION, IDENTITY, UNIFORM, Added, TokenGroups, group_tokens, read_added
from sinkscope.wiring.mixes import OutputWeights, Tokens, dots, largest_square, share, squares

SINGLE = 2.0**-23
"""The spacing of float32 numbers at 1."""

FAR = 3.0
"""From so many times the spread of z on, x around its mean, scaled as z is, takes up digits that tr(B W) needs."""


@dataclass
class FoldedHeads:
    """The tokens and heads of one layer and sequence.

    There are n = T - 1 tokens, i = 1..T-1; token 0 takes part in the mixes only. Below, u_j = W_V diag(gain) z_j.
    Mixes that the heads of a group share are there once for each of G groups. Any tensor may be None; `need` then
    raises Missing.

    Attributes:
        x, z: tokens and normalised tokens, (n, D).
        weights: the output projection.
        values: u_j of every token, (G, n + 1, dv).
        attended: sum_j A_ij u_j, (H, n, dv).
        causal: whether uniform attention is that to the tokens j <= i, else to all.
        written: w_i, what the output projection reads, biases included, (H, n, dv).
        margin: each head's sink margin, (H, n), float64.
        pair_margin: each head's margin of key 0 over the next best key, (H, n), float64.
        scale: the factor s of the head's logits s z_i^T W_Q^T W_K z_j.
        affine: (a, b) with z_i = a_i (x_i - b_i), each (n, 1); None for a b of 0.
        values_out, attended_out, written_out: R_h of each, (H, n + 1, rank) and (H, n, rank), where they are known.
        x_out: W_O^hT (x_i - xbar), and behind the last token W_O^hT xbar, (H, n + 1, dv), where they are known.
    """

    heads: int
    x: Tensor | None = None
    z: Tensor | None = None
    weights: OutputWeights | None = None
    values: Tensor | None = None
    attended: Tensor | None = None
    causal: bool = True
    written: Tensor | None = None
    margin: Tensor | None = None
    pair_margin: Tensor | None = None
    scale: float | None = None
    affine: tuple[Tensor, Tensor | None] | None = None
    values_out: Tensor | None = None
    attended_out: Tensor | None = None
    written_out: Tensor | None = None
    x_out: Tensor | None = None

    def need(self, tensor: Tensor | None) -> Tensor:
        """Returns a tensor that the layer has. Raises Missing where it is None."""
        if tensor is None:
            raise Missing
        return tensor

    @cached_property
    def tokens(self) -> Tokens:
        """x_i, i >= 1."""
        return self.need(self.x)

    @cached_property
    def normalised(self) -> Tokens:
        """z_i, i >= 1."""
        return self.need(self.z)

    @cached_property
    def centred(self) -> Tokens:
        """z_i - zbar."""
        return self.normalised - self.normalised.mean(0)

    @cached_property
    def whole_spread(self) -> Float[Tensor, ""]:
        """mean |z_i - zbar|^2, whatever rounding makes of it."""
        return squares(self.centred).mean()

    @cached_property
    def equal(self) -> Bool[Tensor, ""]:
        """Whether all z_i are equal, as far as rounding tells."""
        return are_equal(self.whole_spread, self.mean_square)

    @property
    def spread(self) -> Float[Tensor, ""]:
        """tr B = mean |z_i - zbar|^2; NaN where all z_i are equal, since the metrics divide by it."""
        return torch.where(self.equal, torch.nan, self.whole_spread)

    @cached_property
    def mean_square(self) -> Float[Tensor, ""]:
        """|zbar|^2."""
        return squares(self.normalised.mean(0))

    @cached_property
    def beta(self) -> Float[Tensor, ""]:
        """The least-squares slope of x on z."""
        return as_float64((self.centred_tokens * self.centred).sum(-1)).mean() / self.spread

    @cached_property
    def centred_tokens(self) -> Tokens:
        """x_i - xbar."""
        return self.tokens - self.tokens.mean(0)

    @cached_property
    def tokens_spread(self) -> Float[Tensor, ""]:
        """tr Cov(x)."""
        return squares(self.centred_tokens).mean()

    @cached_property
    def tokens_mean_square(self) -> Float[Tensor, ""]:
        """|xbar|^2."""
        return squares(self.tokens.mean(0))

    @cached_property
    def added(self) -> Added:
        """The tokens with what the heads would add to them by each mix."""
        values = self.need(self.values)
        out = self._weights.through(values) if self.values_out is None else self.values_out
        attended, attended_out = self.attended, self.attended_out
        if attended is not None and attended_out is None:
            attended_out = self._weights.through(attended)
        return read_added(Added(self.read, self.token_squares, values, out, attended, attended_out, self.causal))

    @cached_property
    def tr_bw(self) -> Float[Tensor, " head"]:
        """tr(B W) = mean (z_i - zbar).W_O^h (u_i - ubar)."""
        # B is the mean of (z_i - zbar) (z_i - zbar)^T, and W (z_i - zbar) = W_O^h (u_i - ubar): hence the mean above.
        # Where z_i = a_i (x_i - b_i), no z_i is read. The u_i - ubar sum to 0, so that zbar drops out, and what is left
        # is the mean of a_i x_i.W_O^h (u_i - ubar) - a_i b_i 1.W_O^h (u_i - ubar). With x_i = (x_i - xbar) + xbar it is
        #     mean a_i (x_i - xbar).W_O^h u_i  +  mean (a_i - abar) xbar.W_O^h u_i
        #     - mean (a_i b_i - mean a b) 1.W_O^h u_i  -  (mean a_i W_O^hT (x_i - xbar)).ubar
        # In the code these are scale * around, varied's two parts, and scaled_read times values_mean.
        values = self.need(self.values)[:, 1:]
        if self.affine is None or self._mean_is_far:
            return dots(self._weights.read(self.centred), values).mean(-1)
        scale = as_float64(self.affine[0][:, 0])
        varied = (scale - scale.mean()) * self.added.along
        if self.affine[1] is not None:
            shift = scale * as_float64(self.affine[1][:, 0])
            varied = varied - (shift - shift.mean()) * as_float64(share(self._weights.sums, values))
        inside = (scale * self.added.around + varied).mean(-1)
        return inside - (as_float64(self.scaled_read) * self.added.values_mean).sum(-1)

    @cached_property
    def _mean_is_far(self) -> bool:
        """Whether a_i (x_i - xbar) is so much larger than z_i - zbar that `tr_bw` would lose digits in the difference
        of its products: some tokens behind the first have a massive activation, and draw xbar away from the others."""
        assert self.affine is not None
        around = (as_float64(self.affine[0][:, 0]).square() * squares(self.centred_tokens)).mean()
        return bool(around > FAR**2 * self.spread)

    @property
    def tr_bwtw(self) -> Float[Tensor, " head"]:
        """tr(B W^T W) = mean |W_O^h (u_i - ubar)|^2."""
        return self.added.out_spread

    @cached_property
    def mean_through(self) -> Float[Tensor, " head"]:
        """zbar.W zbar."""
        mean = self.added.values_mean
        if self.affine is None:
            return (as_float64(self._weights.read(self.normalised.mean(0)[None])[:, 0]) * mean).sum(-1)
        scale = as_float64(self.affine[0][:, 0])
        read = as_float64(self.scaled_read) + scale.mean() * as_float64(self.mean_read)
        if self.affine[1] is not None:
            read = read - (scale * as_float64(self.affine[1][:, 0])).mean() * as_float64(self._weights.sums)
        return (read * mean).sum(-1)

    @property
    def mean_out(self) -> Float[Tensor, "head rank"]:
        """R_h ubar."""
        return self.added.out_mean

    @cached_property
    def read(self) -> Float[Tensor, "head token vdim"]:
        """W_O^hT (x_i - xbar), and behind the last token W_O^hT xbar."""
        if self.x_out is not None:
            return self.x_out
        return self._weights.read(torch.cat([self.centred_tokens, self.tokens.mean(0, keepdim=True)]))

    @property
    def mean_read(self) -> Float[Tensor, "head vdim"]:
        """W_O^hT xbar."""
        return self.read[:, -1]

    @cached_property
    def scaled_read(self) -> Float[Tensor, "head vdim"]:
        """The mean over tokens of a_i W_O^hT (x_i - xbar)."""
        assert self.affine is not None
        return (self.affine[0].mT @ self.read[:, :-1])[:, 0] / len(self.tokens)

    @cached_property
    def exact_written_out(self) -> Float[Tensor, "head token rank"]:
        """R_h w_i in float64, for spectra."""
        written = self._weights.through(self.need(self.written)) if self.written_out is None else self.written_out
        return as_float64(written)

    @cached_property
    def token_top(self) -> Float[Tensor, ""]:
        """|B|_2, the largest eigenvalue of the tokens' covariance (1/n); NaN where all z_i are equal."""
        return torch.where(self.equal, torch.nan, largest_square(self.centred) / len(self.centred))

    @cached_property
    def token_rank(self) -> Float[Tensor, ""]:
        """Stable rank tr B / |B|_2 of the tokens around their mean."""
        return self.spread / self.token_top

    @cached_property
    def exact_centred(self) -> Tokens:
        """z_i - zbar in float64, 0 where all z_i are equal: float32 would leave a sum that is not 0, and with it a
        dimension too many."""
        exact = as_float64(self.normalised)
        return torch.where(self.equal, 0.0, exact - exact.mean(0))

    @cached_property
    def span_bound(self) -> Float[Tensor, ""]:
        """max(T - 1, D) 2^-23 times the largest singular value of the rows z_i - zbar, squared: what rounding in
        float32 leaves of a value that is 0."""
        return (max(self.exact_centred.shape) * SINGLE) ** 2 * self._token_values[-1]

    @property
    def token_span(self) -> Float[Tensor, ""]:
        """Dimension of the span of the tokens around their mean: the number of squared singular values above
        span_bound."""
        return _span(self._token_values, self.span_bound)

    @cached_property
    def _token_values(self) -> Float[Tensor, " value"]:
        return _square_values(self.exact_centred)

    @cached_property
    def groups(self) -> TokenGroups:
        """The tokens' groups of alike ones."""
        return group_tokens(as_float64(self.normalised))

    @cached_property
    def group_span(self) -> Float[Tensor, ""]:
        """As token_span, of the tokens around the mean of their group; the bound is the same."""
        if self.groups.count == 1:
            return self.token_span
        return _span(_square_values(self.groups.shared), self.span_bound)

    @cached_property
    def smallest_gap(self) -> Float[Tensor, ""]:
        """The smallest over pairs i != j of (z_i - zbar).(z_i - z_j); NaN for a single token."""
        rows = self.exact_centred
        gram = rows @ rows.mT
        gaps = gram.diagonal()[:, None] - gram
        off_diagonal = ~torch.eye(len(rows), dtype=torch.bool, device=rows.device)
        return gaps[off_diagonal].amin() if len(rows) > 1 else gram.new_tensor(torch.nan)

    @cached_property
    def unit_square(self) -> Float[Tensor, ""]:
        """|sum x_i / |x_i||^2; a zero vector adds nothing."""
        return squares(inverse(self.token_squares.sqrt()) @ self.exact_tokens)

    @property
    def cos_residual(self) -> Float[Tensor, " head"]:
        """Mean cosine of the x_i over unordered pairs i != j."""
        return _mean_cosine(self.token_squares, self.unit_square).expand(self.heads)

    @property
    def cos_identity(self) -> Float[Tensor, " head"]:
        """The same of x_i + W_O^h v_i."""
        return self.cos_added[IDENTITY]

    @property
    def cos_attention(self) -> Float[Tensor, " head"]:
        """The same of x_i + W_O^h o_i."""
        self.need(self.attended)
        return self.cos_added[ATTENTION]

    @property
    def cos_uniform(self) -> Float[Tensor, " head"]:
        """The same with the same weight for all tokens that i sees."""
        return self.cos_added[UNIFORM]

    @cached_property
    def cos_added(self) -> Float[Tensor, "mix head"]:
        """Mean cosine over unordered pairs i != j of x_i + W_O^h y_i, for each mix y of `Added.units`.

        It is (|sum of unit vectors|^2 - n) / (n (n - 1)); a zero vector has cosine 0 with every other.
        """
        weights, change = self.added.units
        return _mean_cosine(weights, squares(weights @ self.exact_tokens) + change)

    @property
    def cos_half(self) -> Float[Tensor, " head"]:
        """As cos_added, half way between identity and uniform attention."""
        weights, change = self.added.half
        return _mean_cosine(weights, squares(weights @ self.exact_tokens) + change)

    @cached_property
    def path_slopes(self) -> Float[Tensor, "end head"]:
        """V'(0) / V(0) and V'(1) / V(0) of V(lam), the spread of x_i + W_O^h y_i around its mean, with y = (1 - lam)
        identity + lam uniform; NaN where V(0) is 0, as it is where all x_i are equal."""
        added = self.added
        start = self.tokens_spread + 2 * added.around.mean(-1) + added.out_spread
        slopes = 2 * torch.stack([added.towards, added.towards + added.moved]) / start
        moves = (start > 0) & ~are_equal(self.tokens_spread, self.tokens_mean_square)
        return torch.where(moves, slopes, torch.nan)

    @cached_property
    def exact_tokens(self) -> Tokens:
        """x_i in float64: where a head adds little to x, cosines under two mixes differ by less than float32 rounds."""
        return as_float64(self.tokens)

    @cached_property
    def token_squares(self) -> Float[Tensor, " token"]:
        """|x_i|^2."""
        return squares(self.exact_tokens)

    @property
    def _weights(self) -> OutputWeights:
        if self.weights is None:
            raise Missing
        return self.weights


def _square_values(rows: Tokens) -> Float[Tensor, " value"]:
    """The squared singular values, from the smallest on; NaN for rows with NaN or infinity."""
    gram = rows @ rows.mT if len(rows) <= rows.shape[1] else rows.mT @ rows
    if not gram.isfinite().all():
        return gram.new_full((1,), torch.nan)
    return torch.linalg.eigvalsh(gram.cpu()).clamp(min=0.0).to(gram)


def _span(values: Float[Tensor, " value"], bound: Float[Tensor, ""]) -> Float[Tensor, ""]:
    return torch.where(values.isnan().any() | bound.isnan(), torch.nan, (values > bound).sum().to(values))


def _mean_cosine(norms: Float[Tensor, "*batch token"], unit_square: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
    """From |sum of unit vectors|^2 and numbers that are 0 for the vectors that are 0."""
    count = norms.shape[-1]
    if count < 2:
        return torch.full_like(unit_square, torch.nan)
    return (unit_square - (norms > 0).sum(-1)) / (count * (count - 1))
