"""Joins the passes of one batch of sequences, which a cache of keys and values carries on, into whole attention calls.

A decode step brings one query and the keys of all tokens before it. What the steps computed is put together as one
pass over all tokens would compute it: queries, new keys and values in their order, and for each query the keys that it
saw. The sums are then taken once, of the whole, so that a step costs no more than keeping its row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from sinkscope.capture.calls import AttentionCall, MaskReadings
from sinkscope.capture.cuts import Part, Span
from sinkscope.capture.heard import Around, Heard, Kept, Pass, padding
from sinkscope.capture.masks.lazy import made_in_strips
from sinkscope.capture.masks.visibility import Visibility, from_spans
from sinkscope.capture.plan import INTERFACE
from sinkscope.capture.sites import stream_of
from sinkscope.capture.views import Stream
from sinkscope.errors import SinkscopeError

JOINED = frozenset({"query", "key", "value", "mask", "causal", "scaling", "softcap", "sinks", "window", "score"})
"""The fields of a call whose rows can be put together."""


@dataclass(eq=False)
class Whole:
    """One attention call over whole sequences: `call`, or the `parts` of a map that the model formed.

    The other tensors are as in AttentionMap, with every row. `stream` gives the residual stream around the call, from
    the path of the block that holds it.
    """

    heard: Heard
    call: AttentionCall | None
    parts: list[Part] | None
    query: Tensor | None
    key: Tensor | None
    value: Tensor | None
    output: Tensor | None
    projected: Tensor | None
    stream: Callable[[str | None], Stream]

    @property
    def queries(self) -> int:
        """Rows of the whole call."""
        return self.heard.queries if self.query is None else self.query.shape[2]

    @property
    def keys(self) -> int:
        """Keys of the whole call."""
        return self.heard.keys if self.key is None else self.key.shape[2]


class Joined:
    """The passes over one batch of sequences, in their order.

    `add` raises SinkscopeError where a pass does not go on where the last one ended.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.passes: list[Pass] = []
        self.length = 0
        self._sites: dict[str, _Site] = {}
        self._moved: list[bool | Tensor] = []
        self._by_interface = True
        self._idle: frozenset[str] | None = None
        self._told: set[str] = set()
        self._mask: Tensor | None = None

    @property
    def ids(self) -> Tensor | None:
        """[B, T]: the token ids; None where some pass had none."""
        found = [each.ids for each in self.passes]
        if not found or any(each is None for each in found):
            return None
        ids = torch.cat([each for each in found if each is not None], 1)
        return ids if ids.shape[1] == self.length else None

    @property
    def idle(self) -> frozenset[str] | None:
        """The modules that ran without attention, once a prefill and a step were seen whose attention all went through
        transformers' interface; else None. Of the steps to come no torch call needs to be looked at."""
        if self._idle is None and len(self.passes) > 1 and self._by_interface:
            self._idle = frozenset(set().union(*(each.entered for each in self.passes)) - self._told)
        return self._idle

    def add(self, now: Pass) -> None:
        """Adds a pass. Its new rows are copied out of the cache, which goes on changing."""
        if now.refused is not None:
            raise SinkscopeError(now.refused)
        if self.passes and now.before != self.length:
            raise SinkscopeError(
                f"a cache went on at token {now.before} after {self.length} tokens: it was cut in between (assisted "
                "generation?), and is not read"
            )
        masks = MaskReadings()
        for number, heard in enumerate(now.heard):
            if heard.changed:
                raise SinkscopeError(f"{heard.name} writes into the tensors that it attends with: they cannot be read")
            self._add(heard, now, number, masks)
        if self.passes:
            self._check_same(now)
        if now.heard:
            self.length += _tokens(now)
        if now.mask is not None:
            self._mask, now.mask = now.mask.clone(), None
        if self._idle is None:
            self._by_interface &= not now.unmatched and all(heard.path == INTERFACE for heard in now.heard)
            self._told |= {each.path for each in now.around}
            self._told |= {each.projection for each in now.heard if each.projection is not None}
        self.passes.append(now)

    def _add(self, heard: Heard, now: Pass, number: int, masks: MaskReadings) -> None:
        around = {each.path: each for each in now.around if each.first <= number < each.past}
        if heard.name not in self._sites:
            if self.passes:
                raise SinkscopeError(f"{heard.name} attended in a later pass over a cache, but not in the first")
            cross = stream_of(self._model, heard.module, False) == "cross"
            self._sites[heard.name] = _Site(heard, cross)
        site = self._sites[heard.name]
        site.add(heard, around, masks, now.cache is not None)
        self._moved += site.moved
        site.moved.clear()

    def _check_same(self, now: Pass) -> None:
        missing = self._sites.keys() - {heard.name for heard in now.heard}
        if missing:
            raise SinkscopeError(
                f"{min(missing)} computes attention in its own code, whose steps over a cache are not read: run "
                "it with use_cache=False"
            )

    def spans(self, wholes: list[Whole]) -> list[Span] | None:
        """The valid positions of each sequence; None without padding.

        In `generate`, a sequence that has ended goes on with padding while others of its batch are written: it is cut.
        """
        spans, ends = self._padded(wholes), self._ends()
        if ends is None:
            return spans
        starts = [start for start, _ in spans] if spans else [0] * len(ends)
        return [*zip(starts, ends, strict=True)]

    def _ends(self) -> list[int] | None:
        """The end of each sequence after the token that ends its text, where one and the same token fills the rest;
        None where no sequence has such an end."""
        ids, prompt = self.ids, _tokens(self.passes[0])
        told = getattr(getattr(self._model, "generation_config", None), "eos_token_id", None)
        if ids is None or told is None or len(self.passes) == 1:
            return None
        last = torch.as_tensor(told, device=ids.device).view(-1)
        ends = [_end(row, prompt, last) for row in ids]
        return ends if min(ends) < self.length else None

    def _padded(self, wholes: list[Whole]) -> list[Span] | None:
        given = self._mask
        try:
            if given is not None:
                rest = self.length - given.shape[1]
                return padding(torch.nn.functional.pad(given, (0, rest), value=1) if rest > 0 else given, self.length)
        except ValueError as error:
            raise SinkscopeError(str(error)) from None
        found = [_beginnings(each.call, self.length) for each in wholes if each.call is not None]
        starts = next((each for each in found if each is not None), None)
        if starts is None or not any(starts):
            return None
        return [(start, self.length) for start in starts]

    def wholes(self) -> list[Whole]:
        """Every attention call over whole sequences, in the order of a pass."""
        if any(self._moved):
            raise SinkscopeError(
                "the rows of a cache changed between two passes (beam search reorders them; some caches drop or round "
                "keys): such sequences are not read"
            )
        read: dict[tuple[object, ...], Visibility] = {}
        return [site.whole(read) for site in self._sites.values()]


