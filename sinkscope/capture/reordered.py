"""Sequences that go on behind padding: the tokens of each are put one after another, with its padding behind them.

A prompt that was padded on the right leaves padding in the middle of a cache. Attention knows the order of its queries
and keys by its mask alone: in another order, with the mask in the same, every token attends to what it attended to.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sinkscope.capture.masks.lazy import LazyMask, made_in_strips
from sinkscope.capture.masks.visibility import ROWS, Visibility, read_mask
from sinkscope.capture.views import Stream
from sinkscope.capture.wholes import Outline, Whole


@dataclass(frozen=True, eq=False)
class Order:
    """The new order of the positions of a batch: `places` [B, T] names the old ones. `counts`: tokens in each row."""

    places: Tensor
    counts: list[int]

    @classmethod
    def of(cls, valid: Tensor) -> Order:
        """The order by which the positions that are `valid` [B, T] come first."""
        return cls((~valid).int().argsort(dim=1, stable=True), valid.sum(1).tolist())

    def tokens(self, tensor: Tensor, axis: int) -> Tensor:
        """A tensor whose first axis is the batch, with the positions along an axis in the new order."""
        shape = [1] * tensor.dim()
        shape[0], shape[axis] = self.places.shape
        return torch.take_along_dim(tensor, self.places.to(tensor.device).view(shape), axis)

    def outline(self, outline: Outline, known: dict[tuple[object, ...], object]) -> Outline | None:
        """A call over whole sequences, in the new order. None where a token attends to padding. `known`: what was made
        of masks that other calls share."""
        old, length = outline.visible, self.places.shape[1]
        if old is None or outline.queries != length:
            return outline
        square = outline.keys == length and not outline.cross
        mask, visible = self._visible(old, square, known)
        if square and not self._hides_padding(visible, known):
            return None
        return replace(outline, visible=visible, load=lambda: self._whole(outline.load(), mask, visible, square))

    def _whole(self, whole: Whole, mask: Tensor, visible: Visibility, square: bool) -> Whole:
        call, length = whole.call, self.places.shape[1]
        assert call is not None

        def moved(tensor: Tensor | None, axis: int, keys: bool = False) -> Tensor | None:
            return tensor if tensor is None or (keys and not square) else self.tokens(tensor, axis)

        query = self.tokens(call.query, 2)
        key, value = (self.tokens(tensor, 2) if square else tensor for tensor in (call.key, call.value))
        bias = None if call.bias is None else self._pairs(call.bias.expand(len(query), -1, length, -1), square)
        sinks = call.sinks if call.sinks is None or call.sinks.shape[2] == 1 else self.tokens(call.sinks, 2)
        call = replace(call, query=query, key=key, value=value, mask=mask, bias=bias, sinks=sinks, causal=False)
        return replace(
            whole, call=call.with_visible(visible), query=moved(whole.query, 2), key=moved(whole.key, 2, True),
            value=moved(whole.value, 2, True), output=moved(whole.output, 1), projected=moved(whole.projected, 1),
            stream=self._stream(whole.stream),
        )  # fmt: skip

    def _stream(self, stream: Callable[[str | None], Stream]) -> Callable[[str | None], Stream]:
        def moved(block: str | None) -> Stream:
            tensors = vars(stream(block))
            return Stream(**{name: None if each is None else self.tokens(each, 1) for name, each in tensors.items()})

        return moved

    def _pairs(self, rows: Tensor, square: bool) -> Tensor:
        """(B, h, T, keys) with queries, and where they are the same positions keys, in the new order."""
        moved = self.tokens(rows, 2)
        return self.tokens(moved, 3) if square else moved

    def _visible(
        self, visible: Visibility, square: bool, known: dict[tuple[object, ...], object]
    ) -> tuple[Tensor, Visibility]:
        """The mask of a call in the new order, and what it lets the queries see; made once for calls that share one."""
        key = "order", id(visible), square
        if key not in known:  # which keeps the old one alive, since it is told by its id
            known[key] = visible, self._moved(visible, square)
        return known[key][1]  # type: ignore[index]

    def _moved(self, visible: Visibility, square: bool) -> tuple[Tensor, Visibility]:
        (batch, length), places = self.places.shape, self.places.to(visible.counts.device)
        if visible.spans is None:
            assert visible.mask is not None
            mask = visible.mask.whole() if isinstance(visible.mask, LazyMask) else visible.mask
            moved: Tensor = self._pairs(mask.expand(batch, -1, length, -1), square)
        else:
            first, past = (self.tokens(edge.expand(batch, -1, -1), 2)[..., None] for edge in visible.spans)
            old = places if square else torch.arange(visible.keys, device=places.device).expand(batch, -1)

            def part(start: int, stop: int, low: int, high: int) -> Tensor:
                keys = old[:, None, None, low:high]
                return (keys >= first[:, :, start:stop]) & (keys < past[:, :, start:stop])

            moved = made_in_strips(part, batch, length, visible.keys)
        return moved, read_mask(moved, False, length, visible.keys, places.device)

    def _hides_padding(self, visible: Visibility, known: dict[tuple[object, ...], object]) -> bool:
        """Whether no token sees a position of padding."""
        key = "hides", id(visible)
        if key not in known:
            known[key] = self._hides(visible)
        return bool(known[key])

    def _hides(self, visible: Visibility) -> bool:
        counts = torch.tensor(self.counts, device=visible.counts.device)[:, None]
        padding = torch.arange(visible.keys, device=counts.device) >= counts
        for start in range(0, visible.counts.shape[-1], ROWS):
            stop = min(start + ROWS, visible.counts.shape[-1])
            tokens = torch.arange(start, stop, device=counts.device) < counts
            seen = visible.seen(start, stop) & padding[:, None, None] & tokens[:, None, :, None]
            if bool(seen.any()):
                return False
        return True
