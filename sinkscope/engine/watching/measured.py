"""Measures the attention calls of one batch of sequences, once its last pass has ended."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from sinkscope.capture import Site
from sinkscope.capture.calls import MaskReadings
from sinkscope.capture.heard import Pass, not_followed
from sinkscope.capture.joined import Joined
from sinkscope.capture.kernels.attend import TORCH, kernel_of
from sinkscope.capture.padded import Padding, like_padding, padding_tokens
from sinkscope.capture.parts import Given, Keys, Seen, in_pieces, no_maps
from sinkscope.capture.plan import Plan, sites_of
from sinkscope.capture.sites import place_of, shown_name, stream_of
from sinkscope.capture.views import Cut, Part, Pending, Span, Views
from sinkscope.capture.wholes import Outline
from sinkscope.engine.collector import Collector, Parts, Unfinished
from sinkscope.engine.watching.unseen import PACKED, Unseen, kept_apart
from sinkscope.errors import SinkscopeError
from sinkscope.metrics.quantities import QuantitySet

BOUNDS = {torch.float64: 1e-6, torch.float32: 5e-3, torch.bfloat16: 5e-2, torch.float16: 2e-2}
"""Largest difference of an attention output, relative to the size of its row, that rounding explains. Float32 may be
computed in TF32."""


@dataclass(frozen=True)
class Calls:
    """The attention calls that the passes of one kind make, in their order: what was seen of each, its site and its
    `place_of`, by its name, and the modules left out. `decodes`: the ids are a decoder's, whose encoder ran in another
    pass."""

    seen: dict[str, Seen]
    sites: dict[str, Site]
    places: dict[str, str]
    unread: tuple[str, ...]
    decodes: bool = False

    def named_by_ids(self, site: Site) -> bool:
        """Whether the positions of a call are those of the token ids: not pictures, nor the other side's text."""
        places, place = {*self.places.values()}, self.places[site.name]
        if place in ("cross", "signal"):
            return False
        return self.decodes or place != "decoder" or not places & {"encoder", "cross"}

    @property
    def streams(self) -> dict[str, str]:
        """The stream of each call."""
        return {name: site.stream for name, site in self.sites.items()}


@dataclass
class Sequences:
    """What was measured of one batch of sequences.

    `ids`: [sequence, T], -1 past a sequence's end; None where no token ids were given. `given`: SHA-256 of what else
    each sequence was given; None where the ids tell all. `unseen`: how many sequences have a position that no query
    may see. `like_padding`: how many begin or end with a token with which programs pad, without a mask. `pooled`:
    modules that attended from one position alone, and were not read. `facts`, `partial`: as `Joined` has them.
    """

    calls: Calls
    count: int
    length: int
    lengths: list[int]
    ids: Tensor | None
    given: list[str] | None
    parts: Parts
    unseen: int
    like_padding: int
    pooled: frozenset[str] = frozenset()
    facts: dict[str, str | None] = field(default_factory=dict)
    partial: frozenset[str] = frozenset()


