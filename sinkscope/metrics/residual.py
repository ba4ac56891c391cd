"""The residual stream at a layer: alignment of the sink embedding, norms, massive activations, compression."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sinkscope.capture import loops
from sinkscope.capture.token_sums import token_sums
from sinkscope.capture.view import LayerView, need, once_per_view
from sinkscope.metrics.quantities import quantity
from sinkscope.metrics.registry import layer_metric
from sinkscope.metrics.spectra import SpectrumEntropy, spectrum_entropy

BITS = 31
"""Of a non-negative float32 number, which sort like its value."""
SAMPLE, MARGIN = 16_384, 0.02
"""Elements of a row that tell about where its median lies, and the share of elements on either side of it that are
sorted: five standard deviations of the sample's median."""


def median_abs(x: Float[Tensor, "batch element"]) -> Float[Tensor, " batch"]:
    """Median of |x| for each row: the mean of the two middle values for an even count (numpy's rule), NaN if any x is.

    A compiled loop finds it on a CPU, or numpy selects, with vector instructions that torch lacks; torch does on an
    accelerator, in all rows at once, because each row apart would be waited for.
    """
    loop = loops.loops_over("vectors", x, x.shape[-1])
    if loop is not None:
        medians = torch.empty(len(x))
        loops.run(loop.read_medians, loops.in_rows(x), medians.numpy())
        return medians.to(x.dtype)
    if x.device.type == "cpu":
        return _partitioned(x.float().abs()).to(x.dtype)
    bits = x.float().contiguous().view(torch.int32) & 0x7FFFFFFF
    middles = _middles(bits).view(torch.float32).to(x.dtype)
    return torch.where(torch.isnan(x).any(-1), torch.nan, middles.mean(-1))


def _partitioned(sizes: Float[Tensor, "batch element"]) -> Float[Tensor, " batch"]:
    """Medians of rows on the CPU; the sizes are left in another order."""
    count, middle = sizes.shape[-1], sizes.shape[-1] // 2
    missing = sizes.amax(-1).isnan()
    sizes.numpy().partition(middle, axis=-1)  # in place: no smaller element follows the middle one
    upper = sizes[:, middle]
    medians = upper if count % 2 else (sizes[:, :middle].amax(-1) + upper) / 2
    return medians.masked_fill(missing, torch.nan)


