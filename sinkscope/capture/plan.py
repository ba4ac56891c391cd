"""The dry run: which attention calls a model makes in a forward pass, in which modules, how each can be read, and which
are not one map of a sequence's queries and keys."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sinkscope.capture.calls import AttentionCall
from sinkscope.capture.inline.calls import InlineCall, SdpaCall, told_by_products
from sinkscope.capture.inline.mode import InlineWatch
from sinkscope.capture.interface import Passed, shadowed
from sinkscope.capture.kernels.attend import TORCH, kernel_of, read
from sinkscope.capture.kernels.map_walk import AttentionMap, map_sums
from sinkscope.capture.learned_keys import LearnedKeys, Places, Record, not_read, unchanged, without
from sinkscope.capture.masks.lazy import windows_of_masks
from sinkscope.capture.output_projection import output_projection
from sinkscope.capture.output_readers import OutputReaders
from sinkscope.capture.parts import Keys, Seen, goes_on, hidden_states, in_pieces, keeps_keys, no_maps
from sinkscope.capture.private_doors import is_out_of_memory, is_smaller_than_kernel
from sinkscope.capture.shapes import shape_of
from sinkscope.capture.sites import (
    Site,
    block_of,
    call_name,
    config_alone_counts,
    head_counts,
    is_torch_attention,
    kind_of,
    stream_of,
    stream_width,
)
from sinkscope.errors import SinkscopeError, all_lines

INTERFACE, INLINE = "interface", "inline"


@dataclass(frozen=True)
class Plan:
    """The attention calls of one forward pass, in the order of the dry run."""

    sites: list[Site]
    unread: tuple[str, ...] = ()
    """Modules whose attention is not one map of queries and keys: computed window by window, in bands, or pooled."""
    positions: int = 0
    """The largest number of queries of any site in the dry run. For an image model: the positions of an image."""
    failures: list[str] = field(default_factory=list)
    """Why Triton failed, in the dry run or in a later pass that follows this plan: at most one line."""
    keywords: dict[str, str] = field(default_factory=dict)
    """Attention keywords that the model passes and that sinkscope does not know, in the dry run or in a later pass that
    follows this plan, each with the module that passed it first."""
    declared: dict[str, str] = field(default_factory=dict)
    """As `keywords`: those that code outside sinkscope has declared."""
    calls: Mapping[str, int] = field(default_factory=dict)
    """How often each module is called in the dry run: several times where layers share it, or in a loop."""
    learned: Mapping[str, Places] = field(default_factory=dict)
    """Where the modules that put learned keys beside those of their tokens put these."""
    aside: frozenset[str] = frozenset()
    """Modules that attend over something else than positions, as over the layers before them."""

    def of_positions(self, path: str | None, call: AttentionCall) -> bool:
        """Whether a call of the module at `path` is one over positions, and can be read."""
        return call.of_positions and path not in self.aside and path not in self.unread

    def of_tokens(self, path: str, record: Record) -> Record:
        """The record of a call in the module at `path` without the keys that it has learned; see `learned_keys`."""
        places = self.learned.get(path)
        return record if places is None else without(path, record, places)

    @property
    def inline(self) -> bool:
        """Whether some call does not go through transformers' attention interface."""
        return any(site.path == INLINE for site in self.sites)


def plan(
    model: nn.Module, forward: Callable[[], Any], other: Callable[[], Any] | None = None, advice: str = ""
) -> Plan:
    """Runs `forward` on one sequence (8 to 16 tokens are enough) and records every attention call.

    Runs it a second time where a model computes attention in its own code; `other`, where given, on a sequence that has
    another token at every position. The weights may be shapes without numbers, within `Shapes`. Raises SinkscopeError
    where no call can be read, or the model fails; the error ends with `advice` then.
    """
    failures: list[str] = []
    passed = Passed({}, {})
    run = _dry_run(model, forward, failures, passed, advice)
    if any(record.path == INLINE for record in run.seen):
        # BigBird replaces its attention modules during its first forward pass, so the first record is out of date.
        before, run = run, _dry_run(model, other or forward, failures, passed, advice)
        if (module := keeps_keys(run.keys, before.keys)) is not None:
            raise SinkscopeError(
                f"attention module {module!r} attends to keys of earlier passes, in a cache of its own: each sequence "
                "would read the one before"
            )
        known = {} if other is None else unchanged(run.keys, before.keys)
        if known:
            run = _dry_run(model, forward, failures, passed, advice, known)
    seen = run.seen
    if not seen:
        raise SinkscopeError(
            f"no attention of {type(model).__name__} could be read: it has no softmax attention, or computes it "
            "only in parts, such as windows of an image"
        )
    if failures:  # Triton failed in some call: no layer tries it again
        seen = [replace(record, kernel=record.kernel and TORCH) for record in seen]
    positions = max(record.queries for record in seen)
    return Plan(
        sites_of(model, seen), run.unread, positions, failures, passed.unknown, passed.declared, run.calls, run.learned,
        run.aside,
    )  # fmt: skip