@dataclass
class Measurer:
    """Measures batches of sequences. `quantities`: what is measured. `spectra`: as in a scan.

    `worst` is the largest difference of an output so far, and where it was. `unfinished`: what the parts of measured
    batches still lack.
    """

    model: nn.Module
    views: Views
    quantities: QuantitySet
    spectra: int | None
    worst: tuple[float, str] = (0.0, "")
    compared: set[str] = field(default_factory=set)
    unfinished: Unfinished = field(default_factory=Unfinished)
    _known: dict[tuple[object, ...], Calls] = field(default_factory=dict)

    def begin(self, first: Pass) -> None:
        """Keeps what is derived from the weights for the sequences that begin with this pass over a cache: when they
        have ended, the weights may be others."""
        for heard in first.heard:
            if heard.projection is not None and heard.value is not None:
                heard.factors = self.views.factors(heard.projection, heard.heads, heard.value.shape[-1])

    def measure(self, joined: Joined, start: int, signals: bool = False) -> Sequences | None:
        """Measures every call of a batch of sequences. None where it holds no attention over positions.

        `start`: number of its first sequence in its domain. `signals`: measures the pictures or recordings of a pass
        that are not as many as its texts (None where there are none), which are left out otherwise. Raises
        SinkscopeError where it cannot be read rightly.
        """
        every = joined.outlines()
        pieces = _in_pieces(every, joined.first.pooled)
        outlines = [outline for outline in every if outline.queries > 1]
        unread = joined.first.unmatched | joined.first.split
        if not outlines and unread:
            raise SinkscopeError(not_read(unread))
        if joined.first.cache is None:
            own = [outline for outline in outlines or every if outline.heard.module not in pieces]
            _check_cache(own, {joined.length, joined.first.second})
        if not outlines:
            return None
        rows = _rows(joined, outlines)
        apart = self._apart(joined, outlines, rows)
        if signals and not apart:
            return None
        outlines, rows = (apart, apart[0].heard.rows) if signals else ([w for w in outlines if w not in apart], rows)
        calls = self._calls(joined, outlines, rows, pieces)
        read = [outline for outline in outlines if outline.heard.name in calls.sites]
        padding, spans = (Padding(), None) if signals else self._padding(joined, read, calls)
        cuts = self._cuts(padding, read, calls)
        length = joined.length
        if signals or all(outline.queries != length for outline in read):
            length = max(outline.queries for outline in read)
        lengths = [length] * rows if spans is None else [stop - first for first, stop in spans]
        if min(lengths) < 2:
            raise SinkscopeError("a sequence of one token was left out: bos_mass starts at the second")
        parts, unseen = self._measured(read, calls, cuts, max(lengths), start, joined.first.texts)
        ids = None if signals else _valid_ids(joined.ids, spans)
        untold = spans is None and not padding.sides
        alike = like_padding(ids, padding_tokens(self.model)) if untold and ids is not None else 0
        return Sequences(
            calls, rows, max(lengths), lengths, ids, joined.given(rows), parts, unseen.sequences(rows), alike,
            _pooled(joined.first, every), joined.facts, joined.partial,
        )  # fmt: skip

    def _measured(
        self, read: list[Outline], calls: Calls, cuts: dict[str, list[Cut] | None], longest: int, start: int,
        texts: Tensor | None,
    ) -> tuple[Parts, Unseen]:  # fmt: skip
        """What is measured of these calls, and the positions that no query may see. `texts`: as a Pass has them."""
        collector = Collector(longest, self.quantities, self.spectra, self.unfinished)
        collector.begin(start)
        try:
            masks, unseen = MaskReadings(), Unseen()
            for outline in read:
                site, own_cuts = calls.sites[outline.heard.name], cuts[outline.heard.name]
                parts = self._add(collector, site, outline, masks, own_cuts)
                if own_cuts is None and outline.queries == outline.keys:
                    seen_by = torch.cat([part[2].seen_by for part in parts])
                    if texts is not None and kept_apart(texts, seen_by, outline.causal):
                        raise SinkscopeError(PACKED)
                    unseen.add(calls.places[outline.heard.name], seen_by, outline.causal, outline.chosen)
            bad = collector.bad_site([*calls.sites.values()])
            if bad is not None:
                raise SinkscopeError(
                    f"layer {bad.layer} ({shown_name(bad.module)}) gives NaN or infinity: the sequence was left out"
                )
            return collector.commit(), unseen
        except BaseException:
            collector.drop()
            raise

    def _padding(self, joined: Joined, read: list[Outline], calls: Calls) -> tuple[Padding, list[Span] | None]:
        """As `Joined.padding`, without masks that the model does not heed."""
        told, spans = joined.padding(read)
        places = calls.places
        if not told.any:
            return told, spans
        asked = [
            (outline.heard.name, places[outline.heard.name], (outline.queries, outline.keys), outline.hides)
            for outline in read
        ]
        padding = told.heeded(asked, frozenset(places.values()))
        return padding, spans if joined.of_ids in padding.sides or joined.of_ids not in told.sides else None

    def _cuts(self, padding: Padding, read: list[Outline], calls: Calls) -> dict[str, list[Cut] | None]:
        """How each call is cut into its sequences. Raises SinkscopeError where a map was cut before the pass showed
        whose padding it has."""
        among, cuts = frozenset(calls.places.values()), dict[str, list[Cut] | None]()
        for outline in read:
            name = outline.heard.name
            place = calls.places[name]
            cuts[name] = padding.cuts(name, place, among)
            if outline.visible is None and padding.any and not padding.alike(name, place, outline.heard.among, among):
                raise SinkscopeError(
                    f"{shown_name(name)} attended before a cross-attention: whose padding its mask shows cannot be "
                    "told; give sequences of equal length"
                )
        return cuts

    def _add(
        self, collector: Collector, site: Site, outline: Outline, masks: MaskReadings, cuts: list[Cut] | None
    ) -> list[Part]:
        loaded = outline.load()
        of_tokens = loaded.of_tokens
        if loaded.call is None:
            parts = outline.parts(cuts)
        else:
            outputs, parts = self.views.of_call(site.name, loaded.call, masks, cuts)
            of_tokens = outputs.of_tokens
            if loaded.output is not None and not outline.heard.dropped:
                self._compare(site.name, outputs.whole, loaded.output, cuts)
        pending = Pending(
            site, parts, (outline.heard.rows, outline.queries), loaded.query, loaded.key, loaded.value, loaded.output,
            loaded.projected, factors=outline.heard.factors, time_first=outline.heard.time_first, of_tokens=of_tokens,
        )  # fmt: skip
        stream = loaded.stream(site.block)
        for part in parts:
            collector.add(self.views.view(pending, part, stream), part[0].start)
        return parts

    def _compare(self, name: str, ours: Tensor, theirs: Tensor, cuts: list[Cut] | None) -> None:
        """Compares the output that our sums belong to, which it overwrites, with the model's own. Raises
        SinkscopeError where it differs."""
        rows = (
            [(slice(None), slice(None))] if cuts is None else [(cut.batch_row, cut.rows(ours.shape[1])) for cut in cuts]
        )
        self.compared.add(name)
        for row, span in rows:
            output, model = ours[row, span].float(), theirs[row, span].float()
            size = model.norm(dim=-1)
            if not bool(size.isfinite().all()) and not bool(model.isfinite().all()):
                raise SinkscopeError(f"{shown_name(name)} gives NaN or infinity: the sequence was left out")
            difference = float((output.sub_(model).norm(dim=-1) / (size + size.mean()).clamp(min=1e-12)).max())
            if not difference <= self.worst[0]:
                self.worst = difference, name
            if not difference <= BOUNDS.get(theirs.dtype, BOUNDS[torch.float32]):
                raise SinkscopeError(
                    f"{shown_name(name)} attends in another way than sinkscope reads: its output differs by "
                    f"{difference:.2g} of its size; the sequence was left out"
                )

    def _calls(self, joined: Joined, outlines: list[Outline], rows: int, pieces: set[str]) -> Calls:
        """The sites of these calls, without those of modules that attend in `pieces`.

        They are found once for all passes that make the same calls.
        """
        first, seen = joined.first, [_seen(outline) for outline in outlines]
        given = Given(rows, first.second)
        if joined.passes == 1:
            given = Given(rows, first.second, first.hidden_shapes, first.several, first.padded_windows)
        named = {outline.heard.name: call for outline, call in zip(outlines, seen, strict=True)}
        parts = frozenset(first.split | pieces | no_maps(self.model, named, first.unmatched, given))
        names = tuple(
            (outline.heard.name, outline.heard.heads, outline.heard.projection, outline.queries == outline.keys)
            for outline in outlines
        )
        key = names, parts, frozenset(first.unmatched), first.decodes, first.changes
        if key not in self._known:
            read = {name: call for name, call in named.items() if call.module not in parts}
            sites = sites_of(self.model, [*read.values()])
            unread = tuple(sorted(parts | first.unmatched))
            if not sites:
                raise SinkscopeError(not_read(unread))
            by_name = dict(zip(read, sites, strict=True))
            places = {name: place_of(self.model, site.stream, site.module) for name, site in by_name.items()}
            self._known[key] = Calls(read, by_name, places, unread, first.decodes)
        return self._known[key]

    def _apart(self, joined: Joined, outlines: list[Outline], rows: int) -> list[Outline]:
        """The calls over pictures or recordings that are not as many as the texts of their pass."""
        signals = joined.first.signals
        if signals in (None, rows) or joined.first.ids is None or joined.first.cache is not None:
            return []
        paths = {outline.heard.module for outline in outlines if outline.heard.rows == signals}
        towers = {path for path in paths if place_of(self.model, stream_of(self.model, path, False), path) == "signal"}
        return [outline for outline in outlines if outline.heard.module in towers]