class _Site:
    """The rows of one attention call so far."""

    def __init__(self, heard: Heard, cross: bool) -> None:
        self.cross = cross
        self.moved: list[bool | Tensor] = []
        self._heard: list[Heard] = []
        self._around: list[dict[str, Around]] = []
        self._calls: list[AttentionCall] = []
        self._first: Tensor | None = None
        self._nothing: tuple[Tensor, Tensor] | None = None
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self._visible: list[Visibility] = []
        self._offsets: list[int] = []
        self._rows = 0

    def add(self, heard: Heard, around: dict[str, Around], masks: MaskReadings, cached: bool) -> None:
        call = heard.call
        if self._heard and (call is None or not self._calls):
            raise SinkscopeError(
                f"{heard.name} computes attention in its own code, whose steps over a cache are not read: run "
                "it with use_cache=False"
            )
        if call is not None and cached:
            call = self._of_cache(heard, call, masks)
        elif call is not None:
            call = masks.read(call)
        if call is not None:
            self._calls.append(call)
            heard.call, heard.key, heard.value, heard.versions = None, None, None, ()  # every step's keys are T^2
        self._heard.append(heard)
        self._around.append(around)
        self._rows += heard.queries

    def _of_cache(self, heard: Heard, call: AttentionCall, masks: MaskReadings) -> AttentionCall:
        """The call without the keys that a static cache has still to fill; keeps its new keys and their place."""
        before, new, keys = self._rows, heard.queries, heard.keys
        call = masks.read(call)
        visible = call.visible
        if not self._heard and not self.cross and keys != new:
            self.cross = not (keys > new and int(visible.reach[3].max()) <= new)
        if self.cross:
            if self._keys and keys != self._keys[0].shape[2]:
                raise SinkscopeError(
                    f"{heard.name} attends to {keys} keys after {self._keys[0].shape[2]} of another text"
                )
            if not self._keys:
                self._keys, self._values = [call.key], [call.value]
            self._visible.append(visible)
            self._offsets.append(0)
            return call
        total = before + new
        offset = max(0, total - keys)
        if keys > total:
            if visible.mask is not None or int(visible.reach[3].max()) > total:
                raise SinkscopeError(f"{heard.name} attends to {keys} keys where its cache holds {total} tokens")
            call = replace(
                call, key=call.key[:, :, :total], value=call.value[:, :, :total], mask=_cut(call.mask, total)
            )
            assert visible.spans is not None
            call = call.with_visible(from_spans(*visible.spans, total))
            visible = call.visible
        place = before - offset
        if self._keys and place > 0:
            self.moved.append(_differ(call.key[:, :, place - 1], self._keys[-1][:, :, -1]))
        if self._first is not None and offset == 0:
            self.moved.append(_differ(call.key[:, :, 0], self._first))
        fresh = slice(place, place + new)
        whole = not self._keys and keys == new
        if self._first is None:
            self._first = call.key[:, :, 0].clone()
        self._keys.append(call.key if whole else call.key[:, :, fresh].clone())
        self._values.append(call.value if whole else call.value[:, :, fresh].clone())
        self._visible.append(visible)
        self._offsets.append(offset)
        if not self._heard:
            return call
        if self._nothing is None:  # a slice would keep the keys and values that it is of
            self._nothing = call.key[:, :, :0].clone(), call.value[:, :, :0].clone()
        return replace(call, key=self._nothing[0], value=self._nothing[1], mask=None)

    def whole(self, read: dict[tuple[object, ...], Visibility]) -> Whole:
        """The call over whole sequences. `read`: what was joined of masks that other calls share."""
        first = self._heard[0]
        if len(self._heard) == 1:
            call = self._calls[0] if self._calls else None
            key, value = (first.key, first.value) if call is None else (call.key, call.value)
            return Whole(first, call, first.parts, first.query, key, value, first.output, first.projected, self._stream)
        call = self._joined_call(first, read)
        return Whole(
            first, call, None, call.query, call.key, call.value, _along([each.output for each in self._heard], 1),
            _along([each.projected for each in self._heard], 1), self._stream,
        )  # fmt: skip

    def _joined_call(self, first: Heard, read: dict[tuple[object, ...], Visibility]) -> AttentionCall:
        calls = self._calls
        query = torch.cat([call.query for call in calls], 2)
        key, value = (
            (self._keys[0], self._values[0]) if self.cross else (torch.cat(self._keys, 2), torch.cat(self._values, 2))
        )
        for call, visible in zip(calls, self._visible, strict=True):
            beyond = [name for name in call.beyond(JOINED) if getattr(call, name) is not None]
            if visible.spans is None or beyond or (call.sinks is not None and call.sinks.shape[2] != 1):
                what = beyond[0] if beyond else "mask" if visible.spans is None else "sinks"
                raise SinkscopeError(
                    f"the {what} of {first.name} changes from step to step over a cache, which is not read: run it "
                    "with use_cache=False"
                )
        shared = (*map(id, self._visible), *self._offsets, key.shape[2])
        if shared not in read:
            read[shared] = from_spans(self._edges(0), self._edges(1), key.shape[2])
        joined = read[shared]
        mask = _mask_of(joined, query.shape[0])
        return replace(calls[0], query=query, key=key, value=value, mask=mask, causal=False).with_visible(joined)

    def _edges(self, edge: int) -> Tensor:
        """First keys (0) or ends (1) of every query, counted from the first token; 0 for a query that sees nothing."""
        rows = []
        for visible, offset in zip(self._visible, self._offsets, strict=True):
            assert visible.spans is not None
            rows.append(torch.where(visible.counts > 0, visible.spans[edge] + offset, 0))
        sizes = [max(row.shape[axis] for row in rows) for axis in (0, 1)]
        return torch.cat([row.expand(*sizes, -1) for row in rows], 2)

    def _stream(self, block: str | None) -> Stream:
        module = self._heard[0].module
        return Stream(
            self._over(block, lambda each: each.given), self._over(module, lambda each: each.given),
            self._over(block, lambda each: each.returned),
        )  # fmt: skip

    def _over(self, path: str | None, of: Callable[[Around], Kept | None]) -> Tensor | None:
        found = [None if path not in each else of(each[path]) for each in self._around if path is not None]
        return _along([None if kept is None else kept.unwritten for kept in found], 1) if found else None


