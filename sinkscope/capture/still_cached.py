"""Which tokens' keys a cache still holds, where it has dropped some of them.

A dropped key is one that no later query sees, as if a mask hid it. The slots of a cache do not say whose keys they
hold, and heads may keep different ones. So keys and values are compared, bit by bit, with those that the tokens had.
"""

from __future__ import annotations

import torch
from jaxtyping import Int
from torch import Tensor

from sinkscope.capture.marks import row_marks
from sinkscope.errors import SinkscopeError

HELD = torch.iinfo(torch.int64).max
"""The end of a key that is still there."""


class StillCached:
    """The tokens of one attention call's cache.

    `keys`, `values`: (B, G, T, d) of the tokens so far. `seen`: (B | 1, T), whether a query ever saw the token; padding
    is seen by none.

    `end` (B, G, T): the first query that does not see the key of a token any more.
    """

    def __init__(self, keys: Tensor, values: Tensor, seen: Tensor) -> None:
        self._marks = marks(keys, values)
        self._seen = seen.expand(keys.shape[0], -1)
        self.end = torch.full_like(self._marks, HELD)

    def keep(self, keys: Tensor, values: Tensor, first: Tensor, name: str) -> None:
        """The cache now holds the slots `keys` and `values`, (B, G, n, d), of which the next query sees those from
        `first` (B | 1) on. Raises SinkscopeError where these are not the keys and values of tokens; `name` is the
        call's."""
        tokens = self._tokens(marks(keys, values), name)
        places = torch.arange(keys.shape[2], device=keys.device)
        seen = (places >= first.view(-1, 1, 1)).expand(tokens.shape)
        held = torch.zeros_like(self.end).scatter_reduce_(2, tokens, seen.long(), "amax") > 0
        if not bool(held[..., -1].any()):
            raise SinkscopeError(f"the cache of {name} lost its newest token after it had dropped others: not read")
        if bool((held & (self.end < HELD)).any()):
            raise SinkscopeError(f"keys that the cache of {name} had dropped came back: such a sequence is not read")
        now = self.end.shape[2]
        self.end = self.end.where(held | (self.end < HELD), now)

    def grow(self, keys: Tensor, values: Tensor) -> None:
        """A pass brought the keys and values of new tokens, which its cache holds."""
        found = marks(keys, values)
        self._marks = torch.cat([self._marks, found], 2)
        self.end = torch.cat([self.end, torch.full_like(found, HELD)], 2)
        self._seen = torch.cat([self._seen, self._seen.new_ones(len(found), found.shape[2])], 1)

    def move(self, rows: Tensor) -> None:
        """The sequences that go on are those at `rows`."""
        rows = rows.to(self.end.device)
        self._marks, self.end, self._seen = (each[rows] for each in (self._marks, self.end, self._seen))

    def cut(self, length: int) -> None:
        """The cache took back the tokens from `length` on."""
        self._marks, self._seen = self._marks[..., :length], self._seen[:, :length]
        end = self.end[..., :length]
        self.end = end.where(end == HELD, end.clamp(max=length))

    def _tokens(self, slots: Int[Tensor, "batch group slot"], name: str) -> Int[Tensor, "batch group slot"]:
        """The token of each slot."""
        order = self._marks.sort(2)
        place = torch.searchsorted(order.values, slots).clamp(max=order.values.shape[2] - 1)
        if bool((order.values.gather(2, place) != slots).any()):
            raise SinkscopeError(
                f"the cache of {name} holds keys or values that no token had (it merges, rounds or turns them, or its "
                "rows changed): such a sequence is not read"
            )
        tokens = order.indices.gather(2, place)
        twice = torch.zeros_like(slots, dtype=torch.bool)
        if order.values.shape[2] > 1:
            same = order.values[..., 1:] == order.values[..., :-1]
            twice = torch.nn.functional.pad(same, (0, 1)).gather(2, place)
        if bool((twice & self._seen[:, None].expand_as(self.end).gather(2, tokens)).any()):
            raise SinkscopeError(f"two tokens have equal keys in {name}: which of them its cache dropped is not known")
        return tokens


def newest(held: StillCached, slots: int) -> bool:
    """Whether a cache holds the newest tokens alone, every head the same, as under a sliding window."""
    tokens = held.end.shape[2]
    return bool(((held.end == HELD).sum(2) == slots).all()) and bool((held.end[..., tokens - slots :] == HELD).all())


def marks(keys: Tensor, values: Tensor) -> Int[Tensor, "batch group token"]:
    """A number for each token and KV head that is the same for the same bits of key and value, and for others with a
    chance of about 2**-60."""
    return row_marks(keys, 0) + row_marks(values, 1)
