"""The rows that each pass over a cache computed of one attention call, put together as one call.

Each step over a cache leaves some hundred small tensors, which stay until the sequence ends. Between them, the tensors
of the cache grow and move with every step. On a CPU, their old places then lie between small ones that are in use, and
the process becomes many times as large as all that it holds. So `pack` puts what is kept into few pieces of memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from sinkscope.capture.calls import AttentionCall
from sinkscope.capture.masks.lazy import made_in_strips
from sinkscope.capture.masks.visibility import Visibility, from_spans, read_mask
from sinkscope.capture.still_cached import Taken, joined
from sinkscope.errors import SinkscopeError

JOINED = frozenset({
    *("query", "key", "value", "mask", "causal", "scaling", "softcap", "bias", "sinks", "window", "score", "learned"),
})  # fmt: skip
"""The fields of a call whose rows can be put together."""


@dataclass(eq=False)
class CallRows:
    """The call `name` in each pass so far, what its queries saw, and the token that its first key belongs to."""

    name: str
    calls: list[AttentionCall] = field(default_factory=list)
    visible: list[Visibility] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)

    def pack(self, start: int, place: Place) -> None:
        """Puts the queries of the passes from number `start` on where `place` says."""
        for number, call in enumerate(self.calls[start:], start):
            query = place(call.query)
            if query is not call.query:
                self.calls[number] = replace(call, query=query, mask=None)

    def edges(self, edge: int, taken: list[Taken]) -> Tensor:
        """First keys (0) or ends (1) of every query, counted from the first token; 0 for a query that sees nothing."""
        rows = []
        for visible, offset, part in zip(self.visible, self.offsets, taken, strict=True):
            assert visible.spans is not None
            rows.append(part.shared(torch.where(visible.counts > 0, visible.spans[edge] + offset, 0), 2))
        sizes = [max(row.shape[axis] for row in rows) for axis in (0, 1)]
        return torch.cat([row.expand(*sizes, -1) for row in rows], 2)

    def joined(
        self, key: Tensor, value: Tensor, held: Tensor | None, known: dict[tuple[object, ...], object],
        taken: list[Taken],
    ) -> AttentionCall:  # fmt: skip
        """The call over whole sequences, whose keys and values are `key` and `value`.

        `held` (B, G, T): the token from whose query on each key was no longer cached; None = all were kept. `known`:
        what was joined of masks and biases that other calls share. `taken`: what belongs to the sequences of each pass.
        """
        self._check(held)
        query = joined([call.query for call in self.calls], taken, 2)
        visible = self._visible(query, key, held, known, taken)
        mask = _mask_of(visible, query.shape[0]) if visible.mask is None else visible.mask
        bias, sinks = self._bias(known, taken, key.shape[2]), self._sinks(taken)
        of_seen = bias is not None and any(self.offsets)  # the keys before an offset are no longer in the cache
        call = replace(
            self.calls[0], query=query, key=key, value=value, mask=mask, bias=bias, bias_of_seen=of_seen, sinks=sinks,
            causal=False,
        )  # fmt: skip
        return call.with_visible(visible)

    def _check(self, held: Tensor | None) -> None:
        for call in self.calls:
            beyond = [name for name in call.beyond(JOINED) if getattr(call, name) is not None]
            if beyond or _number(call) != _number(self.calls[0]):
                raise SinkscopeError(
                    f"the {beyond[0] if beyond else 'sinks'} of {self.name} changes from step to step over a cache, "
                    "which is not read: run it with use_cache=False"
                )
        added = any(call.bias is not None for call in self.calls) or self._masked
        if held is not None and added:
            raise SinkscopeError(
                f"{self.name} adds a bias to its logits over a cache that dropped keys, which is not read: run it with "
                "use_cache=False"
            )

    def _sinks(self, taken: list[Taken]) -> Tensor | None:
        """The sinks of all queries: one row for all, or the rows of each pass."""
        sinks = [call.sinks for call in self.calls if call.sinks is not None]
        if not sinks:
            return None
        alike = all(each.shape == sinks[0].shape and (len(each), each.shape[2]) == (1, 1) for each in sinks)
        if alike and bool((torch.cat(sinks) == sinks[0]).all()):
            return sinks[0]
        rows = zip(sinks, self.calls, strict=True)
        return joined([each.expand(len(call.query), -1, call.lengths[0], -1) for each, call in rows], taken, 2)

    @property
    def _masked(self) -> bool:
        """Whether some query sees keys that do not follow one another."""
        return any(visible.spans is None for visible in self.visible)

    def _masks(self) -> list[Tensor | None]:
        """The mask of each pass, for those of which some let a query see keys that do not follow one another."""
        if any(visible.has_bias for visible in self.visible):
            return [visible.mask for visible in self.visible]
        return [visible.seen(0, visible.counts.shape[-1]) for visible in self.visible]

    def _visible(
        self, query: Tensor, key: Tensor, held: Tensor | None, known: dict[tuple[object, ...], object],
        taken: list[Taken],
    ) -> Visibility:  # fmt: skip
        keys = key.shape[2]
        shared: tuple[object, ...] = (*map(id, self.visible), *self.offsets, keys)
        if held is not None:
            held = _ends_of_heads(held, query.shape[1])
            shared = (held.shape, held.cpu().numpy().tobytes(), keys)
        if shared not in known:
            if self._masked:
                mask = self._rows_of_keys(self._masks(), taken, keys)
                known[shared] = read_mask(mask, False, query.shape[2], keys, query.device)
            else:
                joint = from_spans(self.edges(0, taken), self.edges(1, taken), keys)
                known[shared] = joint if held is None else _without(joint, held, query.shape[0])
        visible = known[shared]
        assert isinstance(visible, Visibility)
        return visible

    def _bias(self, known: dict[tuple[object, ...], object], taken: list[Taken], keys: int) -> Tensor | None:
        biases = [call.bias for call in self.calls]
        if all(bias is None for bias in biases):
            return None
        shared = (*map(id, biases), *self.offsets, keys)
        if shared not in known:
            known[shared] = self._rows_of_keys(biases, taken, keys)
        bias = known[shared]
        assert isinstance(bias, Tensor)
        return bias

    def _rows_of_keys(self, pieces: list[Tensor | None], taken: list[Taken], keys: int) -> Tensor:
        """(b | 1, h | 1, T, keys): what the passes' masks or biases say of the keys that their queries had, of which
        the first stands at the pass's offset; the others are hidden."""
        rows = list[Tensor]()
        for piece, offset, part, call in zip(pieces, self.offsets, taken, self.calls, strict=True):
            if piece is None or (rows and piece.dtype != rows[0].dtype):
                raise SinkscopeError(
                    f"{self.name} has a mask or a bias in some passes over a cache alone, which is not read: run it "
                    "with use_cache=False"
                )
            own = part.shared(piece.expand(-1, -1, call.query.shape[2], -1), 2)
            hidden = False if piece.dtype == torch.bool else torch.finfo(piece.dtype).min
            rows.append(torch.nn.functional.pad(own, (offset, keys - offset - own.shape[3]), value=hidden))
        sizes = [max(row.shape[axis] for row in rows) for axis in (0, 1)]
        return torch.cat([row.expand(*sizes, -1, -1) for row in rows], 2)


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


