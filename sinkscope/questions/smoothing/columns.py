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
    """Least-squares slope of x_i on z_i over i >= 1: (mean of (x_i - xbar).(z_i - zbar)) / (mean of |z_i - zbar|^2).
    z_i is the normalised token without the norm's gain. The same for all heads of a layer."""
    return folded.beta.expand(folded.heads)


@smoothing_metric(unit="activation^2", range="(-inf, inf)", source=LAMPERT)
def tr_bw(folded: FoldedHeads) -> HeadValues:
    """tr(B W): mean over i >= 1 of (z_i - zbar)^T W (z_i - zbar). z_i is the normalised token without the norm's gain;
    the gain is in W = W_O^h W_V^h diag(gain)."""
    return folded.tr_bw


@smoothing_metric(unit="activation^2", range="[0, inf)", source=LAMPERT)
def tr_bwtw(folded: FoldedHeads) -> HeadValues:
    """tr(B W^T W): mean over i >= 1 of |W (z_i - zbar)|^2. z_i and W as in tr_bw."""
    return folded.tr_bwtw


@smoothing_metric(unit="activation^2", range="(-inf, inf)", source=LAMPERT)
def beta_tr_bw(folded: FoldedHeads) -> HeadValues:
    """beta times tr_bw, both of the same sequence. `verdict` depends on the sign of its mean."""
    return beta(folded) * tr_bw(folded)


@smoothing_metric(unit="cosine", range="[-1, 1]", source=LAMPERT)
def avgcos_residual(folded: FoldedHeads) -> HeadValues:
    """Mean cosine of x_i and x_j over pairs i != j, both >= 1, before the head adds anything. The same for all heads of
    a layer."""
    return folded.cos_residual


@smoothing_metric(unit="cosine", range="[-1, 1]", source=LAMPERT)
def avgcos_identity(folded: FoldedHeads) -> HeadValues:
    """Mean cosine over pairs i != j, both >= 1, of the vectors x_i + W z_i, as if each token attended only to itself.
    z_i and W as in tr_bw."""
    return folded.cos_identity


@smoothing_metric(unit="cosine", range="[-1, 1]", source=LAMPERT)
def avgcos_attention(folded: FoldedHeads) -> HeadValues:
    """Mean cosine over pairs i != j, both >= 1, of the vectors x_i + W sum_k A[i,k] z_k, with the head's own attention.
    Key 0 is in the sum. z_i and W as in tr_bw. Empty where a gate or norm lies between attention and the output
    projection."""
    return folded.cos_attention


@smoothing_metric(unit="cosine", range="[-1, 1]", source=LAMPERT)
def avgcos_uniform(folded: FoldedHeads) -> HeadValues:
    """Mean cosine over pairs i != j, both >= 1, of the vectors x_i + W mean_{k<=i} z_k, as if attention were uniform.
    Key 0 is in the mean, and windows are ignored. In a bidirectional layer the mean is over all k. z_i and W as in
    tr_bw."""
    return folded.cos_uniform


@smoothing_metric(unit="cosine", range="[-2, 2]", source=f"{LAMPERT} fig. 8")
def attention_minus_identity(folded: FoldedHeads) -> HeadValues:
    """avgcos_attention - avgcos_identity, in the same sequence. Above 0, the head's attention makes tokens more
    similar."""
    return folded.cos_attention - folded.cos_identity


@smoothing_metric(unit="cosine", range="[-2, 2]", source=f"{LAMPERT} fig. 9")
def uniform_minus_attention(folded: FoldedHeads) -> HeadValues:
    """avgcos_uniform - avgcos_attention, in the same sequence. Above 0, tokens are less similar under the head's own
    attention than under uniform attention."""
    return folded.cos_uniform - folded.cos_attention


@smoothing_metric(unit="ratio", range="(-inf, inf)", source=f"{LAMPERT} fig. 10; its denominator is our reading")
def relative_change(folded: FoldedHeads) -> HeadValues:
    """(avgcos_attention - avgcos_identity) / |avgcos_identity|, in the same sequence."""
    return attention_minus_identity(folded) / folded.cos_identity.abs()


