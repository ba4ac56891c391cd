"""Keeps what was measured of a watched model by domain, and builds a run of it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pandas as pd
import torch

from sinkscope.capture import Plan, Site
from sinkscope.capture.sites import shown_name
from sinkscope.checkpoints import Checkpoint
from sinkscope.engine.assemble import build_run
from sinkscope.engine.input_kinds.kind import InputKind, Reading
from sinkscope.engine.launch import ALONE, Processes
from sinkscope.engine.manifest import describe
from sinkscope.engine.measurement import Measurement
from sinkscope.engine.record import GrowingRecord
from sinkscope.engine.shards import Shards
from sinkscope.engine.watching.measured import BOUNDS, Calls, Measurer, Sequences, plan_of
from sinkscope.inputs import Corpus, TokenRules, token_rules
from sinkscope.inputs.batches import TokenData
from sinkscope.inputs.signals import KindNames
from sinkscope.metrics.guests import Guests
from sinkscope.metrics.quantities import QuantitySet
from sinkscope.runs.passages import Passage, ids_fingerprint, text_fingerprint
from sinkscope.runs.request import WATCHED, Request
from sinkscope.runs.run import Run
from sinkscope.tables.values import Domain, Places, PlacesOf, text_regions

OUTPUTS = "the outputs of the model's own attention"
_SAID = {"dtype": "dtype", "device": "device", "attention_implementation": "attention implementation"}
KINDS = KindNames(("first position", "position"))


@dataclass
class _Kind:
    """The sequences whose passes make the same attention calls.

    `read`: SHA-256 of what the model read of each. `has_tokens`: whether it read token ids in all of them; `by_ids`:
    whether it read nothing else. `unseen`: how many have a position that no query may see; `like_padding`: how many
    begin or end with a token with which programs pad, without a mask; `longer`: how many begin with all tokens of one
    of the batch before; `facts`: what the passes computed in, as `computed_now` says it.
    """

    calls: Calls
    record: GrowingRecord
    ids: list[np.ndarray] = field(default_factory=list)
    read: list[str] = field(default_factory=list)
    has_tokens: bool = True
    by_ids: bool = True
    unseen: int = 0
    like_padding: int = 0
    longer: int = 0
    facts: dict[str, set[str | None]] = field(default_factory=dict)

    @property
    def of_signals(self) -> bool:
        """Whether the passes are of pictures or sound alone."""
        return {*self.calls.places.values()} == {"signal"}

    def rows(self) -> np.ndarray:
        """[sequence, T]: token ids, or 0 for a first position and 1 for others; -1 past a sequence's end."""
        rows = self.ids if self.has_tokens else [_as_positions(row) for row in self.ids]
        longest = self.record.longest
        return np.stack([np.pad(row, (0, longest - len(row)), constant_values=-1) for row in rows])


def _in_order(kinds: Collection[_Kind]) -> list[_Kind]:
    """Texts before the pictures that they go with, of which there may be more, then by how often they came. Of as many,
    those of a model's first layers alone, which draft for it, come last."""

    def drafts(kind: _Kind) -> bool:
        return any(kind.calls.sites.keys() < other.calls.sites.keys() for other in kinds)

    return sorted(kinds, key=lambda kind: (kind.of_signals, -kind.record.count, drafts(kind)))


