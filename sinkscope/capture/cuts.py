"""One sequence cut out of a padded batch, and what is kept of an attention call until its block has ended."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sinkscope.capture.calls import AttentionCall
from sinkscope.capture.kernels.map_walk import AttentionMap
from sinkscope.capture.kernels.sums import AttentionSums
from sinkscope.capture.view import Site
from sinkscope.errors import SinkscopeError

Span = tuple[int, int]
"""First and past-the-last valid position of one sequence."""


class Cut:
    """One sequence of a padded batch, its valid positions only: everything after this is free of padding.

    `length`: positions of the padded batch. Axes of another length (compressed keys, another stream's) have no
    positions to be cut by, and stay whole.
    """

    def __init__(self, index: int, span: Span, length: int) -> None:
        self.index, self.one, self.span, self.length = index, slice(index, index + 1), slice(*span), length

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

    def call(self, call: AttentionCall) -> AttentionCall:
        """The call of that sequence alone."""
        return replace(
            call,
            query=self.axis(call.query, 2),
            key=self.axis(call.key, 2),
            value=self.axis(call.value, 2),
            mask=self.square(None if call.mask is None else call.mask[..., : call.key.shape[2]]),
            bias=self.square(call.bias),
            sinks=None if call.sinks is None else self.axis(call.sinks, 2),
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
