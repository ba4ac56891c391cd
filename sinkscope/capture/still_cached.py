"""Which tokens' keys a cache still holds, where it has dropped or changed some of them. Also what one pass shows of the
cache's slots: which it sees, and which get attention.

A dropped key is one that no later query sees, as if a mask hid it. The slots of a cache do not say whose keys they
hold, and heads may keep different ones. So keys and values are compared, bit by bit, with those that the tokens had.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Int
from torch import Tensor

from sinkscope.capture.bits import bit_sums, marks, row_marks
from sinkscope.capture.calls import AttentionCall
from sinkscope.capture.growth import Growth, Slots
from sinkscope.capture.kernels.attend import read
from sinkscope.capture.masks.visibility import Visibility
from sinkscope.errors import SinkscopeError

NO_WEIGHT = 1e-30
"""Less attention than this changes no number in float32. The compiled exponential gives no less than 1e-38."""


def weighs(call: AttentionCall, past: int) -> Tensor:
    """(B, G, past): whether the queries of a pass give a slot of the cache any attention.

    NaN counts as some, and so does every weight of a score that is not softmax's.
    """
    if call.score != "softmax":
        return torch.ones((*call.key.shape[:2], past), dtype=torch.bool, device=call.key.device)
    columns = read(call)[1].columns[..., :past]
    return ~(columns < NO_WEIGHT).unflatten(1, (call.key.shape[1], -1)).all(2)


def windowed(call: AttentionCall, before: int) -> bool:
    """Whether a cache holds as many keys as the model's sliding window needs, so that it dropped none that are seen."""
    new, keys = call.lengths
    return call.window is not None and keys == min(before, call.window - 1) + new


def first_seen(visible: Visibility, past: int, name: str) -> Tensor:
    """(B | 1): the first slot that the queries of a pass see, of the `past` ones before their own.

    Raises SinkscopeError where it is not the same for all of them, or where they do not see each other in causal order.
    """
    if visible.spans is not None and visible.spans[0].shape[1] == 1:
        first, end = visible.spans
        order = torch.arange(past + 1, past + 1 + end.shape[2], device=end.device)
        if bool((end == order).all()) and bool((first == first[..., :1]).all()) and bool((first < order).all()):
            return first[:, 0, 0].clamp(max=past)
    raise SinkscopeError(f"{name} hides keys from some queries over a cache that changed others: it is not read")


HELD = torch.iinfo(torch.int64).max
"""The end of a key that is still there."""


