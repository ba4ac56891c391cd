"""Calls as models make them -> what the kernels take: masks read, one sequence cut out of a padded batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sinkscope.capture.inline.calls import SdpaCall
from sinkscope.capture.interface import RawCall
from sinkscope.capture.kernels.map_walk import AttentionMap
from sinkscope.capture.kernels.sums import AttentionCall, AttentionSums
from sinkscope.capture.masks.visibility import Visibility
from sinkscope.capture.view import Site
from sinkscope.errors import SinkscopeError

Span = tuple[int, int]
"""First and past-the-last valid position of one sequence."""


def normalise(call: RawCall, visible: Visibility) -> AttentionCall:
    """The call as the kernel takes it."""
    return AttentionCall(
        query=call.query,
        key=call.key,
        value=call.value,
        visible=visible,
        scaling=call.scaling,
        softcap=call.softcap,
        bias=call.bias,
        sinks=call.sinks,
        score=call.score,
    )


def lengths(call: RawCall) -> tuple[int, int]:
    """Queries and keys of a call."""
    return call.query.shape[2], call.key.shape[2]


def of_positions(call: RawCall) -> bool:
    """Whether positions attend to positions: not one query (pooling), nor layers attending to earlier layers."""
    return call.query.shape[2] > 1


def from_sdpa(call: SdpaCall, module: nn.Module, heads: int | None) -> RawCall:
    """A call of torch's own attention function as one of the interface; `heads` unfolds (B * H, T, d)."""

    def unfold(tensor: Tensor) -> Tensor:
        return tensor if tensor.dim() == 4 else tensor.unflatten(0, (-1, heads or tensor.shape[0]))

    query = unfold(call.query)
    mask = call.mask
    if mask is not None:
        mask = unfold(mask) if mask.dim() == 3 and mask.shape[0] > 1 else mask[(None,) * (4 - mask.dim())]
    return RawCall(
        module=module,
        query=query,
        key=unfold(call.key),
        value=unfold(call.value),
        mask=mask,
        causal=call.causal,
        scaling=call.scaling,
        softcap=None,
        bias=None,
        sinks=None,
        window=None,
    )


class Cut:
    """One sequence of a padded batch, its valid positions only: everything after this is free of padding.

    `length`: positions of the padded batch. Axes of another length (compressed keys, another stream's) have no
    positions to be cut by, and stay whole.
    """

    def __init__(self, index: int, span: Span, length: int) -> None:
        self.one, self.span, self.length = slice(index, index + 1), slice(*span), length

    def check(self, name: str, batch: int, queries: int, sequences: int) -> None:
        """Refuses an attention whose rows are not the sequences' positions: padding could not be told from text."""
        if batch != sequences or queries != self.length:
            raise SinkscopeError(
                f"{name} has {batch} x {queries} queries for {sequences} padded sequences of {self.length}: padding "
                "cannot be told from text there; give sequences of equal length"
            )

    def rows(self, size: int) -> slice:
        """The valid part of an axis of that size."""
        return self.span if size == self.length else slice(None)

    def axis(self, tensor: Tensor, axis: int) -> Tensor:
        """That row of the batch (or the one row all share), cut along one axis."""
        row = tensor[self.one] if tensor.shape[0] > 1 else tensor
        place = axis % tensor.dim()
        return row[(slice(None),) * place + (self.rows(tensor.shape[axis]),)]

    def square(self, tensor: Tensor | None) -> Tensor | None:
        """Cut along the last two axes, queries and keys."""
        return None if tensor is None else self.axis(self.axis(tensor, -1), -2)

    def call(self, call: RawCall) -> RawCall:
        return RawCall(
            module=call.module,
            query=self.axis(call.query, 2),
            key=self.axis(call.key, 2),
            value=self.axis(call.value, 2),
            mask=self.square(None if call.mask is None else call.mask[..., : call.key.shape[2]]),
            causal=call.causal,
            scaling=call.scaling,
            softcap=call.softcap,
            bias=self.square(call.bias),
            sinks=None if call.sinks is None else self.axis(call.sinks, 2),
            window=call.window,
            score=call.score,
        )

    def map(self, seen: AttentionMap) -> AttentionMap:
        """Probabilities and logits alone; learned sinks behind the keys' logits stay."""
        keys = seen.probabilities.shape[-1]
        logits = self.square(None if seen.logits is None else seen.logits[..., :keys])
        if seen.logits is not None and logits is not None and seen.logits.shape[-1] > keys:
            logits = torch.cat([logits, self.axis(seen.logits[..., keys:], -2)], -1)
        probabilities = self.square(seen.probabilities)
        assert probabilities is not None
        return AttentionMap(probabilities, logits)


Part = tuple[slice, Cut | None, AttentionSums]
"""Sums over some rows of a batch: all of it, or one sequence cut out of a padded one."""


@dataclass
class Pending:
    """One attention call of the pass under way, until its block has ended; `rows`: sequences, queries.

    Shapes as in AttentionMap.
    """

    site: Site
    parts: list[Part]
    rows: tuple[int, int]
    query: Tensor | None
    key: Tensor | None
    value: Tensor | None
    output: Tensor | None
    projected: Tensor | None = None
