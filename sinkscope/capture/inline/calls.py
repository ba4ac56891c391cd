"""Records of attention that a model computes inline: a map with the tensors around it, or a call of torch's sdpa."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from string import ascii_letters
from typing import Any

import torch
from torch import Tensor

from sinkscope.capture.calls import AttentionCall
from sinkscope.capture.inline.groups import heads_together, is_grouped, product_together
from sinkscope.capture.kernels.map_walk import AttentionMap
from sinkscope.capture.masks.lazy import made_in_strips
from sinkscope.capture.sites import shown_name
from sinkscope.errors import SinkscopeError

MATMULS = ("matmul", "__matmul__", "bmm")


@dataclass(frozen=True, eq=False)
class Product:
    """left (..., n, k) @ right (..., k, m) = out (..., n, m); the leading axes are batch axes.

    `factors` are left and right as the tensors that the model's code passed. `exact`: `out` is the product itself, with
    nothing added.
    """

    left: Tensor
    right: Tensor
    out: Tensor
    factors: tuple[Tensor, Tensor]
    exact: bool = True


def read_product(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor, of_map: bool = False
) -> Product | None:
    """The product that a call of the torch function `name` computed; None where it is no batched matrix product.

    `of_map`: one factor is a softmax.
    """
    if name == "einsum":
        operands = args[1] if len(args) == 2 and isinstance(args[1], list | tuple) else args[1:]
        return _einsum(args[0], operands, result, of_map) if len(operands) == 2 and isinstance(args[0], str) else None
    if name in MATMULS:
        pair = [*args, *kwargs.values()][:2]
    elif name == "baddbmm":
        pair = [*args[1:3], *(kwargs[key] for key in ("batch1", "batch2") if key in kwargs)]
    else:
        return None
    if len(pair) != 2 or not all(isinstance(tensor, Tensor) and tensor.dim() > 2 for tensor in pair):
        return None
    return Product(pair[0], pair[1], result, (pair[0], pair[1]), name != "baddbmm")


def _einsum(equation: str, operands: Any, result: Tensor, of_map: bool) -> Product | None:
    """Reads an einsum as a batched matrix product: exactly one index is summed, each operand keeps exactly one index of
    its own, all others are batch axes. None for any other einsum.

    The heads of the left one may share the right (multi-query attention, or the query heads of a group beside an axis
    of KV heads), where sequences come first in both. Then it keeps two indices: that of the rows stands before the
    summed one in a map, and before the columns' in what becomes one.
    """
    equation = _spelled_out(equation.replace(" ", ""), operands)
    terms, arrow, out = equation.partition("->")
    first, comma, second = terms.partition(",")
    if not arrow or not comma or "." in equation or len({*first}) < len(first) or len({*second}) < len(second):
        return None
    summed = [index for index in first if index in second and index not in out]
    shared = [index for index in out if index in first and index in second]
    kept = [index for index in out if (index in first) != (index in second)]
    if len(summed) != 1 or len(kept) not in (2, 3):
        return None
    left, right = operands
    if kept[-1] in first:
        first, second, left, right = second, first, right, left
    row = kept[-2] if len(kept) == 2 or not of_map else first[-2]
    heads = [index for index in kept[:-1] if index != row]
    rows = [*shared, *heads, row, summed[0]]
    if {*first} != {*rows} or {*second} != {*shared, summed[0], kept[-1]} or len(rows) != len(first):
        return None
    if heads and (len(shared) not in (1, 2) or first[0] != shared[0] or second[0] != shared[0]):
        return None
    if heads and len(shared) == 2 and any(term.index(heads[0]) < term.index(shared[1]) for term in (first, out)):
        return None  # its heads are numbered in another order

    def axes(tensor: Tensor, names: str, order: list[str]) -> Tensor:
        return tensor.permute([names.index(index) for index in order])

    columns = axes(right, second, [*shared, summed[0], kept[-1]])
    return Product(
        axes(left, first, rows),
        columns.unsqueeze(-3) if heads else columns,
        axes(result, out, [*rows[:-1], kept[-1]]),
        (left, right),
    )


def _spelled_out(equation: str, operands: Any) -> str:
    """The equation with letters in place of `...`; unchanged where the operands disagree on how many axes it covers."""
    terms = equation.partition("->")[0].split(",")
    hidden = {operand.dim() - len(term) + 3 for term, operand in zip(terms, operands, strict=False) if "..." in term}
    if len(hidden) != 1:
        return equation
    free = [letter for letter in ascii_letters if letter not in equation]
    return equation.replace("...", "".join(free[: hidden.pop()]))


# Records of attention that a model computes inline: a map with the tensors around it, or a call of torch's sdpa.


@dataclass
class InlineCall:
    """One attention map computed inline. Batch and heads, the axes before (query, key), may still be folded into one.

    `feeds_projection`: the output projection reads the output unchanged. This is known for torch's own multi-head
    attention, which applies the projection as a function, where no hook can read its input. `dropped`: the output is
    that of the map after dropout.
    """

    module: str
    seen: AttentionMap
    feeds_projection: bool = False
    dropped: bool = False

    @property
    def folded(self) -> bool:
        """Whether batch and heads are one axis of the map, [batch * head, query, key]."""
        return self.seen.probabilities.dim() == 3

    def unfolded(self, heads: int) -> AttentionMap:
        """The map with (B * H, ...) unfolded to (B, H, ...); `sequences_first` tells whether that is the order."""
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
    """One call of torch's scaled_dot_product_attention in the module at path `module`; output (B, H, Tq, dv).

    Batch and heads, also those of the mask, may still be folded into one axis. The others are as in InlineCall.
    """

    module: str
    call: AttentionCall
    output: Tensor
    feeds_projection: bool = False
    dropped: bool = False

    @property
    def folded(self) -> bool:
        """Whether batch and heads are one axis."""
        return self.call.query.dim() == 3

    def unfolded(self, heads: int | None) -> AttentionCall:
        """(B * H, T, d) -> (B, H, T, d); None for `heads` takes the whole axis as the heads of one sequence."""
        call, mask = self.call, self.call.mask
        if mask is not None:
            shared = mask.dim() != 3 or mask.shape[0] == 1
            mask = mask[(None,) * (4 - mask.dim())] if shared else _unfold(mask, heads)
        query, key, value = (_unfold(tensor, heads) for tensor in (call.query, call.key, call.value))
        return replace(call, query=query, key=key, value=value, mask=mask)

    def unfolded_output(self, heads: int | None) -> Tensor:
        """The output as (B, Tq, H, dv); `heads` as in `unfolded`."""
        return _unfold(self.output, heads).transpose(1, 2)


def _unfold(tensor: Tensor, heads: int | None) -> Tensor:
    return tensor if tensor.dim() == 4 else tensor.unflatten(0, (-1, heads or tensor.shape[0]))


def sequences_first(output: Tensor, read: Tensor) -> bool | None:
    """Whether sequences come before heads in the axis that `output` (B, T, H, dv) was unfolded from, by a tensor that a
    module reads of it. None where that tensor is another one."""
    batch, queries, heads, width = output.shape
    layouts = read.reshape(output.shape), read.reshape(queries, batch, heads, width).transpose(0, 1)
    turned = output.transpose(1, 2).flatten(0, 1).unflatten(0, (heads, batch)).permute(1, 2, 0, 3)
    for first, rows in ((True, output), (False, turned)):
        if any(same_values(layout, rows) for layout in layouts):
            return first
    return None


def as_output(output: Tensor, read: Tensor) -> tuple[Tensor, bool] | None:
    """What a module reads of an attention output, in its shape (B, T, H, dv), and whether it reads it with time first.
    None where it reads something else."""
    batch, queries, heads, width = output.shape
    plain, turned = read.reshape(output.shape), read.reshape(queries, batch, heads, width).transpose(0, 1)
    return next(((rows, first) for rows, first in ((plain, False), (turned, True)) if same_values(rows, output)), None)


def same_values(read: Tensor, output: Tensor) -> bool:
    """Whether a module reads an attention output unchanged, or cast to another dtype."""
    coarse = max((read.dtype, output.dtype), key=lambda dtype: torch.finfo(dtype).eps)
    return torch.allclose(read.to(coarse), output.to(coarse), rtol=1e-3, atol=1e-6)


def check_axes(name: str, output: Tensor, read: Tensor) -> None:
    """Raises SinkscopeError where a call was read with two of its axes exchanged, which its sizes did not show: a
    module reads `output` (B, T, H, dv) with heads in the place of sequences, or positions in that of channels."""
    batch, queries, heads, width = output.shape
    if (batch != heads and queries != width) or same_values(read := read.reshape(output.shape), output):
        return
    if batch == heads and same_values(read, output.transpose(0, 2)):
        raise SinkscopeError(f"{name} puts heads before sequences: as many sequences as heads are not read; give fewer")
    if queries == width and same_values(read, output.transpose(1, 3)):
        raise SinkscopeError(f"{name} attends among channels, not positions: it is not read")


def turned_fold(name: str, known: bool) -> str:
    """What is said of a call whose sequences and heads are one axis, in the other order (`known`) or in one that cannot
    be told."""
    why = "folds heads before sequences into one axis" if known else (
        "folds sequences and heads into one axis, in an order that no module's input shows"
    )  # fmt: skip
    return f"{name} {why}: several sequences at once are not read; give one at a time"


def told_by_products(call: InlineCall) -> bool:
    """Whether a map's own products show that it is attention: of q and k, with heads in an axis of their own, and with
    values."""
    return not call.folded and call.seen.query is not None and call.seen.value is not None


def map_of(logits: Tensor, product: Product, products: frozenset[Product]) -> AttentionMap | None:
    """The map and the tensors around it, with the same leading axes; None where probabilities and logits do not fit.

    `product` is map @ values, `products` are those that formed the logits.
    """
    if product.left.dim() == 5:
        formed = next(iter(products)) if len(products) == 1 else None
        if formed is None or not is_grouped(formed.left, formed.right.mT):
            return None
        rows = product.left.shape[2]
        product, logits = product_together(product, rows), heads_together(logits, rows)
        products = frozenset([product_together(formed, rows)])
    probabilities = product.left
    for tensor in (probabilities, logits):
        if tensor.dim() not in (3, 4):
            return None
    lead = max((probabilities, logits), key=Tensor.dim).shape[:-2]
    queries, keys = probabilities.shape[-2:]
    fit, fit_each = partial(_fit, lead), partial(_fit_each, lead)
    probabilities_fit, logits_fit = fit(queries, probabilities), fit_each(queries, logits)
    if probabilities_fit is None or logits_fit is None or logits_fit.shape[-1] < keys:
        return None
    factors = next(iter(products)) if len(products) == 1 else None
    query = None if factors is None else fit_each(queries, factors.left)
    key = None if factors is None else fit(keys, factors.right.mT)
    output = fit(queries, product.out) if product.exact else None
    if output is not None and output.dim() == 4:
        output = output.transpose(1, 2)
    return AttentionMap(
        probabilities_fit,
        logits_fit,
        query if key is not None else None,
        key if query is not None else None,
        fit(keys, product.right),
        output,
    )


def _fit(lead: torch.Size, rows: int, tensor: Tensor) -> Tensor | None:
    """The tensor with the map's leading axes (the head axis may hold fewer groups); None where it does not fit."""
    if tensor.shape[-2] != rows:
        return None
    if len(lead) == 2 and tensor.dim() == 3 and tensor.shape[0] == lead.numel():
        tensor = tensor.unflatten(0, lead)
    whole = tensor.dim() == len(lead) + 2 and (len(lead) == 1 or lead[1] % tensor.shape[1] == 0)
    if not whole or tensor.shape[0] not in (1, lead[0]):
        return None
    return tensor.expand(lead[0], *tensor.shape[1:])