@smoothing_metric(unit="cosine", range="[0, 1]", source=EQ2)
def theory_residual(folded: FoldedHeads) -> HeadValues:
    """The predicted avgcos_residual: |xbar|^2 / (|xbar|^2 + tr Cov(x)) over the tokens i >= 1, where Cov has 1/n. The
    same for all heads of a layer."""
    return _theory(folded.tokens_mean_square, folded.tokens_spread).expand(folded.heads)


@smoothing_metric(unit="cosine", range="[0, 1]", source=EQ2)
def theory_identity(folded: FoldedHeads) -> HeadValues:
    """The predicted avgcos_identity: |M zbar|^2 / (|M zbar|^2 + tr(M B M^T)) with M = beta I + W. z_i, W and B as in
    tr_bw. It is inexact where x_i is not beta z_i."""
    slope, size = beta(folded), squares(folded.mean_out)
    mean = slope.square() * folded.mean_square + 2 * slope * folded.mean_through + size
    variance = slope.square() * folded.spread + 2 * slope * tr_bw(folded) + tr_bwtw(folded)
    return _theory(mean, variance)


@smoothing_metric(unit="rank", range="[1, head dim]", source="ours, comparable to Lampert et al. fig. 12", sampled=True)
def rank_output(folded: FoldedHeads) -> HeadValues:
    """Stable rank |Y|_F^2 / |Y|_2^2 of the matrix Y with the rows W_O^h w_i, i >= 1. w_i includes biases, and the mean
    is not subtracted. It is 1 where the head writes in the same direction for every token, and empty where it writes
    nothing. Measured on the first n sequences only, as matrix_entropy is."""
    written = folded.exact_written_out
    largest = largest_square(written)
    return written.square().sum((1, 2)) / torch.where(largest > 0, largest, torch.nan)


@smoothing_metric(unit="cost", range="(0, inf)", source=COSTS, sampled=True)
def cost_sink_lower(folded: FoldedHeads) -> HeadValues:
    """kappa C / (2 s D): a lower bound on the cost of a sink. The cost is |W_Q|_F^2 + |W_K|_F^2; the upper bounds also
    include W_O, W_V and an MLP. kappa is the head's own sink_margin, in nats. A sequence in which it is not above 0 has
    no cost and is left out. C is 1: all tokens of the text count as one group. D is the width of z_i, and behind a norm
    also |z_i|^2. s is the factor of the head's logits, s z_i^T W_Q^T W_K z_j. Where logits are soft-capped, it is that
    of the logits before; where q or k is normalised, it is that of q_i.k_j. The bounds are then those of a head with
    this margin, but without soft-cap and norm. Where s could not be found, no head has a cost. All bounds are measured
    on the first n sequences only, as matrix_entropy is."""
    return _kappa(folded) * GROUPS / (2 * _reach(folded))


@smoothing_metric(unit="cost", range="(0, inf)", source=COSTS, sampled=True)
def cost_sink_upper(folded: FoldedHeads) -> HeadValues:
    """12 kappa C / (s D) + 5 (r + C), where r = tr B / |B|_2 is the stable rank of the tokens around their mean. It is
    not an upper bound: the paper's r is the dimension of the tokens' span, which is larger. cost_sink_upper_qk and
    cost_sink_upper_value use that dimension. kappa, C, s, D and the sequences are those of cost_sink_lower."""
    return 12 * _kappa(folded) * GROUPS / _reach(folded) + 5 * (folded.token_rank + GROUPS)


