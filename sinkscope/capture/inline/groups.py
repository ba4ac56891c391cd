"""Grouped queries with an axis of their own: [batch, KV head, query head of the group, query, key]."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from sinkscope.capture.inline.calls import Product


def is_grouped(query: Tensor, key: Tensor) -> bool:
    """Whether the third axis of two tensors (B, G, R, T, d) holds the query heads of a group, which share their key.

    Where each entry of that axis has keys of its own, the second is one of windows or pictures.
    """
    if query.dim() != 5 or key.dim() != 5 or query.shape[2] == 1 or key.shape[:2] != query.shape[:2]:
        return False
    return key.shape[2] == 1 or (key.shape[2] == query.shape[2] and key.stride(2) == 0)


def is_grouped_call(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *_: Any, **__: Any
) -> bool:
    """Whether a call of torch's `scaled_dot_product_attention` is one of grouped queries with one mask for all heads,
    or one for each."""
    axes = (1, 1) if attn_mask is None or attn_mask.dim() < 5 else tuple(attn_mask.shape[1:3])
    one_for_all = attn_mask is None or attn_mask.dim() in (2, 5)
    return is_grouped(query, key) and is_grouped(query, value) and one_for_all and axes in ((1, 1), query.shape[1:3])


def heads_together(tensor: Tensor, rows: int) -> Tensor:
    """(B, G, R, ...) as (B, G * R, ...); what the R query heads of a group share as (B, G, ...)."""
    if tensor.dim() != 5:
        return tensor
    shared = tensor.shape[2] == 1 or (tensor.shape[2] == rows and tensor.stride(2) == 0)
    return tensor[:, :, 0] if shared and rows > 1 else tensor.flatten(1, 2)


def product_together(product: Product, rows: int) -> Product:
    """A product of five axes as one of four."""
    left, right, out = (heads_together(tensor, rows) for tensor in (product.left, product.right, product.out))
    return replace(product, left=left, right=right, out=out)