def _middles(bits: Int[Tensor, "batch element"]) -> Int[Tensor, "batch two"]:
    """The two middle elements of each row (the same one twice for an odd count); all are non-negative.

    The median of a sample of the row lies near its own. Only elements between two of the sample's, on either side of
    its median, are sorted, once it is counted that both middle elements are among them: else the whole row is.
    """
    rows, count = bits.shape
    ranks = torch.arange(2, device=bits.device).mul_(1 - count % 2) + (count - 1) // 2
    if count <= SAMPLE:
        return bits.sort(-1).values[:, ranks]
    sample = bits[:, :: count // SAMPLE | 1].sort(-1).values  # an odd step meets every channel
    middle, margin = sample.shape[1] // 2, int(MARGIN * sample.shape[1])
    low, high = sample[:, middle - margin, None], sample[:, middle + margin, None]
    smaller = (bits < low).sum(-1, keepdim=True)
    holds = (smaller <= ranks[0]) & ((bits <= high).sum(-1, keepdim=True) > ranks[1])
    low, high = low.where(holds, 0), high.where(holds, (1 << BITS) - 1)
    row, place = ((bits >= low) & (bits <= high)).nonzero().T
    near = (bits[row, place] + (row << BITS)).sort().values & ((1 << BITS) - 1)  # row by row, each in order
    counts = torch.bincount(row, minlength=rows)[:, None]
    return near[counts.cumsum(0) - counts + ranks - smaller.where(holds, 0)].int()


# The residual stream at a layer: alignment of the sink embedding, norms, massive activations, compression.
#
# x is the residual stream entering the block, z what the q/k/v projections read (after the block's input norm, where it
# has one), e the residual stream leaving the block. Hooks at the block's input and output read them: transformers'
# `hidden_states[-1]` is after the final norm and would distort the last layer. Means over "other" tokens leave out
# position 0. A median over an even count is the mean of the two middle values.


FIG1 = "Lampert et al. 2605.08453 fig. 1; we could not read whether before or after the input norm: both are given"
FIG246 = "Lampert et al. 2605.08453 fig. 2, 4, 6"
GU = "Gu et al. 2410.10781"
SUN = "Sun et al. 2402.17762"
MASSIVE_ABS, MASSIVE_RATIO = 100.0, 1000.0

LayerValues = Float[Tensor, " batch"]


@layer_metric(unit="cosine", range="[-1, 1]", source=FIG1)
def cos_first_residual(view: LayerView) -> LayerValues:
    """Mean over j >= 1 of cos(x_0, x_j): alignment of the first token with all other tokens in the residual stream."""
    return view.x_sums.first_cosines[:, 1:].mean(-1)


@layer_metric(unit="cosine", range="[-1, 1]", source=FIG1)
def cos_first_input(view: LayerView) -> LayerValues:
    """Mean over j >= 1 of cos(z_0, z_j): alignment of the first token with all other tokens in the input of the q/k/v
    projections."""
    return view.z_sums.first_cosines[:, 1:].mean(-1)


@layer_metric(unit="cosine", range="[-1, 1]", source=FIG246)
def avg_cos_residual(view: LayerView) -> LayerValues:
    """Mean of cos(x_i, x_j) over all pairs of different tokens i, j >= 1. Empty where T < 3."""
    return view.x_sums.pair_cosine


@layer_metric(unit="cosine", range="[-1, 1]", source=FIG246)
def avg_cos_input(view: LayerView) -> LayerValues:
    """Mean of cos(z_i, z_j) over all pairs of different tokens i, j >= 1. Empty where T < 3."""
    return view.z_sums.pair_cosine


@layer_metric(unit="cosine", range="[-1, 1]", source=FIG246)
def avg_cos_output(view: LayerView) -> LayerValues:
    """Mean of cos(e_i, e_j) over all pairs of different tokens i, j >= 1. Empty where T < 3."""
    return token_sums(need(view.residual_out)).pair_cosine


@layer_metric(unit="norm", range="[0, inf)", source=GU)
def norm_first(view: LayerView) -> LayerValues:
    """norm x_0."""
    return view.x_norms[:, 0]


@layer_metric(unit="norm", range="[0, inf)", source=GU)
def norm_other(view: LayerView) -> LayerValues:
    """Mean over j >= 1 of norm x_j."""
    return view.x_norms[:, 1:].mean(-1)


@layer_metric(unit="ratio", range="[0, inf)", source=GU)
def norm_ratio(view: LayerView) -> LayerValues:
    """norm x_0 / (mean over j >= 1 of norm x_j), in the same sequence."""
    return norm_first(view) / norm_other(view)


@layer_metric(unit="activation", range="[0, inf)", source="Bondarenko et al. 2306.12929")
def inf_norm(view: LayerView) -> LayerValues:
    """Largest absolute value of the elements of x in the sequence."""
    return view.x_peaks.amax(-1)


@layer_metric(unit="ratio", range="[1, inf)", source=SUN)
def max_over_token_median(view: LayerView) -> LayerValues:
    """Largest absolute value of the elements of x in the sequence, divided by the median absolute value of the elements
    of the same token."""
    return inf_norm(view) / median_abs(loudest_token(view))


@layer_metric(unit="ratio", range="[1, inf)", source=SUN)
def max_over_layer_median(view: LayerView) -> LayerValues:
    """Largest absolute value of the elements of x in the sequence, divided by the median absolute value of all these
    elements."""
    return inf_norm(view) / layer_median(view)


@layer_metric(unit="tokens", range="[0, T]", source=SUN)
def massive_tokens(view: LayerView) -> LayerValues:
    """Number of tokens with an element whose absolute value is above 100 and above 1000 times the median absolute value
    of the elements of x in the sequence."""
    return (view.x_peaks > massive_bound(view)[:, None]).float().sum(-1)


@layer_metric(unit="kurtosis", range="[-2, inf)", source="Kaul et al. 2410.17174")
def kurtosis_first(view: LayerView) -> LayerValues:
    """Excess kurtosis (Fisher) of the elements of x_0, from population moments. It is 0 for a normal distribution.
    Empty where all elements are equal."""
    return view.x_sums.kurtosis[:, 0]


@layer_metric(unit="kurtosis", range="[-2, inf)", source="Kaul et al. 2410.17174")
def kurtosis_other(view: LayerView) -> LayerValues:
    """Mean over j >= 1 of the excess kurtosis of the elements of x_j, as in kurtosis_first."""
    return view.x_sums.kurtosis[:, 1:].mean(-1)


def begin_matrix_entropy(view: LayerView) -> SpectrumEntropy:
    """Starts `matrix_entropy`; threads compute the eigenvalues while the forward pass continues."""
    return SpectrumEntropy.of(view.x)


@layer_metric(
    unit="nats", range="[0, log min(T, D)]", source="Queipo-de-Llano et al. 2510.06477",
    sampled=True, begin=begin_matrix_entropy,
)  # fmt: skip
def matrix_entropy(view: LayerView) -> LayerValues:
    """Entropy of the squared singular values of the matrix with the rows x_i of all tokens, each divided by their sum.
    The rows are not centred. It is measured on the first n sequences of each dataset only and is empty in the others.
    --spectra sets n. By default n is the largest number with n min(T, D)^3 <= 2^26, where T is that of the longest
    sequence, but at least 2."""
    return spectrum_entropy(view.x)


@layer_metric(unit="position", range="[0, T)", source=SUN, shown=False)
def max_abs_token(view: LayerView) -> Int[Tensor, " batch"]:
    """Position of the token with the largest absolute value of an element of x in the sequence; in a tie the lowest
    position."""
    return view.x_peaks.argmax(-1)


@layer_metric(unit="channel", range="[0, D)", source=SUN, shown=False)
def max_abs_dim(view: LayerView) -> Int[Tensor, " batch"]:
    """Channel with the largest absolute value of an element of x in the sequence; in a tie the lowest position, and
    there the lowest channel."""
    return loudest_token(view).abs().argmax(-1)


@layer_metric(unit="norm", range="[0, inf)", source=GU, shown=False)
def norm_first_output(view: LayerView) -> LayerValues:
    """norm e_0, of the first token as it leaves the block. The summary reports where this norm rises and falls."""
    return torch.linalg.vector_norm(need(view.residual_out)[:, 0], dim=-1)


def massive_bound(view: LayerView) -> LayerValues:
    """The bound that a massive element's abs exceeds: the larger of 100 and 1000 x the median abs of the sequence's
    x."""
    return (MASSIVE_RATIO * layer_median(view)).clamp(min=MASSIVE_ABS)


@quantity("element", "coordinate", unit="position, channel", range="[0, T), [0, D)", source=SUN)
def massive(view: LayerView) -> Int[Tensor, "element two"]:
    """(position, channel) of every massive element of x; one row for each sequence and element."""
    bound = massive_bound(view)
    tokens = (view.x_peaks > bound[:, None]).nonzero()  # few tokens hold a massive element; only these are searched
    rows = view.x[tokens[:, 0], tokens[:, 1]].abs() > bound[tokens[:, 0], None]
    places = rows.nonzero()
    return torch.cat([tokens[places[:, 0], 1:], places[:, 1:]], dim=1)


@quantity("sequence", "channel", unit="ratio", range="[-1, 1]", source="ours")
def first_unit(view: LayerView) -> Float[Tensor, "batch channel"]:
    """x_0 / norm x_0; first_constancy compares it across sequences."""
    return torch.nn.functional.normalize(view.x[:, 0], dim=-1)


def loudest_token(view: LayerView) -> Float[Tensor, "batch channel"]:
    """x of the token that holds the sequence's largest abs element."""
    return view.x[torch.arange(view.batch, device=view.x.device), view.x_peaks.argmax(-1)]


@once_per_view
def layer_median(view: LayerView) -> LayerValues:
    """Median abs over all tokens and channels of x."""
    return median_abs(view.x.flatten(1))