@smoothing_metric(
    unit="cost", range="(0, inf)", source="ours, in place of Lampert et al. 2605.08453 section 7", sampled=True
)
def cost_diagonal_lower(folded: FoldedHeads) -> HeadValues:
    """kappa / (s |B'|_2) with B' = B n/(n-1): a lower bound on the cost of a diagonal pattern with the same margin. It
    bounds (|W_Q|_F^2 + |W_K|_F^2) / 2. cost_diagonal_lower_qk has the unit of the other columns, and
    cost_diagonal_lower_paper is the paper's own bound. kappa, s and the sequences are those of cost_sink_lower.

    For every pair, s (z_i - z_j)^T W (z_i - z_j) >= 2 kappa, where W = W_Q^T W_K; the mean over pairs is
    2 s tr(W B'), and tr(W B') <= |W|_* |B'|_2 <= |B'|_2 (|W_Q|_F^2 + |W_K|_F^2) / 2. Nothing may be added for the first
    token: weights exist that keep it out at less than kappa C / (2 s D) more (tests/questions/test_costs.py).
    """
    count = folded.normalised.shape[0]
    return _kappa(folded) * (count - 1) / (_scale(folded) * count * folded.token_top)


@smoothing_metric(unit="cost", range="(0, inf)", source=COSTS, sampled=True)
def cost_diagonal_upper(folded: FoldedHeads) -> HeadValues:
    """13 kappa C / (s D) + 4 kappa r / (s Delta) + 3 (r + C): an estimate of the upper bound on the cost of a diagonal
    pattern with the same margin. Delta is the mean over pairs i != j of (z_i - zbar).(z_i - z_j), which is n/(n-1) tr
    B; the theorem asks for the smallest of these instead. r is that of cost_sink_upper. So this number guarantees
    nothing; cost_diagonal_upper_qk and cost_diagonal_upper_value do. kappa, C, s, D and the sequences are those of
    cost_sink_lower."""
    kappa, reach, rank = _kappa(folded), _reach(folded), folded.token_rank
    count, width = folded.normalised.shape
    gap = folded.spread * count / max(count - 1, 1)
    return 13 * kappa * GROUPS / reach + 4 * kappa * rank * width / (reach * gap) + 3 * (rank + GROUPS)


@smoothing_metric(unit="nats", range="(-inf, inf)", source=f"{LAMPERT} section 7 (requirements); estimator ours")
def sink_margin_pairs(folded: FoldedHeads) -> HeadValues:
    """Mean over i >= 1 of s_i0 - max_j s_ij, where j runs over the other keys that i sees. This is the margin of key 0
    over the best other key, as in the paper's requirements; sink_margin is its margin over all other keys together. The
    theorem asks for the margin in every row, and this column is the mean over rows. Queries that do not see key 0, or
    see no other key, are left out. Empty where attention is no softmax."""
    return folded.need(folded.pair_margin).nanmean(-1)


@smoothing_metric(unit="dimension", range="[0, min(T - 1, D)]", source=f"{LAMPERT} section 7 (r_eta)", sampled=True)
def token_span(folded: FoldedHeads) -> HeadValues:
    """Dimension of the span of z_i - zbar, i >= 1, as a numerical rank: the number of singular values above max(T - 1,
    D) 2^-23 times the largest. This is the rule of numpy.linalg.matrix_rank in float32. It stands for the dimension of
    the paper's nuisance, which leaves out the span of the signal. The same for all heads of a layer. Measured on the
    first n sequences only, as matrix_entropy is."""
    return folded.token_span.expand(folded.heads)


@smoothing_metric(unit="cost", range="(0, inf)", source=PARTS, sampled=True)
def cost_sink_lower_qk(folded: FoldedHeads) -> HeadValues:
    """kappa C / (2 s D): a lower bound on |W_Q|_F^2 + |W_K|_F^2 of a sink with this margin. kappa is sink_margin_pairs,
    here and in all columns that refer to this one. Empty where kappa is not above 0. C is set to 1; s and D are those
    of cost_sink_lower."""
    return _pairs(folded) * GROUPS / (2 * _reach(folded))


@smoothing_metric(unit="cost", range="(0, inf)", source=PARTS, sampled=True)
def cost_sink_upper_qk(folded: FoldedHeads) -> HeadValues:
    """12 kappa C / (s D): there are weights of a sink with this margin whose |W_Q|_F^2 + |W_K|_F^2 is no larger. kappa,
    C, s and D are those of cost_sink_lower_qk."""
    return 12 * _pairs(folded) * GROUPS / _reach(folded)


