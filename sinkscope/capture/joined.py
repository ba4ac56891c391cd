"""Joins the passes of one batch of sequences, which a cache of keys and values carries on, into whole attention calls.

A decode step brings one query and the keys of all tokens before it. What the steps computed is put together as one
pass over all tokens would compute it: queries, new keys and values in their order, and for each query the keys that it
saw. The sums are then taken once, of the whole, so that a step costs no more than keeping its row.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from sinkscope.capture.calls import MaskReadings
from sinkscope.capture.growth import Growth
from sinkscope.capture.heard import Around, Heard, Onward, Pass, for_few_tokens
from sinkscope.capture.padded import BEHIND, HUGGING_FACE, OWN, TARGET, Padding, Side, has_holes, valid_spans
from sinkscope.capture.plan import INTERFACE
from sinkscope.capture.reordered import Order
from sinkscope.capture.rows import Store
from sinkscope.capture.sites import may_be_block, place_of, shown_name, stream_of
from sinkscope.capture.steps import Steps
from sinkscope.capture.taken import Taking
from sinkscope.capture.views import Span
from sinkscope.capture.wholes import Outline
from sinkscope.errors import SinkscopeError

INTERRUPTED = "a step was interrupted while it was read: its sequences were left out"


class Joined:
    """The passes over one batch of sequences, in their order.

    `facts`: what its first pass computed in. `partial`: the modules that `for_few_tokens` finds in it, which are left
    out. `add` raises SinkscopeError where a pass does not go on where the last one ended.
    """

    def __init__(self, model: nn.Module, facts: dict[str, str | None] | None = None) -> None:
        self._model = model
        self.facts = facts or {}
        self.partial = frozenset[str]()
        self.passes = 0
        self._first: Pass | None = None
        self._latest_ids: Tensor | None = None
        self._store = Store()
        self._ids = self._store.rows()
        self._given: dict[int, list[bytes]] = {}
        self._entered: set[str] = set()
        self._taking = Taking()
        self._sites: dict[str, Steps] = {}
        self._by_interface = True
        self._idle: frozenset[str] | None = None
        self._told: set[str] = set()
        self._blocks: dict[str, bool] = {}
        self._masks: dict[str, tuple[int, Tensor]] = {}
        self._moved: Tensor | None = None
        self._ended: list[Tensor] = []
        self._end_tokens: list[int] | None = None
        self._stopped: Tensor | None = None
        self._order: Order | None = None
        self._adding = False

    def ends_by(self, ids: Tensor, tokens: list[int], over: Tensor) -> None:
        """Tells which tokens end a text, and which texts are `over` [B] by any criterion, a string for one.

        `ids` [B, T]: these texts, and the token that was written behind them. The tokens that are told first
        count: a generation does not change them.
        """
        last = self._latest_ids
        if last is None or ids.shape != (len(last), self.length + 1) or over.shape != ids.shape[:1]:
            return
        if not torch.equal(ids[:, : self.length][:, -last.shape[1] :].to(last.device), last):
            return
        if self._end_tokens is None:
            self._end_tokens = tokens
        stopped = torch.full_like(over, -1, dtype=torch.long) if self._stopped is None else self._stopped
        self._stopped = torch.where(over & (stopped < 0), ids.shape[1], stopped)

    @property
    def length(self) -> int:
        """Tokens of each sequence so far."""
        return self._taking.length

    @property
    def first(self) -> Pass:
        """The pass that these sequences began with."""
        assert self._first is not None
        return self._first

    @property
    def batch(self) -> int | None:
        """Sequences that the last pass read; None where the inputs do not tell."""
        rows = self._taking.of_last()[0].rows
        return self.first.batch if rows is None else len(rows)

    @property
    def ids(self) -> Tensor | None:
        """[B, T]: the token ids; None where some pass had none."""
        pieces = self._ids.pieces
        if not pieces:
            return None
        ids = torch.cat([part.of(piece, 1) for part, piece in zip(self._taking.of_last(), pieces, strict=True)], 1)
        if ids.shape[1] != self.length:
            return None
        return ids if self._order is None else self._order.tokens(ids, 1)

    def given(self, rows: int) -> list[str] | None:
        """SHA-256 of what each sequence was given beside token ids; None where the ids tell all.

        Several passes without ids, or whose rows are not the sequences, give one digest for all sequences.
        """
        if not self._given:
            return None
        first, kept = self._given.get(0), self._taking.of_last()[0].rows
        if (
            first is not None
            and len(first) == (rows if kept is None else self.first.batch)
            and len(self._given) == 1
            and (self.passes == 1 or self.ids is not None)
        ):
            return [first[row].hex() for row in (range(rows) if kept is None else kept.tolist())]
        whole, ids = hashlib.sha256(), self._ids.pieces
        for number in range(self.passes):
            whole.update(b"".join(self._given.get(number, [])))
            whole.update(b"" if ids is None else str(ids[number].tolist()).encode())
        return [whole.hexdigest()] * rows

    @property
    def idle(self) -> frozenset[str] | None:
        """The modules that ran without attention, once a prefill and a step were seen whose attention all went through
        transformers' interface; else None. Of the steps to come no torch call needs to be looked at."""
        if self._idle is None and self.passes > 1 and self._by_interface:
            self._idle = frozenset(self._entered - self._told)
        return self._idle

    def onward(self, name: str, keys: int) -> Onward | None:
        """How the map of a call over so many keys goes on; see Onward."""
        return self._sites[name].onward(keys) if name in self._sites else None

    def order(self, name: str, key: Tensor, value: Tensor, queries: int, ends: Callable[[], int]) -> Tensor | None:
        """As `Steps.order`, of the call `name`. Raises KeyError where the first pass did not make it."""
        return self._sites[name].order(key, value, queries, ends)

    def __contains__(self, name: str) -> bool:
        """Whether the first pass made the call `name`."""
        return name in self._sites

    def settle(self) -> None:
        """The cache is about to change otherwise than by a pass."""
        for site in self._sites.values():
            site.settle()

    def move(self, rows: Tensor) -> None:
        """The sequences that go on are those that the last pass had at `rows`: the cache was put in this order."""
        if not self.passes:
            return
        self._moved = rows if self._moved is None else self._moved[rows]
        self._taking.move(rows)
        for site in self._sites.values():
            site.move(rows)

    def take_back(self, tokens: int) -> None:
        """The cache took back its newest tokens, so many: what they computed is no part of the sequences."""
        self._taking.take_back(max(0, self.length - tokens))
        taken = self._taking.of_next()
        for site in self._sites.values():
            if site.passes == len(taken):  # pictures are read once
                site.take_back(taken)

    def add(self, now: Pass) -> None:
        """Adds a pass. Its new rows are copied out of the cache, which goes on changing."""
        if now.refused is not None:
            raise SinkscopeError(now.refused)
        if self._adding:
            raise SinkscopeError(INTERRUPTED)
        if self.passes and now.before > self.length:
            raise SinkscopeError(
                f"a cache went on at token {now.before} after {self.length} tokens: what came in between is not read"
            )
        if not self.passes:
            self.partial = for_few_tokens(now.heard)
        if now.cache is not None and self.passes:
            for heard in now.heard:
                if heard.name in self._sites and heard.call is not None:
                    heard.call = self._sites[heard.name].grouped(heard.call)
            self._take_back_slices(now)
            self._cut_ids(now)
        live, grown = self._live(now), now.grown
        masks = MaskReadings()
        self._adding = True
        around: list[dict[str, Around]] = [{} for _ in now.heard]
        for record in now.around:
            for number in range(record.first, record.past):
                if record.path == now.heard[number].module or self._may_be_block(record.path):
                    around[number][record.path] = record
        for heard, surrounding in zip(now.heard, around, strict=True):
            if heard.module in self.partial:
                continue
            if heard.changed:
                raise SinkscopeError(f"{heard.shown} writes into the tensors that it attends with: they cannot be read")
            growth = None if heard.call is None else grown.get(id(heard.call.key))
            self._add(heard, now, surrounding, masks, live, growth)
        if self.passes:
            self._check_same(now)
        self._taking.add(self._tokens(now) if now.heard else 0)
        self._masks |= {name: (self.passes, mask.clone()) for name, mask in now.masks.items()}
        now.masks = {}
        if self._idle is None:
            self._by_interface &= not now.unmatched and all(heard.path == INTERFACE for heard in now.heard)
            self._told |= {around.path for around in now.around}
            attending = {heard.module for heard in now.heard}
            self._told |= {around.reader for around in now.around if around.reader and around.path in attending}
            self._told |= {heard.projection for heard in now.heard if heard.projection is not None}
            self._entered |= now.entered
        self._note(now)
        if now.cache is not None:
            self._store.pack()
        self._adding = False

    def _note(self, now: Pass) -> None:
        """Notes what a pass was given."""
        self._first = self._first or now
        if now.given:
            self._given[self.passes] = now.given
        ids = None if now.ids is None else now.ids.clone()  # a program may use its tensor again
        self._ids.add(ids)
        self._latest_ids = ids
        self.passes += 1
        now.let_go()

    def _cut_ids(self, now: Pass) -> None:
        """Leaves a pass its own token ids, where the model was given the whole text again and read its end alone."""
        queries = self._queries(now)
        if now.ids is not None and len(queries) == 1 and self.length + (new := queries.pop()) == now.ids.shape[1]:
            now.ids = now.ids[:, -new:]

    def _queries(self, now: Pass) -> set[int]:
        return {heard.queries for heard in now.heard if heard.module not in self.partial}

    def _tokens(self, now: Pass) -> int:
        """The positions that a pass adds: its tokens, or as many as attend where a model (GIT) puts others before."""
        queries = self._queries(now)
        if now.ids is not None and (now.ids.shape[1] in queries or not queries):
            return int(now.ids.shape[1])
        return max(queries)

    def _live(self, now: Pass) -> Tensor | None:
        """[B]: the sequences that had not ended before a pass; None where none had."""
        if self._moved is not None:
            self._ended = [each[self._moved.to(each.device)] for each in self._ended]
            self._stopped = None  # beams end by their tokens
            self._moved = None
        if self._stopped is not None and bool((self._stopped >= 0).all()):
            self._stopped = None  # that generation is over: what comes now is text
        last = None if now.ids is None else self._last_tokens(now.ids)
        if now.ids is None or last is None or len(now.ids) == 1:
            return None
        if not self.passes:
            over = torch.zeros(len(now.ids), dtype=torch.bool, device=now.ids.device)
            self._ended = [over, over.long()]
        if len(self._ended) != 2 or len(self._ended[0]) != len(now.ids):
            return None
        over, behind = self._ended
        behind = behind + over * now.ids.shape[1]
        # Such a token inside of several is one of a next prompt's: chats hold those of earlier answers.
        self._ended = [over | torch.isin(now.ids[:, -1], last) if self.passes else over, behind]
        if self._stopped is not None and len(self._stopped) == len(over):
            stopped = self._stopped.to(over.device)
            self._ended[0] = self._ended[0] | ((stopped >= 0) & (stopped <= self.length + now.ids.shape[1]))
        return ~over if bool(over.any()) else None

    def _last_tokens(self, ids: Tensor) -> Tensor | None:
        """The tokens that end a text: those of the generation, outside of one the model's own; None where none does."""
        if self._end_tokens is not None:
            return torch.as_tensor(self._end_tokens, device=ids.device) if self._end_tokens else None
        told = getattr(getattr(self._model, "generation_config", None), "eos_token_id", None)
        return None if told is None else torch.as_tensor(told, device=ids.device).view(-1)

    def _take_back_slices(self, now: Pass) -> None:
        """Takes back the newest tokens that somebody sliced off every layer of the cache without calling `crop`."""
        told = [self._sites[heard.name].cut_by(heard, self._taking) for heard in now.heard if heard.name in self._sites]
        counts = {count for count in told if count is not None}
        if len(counts) == 1 and (count := counts.pop()):
            self.take_back(count)

    def _add(
        self, heard: Heard, now: Pass, around: dict[str, Around], masks: MaskReadings, live: Tensor | None,
        growth: Growth | None,
    ) -> None:  # fmt: skip
        if heard.name not in self._sites:
            if self.passes:
                raise SinkscopeError(f"{heard.shown} attended in a later pass over a cache, but not in the first")
            cross = stream_of(self._model, heard.module, False) == "cross"
            self._sites[heard.name] = Steps(heard, cross, self._store, self._may_be_block(heard.module))
        self._sites[heard.name].add(heard, around, masks, now.cache is not None, self._taking, live, growth)

    def _may_be_block(self, path: str) -> bool:
        if path not in self._blocks:
            self._blocks[path] = may_be_block(self._model, path)
        return self._blocks[path]

    def _check_same(self, now: Pass) -> None:
        missing = self._sites.keys() - {heard.name for heard in now.heard}
        missing = {name for name in missing if self._place(self._sites[name]) != "signal"}  # pictures are read once
        if missing:
            raise SinkscopeError(
                f"{shown_name(min(missing))} attended in the first pass over a cache, but was not read in a later one: "
                "run it with use_cache=False"
            )

    def padding(self, outlines: list[Outline]) -> tuple[Padding, list[Span] | None]:
        """What the masks say of the whole batch, and the valid positions of the sequences that the ids name; None where
        these hold no padding.

        In `generate`, a sequence that has ended goes on with padding while others of its batch are written: it is cut.
        """
        side, sides = self.of_ids, self._sides_told()
        spans = sides[side].spans if side in sides else self._begun(outlines)
        ends = self._ends() if self._order is None else None  # the order has seen to them
        if ends is not None:
            told = spans or [(0, self.length)] * len(ends)
            spans = [(start, min(stop, end)) for (start, stop), end in zip(told, ends, strict=True)]
        self._check_maps(outlines, spans)
        if spans is not None and (ends is not None or side not in sides):
            sides |= {side: Side(spans, self.length)}
        return Padding(sides, self.ids is not None), spans

    @property
    def of_ids(self) -> str:
        """Whose padding the mask of the ids tells."""
        return TARGET if self.first.decodes else OWN

    def _sides_told(self) -> dict[str, Side]:
        """What each mask says. Raises SinkscopeError where it has holes."""
        sides = dict[str, Side]()
        for name, (number, mask) in self._masks.items():
            again = name == HUGGING_FACE and not self.first.decodes
            if self._order is not None and (name == self.of_ids or again):
                sides[name] = Side([(0, count) for count in self._order.counts], self.length)
                continue
            try:
                sides[name] = self._side(number, mask, name == self.of_ids)
            except ValueError as error:
                raise SinkscopeError(BEHIND if name == self.of_ids and self.passes > 1 else str(error)) from None
        return sides

    def _check_maps(self, outlines: list[Outline], spans: list[Span] | None) -> None:
        """Raises SinkscopeError where the queries of maps are not those of the valid positions: pass after pass they
        were cut by the first mask and by the tokens that end a text, before the whole was known."""
        behind = self._ended[1].tolist() if self._ended else []
        for outline in outlines if self.passes > 1 else ():
            if outline.maps is None:
                continue
            for row in range(outline.heard.rows):
                rows = outline.maps[row if len(outline.maps) == outline.heard.rows else 0].queries
                every_row = (0, outline.queries)
                start, stop = spans[row] if spans is not None and outline.queries == self.length else every_row
                if rows - (behind[row] if behind else 0) != stop - start:
                    raise SinkscopeError(
                        f"{outline.heard.shown} computes attention in its own code, and a sequence goes on behind a "
                        "token that ends texts, or has padding that its first pass does not tell: neither is read"
                    )

    def _side(self, number: int, mask: Tensor, of_ids: bool) -> Side:
        """What the mask of a pass says; where it tells of the ids, later passes without one brought tokens alone."""
        mask = self._whole_mask(number, mask) if of_ids else self._taking.of_last()[number].batch(mask)
        told = of_ids and (self.ids is not None or self.passes > 1)  # else nothing says how long the input is
        length = min(mask.shape[1], self.length) if told else mask.shape[1]
        spans = valid_spans(mask[:, :length])  # what comes behind are places of a static cache
        if spans is not None and told and length < self.length:
            raise SinkscopeError(
                f"a padding mask of {length} positions for {self.length}: padding cannot be told from text there; give "
                "sequences of equal length"
            )
        return Side(spans, length)

    def _whole_mask(self, number: int, mask: Tensor) -> Tensor:
        """The mask of the ids in a pass, and 1 for what came after it."""
        mask = self._taking.of_last()[number].batch(mask)
        rest = self.length - mask.shape[1]
        return torch.nn.functional.pad(mask, (0, rest), value=1) if rest > 0 and self.passes > 1 else mask

    def _begun(self, outlines: list[Outline]) -> list[Span] | None:
        """The valid positions of each sequence, where no mask was given for them but a call's own hides their start."""
        readings = [_beginnings(outline, self.length) for outline in outlines]
        starts = next((reading for reading in readings if reading is not None), None)
        if starts is None or not any(starts):
            return None
        return [(start, self.length) for start in starts]

    def _ends(self) -> list[int] | None:
        """The end of each sequence after the token that ends its text, where one and the same token fills the rest;
        None where no sequence has such an end."""
        ids, prompt = self.ids, self._tokens(self.first)
        last = None if ids is None else self._last_tokens(ids)
        if ids is None or last is None or self.passes == 1 or len(ids) == 1:
            return None  # a sequence alone waits for no other
        ends = [_end(row, prompt, last) for row in ids]
        if self._stopped is not None and len(self._stopped) == len(ends):
            told = self._stopped.tolist()
            ends = [min(end, stop) if stop >= 0 else end for end, stop in zip(ends, told, strict=True)]
        return ends if min(ends) < self.length else None

    def outlines(self) -> list[Outline]:
        """Every attention call over whole sequences, in the order of a pass. Raises SinkscopeError where a mask has
        holes, unless they are padding behind a prompt, which no token attends to."""
        if self._adding:
            raise SinkscopeError(INTERRUPTED)
        self._order = None
        self._order = self._order_behind_padding()
        if self.passes > 1:
            self._sides_told()  # a hole in the padding is told, not what it does to each call's mask
        for site in self._sites.values():
            if any(site.changed):
                raise SinkscopeError(
                    f"keys or values in the cache of {site.name} first changed after the second pass (some caches "
                    "round them, some presses overwrite those that they drop): this is read on a CPU alone"
                )
        known: dict[tuple[object, ...], object] = {}
        taken = self._taking.of_last()
        once = [replace(taken[0], tokens=None)]  # of the pictures that only the first pass read
        outlines = [site.outline(known, taken if site.passes == len(taken) else once) for site in self._sites.values()]
        if self._order is None:
            return outlines
        return [self._in_order(outline, self._order, known) for outline in outlines]

    def _order_behind_padding(self) -> Order | None:
        """The order that puts the tokens of every sequence together, where one went on behind padding. None where
        none did, and where attention is computed in a model's own code, or beside an encoder's."""
        mask = self._masks.get(self.of_ids)
        if mask is None or self.passes == 1 or any(site.of_maps for site in self._sites.values()):
            return None
        if {"encoder", "cross"} & {self._place(site) for site in self._sites.values()} and not self.first.decodes:
            return None
        valid = self._whole_mask(*mask)[:, : self.length] != 0
        ends = self._ends()
        if ends is not None:
            valid &= torch.arange(self.length, device=valid.device) < torch.tensor(ends, device=valid.device)[:, None]
        if valid.shape[1] != self.length or not has_holes(valid) or not bool(valid.any(1).all()):
            return None
        return Order.of(valid)

    def _place(self, site: Steps) -> str:
        return place_of(self._model, stream_of(self._model, site.module, site.cross), site.module)

    def _in_order(self, outline: Outline, order: Order, known: dict[tuple[object, ...], object]) -> Outline:
        if self._place(self._sites[outline.heard.name]) in ("signal", "encoder"):
            return outline
        moved = order.outline(outline, known)
        if moved is None:
            raise SinkscopeError(BEHIND)
        return moved


def _beginnings(outline: Outline, length: int) -> list[int] | None:
    """The first valid position of each sequence: its query sees itself alone. None where the mask does not tell. Maps
    were cut there already."""
    if outline.maps is not None:
        cut = len(outline.maps) == outline.heard.rows and (outline.queries, outline.keys) == (length, length)
        return [length - rows.queries for rows in outline.maps] if cut else None
    assert outline.visible is not None
    spans = outline.visible.spans
    if spans is None or (outline.queries, outline.keys) != (length, length) or spans[0].shape[0] == 1:
        return None
    places = torch.arange(length, device=spans[0].device)
    alone = ((spans[0] == places) & (spans[1] == places + 1))[:, 0]
    return alone.int().argmax(1).tolist() if bool(alone.any(1).all()) else None


def _end(ids: Tensor, prompt: int, last: Tensor) -> int:
    """The end of one sequence; see `Joined._ends`."""
    places = torch.isin(ids[prompt:], last).nonzero()
    if not len(places):
        return len(ids)
    end = prompt + int(places[0]) + 1
    return end if end < len(ids) and bool((ids[end:] == ids[-1]).all()) else len(ids)