def _pooled(now: Pass, every: list[Outline]) -> frozenset[str]:
    """The modules that attended from one position alone in a pass that no other one goes on with."""
    if now.cache is not None:
        return frozenset()
    return frozenset({*now.pooled} | {outline.heard.module for outline in every if outline.queries == 1})


def from_one(modules: Iterable[str]) -> str:
    """What is said of modules that attended from one position alone, as a class token's pooling does."""
    return f"attention from one position alone was not read: {', '.join(map(shown_name, sorted(modules)))}"


def of_few_tokens(modules: Iterable[str]) -> str:
    """What is said of modules that ran for some tokens of a text alone."""
    names = ", ".join(map(shown_name, sorted(modules)))
    return (
        f"the model ran {names} for the last tokens of a text alone, over the keys of an earlier layer: not measured "
        "(Gemma 4 runs them for all tokens where it is given output_hidden_states=True)"
    )


def not_read(modules: Iterable[str]) -> str:
    """What is said of modules whose attention could not be read."""
    names = ", ".join(map(shown_name, sorted(modules)))
    return f"attention that is no map of queries and keys was not read: {names}"


def plan_of(model: nn.Module, every: list[Calls], failures: list[str], keywords: dict[str, str]) -> Plan:
    """The calls of all passes, as one plan: their layers are numbered as if one pass had made them all.

    Raises SinkscopeError where a module that made one was taken out of the model since.
    """
    seen: dict[str, Seen] = {}
    for calls in every:
        seen |= {name: call for name, call in calls.seen.items() if name not in seen}
    present = {name for name, _ in model.named_modules()}
    for call in seen.values():
        if call.module not in present:
            raise SinkscopeError(
                f"{call.module} attended in this watch and is no longer a module of the model: call run() before you "
                "take it out, and reset() after that"
            )
    unread = {module for calls in every for module in calls.unread}
    return Plan(sites_of(model, [*seen.values()]), tuple(sorted(unread)), 0, failures, keywords)