@smoothing_metric(unit="cost", range="(0, inf)", source=PARTS, sampled=True)
def cost_sink_upper_value(folded: FoldedHeads) -> HeadValues:
    """5 (r + C) with r = token_span: an upper bound on the cost of values and MLP of such a sink, whatever its margin.
    The lower bounds have no such term. Empty where cost_sink_upper_qk is empty."""
    return 5 * (token_span(folded) + GROUPS) + 0 * _pairs(folded)


@smoothing_metric(
    unit="cost", range="(0, inf)", source="ours, in place of Lampert et al. 2605.08453 section 7", sampled=True
)
def cost_diagonal_lower_qk(folded: FoldedHeads) -> HeadValues:
    """2 kappa / (s |B'|_2) with B' = B n/(n-1): a lower bound on |W_Q|_F^2 + |W_K|_F^2 of a diagonal pattern with this
    margin. It uses both orders of every pair of tokens. kappa and s are those of cost_sink_lower_qk."""
    return 2 * _pairs(folded) / (_scale(folded) * _top(folded))


@smoothing_metric(unit="cost", range="(0, inf)", source=PARTS, sampled=True)
def cost_diagonal_lower_paper(folded: FoldedHeads) -> HeadValues:
    """kappa r_eff / (delta^2 s D) + kappa C / (2 s D): the paper's lower bound on the cost of a diagonal pattern. r_eff
    = tr B' / |B'|_2 and delta^2 = tr B' / D, so that the first term is kappa / (s |B'|_2). The second term need not
    hold here, because no part of a token is orthogonal to all other tokens. Other symbols as in cost_diagonal_lower_qk
    and cost_sink_lower_qk.

    tests/questions/test_costs.py has weights below it.
    """
    kappa = _pairs(folded)
    return kappa / (_scale(folded) * _top(folded)) + kappa * GROUPS / (2 * _reach(folded))


@smoothing_metric(unit="cost", range="(0, inf)", source=PARTS, sampled=True)
def cost_diagonal_upper_qk(folded: FoldedHeads) -> HeadValues:
    """13 kappa C / (s D) + 4 kappa r / (s Delta), where r = token_span and Delta is the smallest (z_i - zbar).(z_i -
    z_j) over pairs i != j: there are weights of a diagonal pattern with this margin whose |W_Q|_F^2 + |W_K|_F^2 is no
    larger. Empty where Delta is not above 0, for example where a token occurs twice, since the theorem then gives no
    weights. Other symbols as in cost_sink_lower_qk."""
    kappa, gap = _pairs(folded), folded.smallest_gap
    gap = torch.where(gap > 0, gap, torch.nan)
    return 13 * kappa * GROUPS / _reach(folded) + 4 * kappa * token_span(folded) / (_scale(folded) * gap)


@smoothing_metric(unit="cost", range="(0, inf)", source=PARTS, sampled=True)
def cost_diagonal_upper_value(folded: FoldedHeads) -> HeadValues:
    """3 (r + C) with r = token_span: an upper bound on the cost of values and MLP of such a diagonal pattern, whatever
    its margin. Empty where cost_sink_upper_qk is empty."""
    return 3 * (token_span(folded) + GROUPS) + 0 * _pairs(folded)


@smoothing_metric(unit="ratio", range="(-inf, inf)", source=WALKED, sampled=True)
def path_slope_own(folded: FoldedHeads) -> HeadValues:
    """V'(0) / V(0): how fast the spread V of the tokens changes at the start of a path. At its start, lam = 0, each
    token attends only to itself (avgcos_identity); at its end, lam = 1, attention is uniform (avgcos_uniform). Below 0,
    the first step brings tokens together. The path is y_i(lam) = x_i + (1 - lam) W z_i + lam W mean_{k<=i} z_k. Key 0
    is in the mean, and in bidirectional heads the mean is over all k. The spread is V(lam) = mean over i >= 1 of |y_i -
    ybar|^2, where ybar is the mean of the y_i. With a_i = y_i(0) and b_i = y_i(1), V'(0) = 2 mean (a_i - abar).(b_i -
    a_i). Empty where V(0) is 0, as it is where all x_i are equal. Measured on the first n sequences only, as
    matrix_entropy is.

    For tokens drawn independently it is -2 (1 - 1/k) (beta tr(B W) + tr(B W^T W)) / V(0), k the tokens in the mean.
    """
    return folded.path_slopes[0]