class Heap:
    """The sequences of one domain. `new`: makes an empty record."""

    def __init__(self, new: Callable[[], GrowingRecord]) -> None:
        self._new = new
        self.kinds: dict[frozenset[tuple[str, str, int]], _Kind] = {}

    @property
    def count(self) -> int:
        """Sequences of the kind that comes first."""
        return next((kind.record.count for kind in _in_order(self.kinds.values())), 0)

    def add(self, found: Sequences) -> None:
        """Adds a batch of sequences."""
        key = frozenset((call, site.stream, site.heads) for call, site in found.calls.sites.items())
        kind = self.kinds.setdefault(key, _Kind(found.calls, self._new()))
        kind.record.keep(found.length, found.count, found.parts)
        kind.has_tokens &= found.ids is not None
        kind.by_ids &= found.given is None
        kind.unseen += found.unseen
        kind.like_padding += found.like_padding
        for name, fact in found.facts.items():
            kind.facts.setdefault(name, set()).add(fact)
        before = kind.ids[len(kind.ids) - found.count :] if found.ids is not None else []
        for number, length in enumerate(found.lengths):
            row = np.zeros(length, dtype=np.int64) if found.ids is None else found.ids[number, :length].numpy()
            kind.ids.append(row.astype(np.int64))
            earlier = before[number] if len(before) == found.count else row
            kind.longer += len(earlier) < length and np.array_equal(row[: len(earlier)], earlier)
            read = "" if found.ids is None else ids_fingerprint(row.tolist())
            kind.read.append(read if found.given is None else text_fingerprint(read + found.given[number]))

    def readable(self, name: str, sites: dict[str, Site]) -> tuple[list[_Kind], list[str]]:
        """The kinds that one table can hold: as many sequences of each, and no attention call in two. The others are
        told of in a line each. Those of text come first, then those that came most often.

        `name`: the domain's. `sites`: those of the calls of other domains, in which a call has the same stream and as
        many heads. A call that reads its own sequence in some kind does so in all: over a cache of the model's own it
        has more keys.
        """
        kept, told = list[_Kind](), list[str]()
        every = [kind.calls.streams for kind in self.kinds.values()]
        streams = {call: stream for calls in every for call, stream in calls.items() if stream != "cross"}
        streams |= {call: site.stream for call, site in sites.items()}
        for kind in _in_order(self.kinds.values()):
            known = sites | {call: site for each in kept for call, site in each.calls.sites.items()}
            why = _turned(kind, streams) or _resized(kind, known) or _beside(kind, kept)
            if why is None:
                kept.append(kind)
            else:
                told.append(f"{kind.record.count} sequences of {name} are left out: {why}")
        return kept, told


def _turned(kind: _Kind, streams: dict[str, str]) -> str | None:
    """What is said of sequences with a call that has another stream elsewhere; None where there is no such call."""
    turned = [call for call, stream in kind.calls.streams.items() if streams.get(call, stream) != stream]
    if not turned:
        return None
    return (
        f"{shown_name(turned[0])} reads its own sequence in some and another sequence, or a cache of the model's own, "
        "in others; watch them one by one"
    )


def _resized(kind: _Kind, known: dict[str, Site]) -> str | None:
    """What is said of sequences with a call that has another number of heads elsewhere; None where there is none."""
    for call, site in kind.calls.sites.items():
        others = known.get(call, site).heads
        if site.heads != others:
            heads = f"{site.heads} head{'s' * (site.heads != 1)}"
            return f"{shown_name(call)} has {heads} in them and {others} in others; watch them one by one"
    return None


def _beside(kind: _Kind, kept: list[_Kind]) -> str | None:
    """What is said of sequences that cannot stand in one table with those that are kept; None where they can."""
    most = kept[0].record.count if kept else kind.record.count
    shared = any(kind.calls.sites.keys() & other.calls.sites.keys() for other in kept)
    if kind.record.count == most and not shared:
        return None
    if kind.of_signals and not kept[0].of_signals:
        first = shown_name(next(iter(kind.calls.sites)))
        return f"{first} read them, pictures or sound that are not as many as the {most} text{'s' * (most > 1)}"
    return f"the model made the attention call {_told_apart(kind, kept, most)}; give them a label of their own"


def _told_apart(kind: _Kind, kept: list[_Kind], most: int) -> str:
    """A call that is made for the sequences of one kind, or for the `most` of the kinds that are kept, alone."""
    others = [call for each in kept for call in each.calls.sites]
    own = next((call for call in kind.calls.sites if call not in others), None)
    if own is not None:
        return f"{shown_name(own)} for them, and not for its other {most}"
    missing = next((call for call in others if call not in kind.calls.sites), None)
    if missing is None:  # each of them was made for others, but not all together
        return f"{shown_name(next(iter(kind.calls.sites)))} for them, and for others that are measured apart"
    return f"{shown_name(missing)} for its other {most}, and not for them"