def _check_cache(outlines: list[Outline], given: set[int | None]) -> None:
    """Raises SinkscopeError where a call goes on with earlier ones over a cache that no object of transformers holds:
    each query sees one key more than the one before it, the first sees several, and the keys are not the tokens that
    the pass was given."""
    for outline in outlines:
        if outline.keys <= outline.queries or outline.keys in given or outline.cross:
            continue
        first = int(outline.ends[0])
        if first > 1 and torch.equal(outline.ends, torch.arange(first, first + outline.queries)):
            raise SinkscopeError(not_followed(outline.heard.name, outline.queries))


def _rows(joined: Joined, outlines: list[Outline]) -> int:
    """The sequences of the batch: what was given, or, where that puts time first, what attended.

    Where every call has a multiple of what was given, windows were folded into the batch, which are no sequences.
    Raises SinkscopeError where calls hold some of the texts that were given, and none holds all.
    """
    first = joined.first
    told, attended = joined.batch, [outline.heard.rows for outline in outlines]
    if told is not None and first.second not in attended and all(rows % told == 0 for rows in attended):
        return told
    if (
        told is not None
        and not {told, first.second} & {*attended}
        and (first.ids is not None or _in_turn(outlines, told))
    ):
        held = f"{attended[0]} row{'s' * (attended[0] != 1)}"
        raise SinkscopeError(
            f"{shown_name(outlines[0].heard.name)} attended over {held} at once where {told} sequences were "
            "given: which is whose cannot be told; give one at a time"
        )
    return told if told in attended else max(set(attended), key=attended.count)


def _in_turn(outlines: list[Outline], told: int) -> bool:
    """Whether the calls of each module hold all sequences together, in several calls."""
    rows = Counter[str]()
    for outline in outlines:
        rows[outline.heard.module] += outline.heard.rows
    return len(rows) < len(outlines) and {*rows.values()} == {told}


def _seen(outline: Outline) -> Seen:
    heard, one = outline.heard, outline.one
    projection, alone, steered = heard.projection, heard.alone, heard.steered
    return Seen(
        module=heard.module,
        rows=heard.rows,
        queries=outline.queries,
        keys=outline.keys,
        heads=heard.heads,
        kv_groups=heard.heads if outline.value is None else outline.value[1],
        head_dim=None if outline.query is None else outline.query[3],
        value_dim=None if outline.value is None else outline.value[3],
        causal=outline.causal,
        path=heard.path,
        window=None if one is None else one.window,
        score="softmax" if one is None else one.score,
        kernel=None if one is None else (kernel_of(one) or TORCH),
        projects=lambda named: projection,
        alone=lambda: alone,
        number=heard.number,
        steered=lambda path: steered,
    )


def _in_pieces(every: list[Outline], alone: Counter[str]) -> set[str]:
    """As `parts.in_pieces`; keys are put together only of modules that made several calls."""
    calls = Counter(outline.heard.module for outline in every)
    several = [outline for outline in every if calls[outline.heard.module] > 1]
    return in_pieces([Keys(outline.heard.module, outline.queries, outline.key()) for outline in several], alone)


def _valid_ids(ids: Tensor | None, spans: list[Span] | None) -> Tensor | None:
    """The ids of each sequence from its first token on, -1 past its end."""
    if ids is None:
        return None
    ids = ids.cpu()
    if spans is None:
        return ids
    longest = max(stop - start for start, stop in spans)
    rows = torch.full((len(spans), longest), -1, dtype=torch.int64)
    for number, (start, stop) in enumerate(spans):
        rows[number, : stop - start] = ids[number, start:stop]
    return rows
