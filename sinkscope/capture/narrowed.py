"""A call's mask with some more keys hidden, made in strips on demand: never T x T."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sinkscope.capture.calls import AttentionCall
from sinkscope.capture.masks.lazy import LazyMask, identity, made_in_strips
from sinkscope.capture.masks.visibility import strip

Allowed = Callable[[Tensor, Tensor], Tensor]
"""Takes query numbers (rows, 1) and key numbers (1, keys); returns which keys they may see, bool (b | 1, h | 1,
rows, keys)."""


class Narrowing:
    """Hides keys from the calls of one pass. Calls that share a mask share the narrowed one, so that
    it is read once."""

    def __init__(self, allowed: Allowed) -> None:
        self._allowed = allowed
        self._made: dict[tuple[Any, ...], tuple[Tensor | None, LazyMask]] = {}

    def __call__(self, call: AttentionCall) -> AttentionCall:
        """The call whose queries see what its own mask and `allowed` both let them see. A float mask keeps what it adds
        elsewhere."""
        key = (identity(call.mask), call.causal, *call.lengths, len(call.query), call.query.device)
        if key not in self._made:  # the call's own mask is kept alive with it, since masks are told apart by id
            self._made[key] = (call.mask, self._narrowed(call))
        return replace(call, mask=self._made[key][1])

    def _narrowed(self, call: AttentionCall) -> LazyMask:
        queries, keys = call.lengths
        device, own = call.query.device, _whole_rows(call, queries, keys)

        def part(start: int, stop: int, low: int, high: int) -> Tensor:
            rows = torch.arange(start, stop, device=device)[:, None]
            columns = torch.arange(low, high, device=device)[None]
            seen = self._allowed(rows, columns)
            if own is None:
                return seen & (columns <= rows) if call.causal else seen
            given = strip(own, start, stop, low, high)
            if given.dtype == torch.bool:
                return given & seen
            return torch.where(seen, given, torch.finfo(given.dtype).min)

        return made_in_strips(part, len(call.query), queries, keys)


def _whole_rows(call: AttentionCall, queries: int, keys: int) -> Tensor | None:
    """The call's own mask with a row for each query and a column for each key; None where it has none."""
    mask = call.mask
    if mask is None:
        return None
    mask = mask[..., :keys]
    if isinstance(mask, LazyMask):
        if mask.shape[-2] == queries:
            return mask
        mask = mask.whole()
    return mask.expand(-1, -1, queries, keys)