class WatchedInput(InputKind):
    """Sequences that somebody else gave the model."""

    name = WATCHED

    @classmethod
    def asked_for(cls, request: Request) -> bool:
        return False  # no scan reads them

    def read(self, positions: int) -> Reading:
        raise AssertionError("a watch hands its sequences over: nothing asks for them")

    def summary(self, domains: list[Domain], sites: list[Site], positions: pd.DataFrame) -> dict[str, Any]:
        return {}


class Watched:
    """What `build_run` and `describe` read of a watched model; the attributes are those of a scan's `Loop`."""

    shards: Shards | None = None
    smallest_batch: int | None = None
    decoder_input: str | None = None
    processes: Processes = ALONE

    def __init__(
        self, checkpoint: Checkpoint, request: Request, heaps: dict[str, Heap], quantities: QuantitySet,
        measurer: Measurer,
    ) -> None:  # fmt: skip
        self.checkpoint, self.declared, self.measurements = checkpoint, quantities, list[Measurement]()
        self._request, self._measurer = request, measurer
        self.left_out: list[str] = []
        self.keywords: dict[str, str] = {}
        self.failures: list[str] = []
        self.seconds = 0.0
        self._kinds: dict[str, list[_Kind]] = {}
        every, sites = list[Calls](), dict[str, Site]()
        for name, heap in heaps.items():
            kinds, told = heap.readable(name, sites)
            self.left_out += told
            if kinds:
                self._kinds[name] = kinds
            for kind in kinds:
                every.append(kind.calls)
                sites |= kind.calls.sites
        self._facts = self._shared_facts()
        self.plan: Plan = plan_of(checkpoint.model, every, self.failures, self.keywords)
        self.reading = self._reading()

    @property
    def sites(self) -> list[Site]:
        """The attention calls of all passes."""
        return self.plan.sites

    @property
    def done(self) -> int:
        """Sequences measured, over all domains."""
        return sum(kinds[0].record.count for kinds in self._kinds.values())

    @property
    def guests(self) -> Guests:
        """The metrics of others among what is measured."""
        return Guests(self.declared.metrics)

    @property
    def guest_seconds(self) -> dict[str, float]:
        """The time that each of them took."""
        return self.guests.seconds

    def run(self, started: float) -> Run:
        """The run. `started`: time.perf_counter() when the watch began."""
        self.plan = replace(self.plan, failures=self.failures, keywords=self.keywords)
        manifest = describe(self, self._request, self._check())
        warnings = [*manifest.warnings, *self._unseen(), *self._like_padding(), *self._longer(), *self.left_out]
        facts = {name: " and ".join(values) for name, values in self._facts.items() if values}
        warnings += [
            f"the passes differ in their {_SAID[name]}: {facts[name]}"
            for name, values in self._facts.items()
            if len(values) > 1
        ]
        model = manifest.model.model_copy(update=facts)
        return build_run(self, manifest.model_copy(update={"warnings": warnings, "model": model}), started, True)

    def _shared_facts(self) -> dict[str, list[str]]:
        """What the passes computed in: the values of each fact."""
        values: dict[str, set[str]] = {}
        for kind in (kind for kinds in self._kinds.values() for kind in kinds):
            for name, found in kind.facts.items():
                values.setdefault(name, set()).update(value for value in found if value is not None)
        return {name: sorted(found) for name, found in values.items()}

    def _count(self, of: Callable[[_Kind], int]) -> int:
        """The sequences of all domains that have something: of a domain, the most that any of its kinds tells."""
        return sum(max(map(of, kinds)) for kinds in self._kinds.values())

    def _unseen(self) -> list[str]:
        count = self._count(lambda kind: kind.unseen)
        if not count:
            return []
        have = "1 sequence has" if count == 1 else f"{count} sequences have"
        return [
            f"{have} positions that no query may see, which count as text: if they are padding, give the model an "
            "attention_mask, or sequences of equal length"
        ]

    def _like_padding(self) -> list[str]:
        count = self._count(lambda kind: kind.like_padding)
        if not count:
            return []
        some = "1 sequence begins or ends" if count == 1 else f"{count} sequences begin or end"
        return [
            f"{some} with token 0 or the padding token, others of the batch do not, and the model was given no "
            "attention_mask: if this is padding, it counts as text; give the model a mask, or one sequence at a time "
            "(lm-eval: --batch_size 1)"
        ]

    def _longer(self) -> list[str]:
        count = self._count(lambda kind: kind.longer)
        if not count:
            return []
        some = "1 sequence begins" if count == 1 else f"{count} sequences begin"
        return [
            f"{some} with all tokens of the one before: if the model writes a text without a cache of keys and values, "
            "each of its passes counts as a sequence; use a cache, or give the last pass a label of its own"
        ]

    def domains(self) -> list[Domain]:
        """What was measured, by domain; without the columns of metrics of others that failed."""
        domains = []
        for corpus in self.reading.corpora:
            by_kind = [kind.record.values() for kind in self._kinds[corpus.domain]]
            failed = self.guests.failed
            domains.append(
                Domain(corpus, {name: values.without(failed) for sites in by_kind for name, values in sites.items()})
            )
        return domains

    def places(self, domains: list[Domain]) -> PlacesOf:
        """The tokens at the keys of every call that read them; positions where no token ids were given."""
        special = self.reading.rules.special
        places: PlacesOf = {}
        for domain in domains:
            for kind in self._kinds[domain.name]:
                ids = kind.rows()
                for name, site in kind.calls.sites.items():
                    keys = domain.sites[name].keys
                    if kind.has_tokens and kind.calls.named_by_ids(site) and keys == ids.shape[1]:
                        places[domain.name, name] = Places(text_regions(ids, special), ids, self.checkpoint.tokenizer)
                    else:
                        unit = {"vision": "patch", "audio": "frame"}.get(site.stream, "position")
                        places[domain.name, name] = Places(np.full((len(ids), keys), unit))
        return places

    def _check(self) -> dict[str, Any]:
        """The record of how our sums' outputs compared with the model's own, for the manifest."""
        difference, where = self._measurer.worst
        if not self._measurer.compared:
            return {"status": "skipped"}
        bounds = (BOUNDS.get(getattr(torch, name)) for name in self._facts.get("dtype", ()))
        bound = max(filter(None, bounds), default=None)
        layers = len(self._measurer.compared)
        return {
            "status": "passed", "layers": layers, "reference": OUTPUTS, "max_difference": difference, "bound": bound,
            "where": where,
        }  # fmt: skip

    def _reading(self) -> Reading:
        tokens = all(kinds[0].has_tokens for kinds in self._kinds.values())
        tokenizer = self.checkpoint.tokenizer if tokens else KINDS
        corpora = [_corpus(name, kinds[0], tokens) for name, kinds in self._kinds.items()]
        read = [TokenData(corpus.ids) for corpus in corpora]
        kind = WatchedInput(self._request, self.checkpoint, None)  # type: ignore[arg-type]  # it runs nothing
        return Reading(self._rules(tokens), corpora, read, tokenizer, kind)

    def _rules(self, tokens: bool) -> TokenRules:
        tokenizer = self.checkpoint.tokenizer if tokens else None
        return token_rules(tokenizer, 0 if tokenizer is None else len(tokenizer))


def _corpus(name: str, kind: _Kind, tokens: bool) -> Corpus:
    rows = kind.rows() if tokens or not kind.has_tokens else np.where(kind.rows() < 0, -1, 1)
    pieces = [(f"sequence {number} of {name}",) for number in range(len(rows))]
    passages = [(Passage(read),) for read in kind.read]
    beside = [] if tokens and kind.by_ids else kind.read
    return Corpus(name, rows, pieces, passages, bos="as given", source=WATCHED, beside=beside)


def _as_positions(row: np.ndarray) -> np.ndarray:
    kinds = np.ones_like(row)
    kinds[0] = 0
    return kinds