def _fit_each(lead: torch.Size, rows: int, tensor: Tensor) -> Tensor | None:
    """The same of what has a row for each query: one that all heads share is each head's own. None where it holds
    several heads, but fewer than the map: it does not tell which of them a head of the map is."""
    fitted = _fit(lead, rows, tensor)
    if fitted is None or fitted.shape[1:-2] not in ((1,), lead[1:]):
        return None
    return fitted.expand(*lead, *fitted.shape[-2:])


def sdpa_call(
    module: str, output: Tensor, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> SdpaCall:  # fmt: skip
    """The call of torch's `scaled_dot_product_attention`, whose parameters these are after `output`. Tensors of five
    axes are those of grouped queries."""
    scaling = query.shape[-1] ** -0.5 if scale is None else float(scale)
    if key.dim() == query.dim() and key.shape[0] == 1 < query.shape[0]:  # all sequences read one text
        key, value = (tensor.expand(len(query), *tensor.shape[1:]) for tensor in (key, value))
    if query.dim() == 5:
        rows = query.shape[2]
        tensors = query, key, value, output
        query, key, value, output = (heads_together(tensor, rows) for tensor in tensors)
        attn_mask = None if attn_mask is None else heads_together(attn_mask, rows)
    return SdpaCall(
        module, AttentionCall(query, key, value, attn_mask, is_causal, scaling), output, dropped=dropout_p > 0
    )


def flex_call(
    module: str, output: Tensor, query: Tensor, key: Tensor, value: Tensor, score_mod: Any, block_mask: Any,
    scale: float | None = None, *_: Any,
) -> SdpaCall:  # fmt: skip
    """The record of a call of torch's flex_attention: a function tells which keys a query sees.

    Raises SinkscopeError where another one changes the logits, which only torch can compute.
    """
    if getattr(score_mod, "__name__", "") != "_identity":
        raise SinkscopeError(
            f"{shown_name(module)} changes the logits of flex_attention by a score_mod, which sinkscope cannot read; a "
            "mask_mod it can"
        )
    mask = mask_of(block_mask[-1], (query.shape[0], query.shape[1]), query.shape[2], key.shape[2], query.device)
    scaling = query.shape[-1] ** -0.5 if scale is None else float(scale)
    return SdpaCall(module, AttentionCall(query, key, value, mask, scaling=scaling), output)


def mask_of(allowed: Any, leading: tuple[int, int], queries: int, keys: int, device: torch.device) -> Tensor:
    """The mask (B, H, Tq, Tk) of flex_attention's mask_mod, made in strips when it is read."""
    batch, head = (torch.arange(size, device=device) for size in leading)

    def part(start: int, stop: int, low: int, high: int) -> Tensor:
        query, key = torch.arange(start, stop, device=device), torch.arange(low, high, device=device)
        seen = allowed(batch.view(-1, 1, 1, 1), head.view(-1, 1, 1), query.view(-1, 1), key)
        return torch.as_tensor(seen, dtype=torch.bool, device=device).expand(*leading, stop - start, high - low)

    return made_in_strips(part, leading[0], queries, keys)
