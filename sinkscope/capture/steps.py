"""One attention call over all passes of a batch of sequences: its rows are kept, and put together at the end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from sinkscope.capture.axes import in_one_order
from sinkscope.capture.call_rows import CallRows, Place
from sinkscope.capture.calls import AttentionCall, MaskReadings
from sinkscope.capture.heard import Around, Heard, Kept, Onward
from sinkscope.capture.kernels.map_walk import MapRows
from sinkscope.capture.map_steps import MapSteps
from sinkscope.capture.masks.visibility import from_spans
from sinkscope.capture.plan import INTERFACE
from sinkscope.capture.still_cached import (
    SlotSums,
    StillCached,
    Taken,
    Taking,
    first_seen,
    joined,
    newest,
    weighs,
    windowed,
)
from sinkscope.capture.views import Cut, Part, Stream
from sinkscope.errors import SinkscopeError


@dataclass(eq=False)
class Whole:
    """One attention call over whole sequences: `call`, or what was taken of `maps` that the model formed: of the whole
    batch (one), or of each sequence of a padded one.

    `queries`, `keys`: how many there are. `cross`: the keys are named as another text's. The other tensors are as in
    AttentionMap, with every row. `stream` gives the residual stream around the call, from the path of the block that
    holds it.
    """

    heard: Heard
    queries: int
    keys: int
    call: AttentionCall | None
    maps: list[MapRows] | None
    cross: bool
    query: Tensor | None
    key: Tensor | None
    value: Tensor | None
    output: Tensor | None
    projected: Tensor | None
    stream: Callable[[str | None], Stream]
    of_tokens: Tensor | None = None

    @property
    def ends(self) -> Tensor:
        """[Tq]: the key after the last one that any sequence lets a query see; of a map, the most keys that it sees."""
        if self.call is not None:
            return self.call.visible.reach[3].cpu()
        assert self.maps is not None
        return self.maps[0].visible.amax((0, 1)).cpu()

    def parts(self, cuts: list[Cut] | None) -> list[Part]:
        """The sums of maps, cut as `cuts`."""
        assert self.maps is not None
        if cuts is None:
            return [(slice(0, self.heard.rows), None, self.maps[0].sums(), {})]
        own = self.maps if len(self.maps) == len(cuts) else [self.maps[0].row(cut.index) for cut in cuts]
        parts = list[Part]()
        for cut, rows in zip(cuts, own, strict=True):
            queries, keys = (
                len(range(size)[cut.rows(size, side)])
                for side, size in (("queries", self.queries), ("keys", self.keys))
            )
            parts.append((cut.batch_row, cut, rows.begun(queries, keys).sums(), {}))
        return parts


class Steps:
    """The rows of one attention call so far. `cross`: its keys are another text's."""

    def __init__(self, heard: Heard, cross: bool) -> None:
        self.name, self.module, self.cross, self.named_cross = heard.shown, heard.module, cross, cross
        self.changed: list[Tensor] = []
        self._heard: list[Heard] = []
        self._around: list[dict[str, Around]] = []
        self._calls = CallRows(heard.shown)
        self._nothing: tuple[Tensor, Tensor] | None = None
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self._sums = SlotSums()
        self._maps: MapSteps | None = None
        self._held: StillCached | None = None
        self._rolling: int | None = None
        self._slots = self._rows = 0
        self._moved = False

    def add(
        self, heard: Heard, around: dict[str, Around], masks: MaskReadings, cached: bool, before: Taking,
        live: Tensor | None,
    ) -> None:  # fmt: skip
        """Adds the rows of a pass. `before`: the passes before it. `live` [B]: the sequences that had not ended; None =
        all. Raises SinkscopeError where it does not go on where they ended."""
        call = heard.call
        if not self._heard and cached and heard.keys != heard.queries:
            self.cross = self.cross or not heard.has_room(masks)
        if self._heard and (call is None) != (self._maps is not None):
            raise SinkscopeError(
                f"{heard.shown} computes attention in its own code in some passes over a cache alone, which is not "
                "read: run it with use_cache=False"
            )
        if call is None:
            self._add_map(heard, cached, live)
        elif cached:
            call = self._of_cache(heard, call, masks, before)
        else:
            call = masks.read(call)
        if call is not None:
            self._calls.calls.append(call)
            heard.call, heard.key, heard.value, heard.versions = None, None, None, ()  # every step's keys are T^2
        self._heard.append(heard)
        self._around.append(around)
        self._rows += heard.queries

    def pack(self, start: int, place: Place) -> None:
        """Puts what is kept of the passes from number `start` on where `place` says."""
        for heard, by_path in zip(self._heard[start:], self._around[start:], strict=True):
            heard.pack(place)
            for around in by_path.values():
                around.pack(place)
        self._calls.pack(start, place)
        if not self.cross:
            for pieces in (self._keys, self._values):
                pieces[start:] = map(place, pieces[start:])

    @property
    def of_maps(self) -> bool:
        """Whether the model formed the call's maps in its own code."""
        return self._maps is not None

    def _add_map(self, heard: Heard, cached: bool, live: Tensor | None) -> None:
        if self._maps is None:
            self._maps = MapSteps(heard, self.cross or not cached)
        else:
            self._maps.add(heard, live)
        if cached:  # the cache's own tensors may be written into, and every step's keys are T^2
            new = slice(None) if self._maps.cross else slice(self._rows, self._rows + heard.queries)
            known = self._maps.cross and len(self._heard) > 0
            heard.key, heard.value = (
                None if tensor is None or known else tensor[:, :, new].clone() for tensor in (heard.key, heard.value)
            )
            heard.versions = ()
        heard.parts = None  # every step's columns are T^2

    def order(self, key: Tensor, value: Tensor, queries: int, ends: Callable[[], int]) -> Tensor | None:
        """The sequences of the last pass, [B], that a pass of so many queries goes on with, told by the keys and values
        (B, G, n, d) before its own. `ends()`: the key after the last one that any of its queries sees. None where it
        goes on with none."""
        past = key.shape[2] - queries
        if self.cross or past < 1 or (past > self._rows and ends() != self._rows + queries):
            return None
        sums = self._sums if self._maps is None else self._maps.sums
        return sums.order(key, value, min(past, self._rows))

    def onward(self, keys: int) -> Onward | None:
        """How the map of the next pass goes on; see Onward."""
        return None if self._maps is None else self._maps.onward(keys)

    def grouped(self, call: AttentionCall) -> AttentionCall:
        """The call with as many KV heads as the first pass had: a model may repeat each for its query heads in some
        passes alone, as transformers does under a mask."""
        groups = self._keys[0].shape[1] if self._keys else call.key.shape[1]
        now = call.key.shape[1]
        if now == groups:
            return call
        tensors = call.key, call.value
        if groups % now == 0:
            key, value = (tensor.repeat_interleave(groups // now, 1) for tensor in tensors)
            return replace(call, key=key, value=value)
        if now % groups == 0 and all(_repeated(tensor, now // groups) for tensor in tensors):
            key, value = (tensor[:, :: now // groups] for tensor in tensors)
            return replace(call, key=key, value=value)
        raise SinkscopeError(f"{self.name} attends with {now} KV heads after {groups} in an earlier pass: not read")

    def cut_by(self, heard: Heard, before: Taking) -> int | None:
        """The number of newest tokens that were sliced off this call's cache since the last pass; 0 where it lacks
        none, or others than these alone. None for a sliding cache, whose slots do not tell."""
        call = heard.call
        if call is None or self.cross or not self._keys:
            return None
        past = heard.keys - heard.queries
        if past == self._rolling or windowed(call, self._rows):
            return None
        if not 0 < past < self._slots:
            return 0
        key, value = call.key[:, :, :past], call.value[:, :, :past]
        if self._held is not None:
            same = self._held.sliced(key, value, self._slots - past, self.name)
        else:
            taken = before.of_next()
            earlier = (joined(pieces, taken, 2)[:, :, :past] for pieces in (self._keys, self._values))
            same = self._slots == self._rows and all(map(torch.equal, (key, value), earlier))
        return self._slots - past if same else 0

    def take_back(self, taken: list[Taken]) -> None:
        """Goes on with what is taken of the passes so far: the newest tokens left the cache."""
        if self._maps is not None:
            self._maps.taken_back = True
        if not self._keys or self.cross:
            return
        sizes = zip(taken, self._keys, strict=True)
        left = sum(keys.shape[2] if part.tokens is None else part.tokens for part, keys in sizes)
        gone, self._rows = self._rows - left, left
        self._slots -= gone
        self._sums.cut(gone)
        if self._held is not None:
            self._held.cut(self._rows)
            self._moved = True  # the newest token left need not be in the last slot

    def move(self, rows: Tensor) -> None:
        """Goes on with the sequences at `rows` of the last pass."""
        if self._maps is not None:
            self._maps.move(rows)
        self._sums.move(rows)
        if self._held is not None:
            self._held.move(rows)

    def _of_cache(self, heard: Heard, call: AttentionCall, masks: MaskReadings, passes: Taking) -> AttentionCall:
        """The call without the keys that a static cache has still to fill; keeps its new keys and their place."""
        before, new, keys = self._rows, heard.queries, heard.keys
        call = masks.read(call if call.bias is None else replace(call, bias=masks.own(call.bias)))
        visible = call.visible
        if self.cross:
            if self._keys and keys != self._keys[0].shape[2]:
                raise SinkscopeError(
                    f"{heard.shown} attends to {keys} keys after {self._keys[0].shape[2]} of another text: one softmax "
                    "over the keys of an encoder and of a cache that grows is not read"
                )
            if not self._keys:
                self._keys, self._values = [call.key.clone()], [call.value.clone()]
                call = replace(call, key=self._keys[0], value=self._values[0]).with_visible(visible)
            self._calls.visible.append(visible)
            self._calls.offsets.append(0)
            return call
        total = before + new
        if keys > total:
            if int(visible.reach[3].max()) > total:
                raise SinkscopeError(f"{heard.shown} attends to {keys} keys where its cache holds {total} tokens")
            call = replace(
                call, key=call.key[:, :, :total], value=call.value[:, :, :total], mask=_cut(call.mask, total),
                bias=_cut(call.bias, total),
            )  # fmt: skip
            call = masks.read(call) if visible.spans is None else call.with_visible(from_spans(*visible.spans, total))
        fresh = self._keep(call, passes)
        if not self._heard:  # the cache's own tensors may be written into
            return replace(call, key=fresh[0], value=fresh[1]).with_visible(call.visible)
        if self._nothing is None:  # a slice would keep the keys and values that it is of
            self._nothing = call.key[:, :, :0].clone(), call.value[:, :, :0].clone()
        return replace(call, key=self._nothing[0], value=self._nothing[1], mask=None)

    def _keep(self, call: AttentionCall, passes: Taking) -> tuple[Tensor, Tensor]:
        """Keeps copies of the new keys and values of a pass, which it returns, and which keys its queries see."""
        new, keys = call.lengths
        past, offset, visible = keys - new, self._rows - (keys - new), call.visible
        dropped = offset > 0 and past != self._rolling and not windowed(call, self._rows)
        anew = (self._held is not None or dropped) and self._find(call, past, passes)
        if past > 0 and not anew and self._heard:
            changed = self._sums.changed(call.key, call.value, past)
            # On an accelerator the answer is waited for in the second pass alone: most presses act after the first.
            if changed is None or len(self._heard) == 1 or changed.device.type == "cpu":
                anew = (changed is None or bool(changed)) and self._find(call, past, passes, changed=True)
            else:
                self.changed.append(changed)
        if self._held is not None:
            ends = torch.arange(self._rows + 1, self._rows + new + 1, device=call.query.device).view(1, 1, -1)
            offset, visible = 0, from_spans(torch.zeros_like(ends), ends, self._rows + new)
        fresh = call.key[:, :, past:].clone(), call.value[:, :, past:].clone()
        if self._held is not None:
            self._held.grow(*fresh)
        self._sums.keep(call.key, call.value, past, anew=anew)
        self._slots = keys
        self._keys.append(fresh[0])
        self._values.append(fresh[1])
        self._calls.visible.append(visible)
        self._calls.offsets.append(offset)
        return fresh

    def _find(self, call: AttentionCall, past: int, passes: Taking, changed: bool = False) -> bool:
        """Finds out whose keys the `past` slots of a cache hold, where these may be others than before. `changed`: they
        are known to be others. Returns whether it did.
        """
        first = first_seen(call.visible, past, self.name)
        known = self._held is not None and past == self._slots and not self._moved and not self._held.foreign
        if known and not changed and not bool((first > 0).any()):
            return False
        self._moved = False
        fresh = self._held is None
        if self._held is None:
            taken = passes.of_next()
            tokens, values = joined(self._keys, taken, 2), joined(self._values, taken, 2)
            self._held = StillCached(tokens, values, self._ever_seen(taken))
        window = self._rolling if call.window is None else call.window - 1
        gone = self._slots - past if window is None else min(self._slots, window) - past
        slots = call.key[:, :, :past], call.value[:, :, :past]
        self._held.keep(*slots, first, gone, lambda: weighs(call, past), self.name)
        if fresh and newest(self._held, past):
            self._held = None
            if past < self._rows:  # a sliding window that the model does not name
                self._rolling = past
        return True

    def _ever_seen(self, taken: list[Taken]) -> Tensor:
        """(B | 1, T): whether any query so far saw the key of each token."""
        starts, ends = (self._calls.edges(edge, taken) for edge in (0, 1))
        spans = from_spans(starts, ends, self._rows)
        return (spans.seen_by > 0).any(1)

    @property
    def passes(self) -> int:
        """How many passes made the call."""
        return len(self._heard)

    def whole(self, known: dict[tuple[object, ...], object], taken: list[Taken]) -> Whole:
        """The call over whole sequences. `known`: what was joined of masks and biases that other calls share. `taken`:
        what belongs to the sequences of each pass."""
        first, stream = self._heard[0], partial(self._stream, taken)
        if taken[0].rows is not None:
            first = replace(first, rows=len(taken[0].rows))
        if self._maps is not None:
            return self._whole_maps(first, self._maps, taken)
        if len(self._heard) == 1 and taken[0].tokens is None:
            call = self._calls.calls[0]
            return Whole(
                first, *call.lengths, call, None, self.named_cross, first.query, call.key, call.value, first.output,
                first.projected, stream,
            )  # fmt: skip
        if self.cross:
            key, value = (taken[0].batch(pieces[0]) for pieces in (self._keys, self._values))
        else:
            key, value = joined(self._keys, taken, 2), joined(self._values, taken, 2)
        call = self._calls.joined(key, value, None if self._held is None else self._held.end, known, taken)
        output, read_next = self._rows_of("output", taken, 1), self._rows_of("projected", taken, 1)
        return Whole(
            first, *call.lengths, call, None, self.named_cross, call.query, key, value, output, read_next, stream
        )

    def _whole_maps(self, first: Heard, maps: MapSteps, taken: list[Taken]) -> Whole:
        found = maps.parts()
        keys = first.keys if maps.cross else maps.queries
        if maps.cross:
            key, value = (None if each is None else taken[0].batch(each) for each in (first.key, first.value))
        else:
            key, value = (self._rows_of(name, taken, 2) for name in ("key", "value"))
        query, output, read_next = (
            self._rows_of(name, taken, axis) for name, axis in (("query", 2), ("output", 1), ("projected", 1))
        )
        return Whole(
            first, maps.queries, keys, None, found, self.named_cross, query, key, value, output, read_next,
            partial(self._stream, taken), self._rows_of("of_tokens", taken, 1),
        )  # fmt: skip

    def _rows_of(self, name: str, taken: list[Taken], axis: int) -> Tensor | None:
        return _along([getattr(heard, name) for heard in self._heard], taken, axis)

    def _stream(self, taken: list[Taken], block: str | None) -> Stream:
        module = self._heard[0].module
        return Stream(
            self._over(block, taken, lambda call: call.given), self._over(module, taken, lambda call: call.read),
            self._over(block, taken, lambda call: call.returned),
        )  # fmt: skip

    def _over(self, path: str | None, taken: list[Taken], of: Callable[[Around], Kept | None]) -> Tensor | None:
        """What was kept of the module at `path` in every pass, [B, T, D]; None where a pass lacks it, or where it is of
        other positions."""
        calls = [None if path is None else by_path.get(path) for by_path in self._around]
        kept = [None if call is None else of(call) for call in calls]
        tensors = [None if each is None else each.unwritten for each in kept]
        pieces = in_one_order(tensors, [(heard.rows, heard.queries) for heard in self._heard], self._last)
        return _along(pieces, taken, 1)

    @property
    def _last(self) -> bool | None:
        """Whether channels stand last in what the module reads; None where nothing shows it. transformers' interface
        has them there, and a linear layer that reads the heads shows it too."""
        first = self._heard[0]
        told = (by_path[first.module].last for by_path in self._around if first.module in by_path)
        known = True if first.path == INTERFACE or first.projected is not None else None
        return next((last for last in told if last is not None), known)


def _along(pieces: list[Tensor | None], taken: list[Taken], axis: int) -> Tensor | None:
    """The pieces of all passes joined along an axis; None where one is missing."""
    whole = [piece for piece in pieces if piece is not None]
    return joined(whole, taken, axis) if whole and len(whole) == len(pieces) else None


def _repeated(tensor: Tensor, times: int) -> bool:
    """Whether each KV head stands so many times, one after another."""
    groups = tensor.unflatten(1, (-1, times))
    return torch.equal(groups, groups[:, :, :1].expand_as(groups))


def _cut(mask: Tensor | None, keys: int) -> Tensor | None:
    return None if mask is None else mask[..., :keys]
