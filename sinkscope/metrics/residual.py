"""The residual stream at a layer: alignment of the sink embedding, norms, massive activations, compression.

x = residual stream entering the block, z = what the q/k/v projections read (after the block's input norm, where there
is one), e = residual stream leaving the block; taken by hooks at the block's input and output (transformers'
`hidden_states[-1]` is after the final norm and would distort the last row). Position 0 is never in a mean over
"others". Medians are the mean of the two middle values where the count is even.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import normalize

from sinkscope.capture.blocks import wide
from sinkscope.capture.view import LayerView, need
from sinkscope.metrics.exact import median_abs, spectrum_entropy
from sinkscope.metrics.registry import layer_metric

FIG1 = "Lampert et al. 2605.08453 fig. 1 (pre- or post-norm not readable: both given)"
FIG246 = "Lampert et al. 2605.08453 fig. 2, 4, 6"
GU = "Gu et al. 2410.10781"
SUN = "Sun et al. 2402.17762"
MASSIVE_ABS, MASSIVE_RATIO = 100.0, 1000.0

LayerValues = Float[Tensor, " batch"]
Tokens = Float[Tensor, "batch token channel"]


@layer_metric(unit="cosine", range="[-1, 1]", source=FIG1)
def cos_first_residual(view: LayerView) -> LayerValues:
    """Mean over j >= 1 of cos(x_0, x_j): alignment of the sink embedding with all others, in the residual stream."""
    return first_cosine(need(view.residual_in))


@layer_metric(unit="cosine", range="[-1, 1]", source=FIG1)
def cos_first_input(view: LayerView) -> LayerValues:
    """Mean over j >= 1 of cos(z_0, z_j): the same where the q/k/v projections read it."""
    return first_cosine(need(view.attention_input))


@layer_metric(unit="cosine", range="[-1, 1]", source=FIG246)
def avg_cos_residual(view: LayerView) -> LayerValues:
    """Mean over unordered pairs i != j, both >= 1, of cos(x_i, x_j)."""
    return pair_cosine(need(view.residual_in))


@layer_metric(unit="cosine", range="[-1, 1]", source=FIG246)
def avg_cos_input(view: LayerView) -> LayerValues:
    """Mean over unordered pairs i != j, both >= 1, of cos(z_i, z_j)."""
    return pair_cosine(need(view.attention_input))


@layer_metric(unit="cosine", range="[-1, 1]", source=FIG246)
def avg_cos_output(view: LayerView) -> LayerValues:
    """Mean over unordered pairs i != j, both >= 1, of cos(e_i, e_j)."""
    return pair_cosine(need(view.residual_out))


@layer_metric(unit="norm", range="[0, inf)", source=GU)
def norm_first(view: LayerView) -> LayerValues:
    """Norm of x_0."""
    return norms(view)[:, 0]


@layer_metric(unit="norm", range="[0, inf)", source=GU)
def norm_other(view: LayerView) -> LayerValues:
    """Mean over j >= 1 of norm x_j."""
    return norms(view)[:, 1:].mean(-1)


@layer_metric(unit="ratio", range="[0, inf)", source=GU)
def norm_ratio(view: LayerView) -> LayerValues:
    """Norm x_0 / mean over j >= 1 of norm x_j, in the same sequence."""
    return norm_first(view) / norm_other(view)


@layer_metric(unit="activation", range="[0, inf)", source="Bondarenko et al. 2306.12929")
def inf_norm(view: LayerView) -> LayerValues:
    """Mean over sequences of max abs of x."""
    return need(view.residual_in).abs().flatten(1).amax(-1)


@layer_metric(unit="ratio", range="[1, inf)", source=SUN)
def max_over_token_median(view: LayerView) -> LayerValues:
    """Largest abs of x over the median abs of the elements of the token where it sits; per sequence, then the mean."""
    x = need(view.residual_in)
    token, _ = largest(x)
    own = x[torch.arange(len(x), device=x.device), token]
    return x.abs().flatten(1).amax(-1) / median_abs(own)


@layer_metric(unit="ratio", range="[1, inf)", source=SUN)
def max_over_layer_median(view: LayerView) -> LayerValues:
    """Largest abs of x over the median abs of all elements of the sequence's x; per sequence, then the mean."""
    x = need(view.residual_in)
    return x.abs().flatten(1).amax(-1) / layer_median(view)


