"""One attention call over all passes of a batch of sequences: its rows are kept, and put together at the end."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from sinkscope.capture.axes import in_one_order
from sinkscope.capture.call_rows import CallRows
from sinkscope.capture.calls import AttentionCall, MaskReadings
from sinkscope.capture.growth import Growth
from sinkscope.capture.heard import Around, Heard, Onward
from sinkscope.capture.map_steps import MapSteps
from sinkscope.capture.masks.visibility import Visibility, from_spans
from sinkscope.capture.plan import INTERFACE
from sinkscope.capture.rows import Rows, Store, are_copied
from sinkscope.capture.still_cached import SlotSums, StillCached, first_seen, newest, weighs, windowed
from sinkscope.capture.taken import Taken, Taking, joined
from sinkscope.capture.views import Stream
from sinkscope.capture.wholes import Outline, Whole
from sinkscope.errors import SinkscopeError

KEYS = ("key", "value")
OF_CALL = ("output", "projected")
OF_MAP = ("query", *KEYS, "output", "projected", "of_tokens")
"""What is kept of each pass of a call whose tensors were seen, and of one whose map was."""

OF_BLOCK = ("given", "returned")
"""What is kept of a module that may be the block around the call."""


class Steps:
    """The rows of one attention call so far, kept in `store`. `cross`: its keys are another text's. `may_be_block`: its
    own module may be the block that it is in."""

    def __init__(self, heard: Heard, cross: bool, store: Store, may_be_block: bool) -> None:
        self.name, self.module, self.cross, self.named_cross = heard.shown, heard.module, cross, cross
        self.changed: list[Tensor] = []
        self._first = heard
        self._sizes: list[tuple[int, int]] = []
        self._own: dict[str, Rows] = defaultdict(store.rows)
        self._around: dict[tuple[str, str], Rows] = defaultdict(store.rows)
        self._channels_last: bool | None = None
        self._of_module = (*OF_BLOCK, "read") if may_be_block else ("read",)
        self._reads_channels = heard.path == INTERFACE or heard.projected is not None
        self._calls = CallRows(heard.shown, store)
        self._keys, self._values = store.rows(), store.rows()
        self._key_sizes: tuple[int, int] | None = None
        self._sums = SlotSums()
        self._maps: MapSteps | None = None
        self._held: StillCached | None = None
        self._rolling: int | None = None
        self._slots = self._rows = 0
        self._moved = False

    def add(
        self, heard: Heard, around: dict[str, Around], masks: MaskReadings, cached: bool, before: Taking,
        live: Tensor | None, growth: Growth | None = None,
    ) -> None:  # fmt: skip
        """Adds the rows of a pass. `around`: the calls of modules that this one is in, by their paths. `before`: the
        passes before it. `live` [B]: the sequences that had not ended; None = all. `growth`: how its cache came to its
        keys; None where that is not known. Raises SinkscopeError where it does not go on where they ended."""
        call = heard.call
        if not self._sizes and cached and heard.keys != heard.queries:
            self.cross = self.cross or not heard.has_room(masks)
        if self._sizes and (call is None) != (self._maps is not None):
            raise SinkscopeError(
                f"{heard.shown} computes attention in its own code in some passes over a cache alone, which is not "
                "read: run it with use_cache=False"
            )
        if call is None:
            self._add_map(heard, cached, live)
        elif cached:
            call = self._of_cache(heard, call, masks, before, growth)
        else:
            call = masks.read(call)
        if call is not None:
            self._calls.add(call)
            heard.call, heard.versions = None, ()
        for name in OF_MAP if call is None else OF_CALL:
            if not (self._sizes and self._of_another_text(name)):  # its keys come with the first pass alone
                self._own[name].add(getattr(heard, name))
        for path, record in around.items():
            for name in self._of_module if path == self.module else OF_BLOCK:
                if (kept := getattr(record, name)) is not None:  # of outer modules, most often none is
                    self._around[path, name].add(kept)
            if self._channels_last is None and path == self.module:
                self._channels_last = record.last
        self._sizes.append((heard.rows, heard.queries))
        self._rows += heard.queries

    def _of_another_text(self, name: str) -> bool:
        """Whether a tensor of a map belongs to another text than the queries."""
        return name in KEYS and self._maps is not None and self._maps.cross

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
            known = self._maps.cross and len(self._sizes) > 0
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
        now = call.key.shape[1]
        groups = now if self._key_sizes is None else self._key_sizes[0]
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
        if call is None or self.cross or self._key_sizes is None:
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
            earlier = (self._all_keys(rows, taken)[:, :, :past] for rows in (self._keys, self._values))
            same = self._slots == self._rows and all(map(torch.equal, (key, value), earlier))
        if not same:
            return 0
        self._sums.found(key, value, self._slots - past)
        return self._slots - past

    def take_back(self, taken: list[Taken]) -> None:
        """Goes on with what is taken of the passes so far: the newest tokens left the cache."""
        if self._maps is not None:
            self._maps.taken_back = True
        if self._key_sizes is None or self.cross:
            return
        left = self._tokens_in(taken)
        gone, self._rows = self._rows - left, left
        self._slots -= gone
        self._sums.cut(gone)
        if self._held is not None:
            self._held.cut(self._rows)
            self._moved = True  # the newest token left need not be in the last slot

    def settle(self) -> None:
        """The cache is about to change otherwise than by a pass."""
        self._sums.settle()

    def move(self, rows: Tensor) -> None:
        """Goes on with the sequences at `rows` of the last pass."""
        if self._maps is not None:
            self._maps.move(rows)
        self._sums.move(rows)
        if self._held is not None:
            self._held.move(rows)

    def _of_cache(
        self, heard: Heard, call: AttentionCall, masks: MaskReadings, passes: Taking, growth: Growth | None
    ) -> AttentionCall:
        """Keeps the new keys of a call, and their place. Returns the call, the first one without the keys that a static
        cache has still to fill."""
        before, new, keys = self._rows, heard.queries, heard.keys
        call = call if call.bias is None else replace(call, bias=masks.own(call.bias))
        visible = masks.visible(call)
        if self.cross:
            if self._key_sizes is not None and keys != self._key_sizes[1]:
                raise SinkscopeError(
                    f"{heard.shown} attends to {keys} keys after {self._key_sizes[1]} of another text: one softmax "
                    "over the keys of an encoder and of a cache that grows is not read"
                )
            if self._key_sizes is None:
                call = replace(call, key=call.key.clone(), value=call.value.clone()).with_visible(visible)
                self._add_keys(call.key, call.value)
            self._calls.add_visible(visible, 0)
            return call
        total = before + new
        if keys > total:
            if int(visible.reach[3].max()) > total:
                raise SinkscopeError(f"{heard.shown} attends to {keys} keys where its cache holds {total} tokens")
            call = replace(
                call, key=call.key[:, :, :total], value=call.value[:, :, :total], mask=_cut(call.mask, total),
                bias=_cut(call.bias, total),
            )  # fmt: skip
            visible = masks.visible(call) if visible.spans is None else from_spans(*visible.spans, total)
        fresh = self._keep(call, visible, passes, growth)
        if self._sizes:
            return call
        return replace(call, key=fresh[0], value=fresh[1]).with_visible(visible)

    def _keep(
        self, call: AttentionCall, visible: Visibility, passes: Taking, growth: Growth | None
    ) -> tuple[Tensor, Tensor]:
        """Keeps the new keys and values of a pass, which it returns, and which keys its queries see."""
        new, keys = call.lengths
        past, offset = keys - new, self._rows - (keys - new)
        dropped = offset > 0 and past != self._rolling and not windowed(call, self._rows)
        anew = (self._held is not None or dropped) and self._find(call, visible, past, passes)
        if past > 0 and not anew and self._sizes:
            changed = self._sums.changed(call.key, call.value, past, growth)
            # On an accelerator the answer is waited for in the second pass alone: most presses act after the first.
            if isinstance(changed, Tensor) and (changed.device.type == "cpu" or len(self._sizes) == 1):
                changed = bool(changed)
            if isinstance(changed, Tensor):
                self.changed.append(changed)
            else:
                anew = changed is not False and self._find(call, visible, past, passes, changed=True)
        if self._held is not None:
            ends = torch.arange(self._rows + 1, self._rows + new + 1, device=call.query.device).view(1, 1, -1)
            offset, visible = 0, from_spans(torch.zeros_like(ends), ends, self._rows + new)
        fresh = call.key[:, :, past:], call.value[:, :, past:]
        if not self._sizes or not all(map(are_copied, fresh)):  # the cache's own tensors may be written into
            fresh = fresh[0].clone(), fresh[1].clone()
        if self._held is not None:
            self._held.grow(*fresh)
        self._sums.keep(call.key, call.value, growth)
        self._slots = keys
        self._add_keys(*fresh)
        self._calls.add_visible(visible, offset)
        return fresh

    def _find(self, call: AttentionCall, visible: Visibility, past: int, passes: Taking, changed: bool = False) -> bool:
        """Finds out whose keys the `past` slots of a cache hold, where these may be others than before. `changed`: they
        are known to be others. Returns whether it did.
        """
        first = first_seen(visible, past, self.name)
        known = self._held is not None and past == self._slots and not self._moved and not self._held.foreign
        if known and not changed and not bool((first > 0).any()):
            return False
        self._moved = False
        fresh = self._held is None
        if self._held is None:
            taken = passes.of_next()
            tokens, values = self._all_keys(self._keys, taken), self._all_keys(self._values, taken)
            self._held = StillCached(tokens, values, self._ever_seen(taken))
        window = self._rolling if call.window is None else call.window - 1
        gone = self._slots - past if window is None else min(self._slots, window) - past
        slots = call.key[:, :, :past], call.value[:, :, :past]
        self._held.keep(*slots, first, gone, lambda: weighs(call.with_visible(visible), past), self.name)
        if fresh and newest(self._held, past):
            self._held = None
            if past < self._rows:  # a sliding window that the model does not name
                self._rolling = past
        return True

    def _ever_seen(self, taken: list[Taken]) -> Tensor:
        """(B | 1, T): whether any query so far saw the key of each token."""
        spans = from_spans(*self._calls.edges(taken), self._rows)
        return (spans.seen_by > 0).any(1)

    def _add_keys(self, key: Tensor, value: Tensor) -> None:
        self._keys.add(key)
        self._values.add(value)
        if self._key_sizes is None:
            self._key_sizes = key.shape[1], key.shape[2]

    def _all_keys(self, rows: Rows, taken: list[Taken]) -> Tensor:
        stacks = rows.stacks
        assert stacks is not None
        return taken[0].batch(stacks[0][0]) if self.cross else joined(stacks, taken, 2)

    def _tokens_in(self, taken: list[Taken]) -> int:
        """The tokens of each sequence in what is taken."""
        sizes = zip(taken, self._sizes, strict=True)
        return sum(queries if part.tokens is None else part.tokens for part, (_, queries) in sizes)

    @property
    def passes(self) -> int:
        """How many passes made the call."""
        return len(self._sizes)

    def outline(self, known: dict[tuple[object, ...], object], taken: list[Taken]) -> Outline:
        """The call over whole sequences. `known`: what was joined of masks and biases that other calls share. `taken`:
        what belongs to the sequences of each pass."""
        first = self._first if taken[0].rows is None else replace(self._first, rows=len(taken[0].rows))
        if self._maps is not None:
            return self._outline_of_maps(first, self._maps, taken)
        if len(self._sizes) == 1 and taken[0].tokens is None:
            call = self._calls.first
            return Outline(
                first, *call.lengths, self.named_cross, call.visible, None, call, call.query.shape, call.value.shape,
                lambda: call.key, partial(self._load_one, call, taken),
            )  # fmt: skip
        queries, one = self._tokens_in(taken), self._calls.one
        keys = self._key_sizes[1] if self.cross and self._key_sizes is not None else queries
        visible = self._calls.visibility(keys, None if self._held is None else self._held.end, known, taken)
        return Outline(
            first, queries, keys, self.named_cross, visible, None, one, one.query.shape, one.value.shape,
            lambda: None if self._keys.pieces is None else self._all_keys(self._keys, taken),
            partial(self._load, visible, known, taken),
        )  # fmt: skip

    def _outline_of_maps(self, first: Heard, maps: MapSteps, taken: list[Taken]) -> Outline:
        keys = first.keys if maps.cross else maps.queries
        return Outline(
            first, maps.queries, keys, self.named_cross, None, maps.parts(), None, self._own["query"].shape,
            self._own["value"].shape, partial(self._rows_of, "key", taken), partial(self._load_map, taken),
        )  # fmt: skip

    def _load_one(self, call: AttentionCall, taken: list[Taken]) -> Whole:
        """The rows of the only pass, which stay where they are."""
        output, read_next = (self._rows_of(name, taken) for name in OF_CALL)
        return Whole(call, call.query, call.key, call.value, output, read_next, partial(self._stream, taken))

    def _load(self, visible: Visibility, known: dict[tuple[object, ...], object], taken: list[Taken]) -> Whole:
        key, value = self._all_keys(self._keys, taken), self._all_keys(self._values, taken)
        call = self._calls.joined(key, value, visible, known, taken)
        output, read_next = self._rows_of("output", taken), self._rows_of("projected", taken)
        self._let_go(self._keys, self._values, self._calls.queries)
        return Whole(call, call.query, key, value, output, read_next, partial(self._stream, taken))

    def _load_map(self, taken: list[Taken]) -> Whole:
        query, key, value, output, read_next, of_tokens = (self._rows_of(name, taken) for name in OF_MAP)
        if self.passes > 1:
            self._let_go()
        return Whole(None, query, key, value, output, read_next, partial(self._stream, taken), of_tokens)

    def _rows_of(self, name: str, taken: list[Taken]) -> Tensor | None:
        stacks = self._own[name].stacks
        if stacks is None:
            return None
        if self._of_another_text(name):
            return taken[0].batch(stacks[0][0])
        return joined(stacks, taken, 2 if name in ("query", *KEYS) else 1)

    def _let_go(self, *others: Rows) -> None:
        for rows in (*self._own.values(), *others):
            rows.let_go()

    def _stream(self, taken: list[Taken], block: str | None) -> Stream:
        """The residual stream around the call. Where several passes made it, what was kept of it is let go."""
        stream = Stream(
            self._over(block, "given", taken), self._over(self.module, "read", taken),
            self._over(block, "returned", taken),
        )  # fmt: skip
        if self.passes > 1:
            for rows in self._around.values():
                rows.let_go()
        return stream

    def _over(self, path: str | None, name: str, taken: list[Taken]) -> Tensor | None:
        """What was kept of the module at `path` in every pass, [B, T, D]; None where a pass lacks it, or where it is of
        other positions."""
        rows = self._around.get((path, name)) if path is not None else None
        stacks = None if rows is None or rows.passes != self.passes else rows.stacks
        if stacks is None:
            return None
        stacks, sizes = _of_one_size(stacks, self._sizes)
        ordered = [stack for stack in in_one_order(stacks, sizes, self._last) if stack is not None]
        return joined(ordered, taken, 1) if len(ordered) == len(stacks) else None

    @property
    def _last(self) -> bool | None:
        """Whether channels stand last in what the module reads; None where nothing shows it. transformers' interface
        has them there, and a linear layer that reads the heads shows it too."""
        return self._channels_last if self._channels_last is not None else True if self._reads_channels else None


def _repeated(tensor: Tensor, times: int) -> bool:
    """Whether each KV head stands so many times, one after another."""
    groups = tensor.unflatten(1, (-1, times))
    return torch.equal(groups, groups[:, :, :1].expand_as(groups))


def _cut(mask: Tensor | None, keys: int) -> Tensor | None:
    return None if mask is None else mask[..., :keys]


def _of_one_size(stacks: list[Tensor], sizes: list[tuple[int, int]]) -> tuple[list[Tensor], list[tuple[int, int]]]:
    """Stacks of passes that all had as many sequences and tokens as one another, and these two numbers of each."""
    alike, numbers = list[Tensor](), list[tuple[int, int]]()
    for stack in stacks:
        start = sum(map(len, alike))
        of_stack = sizes[start : start + len(stack)]
        parts = [stack] if len({*of_stack}) == 1 else [*stack.split(1)]
        alike += parts
        numbers += of_stack[:1] if len(parts) == 1 else of_stack
    return alike, numbers