@smoothing_metric(unit="ratio", range="(-inf, inf)", source=WALKED, sampled=True)
def path_slope_dense(folded: FoldedHeads) -> HeadValues:
    """V'(1) / V(0), the same at the end of the path in path_slope_own. V'(1) = V'(0) + 2 mean |d_i - dbar|^2 with d_i =
    b_i - a_i, so it is never smaller than path_slope_own. Below 0, tokens come together all along the path. Measured on
    the sequences of path_slope_own.

    For tokens drawn independently it is -2 (1 - 1/k) beta tr(B W) / V(0).
    """
    return folded.path_slopes[1]


@smoothing_metric(unit="cosine", range="[-1, 1]", source=WALKED, sampled=True)
def avgcos_half(folded: FoldedHeads) -> HeadValues:
    """Mean cosine over pairs i != j, both >= 1, of y_i(1/2), the middle of the path in path_slope_own, between
    avgcos_identity and avgcos_uniform. Measured on the sequences of path_slope_own."""
    return folded.cos_half


@smoothing_metric(unit="groups", range="[1, T - 1]", source=CLUSTERS, sampled=True)
def token_groups(folded: FoldedHeads) -> HeadValues:
    """C as a number of clusters. Tokens i, j >= 1 are connected where the cosine of z_i and z_j is above 1/2, and the
    clusters are the connected components. A zero vector is a cluster of its own. For tokens as in the paper, the
    clusters are its groups if the signal is longer than the nuisance and nuisances are orthogonal. Only the columns
    that end in _groups use this C; the others use C = 1. The same for all heads of a layer. Measured on the first n
    sequences only, as matrix_entropy is."""
    return folded.spread.new_full((folded.heads,), folded.groups.count)


@smoothing_metric(unit="dimension", range="[0, min(T - 1, D)]", source=CLUSTERS, sampled=True)
def group_span(folded: FoldedHeads) -> HeadValues:
    """Dimension of the span of z_i less the mean of its group in token_groups: the number of singular values above
    max(T - 1, D) 2^-23 times the largest singular value of z_i - zbar. It stands for the dimension of the paper's
    nuisance with C = token_groups, as token_span does with C = 1. The same for all heads of a layer. Measured on the
    first n sequences only, as matrix_entropy is."""
    return folded.group_span.expand(folded.heads)


@smoothing_metric(unit="cost", range="(0, inf)", source=CLUSTERS, sampled=True)
def cost_sink_upper_groups(folded: FoldedHeads) -> HeadValues:
    """12 kappa C / (s D) with C = token_groups, which is cost_sink_upper_qk times token_groups. The paper assumes
    groups with orthogonal signals; the signals of these groups need not be orthogonal. kappa, s and D are those of
    cost_sink_lower_qk."""
    return folded.groups.count * cost_sink_upper_qk(folded)


@smoothing_metric(
    unit="cost", range="(0, inf)", source="ours, in place of Lampert et al. 2605.08453 section 7", sampled=True
)
def cost_diagonal_lower_groups(folded: FoldedHeads) -> HeadValues:
    """The larger of cost_diagonal_lower_qk and 2 kappa / (s |B_g|_2). Both are lower bounds on |W_Q|_F^2 + |W_K|_F^2 of
    a diagonal pattern. B_g is the mean of (z_i - z_j) (z_i - z_j)^T / 2 over all pairs i != j that lie in the same
    group of token_groups. Where no group has two tokens, and where group_span is 0, this column is
    cost_diagonal_lower_qk. kappa and s are those of cost_sink_lower_qk.

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