class StillCached:
    """The tokens of one attention call's cache.

    `keys`, `values`: (B, G, T, d) of the tokens so far. `seen`: (B | 1, T), whether a query ever saw the token; padding
    is seen by none.

    `end` (B, G, T): the first query that does not see the key of a token any more. `foreign`: whether some slots hold
    what no token had. A later pass could attend to these.
    """

    def __init__(self, keys: Tensor, values: Tensor, seen: Tensor) -> None:
        self._marks = marks(keys, values)
        self._seen = seen.expand(keys.shape[0], -1)
        self.end = torch.full_like(self._marks, HELD)
        self.foreign = False

    def keep(
        self, keys: Tensor, values: Tensor, first: Tensor, gone: int, weighs: Callable[[], Tensor], name: str
    ) -> None:
        """The cache now holds the slots `keys` and `values`, (B, G, n, d), of which the next query sees those from
        `first` (B | 1) on. `gone`: how many slots left it beside those that a sliding window lets go. `name` is the
        call's.

        Some presses write into the slots of the keys that they drop, so that these get no attention. `weighs` gives the
        slots that get some from the pass, (B, G, n).

        Raises SinkscopeError where a slot that gets attention holds what no token had, where the newest tokens were
        lost, and where dropped ones came back.
        """
        tokens, known = self._tokens(marks(keys, values), name)
        self.foreign = not bool(known.all())
        if self.foreign and bool((weighs() & ~known).any()):
            raise SinkscopeError(
                f"the cache of {name} holds keys or values that no token had (it merges, rounds, rotates or overwrites "
                "them, or its sequences changed places without reorder_cache): such a sequence is not read"
            )
        places = torch.arange(keys.shape[2], device=keys.device)
        seen = (places >= first.view(-1, 1, 1)) & known
        held = torch.zeros_like(self.end).scatter_reduce_(2, tokens, seen.long(), "amax") > 0
        there = torch.zeros_like(self.end).scatter_reduce_(2, tokens, known.long(), "amax") > 0
        if self._lost_the_newest(there, gone):  # a mask may hide tokens that are there, as at the end of a chunk
            raise SinkscopeError(
                f"the cache of {name} lost its newest tokens, but not by `crop` or by the same slice in every layer: "
                "not read"
            )
        if bool((held & (self.end < HELD)).any()):
            raise SinkscopeError(f"keys that the cache of {name} had dropped came back: such a sequence is not read")
        now = self.end.shape[2]
        self.end = self.end.where(held | (self.end < HELD), now)

    def sliced(self, keys: Tensor, values: Tensor, count: int, name: str) -> bool:
        """Whether the slots hold the same tokens as before, but for the newest `count`, which every head held, and for
        slots that hold what no token had."""
        rest, seen = self.end == HELD, self._seen[:, None]
        if not bool(rest[..., -count:].all()):
            return False
        rest[..., -count:] = False
        tokens, known = self._tokens(marks(keys, values), name)
        held = torch.zeros_like(self.end).scatter_reduce_(2, tokens, known.long(), "amax") > 0
        overwritten = (rest & seen & ~held).sum(2) <= (~known).sum(2)
        return bool(overwritten.all()) and not bool((held & seen & ~rest).any())

    def _lost_the_newest(self, there: Tensor, gone: int) -> bool:
        """Whether the `gone` slots were those of the newest tokens in every head, as if these were taken back."""
        return gone > 0 and not bool(there[..., -gone:].any())

    def grow(self, keys: Tensor, values: Tensor) -> None:
        """A pass brought the keys and values of new tokens, which its cache holds."""
        new_marks = marks(keys, values)
        self._marks = torch.cat([self._marks, new_marks], 2)
        self.end = torch.cat([self.end, torch.full_like(new_marks, HELD)], 2)
        self._seen = torch.cat([self._seen, self._seen.new_ones(len(new_marks), new_marks.shape[2])], 1)

    def move(self, rows: Tensor) -> None:
        """The sequences that go on are those at `rows`."""
        rows = rows.to(self.end.device)
        self._marks, self.end, self._seen = (tensor[rows] for tensor in (self._marks, self.end, self._seen))

    def cut(self, length: int) -> None:
        """The cache took back the tokens from `length` on."""
        self._marks, self._seen = self._marks[..., :length], self._seen[:, :length]
        end = self.end[..., :length]
        self.end = end.where(end == HELD, end.clamp(max=length))

    def _tokens(self, slots: Int[Tensor, "batch group slot"], name: str) -> tuple[Tensor, Tensor]:
        """The token of each slot, and whether it is one: other slots hold what no token had. Raises SinkscopeError
        where it cannot be known."""
        if slots.shape[:2] != self._marks.shape[:2]:
            raise SinkscopeError(
                f"the cache of {name} holds {len(slots)} sequences after {len(self._marks)}: such a batch is not read"
            )
        order = self._marks.sort(2)
        place = torch.searchsorted(order.values, slots).clamp(max=order.values.shape[2] - 1)
        known = order.values.gather(2, place) == slots
        tokens = order.indices.gather(2, place)
        twice = torch.zeros_like(slots, dtype=torch.bool)
        if order.values.shape[2] > 1:
            same = order.values[..., 1:] == order.values[..., :-1]
            twice = torch.nn.functional.pad(same, (0, 1)).gather(2, place)
        if bool((known & twice & self._seen[:, None].expand_as(self.end).gather(2, tokens)).any()):
            raise SinkscopeError(
                f"two tokens have equal keys in {name}: which of them its cache still holds is not known"
            )
        return tokens, known


