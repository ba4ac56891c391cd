"""Smoothing: does a head that mixes tokens make them more similar? After Lampert et al. 2605.08453.

Some formulas of the paper could not be read; the sources below say which ones are our reconstruction.

Notation for one head of one sequence: W = W_O^h W_V^h diag(gain of the input norm). x_i is the residual stream entering
the block. z_i is the normalised token without gain and bias, or x_i itself where the block has no input norm. Only
tokens i >= 1 count; zbar is the mean of their z_i, and B = Cov(z) with 1/n. Biases are left out, and so is any norm or
multiplier after W_O. Each column is a mean over sequences of per-sequence values. Columns that depend on x and z alone
are constant within a layer.
"""

from __future__ import annotations

from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from sinkscope.capture.view import Missing
from sinkscope.metrics.registry import measured_metric
from sinkscope.wiring.folded import FoldedHeads
from sinkscope.wiring.mixes import largest_square, squares

LAMPERT = "Lampert et al. 2605.08453"
EQ2 = f"{LAMPERT} eq. 2, our reconstruction"
COSTS = f"{LAMPERT} section 7; our reading of kappa, C, r and Delta"
PARTS = f"{LAMPERT} section 7; which terms pay for which weights, and the symbols' readings, are ours"
OWN_BOUND = f"ours, in place of the paper's ({LAMPERT} section 7)"
WALKED = f"ours, after D_k(lambda) of {LAMPERT}"
CLUSTERS = f"ours, for C and r_eta of {LAMPERT} section 7"
GROUPS = 1.0
"""C, the number of groups of tokens: given, not found. All tokens of a text count as one group. Columns that end in
_groups take clusters."""

HeadValues = Float[Tensor, " head"]

smoothing_metric = partial(measured_metric, "smoothing")
"""Declares a function FoldedHeads -> [head] as a column of smoothing.csv."""


@smoothing_metric(unit="ratio", range="(-inf, inf)", source=f"{LAMPERT}, our reconstruction")
def beta(folded: FoldedHeads) -> HeadValues:
    """mean (x_i - xbar).(z_i - zbar) / mean |z_i - zbar|^2 over i >= 1: the least-squares slope of x on z, the
    normalised token without the norm's gain; constant within a layer."""
    return folded.beta.expand(folded.heads)


@smoothing_metric(unit="activation^2", range="(-inf, inf)", source=LAMPERT)
def tr_bw(folded: FoldedHeads) -> HeadValues:
    """tr(B W) = mean (z_i - zbar)^T W (z_i - zbar) over i >= 1; z is without the norm's gain, W = W_O^h W_V^h
    diag(gain) holds it."""
    return folded.tr_bw


@smoothing_metric(unit="activation^2", range="[0, inf)", source=LAMPERT)
def tr_bwtw(folded: FoldedHeads) -> HeadValues:
    """tr(B W^T W) = mean |W (z_i - zbar)|^2 over i >= 1; z and W as in tr_bw."""
    return folded.tr_bwtw


@smoothing_metric(unit="activation^2", range="(-inf, inf)", source=LAMPERT)
def beta_tr_bw(folded: FoldedHeads) -> HeadValues:
    """beta * tr(B W), both of the same sequence; `verdict` depends on its sign."""
    return beta(folded) * tr_bw(folded)


@smoothing_metric(unit="cosine", range="[-1, 1]", source=LAMPERT)
def avgcos_residual(folded: FoldedHeads) -> HeadValues:
    """Mean cosine over pairs i != j, both >= 1, of x_i and x_j, before the head adds anything; constant within
    a layer."""
    return folded.cos_residual


@smoothing_metric(unit="cosine", range="[-1, 1]", source=LAMPERT)
def avgcos_identity(folded: FoldedHeads) -> HeadValues:
    """Mean cosine over pairs i != j, both >= 1, of x_i + W z_i: each token attends to itself alone; z and W as in
    tr_bw."""
    return folded.cos_identity


@smoothing_metric(unit="cosine", range="[-1, 1]", source=LAMPERT)
def avgcos_attention(folded: FoldedHeads) -> HeadValues:
    """Mean cosine over pairs i != j, both >= 1, of x_i + W sum_k A_ik z_k: the head's own attention, key 0 included; z
    and W as in tr_bw; empty where a gate or norm lies between attention and the output projection."""
    return folded.cos_attention