def _along(pieces: list[Tensor | None], axis: int) -> Tensor | None:
    """The pieces joined along an axis; None where one is missing."""
    whole = [piece for piece in pieces if piece is not None]
    if not whole or len(whole) < len(pieces):
        return None
    return whole[0] if len(whole) == 1 else torch.cat(whole, axis)


def _differ(one: Tensor, other: Tensor) -> bool | Tensor:
    """Whether two tensors of one shape differ. On an accelerator the answer is not waited for."""
    return not torch.equal(one, other) if one.device.type == "cpu" else (one != other).any()


def _cut(mask: Tensor | None, keys: int) -> Tensor | None:
    return None if mask is None else mask[..., :keys]


def _mask_of(visible: Visibility, batch: int) -> Tensor:
    """A mask that says the same as the spans, made in strips."""
    assert visible.spans is not None
    starts, ends = visible.spans

    def part(start: int, stop: int, low: int, high: int) -> Tensor:
        columns = torch.arange(low, high, device=starts.device)
        return (columns >= starts[..., start:stop, None]) & (columns < ends[..., start:stop, None])

    return made_in_strips(part, batch, starts.shape[2], visible.keys)


def _beginnings(call: AttentionCall, length: int) -> list[int] | None:
    """The first valid position of each sequence: its query sees itself alone. None where the mask does not tell."""
    spans = call.visible.spans
    if spans is None or call.lengths != (length, length) or spans[0].shape[0] == 1:
        return None
    places = torch.arange(length, device=spans[0].device)
    alone = ((spans[0] == places) & (spans[1] == places + 1))[:, 0]
    return alone.int().argmax(1).tolist() if bool(alone.any(1).all()) else None


def _end(ids: Tensor, prompt: int, last: Tensor) -> int:
    """The end of one sequence; see `Joined._ends`."""
    found = torch.isin(ids[prompt:], last).nonzero()
    if not len(found):
        return len(ids)
    end = prompt + int(found[0]) + 1
    return end if end < len(ids) and bool((ids[end:] == ids[-1]).all()) else len(ids)


def _tokens(now: Pass) -> int:
    """The tokens that a pass adds."""
    if now.ids is not None:
        return int(now.ids.shape[1])
    return max(heard.queries for heard in now.heard)
