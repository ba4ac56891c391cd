"""The rows that each pass over a cache computed of one attention call, put together as one call."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from sinkscope.capture.calls import AttentionCall
from sinkscope.capture.masks.lazy import made_in_strips
from sinkscope.capture.masks.visibility import Visibility, from_spans, read_mask
from sinkscope.capture.rows import Store
from sinkscope.capture.taken import Taken, joined
from sinkscope.errors import SinkscopeError

JOINED = frozenset({
    *("query", "key", "value", "mask", "causal", "scaling", "softcap", "bias", "sinks", "window", "score", "learned"),
})  # fmt: skip
"""The fields of a call whose rows can be put together."""


class CallRows:
    """The call `name` in each pass so far, what its queries saw, and the token that its first key belongs to."""

    def __init__(self, name: str, store: Store) -> None:
        self.name = name
        self.queries, self._starts, self._ends = store.rows(), store.rows(), store.rows()
        self._keys: list[int] = []
        self._offsets: list[int] = []
        self._masked: dict[int, Visibility] = {}
        self._first: AttentionCall | None = None
        self._sizes: list[tuple[int, int]] = []
        self._biases: list[Tensor | None] = []
        self._sinks: list[Tensor | None] = []
        self._changing: str | None = None

    def add(self, call: AttentionCall) -> None:
        """Adds the call of the next pass."""
        if self._first is None:
            self._first = call
        elif len(self._sizes) == 1:
            self._first = _of_one_token(self._first)
        beyond = [name for name in call.beyond(JOINED) if getattr(call, name) is not None]
        if beyond or _number(call) != _number(self._first):
            self._changing = self._changing or (beyond[0] if beyond else "sinks")
        self.queries.add(call.query)
        self._sizes.append((len(call.query), call.lengths[0]))
        self._biases.append(call.bias)
        self._sinks.append(call.sinks)

    def add_visible(self, visible: Visibility, offset: int) -> None:
        """Adds what the queries of the next pass see of its keys, of which the first is that of the token `offset`."""
        if visible.spans is None:
            self._masked[len(self._keys)] = visible
        starts, ends = (visible.counts, visible.counts) if visible.spans is None else visible.spans
        self._starts.add(starts)
        self._ends.add(ends)
        self._keys.append(visible.keys)
        self._offsets.append(offset)

    @property
    def first(self) -> AttentionCall:
        """The call in its first pass; of its first token alone, where more passes came."""
        assert self._first is not None
        return self._first

    def edges(self, taken: list[Taken]) -> tuple[Tensor, Tensor]:
        """The first key of every query and the one after its last, counted from the first token; 0 for a query that
        sees nothing."""
        firsts, lasts = self._spans()
        if not all(part.whole for part in taken):
            firsts, lasts = (
                [part.shared(row, 2) for row, part in zip(rows, taken, strict=True)] for rows in (firsts, lasts)
            )
        counts = torch.tensor([row.shape[2] for row in firsts])
        starts, ends = _in_a_row(firsts), _in_a_row(lasts)
        offsets = torch.tensor(self._offsets).repeat_interleave(counts).to(starts.device)
        return torch.where(ends > starts, starts + offsets, 0), torch.where(ends > starts, ends + offsets, 0)

    def _spans(self) -> tuple[list[Tensor], list[Tensor]]:
        """The first key of every query of each pass, and the one after its last, counted from the first key in its
        cache."""
        starts, ends = self._starts.pieces, self._ends.pieces
        assert starts is not None
        assert ends is not None
        return starts, ends

    def visibility(
        self, keys: int, held: Tensor | None, known: dict[tuple[object, ...], object], taken: list[Taken]
    ) -> Visibility:
        """Which of so many keys each query of whole sequences sees.

        `held` (B, G, T): the token from whose query on each key was no longer cached; None = all were kept. `known`:
        what was joined of masks and biases that other calls share. `taken`: what belongs to the sequences of each pass.
        Raises SinkscopeError where the passes cannot be put together.
        """
        self._check(held)
        edges = None if self._masked else self.edges(taken)
        shared: tuple[object, ...]
        if edges is None:
            shared = (*map(id, self._masked.values()), *self._masked, *self._offsets, keys)
        elif held is None:
            shared = (*_content(*edges), keys)
        else:
            held = _ends_of_heads(held, self.first.query.shape[1])
            shared = (*_content(*edges, held), keys)
        if shared not in known:
            if edges is None:
                mask = self._rows_of_keys(self._masks(), taken, keys)
                known[shared] = read_mask(mask, False, self.queries_in(taken), keys, self.first.query.device)
            else:
                joint = from_spans(*edges, keys)
                known[shared] = joint if held is None else _without(joint, held, self.rows_in(taken))
        visible = known[shared]
        assert isinstance(visible, Visibility)
        return visible

    def rows_in(self, taken: list[Taken]) -> int:
        """The sequences of what is taken."""
        return self._sizes[0][0] if taken[0].rows is None else len(taken[0].rows)

    def queries_in(self, taken: list[Taken]) -> int:
        """The queries of what is taken."""
        sizes = zip(self._sizes, taken, strict=True)
        return sum(queries if part.tokens is None else part.tokens for (_, queries), part in sizes)

    @property
    def one(self) -> AttentionCall:
        """A call that computes attention as the whole does."""
        return replace(self.first, bias_of_seen=self._of_seen, causal=False)

    def joined(
        self, key: Tensor, value: Tensor, visible: Visibility, known: dict[tuple[object, ...], object],
        taken: list[Taken],
    ) -> AttentionCall:  # fmt: skip
        """The call over whole sequences, whose keys and values are `key` and `value`, and whose `visibility` is
        `visible`."""
        stacks = self.queries.stacks
        if stacks is None:
            raise SinkscopeError(f"something was written into the queries of {self.name} after a pass: they are gone")
        query = joined(stacks, taken, 2)
        mask = _mask_of(visible, query.shape[0]) if visible.mask is None else visible.mask
        bias, sinks = self._bias(known, taken, key.shape[2]), self._all_sinks(taken)
        call = replace(self.one, query=query, key=key, value=value, mask=mask, bias=bias, sinks=sinks)
        return call.with_visible(visible)

    @property
    def _of_seen(self) -> bool:
        """Whether biases are known of the keys alone that a query sees: those before an offset are no longer cached."""
        return self.first.bias is not None and any(self._offsets)

    def _check(self, held: Tensor | None) -> None:
        if self._changing is not None:
            raise SinkscopeError(
                f"the {self._changing} of {self.name} changes from step to step over a cache, which is not read: run "
                "it with use_cache=False"
            )
        added = any(bias is not None for bias in self._biases) or any(each.has_bias for each in self._masked.values())
        if held is not None and (added or self._masked):
            does = "adds a bias to its logits" if added else "hides keys between others that it sees"
            raise SinkscopeError(
                f"{self.name} {does} over a cache that dropped keys, which is not read: run it with use_cache=False"
            )

    def _all_sinks(self, taken: list[Taken]) -> Tensor | None:
        """The sinks of all queries: one row for all, or the rows of each pass."""
        sinks = [each for each in self._sinks if each is not None]
        if not sinks:
            return None
        alike = all(each.shape == sinks[0].shape and (len(each), each.shape[2]) == (1, 1) for each in sinks)
        if alike and bool((torch.cat(sinks) == sinks[0]).all()):
            return sinks[0]
        rows = zip(sinks, self._sizes, strict=True)
        return joined([each.expand(1, count, -1, queries, -1) for each, (count, queries) in rows], taken, 2)

    def _masks(self) -> list[Tensor | None]:
        """The mask of each pass, for those of which some let a query see keys that do not follow one another."""
        if any(visible.has_bias for visible in self._masked.values()):
            return [self._masked[number].mask if number in self._masked else None for number in range(len(self._keys))]
        seen = list[Tensor | None]()
        for number, (start, end, keys) in enumerate(zip(*self._spans(), self._keys, strict=True)):
            visible = self._masked.get(number) or from_spans(start, end, keys)
            seen.append(visible.seen(0, visible.counts.shape[-1]))
        return seen

    def _bias(self, known: dict[tuple[object, ...], object], taken: list[Taken], keys: int) -> Tensor | None:
        biases = self._biases
        if all(bias is None for bias in biases):
            return None
        shared = (*map(id, biases), *self._offsets, keys)
        if shared not in known:
            known[shared] = self._rows_of_keys(biases, taken, keys)
        bias = known[shared]
        assert isinstance(bias, Tensor)
        return bias

    def _rows_of_keys(self, pieces: list[Tensor | None], taken: list[Taken], keys: int) -> Tensor:
        """(b | 1, h | 1, T, keys): what the passes' masks or biases say of the keys that their queries had, of which
        the first stands at the pass's offset; the others are hidden."""
        rows = list[Tensor]()
        for piece, offset, part, (_, queries) in zip(pieces, self._offsets, taken, self._sizes, strict=True):
            if piece is None or (rows and piece.dtype != rows[0].dtype):
                raise SinkscopeError(
                    f"{self.name} has a mask or a bias in some passes over a cache alone, which is not read: run it "
                    "with use_cache=False"
                )
            own = part.shared(piece.expand(-1, -1, queries, -1), 2)
            hidden = False if piece.dtype == torch.bool else torch.finfo(piece.dtype).min
            rows.append(torch.nn.functional.pad(own, (offset, keys - offset - own.shape[3]), value=hidden))
        sizes = [max(row.shape[axis] for row in rows) for axis in (0, 1)]
        return torch.cat([row.expand(*sizes, -1, -1) for row in rows], 2)