@smoothing_metric(unit="cosine", range="[-1, 1]", source=LAMPERT)
def avgcos_uniform(folded: FoldedHeads) -> HeadValues:
    """Mean cosine over pairs i != j, both >= 1, of x_i + W mean_{k<=i} z_k: uniform attention, key 0 included, windows
    ignored; z and W as in tr_bw. In a bidirectional layer the mean is over all k."""
    return folded.cos_uniform


@smoothing_metric(unit="cosine", range="[-2, 2]", source=f"{LAMPERT} fig. 8")
def attention_minus_identity(folded: FoldedHeads) -> HeadValues:
    """avgcos_attention - avgcos_identity, in the same sequence: above 0, the head's mixing makes tokens more
    similar."""
    return folded.cos_attention - folded.cos_identity


@smoothing_metric(unit="cosine", range="[-2, 2]", source=f"{LAMPERT} fig. 9")
def uniform_minus_attention(folded: FoldedHeads) -> HeadValues:
    """avgcos_uniform - avgcos_attention, in the same sequence: how much less similar tokens are under the head's own
    pattern than under uniform attention."""
    return folded.cos_uniform - folded.cos_attention


@smoothing_metric(unit="ratio", range="(-inf, inf)", source=f"{LAMPERT} fig. 10; its denominator is our reading")
def relative_change(folded: FoldedHeads) -> HeadValues:
    """(avgcos_attention - avgcos_identity) / |avgcos_identity|, in the same sequence."""
    return attention_minus_identity(folded) / folded.cos_identity.abs()


@smoothing_metric(unit="cosine", range="[0, 1]", source=EQ2)
def theory_residual(folded: FoldedHeads) -> HeadValues:
    """|xbar|^2 / (|xbar|^2 + tr Cov(x)) of the tokens i >= 1, the predicted avgcos_residual; constant within a
    layer."""
    return _theory(folded.tokens_mean_square, folded.tokens_spread).expand(folded.heads)


@smoothing_metric(unit="cosine", range="[0, 1]", source=EQ2)
def theory_identity(folded: FoldedHeads) -> HeadValues:
    """|(beta I + W) m|^2 / (|(beta I + W) m|^2 + tr((beta I + W) B (beta I + W)^T)), m = zbar: the predicted
    avgcos_identity; z, W and B as in tr_bw; inexact where x is not beta z."""
    slope, size = beta(folded), squares(folded.mean_out)
    mean = slope.square() * folded.mean_square + 2 * slope * folded.mean_through + size
    variance = slope.square() * folded.spread + 2 * slope * tr_bw(folded) + tr_bwtw(folded)
    return _theory(mean, variance)


@smoothing_metric(unit="rank", range="[1, head dim]", source="ours, comparable to Lampert et al. fig. 12", sampled=True)
def rank_output(folded: FoldedHeads) -> HeadValues:
    """Stable rank |Y|_F^2 / |Y|_2^2 of the matrix Y with rows W_O^h w_i, i >= 1, as the head writes them (biases
    included in w, means not subtracted): 1 = the same direction for every token; empty where the head writes
    nothing. Measured on the first n sequences only, as matrix_entropy is."""
    written = folded.exact_written_out
    largest = largest_square(written)
    return written.square().sum((1, 2)) / torch.where(largest > 0, largest, torch.nan)


@smoothing_metric(unit="cost", range="(0, inf)", source=COSTS, sampled=True)
def cost_sink_lower(folded: FoldedHeads) -> HeadValues:
    """kappa C / (2 s D), a lower bound on the cost of a sink. kappa = the head's own sink margin in nats (mean over
    i >= 1; sequences where it is not above 0 have no cost and are left out); C = 1, since all tokens of the text count
    as one group; D = width of z, which is |z|^2 behind a norm; s = the factor of the head's logits, s z_i^T W_Q^T W_K
    z_j. The unit is |W_Q|_F^2 + |W_K|_F^2, and that of W_O, W_V and an MLP beside them in the upper bounds. All bounds
    are measured on the first n sequences only, as matrix_entropy is."""
    return _kappa(folded) * GROUPS / (2 * _reach(folded))


@smoothing_metric(unit="cost", range="(0, inf)", source=COSTS, sampled=True)
def cost_sink_upper(folded: FoldedHeads) -> HeadValues:
    """12 kappa C / (s D) + 5 (r + C), r = stable rank tr B / |B|_2 of the tokens around their mean: no upper bound,
    since the paper's r is the dimension of their span, which is larger; cost_sink_upper_qk and cost_sink_upper_value
    take that. kappa, C, s, D and the sequences as in cost_sink_lower."""
    return 12 * _kappa(folded) * GROUPS / _reach(folded) + 5 * (folded.token_rank + GROUPS)


