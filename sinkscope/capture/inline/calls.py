"""What is seen of an attention computed inline: a map with the tensors around it, or a call of torch's own function."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from sinkscope.capture.calls import AttentionCall
from sinkscope.capture.inline.products import Product
from sinkscope.capture.kernels.map_walk import AttentionMap


@dataclass
class InlineCall:
    """One attention computed inline, as seen: axes in front of (query, key) may still be folded into one.

    `handed_on`: the output projection is known to read the output as it is (torch's own multi-head attention, which
    calls it as a function that no hook sees).
    """

    module: str
    seen: AttentionMap
    handed_on: bool = False

    @property
    def folded(self) -> bool:
        return self.seen.probabilities.dim() == 3

    def unfolded(self, heads: int) -> AttentionMap:
        """(B * H, ...) -> (B, H, ...), the batch in front as all known families fold it."""
        seen = self.seen
        if not self.folded:
            return seen

        def unfold(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.unflatten(0, (-1, heads))

        output = unfold(seen.output)
        probabilities = unfold(seen.probabilities)
        assert probabilities is not None
        return AttentionMap(
            probabilities,
            unfold(seen.logits),
            unfold(seen.query),
            unfold(seen.key),
            unfold(seen.value),
            None if output is None else output.transpose(1, 2),
        )


@dataclass
class SdpaCall:
    """One call of torch's scaled_dot_product_attention from the module of that path; output (B, H, Tq, dv).

    Axes in front of (position, channel), and of the mask, may still be folded into one. `handed_on` as in InlineCall.
    """

    module: str
    call: AttentionCall
    output: Tensor
    handed_on: bool = False

    def unfolded(self, heads: int | None) -> AttentionCall:
        """(B * H, T, d) -> (B, H, T, d); `heads` None takes all for the heads of one sequence."""
        call, mask = self.call, self.call.mask
        if mask is not None:
            shared = mask.dim() != 3 or mask.shape[0] == 1
            mask = mask[(None,) * (4 - mask.dim())] if shared else _unfold(mask, heads)
        query, key, value = (_unfold(tensor, heads) for tensor in (call.query, call.key, call.value))
        return replace(call, query=query, key=key, value=value, mask=mask)

    def unfolded_output(self, heads: int) -> Tensor:
        """(B, Tq, H, dv)."""
        return _unfold(self.output, heads).transpose(1, 2)


def _unfold(tensor: Tensor, heads: int | None) -> Tensor:
    return tensor if tensor.dim() == 4 else tensor.unflatten(0, (-1, heads or tensor.shape[0]))


def map_of(logits: Tensor, product: Product, products: frozenset[Product], plain: bool) -> AttentionMap | None:
    """The map and what surrounds it, all with the same leading axes; None where these do not fit each other.

    `product`: map @ values; `products`: those the logits were made of; `plain`: the map is the softmax of `logits`.
    """
    probabilities = product.left
    for tensor in (probabilities, logits):
        if tensor.dim() not in (3, 4):
            return None
    lead = max((probabilities, logits), key=Tensor.dim).shape[:-2]
    queries, keys = probabilities.shape[-2:]

    def fit(tensor: Tensor | None, rows: int) -> Tensor | None:
        """With the leading axes of the map; the second, heads, may be fewer (groups). None where it does not fit."""
        if tensor is None or tensor.shape[-2] != rows:
            return None
        if len(lead) == 2 and tensor.dim() == 3 and tensor.shape[0] == lead.numel():
            tensor = tensor.unflatten(0, lead)
        whole = tensor.dim() == len(lead) + 2 and (len(lead) == 1 or lead[1] % tensor.shape[1] == 0)
        if not whole or tensor.shape[0] not in (1, lead[0]):
            return None
        return tensor.expand(lead[0], *tensor.shape[1:])

    probabilities_fit, logits_fit = fit(probabilities, queries), fit(logits, queries)
    if probabilities_fit is None or logits_fit is None or logits_fit.shape[-1] < keys:
        return None
    factors = next(iter(products)) if len(products) == 1 else None
    query = None if factors is None else fit(factors.left, queries)
    key = None if factors is None else fit(factors.right.mT, keys)
    output = fit(product.out, queries) if product.exact else None
    if output is not None and output.dim() == 4:
        output = output.transpose(1, 2)
    return AttentionMap(
        probabilities_fit,
        logits_fit if plain else None,
        query if key is not None else None,
        key if query is not None else None,
        fit(product.right, keys),
        output,
    )


def sdpa_call(
    module: str, output: Tensor, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> SdpaCall:  # fmt: skip
    scaling = query.shape[-1] ** -0.5 if scale is None else float(scale)
    return SdpaCall(module, AttentionCall(query, key, value, attn_mask, is_causal, scaling), output)
