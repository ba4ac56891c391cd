"""Cuts one sequence out of a padded batch, and holds what is kept of an attention call until its block has ended."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sinkscope.capture.calls import AttentionCall
from sinkscope.capture.kernels.map_walk import AttentionMap
from sinkscope.capture.kernels.sums import AttentionSums
from sinkscope.capture.plan import INLINE
from sinkscope.capture.site import Site
from sinkscope.errors import SinkscopeError

Span = tuple[int, int]
"""The first valid position of a sequence, and the one after its last."""


UNDERSTOOD = frozenset({"query", "key", "value", "mask", "bias", "sinks"})
"""The tensors of a call that are cut."""


class Cut:
    """Cuts the valid positions of one sequence out of a padded batch's tensors, so that no padding is measured.

    `length` is the number of positions of the padded batch. An axis of another length (compressed keys, the keys of
    another stream) does not hold these positions and is not cut.
    """

    def __init__(self, index: int, span: Span, length: int) -> None:
        self.index, self.batch_row, self.span, self.length = index, slice(index, index + 1), slice(*span), length

    def check(self, name: str, batch: int, queries: int, sequences: int) -> None:
        """Raises SinkscopeError where the queries are not the batch's positions, so that padding cannot be located."""
        if batch != sequences or queries != self.length:
            raise SinkscopeError(
                f"{name} has {batch} x {queries} queries for {sequences} padded sequences of {self.length}: padding "
                "cannot be told from text there; give sequences of equal length"
            )

    def rows(self, size: int) -> slice:
        """The valid part of an axis of this size."""
        return self.span if size == self.length else slice(None)

    def axis(self, tensor: Tensor, axis: int) -> Tensor:
        """This sequence's row of the batch (or the row that all sequences share), cut along one axis."""
        row = tensor[self.batch_row] if tensor.shape[0] > 1 else tensor
        place = axis % tensor.dim()
        return row[(slice(None),) * place + (self.rows(tensor.shape[axis]),)]

    def square(self, tensor: Tensor | None) -> Tensor | None:
        """This sequence's row, cut along the last two axes (queries and keys)."""
        return None if tensor is None else self.axis(self.axis(tensor, -1), -2)

    def call(self, call: AttentionCall) -> AttentionCall:
        """The call for this sequence alone. Raises SinkscopeError where a field is a tensor that it cannot cut."""
        unknown = [name for name in call.beyond(UNDERSTOOD) if isinstance(getattr(call, name), Tensor)]
        if unknown:
            raise SinkscopeError(
                f"{', '.join(unknown)} of an attention call cannot be cut to one sequence of a padded batch: give "
                "sequences of equal length"
            )
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
        """This sequence's probabilities, logits and values, not the other tensors. Learned sinks' logits are kept."""
        keys = seen.probabilities.shape[-1]
        logits = self.square(None if seen.logits is None else seen.logits[..., :keys])
        if seen.logits is not None and logits is not None and seen.logits.shape[-1] > keys:
            logits = torch.cat([logits, self.axis(seen.logits[..., keys:], -2)], -1)
        probabilities = self.square(seen.probabilities)
        assert probabilities is not None
        return AttentionMap(probabilities, logits, value=None if seen.value is None else self.axis(seen.value, 2))


Readers = Mapping[str, Callable[[AttentionCall | AttentionMap], Any]]
"""Functions that read each attention call besides its sums; a LayerView has what they return, by the same names."""

Part = tuple[slice, Cut | None, AttentionSums, dict[str, Any]]
"""Rows of a batch, their cut, their sums and what readers returned: the whole batch (no cut), or one sequence of a
padded batch."""


def readings(readers: Readers, call: AttentionCall | AttentionMap) -> dict[str, Any]:
    """What each reader makes of a call, by its name."""
    return {name: read(call) for name, read in readers.items()}


@dataclass
class Pending:
    """One attention call of the current pass, kept until its block has ended.

    `rows` is (sequences, queries). Tensors have the shapes of AttentionMap; `projected` that of `output`. `written` is
    what the output projection adds, (B, T, D).
    """

    site: Site
    parts: list[Part]
    rows: tuple[int, int]
    query: Tensor | None
    key: Tensor | None
    value: Tensor | None
    output: Tensor | None
    projected: Tensor | None = None
    written: Tensor | None = None

    def keep_read(self, args: tuple[Any, ...]) -> None:
        """Keeps what the output projection reads as w, where it has the shape of the call's output."""
        if self.output is None or not args or args[0].numel() != self.output.numel():
            return
        read = args[0].reshape(self.output.shape)
        # The interface fixes the layout (B, T, H * dv). A model's own code may use another, so values are compared.
        if self.site.path != INLINE or torch.allclose(read, self.output, rtol=1e-3, atol=1e-6):
            self.projected = read

    def keep_written(self, output: Any, bias: Tensor) -> None:
        """Keeps what the projection returns less its `bias` (D), where what it read was kept: the sum over heads of
        W_O^h w_i."""
        written = output[0] if isinstance(output, tuple) else output
        if self.projected is not None and written.shape[:-1] == self.rows:
            self.written = written - bias.to(written.device, written.dtype)