def _content(*tensors: Tensor) -> tuple[object, ...]:
    """What tensors of the same shapes and numbers have alike."""
    return tuple((tensor.shape, str(tensor.device), tensor.cpu().numpy().tobytes()) for tensor in tensors)


def _of_one_token(call: AttentionCall) -> AttentionCall:
    """The call without the memory of its other tokens."""
    query, key, value = (tensor[:, :, :1].clone() for tensor in (call.query, call.key, call.value))
    return replace(call, query=query, key=key, value=value, mask=None)


def _number(call: AttentionCall) -> int:
    """How many sinks a call has."""
    return 0 if call.sinks is None else call.sinks.shape[3]


def _ends_of_heads(end: Tensor, heads: int) -> Tensor:
    """(b | 1, h | 1, T), from the ends of KV heads; one row where all sequences, or all heads, have the same."""
    end = end[:1] if bool((end == end[:1]).all()) else end
    return end[:, :1] if bool((end == end[:, :1]).all()) else end.repeat_interleave(heads // end.shape[1], 1)


def _without(joint: Visibility, end: Tensor, batch: int) -> Visibility:
    """The same visibility, less the keys that queries from `end` on do not see; (b | 1, h | 1, T)."""
    assert joint.spans is not None
    starts, ends = joint.spans

    def part(start: int, stop: int, low: int, high: int) -> Tensor:
        columns = torch.arange(low, high, device=starts.device)
        rows = torch.arange(start, stop, device=starts.device)[:, None]
        inside = (columns >= starts[..., start:stop, None]) & (columns < ends[..., start:stop, None])
        return inside & (rows < end[..., None, low:high])

    queries = starts.shape[2]
    return read_mask(made_in_strips(part, batch, queries, joint.keys), False, queries, joint.keys, starts.device)


def _mask_of(visible: Visibility, batch: int) -> Tensor:
    """A mask that says the same as the spans, made in strips."""
    assert visible.spans is not None
    starts, ends = visible.spans

    def part(start: int, stop: int, low: int, high: int) -> Tensor:
        columns = torch.arange(low, high, device=starts.device)
        return (columns >= starts[..., start:stop, None]) & (columns < ends[..., start:stop, None])

    return made_in_strips(part, batch, starts.shape[2], visible.keys)


def _in_a_row(rows: list[Tensor]) -> Tensor:
    """Rows (B | 1, H | 1, query) of several passes, one behind another."""
    sizes = [max(row.shape[axis] for row in rows) for axis in (0, 1)]
    alike = all([*row.shape[:2]] == sizes for row in rows)
    return torch.cat(rows if alike else [row.expand(*sizes, -1) for row in rows], 2)