@smoothing_metric(
    unit="cost", range="(0, inf)", source="ours, in place of Lampert et al. 2605.08453 section 7", sampled=True
)
def cost_diagonal_lower(folded: FoldedHeads) -> HeadValues:
    """kappa / (s |B'|_2), a lower bound on the cost of a diagonal pattern of the same margin; B' = B n/(n-1); kappa, s
    and the sequences as in cost_sink_lower. It bounds (|W_Q|_F^2 + |W_K|_F^2) / 2: cost_diagonal_lower_qk is in the
    unit of the others, and cost_diagonal_lower_paper the paper's own.

    For every pair, s (z_i - z_j)^T W (z_i - z_j) >= 2 kappa, where W = W_Q^T W_K; the mean over pairs is
    2 s tr(W B'), and tr(W B') <= |W|_* |B'|_2 <= |B'|_2 (|W_Q|_F^2 + |W_K|_F^2) / 2. Nothing may be added for the first
    token: weights exist that keep it out at less than kappa C / (2 s D) more (tests/questions/test_costs.py).
    """
    count = folded.normalised.shape[0]
    return _kappa(folded) * (count - 1) / (_scale(folded) * count * folded.token_top)


@smoothing_metric(unit="cost", range="(0, inf)", source=COSTS, sampled=True)
def cost_diagonal_upper(folded: FoldedHeads) -> HeadValues:
    """13 kappa C / (s D) + 4 kappa r / (s Delta) + 3 (r + C), an estimate of the upper bound on the cost of a diagonal
    pattern of the same margin. Delta = mean over pairs i != j of (z_i - zbar).(z_i - z_j) = n/(n-1) tr B, where the
    theorem asks for the smallest gap; r as in cost_sink_upper: it guarantees nothing, and cost_diagonal_upper_qk and
    cost_diagonal_upper_value do. kappa, C, s, D and the sequences as in cost_sink_lower."""
    kappa, reach, rank = _kappa(folded), _reach(folded), folded.token_rank
    count, width = folded.normalised.shape
    gap = folded.spread * count / max(count - 1, 1)
    return 13 * kappa * GROUPS / reach + 4 * kappa * rank * width / (reach * gap) + 3 * (rank + GROUPS)


@smoothing_metric(unit="nats", range="(-inf, inf)", source=f"{LAMPERT} section 7 (requirements); estimator ours")
def sink_margin_pairs(folded: FoldedHeads) -> HeadValues:
    """Mean over i >= 1 of s_i0 - max s_ij, the maximum over the other keys j that i sees: the margin of key 0 over each
    other key, as the paper's requirements have it, where sink_margin is that over all together. Queries that do not see
    key 0 are left out; the theorem asks for the margin in every row, this is their mean."""
    return folded.need(folded.pair_margin).nanmean(-1)


@smoothing_metric(unit="dimension", range="[0, min(T - 1, D)]", source=f"{LAMPERT} section 7 (r_eta)", sampled=True)
def token_span(folded: FoldedHeads) -> HeadValues:
    """The dimension of the span of z_i - zbar, i >= 1, as a numerical rank: the number of singular values above max(T -
    1, D) 2^-23 times the largest, as numpy.linalg.matrix_rank takes it in float32. It stands for the paper's dimension
    of the nuisance, which leaves out the signal's span; constant within a layer."""
    return folded.token_span.expand(folded.heads)


@smoothing_metric(unit="cost", range="(0, inf)", source=PARTS, sampled=True)
def cost_sink_lower_qk(folded: FoldedHeads) -> HeadValues:
    """kappa C / (2 s D) with kappa = sink_margin_pairs where it is above 0 (else empty), here and in the columns below;
    C = 1, given; s and D as in cost_sink_lower. A lower bound on |W_Q|_F^2 + |W_K|_F^2 of a sink of this margin."""
    return _pairs(folded) * GROUPS / (2 * _reach(folded))


@smoothing_metric(unit="cost", range="(0, inf)", source=PARTS, sampled=True)
def cost_sink_upper_qk(folded: FoldedHeads) -> HeadValues:
    """12 kappa C / (s D): weights of a sink of this margin exist whose |W_Q|_F^2 + |W_K|_F^2 is no larger. kappa, C, s,
    D as in cost_sink_lower_qk."""
    return 12 * _pairs(folded) * GROUPS / _reach(folded)