@dataclass(frozen=True)
class _DryRun:
    """The calls of a pass that are whole maps, the keys of all calls, and what `Plan` has of the pass as `unread`,
    `calls`, `learned` and `aside`."""

    seen: list[Seen]
    keys: list[Keys]
    unread: tuple[str, ...]
    calls: Mapping[str, int]
    learned: Mapping[str, Places]
    aside: frozenset[str]


class _Kept:
    """The calls of a dry run: their keys, and the records of those that are whole maps."""

    def __init__(self, model: nn.Module, known: Mapping[str, Places]) -> None:
        self.seen: list[Seen] = []
        self.keys: list[Keys] = []
        self._counts = Counter[str]()
        self._learned = LearnedKeys(model, known)

    @property
    def learned(self) -> dict[str, Places]:
        """Where modules put learned keys beside those of their tokens."""
        return {path: places for path, places in self._learned.found.items() if places.count}

    def of_tokens(self, module: str, call: Record) -> Record:
        """A call over its tokens' keys alone. Raises SinkscopeError where a module has learned ones in some calls
        alone, or some that cannot be told from those of tokens."""
        if call.lengths[0] < 2:
            return call
        before = self._learned.found.get(module)
        found = self._learned.without(module, call)
        if before not in (None, self._learned.found[module]):
            raise SinkscopeError(not_read(module, "some of its calls have them, and some have not"))
        return found

    def keep(
        self, record: Seen | None, module: str, call: AttentionCall | AttentionMap, onward: bool = False,
        counted: bool = True,
    ) -> None:  # fmt: skip
        """Keeps a call, and its record where it is a whole map. `counted`: it has a number also where it is none."""
        key, value = (None if each is None or each.is_meta else each for each in (call.key, call.value))
        self.keys.append(Keys(module, call.lengths[0], key, onward, value))
        if record is not None:
            self.seen.append(replace(record, number=self._counts[module]))
        if record is not None or counted:
            self._counts[module] += 1


def _dry_run(
    model: nn.Module, forward: Callable[[], Any], failures: list[str], passed: Passed, advice: str,
    known: Mapping[str, Places] | None = None,
) -> _DryRun:  # fmt: skip
    names = {module: name for name, module in model.named_modules()}
    aside, told = set[str](), set[str]()  # `told`: torch's own attention applies its projection as a function
    kept = _Kept(model, known or {})

    def dispatched(module: nn.Module, call: AttentionCall) -> Tensor:
        if module not in names:
            raise SinkscopeError(f"an attention module outside the model was called: {type(module).__name__}")
        with watch.paused():
            output = shape_of(call) if call.query.is_meta else read(call, failures)[0]
            readers.attended(names[module], output)
            call = kept.of_tokens(names[module], call)
            record = _seen(names[module], call, INTERFACE, window_of(call.mask, module))
            if call.over_layers(given.length, stream_width(model)):
                aside.add(names[module])
            whole = record if call.of_positions and names[module] not in aside else None
            kept.keep(whole, names[module], call, counted=False)
            return output

    def inline(found: InlineCall | SdpaCall) -> None:
        if found.feeds_projection:
            told.add(found.module)
        if isinstance(found, SdpaCall):
            readers.attended(found.module, found.unfolded_output(None))
            call = kept.of_tokens(found.module, found.unfolded(None))
            window = window_of(found.call.mask, model.get_submodule(found.module))
            record = _seen(found.module, call, INLINE, window) if call.of_positions else None
            kept.keep(record, found.module, call, _onward(call))
        else:
            whole_map = found.unfolded(found.seen.probabilities.shape[-3])
            readers.attended(found.module, whole_map.output)
            maps = kept.of_tokens(found.module, whole_map)
            kept.keep(_seen_map(model, found, maps), found.module, maps, goes_on(maps.probabilities))

    watch, readers = InlineWatch(inline, model), OutputReaders(model)
    with (
        torch.no_grad(),
        windows_of_masks() as window_of,
        shadowed(model, dispatched, passed),
        watch.watched(model),
        runnable(model, advice=advice),
        hidden_states(model) as given,
        readers.listening(watch.paused),
    ):
        forward()
        watch.flush()
    seen, keys = kept.seen, kept.keys
    unmatched = {module for module, count in watch.unmatched.items() if count > 0}
    parts = (
        watch.split | in_pieces(keys, {}) | no_maps(model, dict(zip(_names(seen), seen, strict=True)), unmatched, given)
    )
    whole = [
        replace(
            record, projects=None if record.module in told else partial(readers.projection, record.module),
            alone=partial(readers.returned_by, record.module), steered=readers.steered,
        ) for record in seen if record.module not in parts
    ]  # fmt: skip
    return _DryRun(whole, keys, tuple(sorted(parts | unmatched)), given.calls, kept.learned, frozenset(aside))


def _onward(call: AttentionCall) -> bool:
    """Whether the queries are the last of more keys, in causal order."""
    queries, keys = call.lengths
    return keys > queries and call.visible.reach[3].tolist() == [*range(keys - queries + 1, keys + 1)]