@layer_metric(unit="tokens", range="[0, T]", source=SUN)
def massive_tokens(view: LayerView) -> LayerValues:
    """Tokens per sequence with an element whose abs is > 100 and > 1000 x the median abs of the sequence's x."""
    bound = (MASSIVE_RATIO * layer_median(view)).clamp(min=MASSIVE_ABS)
    peaks = need(view.residual_in).abs().amax(-1)
    return (peaks > bound[:, None]).float().sum(-1)


@layer_metric(unit="kurtosis", range="[-2, inf)", source="Kaul et al. 2410.17174")
def kurtosis_first(view: LayerView) -> LayerValues:
    """Fisher (excess) kurtosis of the elements of x_0; population moments, 0 for a normal distribution."""
    return kurtosis(need(view.residual_in)[:, 0])


@layer_metric(unit="kurtosis", range="[-2, inf)", source="Kaul et al. 2410.17174")
def kurtosis_other(view: LayerView) -> LayerValues:
    """Mean over j >= 1 of the Fisher (excess) kurtosis of the elements of x_j; population moments."""
    return kurtosis(need(view.residual_in)[:, 1:]).mean(-1)


@layer_metric(unit="nats", range="[0, log min(T, D)]", source="Queipo-de-Llano et al. 2510.06477")
def matrix_entropy(view: LayerView) -> LayerValues:
    """Entropy of the squared singular values of x (all tokens, not centred) divided by their sum."""
    return spectrum_entropy(need(view.residual_in))


@layer_metric(unit="position", range="[0, T)", source=SUN, shown=False)
def max_abs_token(view: LayerView) -> Int[Tensor, " batch"]:
    """Position of the token that holds the sequence's largest abs of x; the lowest where several do."""
    return largest(need(view.residual_in))[0]


@layer_metric(unit="channel", range="[0, D)", source=SUN, shown=False)
def max_abs_dim(view: LayerView) -> Int[Tensor, " batch"]:
    """Channel of the sequence's largest abs of x; the lowest where several hold it."""
    return largest(need(view.residual_in))[1]


@layer_metric(unit="norm", range="[0, inf)", source=GU, shown=False)
def norm_first_output(view: LayerView) -> LayerValues:
    """Norm of e_0, the first token leaving the block: tells in the summary where its norm rises and falls."""
    return torch.linalg.vector_norm(need(view.residual_out)[:, 0], dim=-1)


def norms(view: LayerView) -> Float[Tensor, "batch token"]:
    return torch.linalg.vector_norm(need(view.residual_in), dim=-1)


def layer_median(view: LayerView) -> LayerValues:
    """Median abs over all tokens and channels of x; kept on the view, two columns need it."""
    cached = getattr(view, "_layer_median", None)
    if cached is None:
        cached = median_abs(need(view.residual_in).flatten(1))
        view._layer_median = cached  # type: ignore[attr-defined]
    return cached


def largest(x: Tokens) -> tuple[Int[Tensor, " batch"], Int[Tensor, " batch"]]:
    """(token, channel) of each sequence's largest abs; first in order of tokens, then channels."""
    place = x.abs().flatten(1).argmax(-1)
    return place // x.shape[-1], place % x.shape[-1]


def first_cosine(x: Tokens) -> LayerValues:
    unit = normalize(x, dim=-1)
    return torch.einsum("btd,bd->bt", unit[:, 1:], unit[:, 0]).mean(-1)


def pair_cosine(x: Tokens) -> LayerValues:
    """Mean cosine of unordered pairs of tokens >= 1: (|sum of unit vectors|^2 - n) / (n (n - 1))."""
    unit = normalize(x[:, 1:], dim=-1)
    count = unit.shape[1]
    total = unit.sum(1).square().sum(-1)
    return (
        (total - unit.square().sum((1, 2))) / (count * (count - 1)) if count > 1 else torch.full_like(total, torch.nan)
    )


def kurtosis(x: Float[Tensor, "... channel"]) -> Float[Tensor, ...]:
    exact = wide(x)
    squares = (exact - exact.mean(-1, keepdim=True)).square()
    return squares.square().mean(-1) / squares.mean(-1).square() - 3.0