@smoothing_metric(unit="cost", range="(0, inf)", source=PARTS, sampled=True)
def cost_sink_upper_value(folded: FoldedHeads) -> HeadValues:
    """5 (r + C), r = token_span: what values and MLP of such a sink cost at most, whatever its margin. No lower bound
    has such a term. Empty where cost_sink_upper_qk is."""
    return 5 * (token_span(folded) + GROUPS) + 0 * _pairs(folded)


@smoothing_metric(
    unit="cost", range="(0, inf)", source="ours, in place of Lampert et al. 2605.08453 section 7", sampled=True
)
def cost_diagonal_lower_qk(folded: FoldedHeads) -> HeadValues:
    """2 kappa / (s |B'|_2), a lower bound on |W_Q|_F^2 + |W_K|_F^2 of a diagonal pattern of this margin, both orders of
    every pair; B' = B n/(n-1); kappa and s as in cost_sink_lower_qk."""
    return 2 * _pairs(folded) / (_scale(folded) * _top(folded))


@smoothing_metric(unit="cost", range="(0, inf)", source=PARTS, sampled=True)
def cost_diagonal_lower_paper(folded: FoldedHeads) -> HeadValues:
    """kappa r_eff / (delta^2 s D) + kappa C / (2 s D), the paper's lower bound on the cost of a diagonal pattern, with
    r_eff = tr B' / |B'|_2 and delta^2 = tr B' / D, so that its first term is kappa / (s |B'|_2). The second need not
    hold here, where no part of a token is orthogonal to the others'. Symbols as in cost_diagonal_lower_qk.

    tests/questions/test_costs.py has weights below it.
    """
    kappa = _pairs(folded)
    return kappa / (_scale(folded) * _top(folded)) + kappa * GROUPS / (2 * _reach(folded))


@smoothing_metric(unit="cost", range="(0, inf)", source=PARTS, sampled=True)
def cost_diagonal_upper_qk(folded: FoldedHeads) -> HeadValues:
    """13 kappa C / (s D) + 4 kappa r / (s Delta), r = token_span, Delta = the smallest over pairs i != j of (z_i -
    zbar).(z_i - z_j): weights of a diagonal pattern of this margin exist whose |W_Q|_F^2 + |W_K|_F^2 is no larger.
    Empty where Delta is not above 0, as where a token stands twice: no such weights follow then. Other symbols as in
    cost_sink_lower_qk."""
    kappa, gap = _pairs(folded), folded.smallest_gap
    gap = torch.where(gap > 0, gap, torch.nan)
    return 13 * kappa * GROUPS / _reach(folded) + 4 * kappa * token_span(folded) / (_scale(folded) * gap)


@smoothing_metric(unit="cost", range="(0, inf)", source=PARTS, sampled=True)
def cost_diagonal_upper_value(folded: FoldedHeads) -> HeadValues:
    """3 (r + C), r = token_span: what values and MLP of such a diagonal pattern cost at most, whatever its margin.
    Empty where cost_sink_upper_qk is."""
    return 3 * (token_span(folded) + GROUPS) + 0 * _pairs(folded)


@smoothing_metric(unit="ratio", range="(-inf, inf)", source=WALKED, sampled=True)
def path_slope_own(folded: FoldedHeads) -> HeadValues:
    """D'(0) / D(0) of D(lam) = mean |y_i - ybar|^2 over i >= 1, ybar the mean of the y_i. y_i(lam) = x_i + (1 - lam) W
    z_i + lam W mean_{k<=i} z_k is the path from each token's own value (lam = 0) to uniform attention (lam = 1), whose
    cosines are avgcos_identity and avgcos_uniform; key 0 is in the mean, as there, and in bidirectional heads the mean
    is over all k. With p_i = y_i(0) and q_i = y_i(1), D'(0) = 2 mean (p_i - pbar).(q_i - p_i). Below 0, the first step
    brings tokens together. Empty where D(0) is 0. Measured on the first n sequences only, as matrix_entropy is.

    For tokens drawn independently it is -2 (1 - 1/k) (beta tr(B W) + tr(B W^T W)) / D(0), k the tokens in the mean.
    """
    return folded.path_slopes[0]


@smoothing_metric(unit="ratio", range="(-inf, inf)", source=WALKED, sampled=True)
def path_slope_dense(folded: FoldedHeads) -> HeadValues:
    """D'(1) / D(0) of the path in path_slope_own: D'(1) = D'(0) + 2 mean |d_i - dbar|^2, d_i = q_i - p_i, never smaller
    than D'(0). Below 0, tokens come together all along the path. The sequences are those of path_slope_own.

    For tokens drawn independently it is -2 (1 - 1/k) beta tr(B W) / D(0).
    """
    return folded.path_slopes[1]