def _names(seen: list[Seen]) -> Iterator[str]:
    """The name of each call, as its site's."""
    calls: Counter[str] = Counter()
    for record in seen:
        yield call_name(record.module, calls[record.module] if record.number is None else record.number)
        calls[record.module] += 1


@contextmanager
def runnable(model: nn.Module, given: str = "its main input alone", advice: str = "") -> Iterator[None]:
    """Turns a model's error into a one-line SinkscopeError that names what it was `given`, and ends with `advice`; by
    default it needs more than its main input."""
    try:
        yield
    except (SinkscopeError, MemoryError):
        raise
    except Exception as error:
        if isinstance(error, RuntimeError) and is_out_of_memory(error):
            raise
        name = type(model).__name__
        if is_smaller_than_kernel(error):
            raise SinkscopeError(
                f"{name}: the input is shorter or smaller than the kernel of one of its convolutions: give longer "
                "recordings or larger pictures"
            ) from error
        raise SinkscopeError(f"{name} cannot be run on {given}: {all_lines(error)}{advice}") from error


def _seen(module: str, call: AttentionCall, path: str, window: int | None) -> Seen:
    return Seen(
        module=module,
        rows=call.query.shape[0],
        queries=call.query.shape[2],
        keys=call.key.shape[2],
        heads=call.query.shape[1],
        kv_groups=call.key.shape[1],
        head_dim=call.query.shape[-1],
        value_dim=call.value.shape[-1],
        causal=call.visible.causal,
        path=path,
        window=window if call.window is None else call.window,
        score=call.score,
        kernel=kernel_of(call),
    )


def _seen_map(model: nn.Module, found: InlineCall, seen: AttentionMap) -> Seen | None:
    """The record of an inline call. None where its softmax is not taken for attention: it has one query, or a head
    count that the model does not name, or, where the model names none, unequal numbers of queries and keys, unless its
    products tell."""
    module = found.module
    rows, heads, queries, keys = seen.probabilities.shape
    counts = head_counts(model, module)
    if seen.squares and config_alone_counts(model, module):
        counts = set()
    if queries < 2 or (heads not in counts if counts else queries != keys and not told_by_products(found)):
        return None
    return Seen(
        module=module,
        rows=rows,
        queries=queries,
        keys=keys,
        heads=heads,
        kv_groups=heads if seen.value is None else seen.value.shape[1],
        head_dim=None if seen.query is None else seen.query.shape[-1],
        value_dim=None if seen.value is None else seen.value.shape[-1],
        causal=not seen.probabilities.is_meta and map_sums(seen).causal,  # a map without numbers does not tell
        path=INLINE,
    )


def sites_of(model: nn.Module, seen: list[Seen]) -> list[Site]:
    """The sites of a pass's calls, in their order."""
    paths = {record.module for record in seen}
    calls: Counter[str] = Counter()
    unplaced: Counter[str] = Counter()
    sites = []
    for record in seen:
        stream = stream_of(model, record.module, record.queries != record.keys)
        block = block_of(model, record.module, paths)
        if block is None:
            layer = unplaced[stream]
            unplaced[stream] += 1
        else:
            layer = block[1]
            if block[0] == record.module and (record.alone() or is_torch_attention(model, record.module)):
                block = None  # a list of attention modules: the residual stream passes by outside of them
        width = None if record.value_dim is None else record.heads * record.value_dim
        projection = None if width is None else _projection(model, record, width)
        steered = record.steered(projection)
        sites.append(
            Site(
                stream=stream,
                layer=layer,
                module=record.module,
                call=calls[record.module] if record.number is None else record.number,
                kind=kind_of(
                    model.get_submodule(record.module), record.window, stream == "cross", record.causal, layer
                ),
                heads=record.heads,
                kv_groups=record.kv_groups,
                head_dim=record.head_dim,
                value_dim=record.value_dim,
                causal=record.causal,
                block=block[0] if block else None,
                projection=None if steered else projection,
                path=record.path,
                score=record.score,
                kernel=record.kernel,
                steered=steered,
            )
        )
        calls[record.module] += 1
    return _with_unique_layers(sites)


def _projection(model: nn.Module, record: Seen, width: int) -> str | None:
    named = output_projection(model, record.module, width)
    if record.projects is None:
        return named
    return named or record.projects(None) if record.path == INTERFACE else record.projects(named)


def _with_unique_layers(sites: list[Site]) -> list[Site]:
    """Makes (stream, layer) unique, since (stream, layer, head) identifies a row of the tables.

    Where two calls of a stream share a layer number (a layer with two attentions, two lists of layers), all calls of
    that stream are numbered in their order instead.
    """
    ambiguous = {stream for (stream, _), count in Counter((s.stream, s.layer) for s in sites).items() if count > 1}
    running: Counter[str] = Counter()
    numbered = []
    for site in sites:
        numbered.append(replace(site, layer=running[site.stream]) if site.stream in ambiguous else site)
        running[site.stream] += 1
    return numbered