class SlotSums:
    """What the slots of a cache hold, told by the sum of the bits of each KV head's key and value, as integers. From
    the third pass on, no sums are needed of a cache that is known to have only grown.

    Such a sum is exact in any order, and takes less memory than a copy. Some changes of a single slot leave it as it
    was: words of 64 bits that change places, or the signs of two numbers at the upper ends of such words.
    """

    def __init__(self) -> None:
        self._sums: Tensor | None = None
        self._read: tuple[Tensor, Tensor] | None = None
        self._left: Slots | None = None
        self._grows: bool | None = None

    def changed(self, keys: Tensor, values: Tensor, past: int, growth: Growth | None = None) -> Tensor | bool | None:
        """Whether the `past` first slots, (B, G, n, d), hold anything else than the newest `past` slots did after the
        last pass: one truth, on the tensors' device where the slots were read. None where there were fewer slots, or
        other sequences, or where it is not known. `growth`: how the cache came to these slots."""
        if self._grows is not False and self._left is not None:
            before = None if growth is None or not growth.is_of(keys, values) else growth.before
            self._grows = before is not None and before.count == past and self._left.same(before)
            if self._grows:
                return False
        now = _slot_sums(keys, values)
        self._read, sums = (keys, now), now[..., :past]
        if self._sums is None or self._sums[..., -past:].shape != sums.shape:
            return None
        return (sums != self._sums[..., -past:]).any()

    def order(self, keys: Tensor, values: Tensor, past: int) -> Tensor | None:
        """The sequences of the last pass, [B'], whose slots the `past` first ones of (B', G, n, d) are. None where they
        are no sequence's. They may lack some slots, but not the newest, where all sequences go on in their order."""
        old, sums = self._sums, _slot_sums(keys[:, :, :past], values[:, :, :past])
        if old is None or old.shape[1] != sums.shape[1] or not 0 < past <= old.shape[2]:
            return None
        if old.shape[2] > past:
            if torch.equal(sums, old[..., :past]):  # what comes behind was taken back, or is another copy's
                return None
            some = len(sums) == len(old) and torch.equal(sums[..., -1], old[..., -1])
            return torch.arange(len(old)) if some and bool(torch.isin(sums, old).all()) else None
        rows, known = row_marks(sums.flatten(1)), row_marks(old.flatten(1))
        same = rows[:, None] == known
        if not bool(same.any(1).all()):
            return None
        found, places = same.int().argmax(1), torch.arange(len(rows), device=rows.device)
        stays = places < len(known)
        stays[stays.clone()] = same[places[stays], places[stays]]
        return torch.where(stays, places, found)

    def keep(self, keys: Tensor, values: Tensor, growth: Growth | None = None) -> None:
        """Notes the slots after a pass: their sums are known where `changed` was asked of the same keys, and not needed
        where the cache grew so far."""
        read, self._read = self._read, None
        known = self._grows is not False and growth is not None and growth.is_of(keys, values)
        self._left = growth.left if known and growth is not None else None
        if self._left is not None and self._grows:
            self._sums = None
        else:
            self._sums = read[1] if read is not None and read[0] is keys else _slot_sums(keys, values)

    def settle(self) -> None:
        """Reads the slots that the cache still holds, if it was not done: others are about to take their place."""
        if self._sums is None and self._left is not None:
            held = self._left.unwritten
            self._sums = None if held is None else _slot_sums(*held)
        self._left, self._grows = None, False

    def found(self, keys: Tensor, values: Tensor, lost: int) -> None:
        """The slots still hold what they did, but for the newest, of which so many are lost."""
        if self._sums is None:
            self._sums = torch.nn.functional.pad(_slot_sums(keys, values), (0, lost))
        self._left, self._grows = None, False

    def move(self, rows: Tensor) -> None:
        """The sequences that go on are those at `rows`."""
        self._left, self._grows = None, False
        self._sums = None if self._sums is None else self._sums.index_select(0, rows.to(self._sums.device))

    def cut(self, count: int) -> None:
        """The newest `count` slots left the cache."""
        self._left, self._grows = None, False
        self._sums = None if self._sums is None else self._sums[..., : max(0, self._sums.shape[2] - count)]


def _slot_sums(keys: Tensor, values: Tensor) -> Int[Tensor, "batch group slot"]:
    return bit_sums(keys) + bit_sums(values)


def newest(held: StillCached, slots: int) -> bool:
    """Whether a cache holds the newest tokens alone, every head the same, as under a sliding window."""
    tokens = held.end.shape[2]
    return bool(((held.end == HELD).sum(2) == slots).all()) and bool((held.end[..., tokens - slots :] == HELD).all())