@smoothing_metric(unit="cosine", range="[-1, 1]", source=WALKED, sampled=True)
def avgcos_half(folded: FoldedHeads) -> HeadValues:
    """Mean cosine over pairs i != j, both >= 1, of y_i(1/2), half way between avgcos_identity and avgcos_uniform on the
    path of path_slope_own. The sequences are those of path_slope_own."""
    return folded.cos_half


@smoothing_metric(unit="groups", range="[1, T - 1]", source=CLUSTERS, sampled=True)
def token_groups(folded: FoldedHeads) -> HeadValues:
    """C as clusters: the number of connected components of the graph that joins tokens i, j >= 1 where the cosine of
    z_i and z_j is above 1/2; a zero vector is a group of its own. In the paper's tokens these are the groups where the
    signal is longer than the nuisance and nuisances are orthogonal. Only the columns that end in _groups take this C,
    the others C = 1; constant within a layer. Measured on the first n sequences only, as matrix_entropy is."""
    return folded.spread.new_full((folded.heads,), folded.groups.count)


@smoothing_metric(unit="dimension", range="[0, min(T - 1, D)]", source=CLUSTERS, sampled=True)
def group_span(folded: FoldedHeads) -> HeadValues:
    """The dimension of the span of z_i less the mean of its group of token_groups: the number of singular values above
    max(T - 1, D) 2^-23 times the largest of z_i - zbar. It stands for the paper's dimension of the nuisance with C =
    token_groups, as token_span does with C = 1; constant within a layer."""
    return folded.group_span.expand(folded.heads)


@smoothing_metric(unit="cost", range="(0, inf)", source=CLUSTERS, sampled=True)
def cost_sink_upper_groups(folded: FoldedHeads) -> HeadValues:
    """12 kappa C / (s D) with C = token_groups: cost_sink_upper_qk, whose C is 1, times that. The paper assumes groups
    with orthogonal signals; the signals of these groups need not be orthogonal. kappa, s, D as in
    cost_sink_lower_qk."""
    return folded.groups.count * cost_sink_upper_qk(folded)


@smoothing_metric(
    unit="cost", range="(0, inf)", source="ours, in place of Lampert et al. 2605.08453 section 7", sampled=True
)
def cost_diagonal_lower_groups(folded: FoldedHeads) -> HeadValues:
    """The larger of cost_diagonal_lower_qk and 2 kappa / (s |B_g|_2), both lower bounds on |W_Q|_F^2 + |W_K|_F^2 of a
    diagonal pattern. B_g is the mean of (z_i - z_j) (z_i - z_j)^T / 2 over the pairs i != j of one group of
    token_groups; without such pairs, and where group_span is 0, the first alone. kappa and s as in cost_sink_lower_qk.

    A diagonal has to keep both tokens of every pair apart, so that the argument of cost_diagonal_lower holds for any
    choice of pairs.
    """
    whole, top = cost_diagonal_lower_qk(folded), folded.groups.top
    if not folded.group_span > 0:
        return whole
    return torch.maximum(whole, 2 * _pairs(folded) / (_scale(folded) * top))


def _theory(mean: Tensor, variance: Tensor) -> Tensor:
    return mean / (mean + variance)


def _kappa(folded: FoldedHeads) -> HeadValues:
    return _above_zero(folded.need(folded.margin).nanmean(-1))


def _pairs(folded: FoldedHeads) -> HeadValues:
    return _above_zero(sink_margin_pairs(folded))


def _above_zero(kappa: HeadValues) -> HeadValues:
    """A margin that is not above 0 is no sink's and has no cost."""
    return torch.where(kappa > 0, kappa, torch.nan)


def _top(folded: FoldedHeads) -> Float[Tensor, ""]:
    """|B'|_2, the largest eigenvalue of the tokens' covariance with 1/(n-1)."""
    count = folded.normalised.shape[0]
    return folded.token_top * count / (count - 1) if count > 1 else folded.token_top * torch.nan


def _reach(folded: FoldedHeads) -> float:
    """s D: the largest logit of two normalised tokens under weights of norm 1."""
    return _scale(folded) * folded.normalised.shape[-1]


def _scale(folded: FoldedHeads) -> float:
    if folded.scale is None:
        raise Missing
    return folded.scale