SMALL = 2**16
"""The bytes up to which a tensor is put beside others; larger ones leave no gaps worth the copy."""

Place = Callable[[Tensor], Tensor]
"""Gives the tensor that stands for another one from now on; itself where that stays where it is."""


def pack(holders: list[Callable[[Place], None]]) -> None:
    """Copies small tensors of one shape, type and device into one piece of memory, and tensors that show the same
    numbers once: what an output projection reads is most often the attention's output.

    A holder takes a Place, and puts what it gives in the place of every tensor that it holds.
    """
    met = dict[_Numbers, Tensor]()

    def note(tensor: Tensor) -> Tensor:
        if type(tensor) is Tensor and tensor.nbytes <= SMALL:  # what libraries make of tensors may not stack
            met[_numbers(tensor)] = tensor
        return tensor

    for hold in holders:
        hold(note)
    together = _together(met)
    for hold in holders:
        hold(lambda tensor: together.get(_numbers(tensor), tensor) if type(tensor) is Tensor else tensor)


_Numbers = tuple[torch.device, int, torch.Size, tuple[int, ...], torch.dtype, bool, bool]
"""Where a tensor's numbers are in memory, and how it reads them."""


def _numbers(tensor: Tensor) -> _Numbers:
    steps = tuple(step if size > 1 else 0 for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.device, tensor.data_ptr(), tensor.shape, steps, tensor.dtype, tensor.is_neg(), tensor.is_conj()


def _together(tensors: Mapping[_Numbers, Tensor]) -> dict[_Numbers, Tensor]:
    """The copy of each small tensor beside those that are like it."""
    alike: dict[tuple[object, ...], list[_Numbers]] = {}
    for numbers, tensor in tensors.items():
        alike.setdefault((tensor.shape, tensor.dtype, tensor.device), []).append(numbers)
    copies = dict[_Numbers, Tensor]()
    with torch.no_grad(), torch.inference_mode(False):
        for group in alike.values():
            copies |= zip(group, torch.stack([tensors[numbers] for numbers in group]).unbind(), strict=True)
    return copies
