"""The dry run: which attention calls a model makes in a forward pass, in which modules, how each can be read, and which
are not one map of a sequence's queries and keys."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from sinkscope.capture.calls import AttentionCall
from sinkscope.capture.hooks import hooked
from sinkscope.capture.inline.calls import InlineCall, SdpaCall
from sinkscope.capture.inline.mode import InlineWatch
from sinkscope.capture.interface import Passed, shadowed
from sinkscope.capture.kernels.attend import TORCH, kernel_of, read
from sinkscope.capture.kernels.map_walk import map_sums
from sinkscope.capture.masks.lazy import windows_of_masks
from sinkscope.capture.output_projection import output_projection
from sinkscope.capture.private_doors import is_out_of_memory
from sinkscope.capture.shapes import shape_of
from sinkscope.capture.sites import Site, block_of, call_name, head_counts, kind_of, stream_of
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
    repeated: tuple[str, ...] = ()
    """Modules that are called several times in the dry run: in several layers, or in a loop."""

    @property
    def inline(self) -> bool:
        """Whether some call does not go through transformers' attention interface."""
        return any(site.path == INLINE for site in self.sites)


def plan(model: nn.Module, forward: Callable[[], Any]) -> Plan:
    """Runs `forward` on one sequence (8 to 16 tokens are enough) and records every attention call.

    Runs it a second time where a model computes attention in its own code. The weights may be shapes without numbers,
    within `Shapes`. Raises SinkscopeError where no call can be read.
    """
    failures: list[str] = []
    passed = Passed({}, {})
    seen, unread, repeated = _dry_run(model, forward, failures, passed)
    if any(record.path == INLINE for record in seen):
        # BigBird replaces its attention modules during its first forward pass, so the first record is out of date.
        seen, unread, repeated = _dry_run(model, forward, failures, passed)
    if not seen:
        raise SinkscopeError(
            f"no attention of {type(model).__name__} could be read: it has no softmax attention, or computes it "
            "only in parts, such as windows of an image"
        )
    if failures:  # Triton failed in some call: no layer tries it again
        seen = [replace(record, kernel=record.kernel and TORCH) for record in seen]
    positions = max(record.queries for record in seen)
    return Plan(sites_of(model, seen), unread, positions, failures, passed.unknown, passed.declared, repeated)


def _dry_run(
    model: nn.Module, forward: Callable[[], Any], failures: list[str], passed: Passed
) -> tuple[list[Seen], tuple[str, ...], tuple[str, ...]]:
    """The attention calls of a pass, and the modules that `Plan` calls `unread` and `repeated`."""
    names = {module: name for name, module in model.named_modules()}
    seen: list[Seen] = []
    calls: Counter[str] = Counter()

    def dispatched(module: nn.Module, call: AttentionCall) -> Tensor:
        if module not in names:
            raise SinkscopeError(f"an attention module outside the model was called: {type(module).__name__}")
        with watch.paused():
            output = shape_of(call) if call.query.is_meta else read(call, failures)[0]
            if call.of_positions:
                seen.append(_seen(names[module], call, INTERFACE, window_of(call.mask)))
            return output

    def inline(inline_call: InlineCall | SdpaCall) -> None:
        if isinstance(inline_call, SdpaCall):
            call = inline_call.unfolded(None)
            if call.of_positions:
                seen.append(_seen(inline_call.module, call, INLINE, window_of(inline_call.call.mask)))
        else:
            record = _seen_map(model, inline_call)
            if record is not None:
                seen.append(record)

    watch = InlineWatch(inline)
    with (
        torch.no_grad(),
        windows_of_masks() as window_of,
        shadowed(model, dispatched, passed),
        watch.watched(model),
        runnable(model),
        hidden_states(model, calls) as shapes,
    ):
        forward()
    unmatched = {module for module, count in watch.unmatched.items() if count > 0}
    parts = watch.split | no_maps(model, seen, unmatched, shapes)
    repeated = tuple(name for name, count in calls.items() if count > 1)
    return [record for record in seen if record.module not in parts], tuple(sorted(parts | unmatched)), repeated


@contextmanager
def runnable(model: nn.Module, given: str = "its main input alone") -> Iterator[None]:
    """Turns a model's error into a one-line SinkscopeError that names what it was `given`; by default it needs more
    than its main input."""
    try:
        yield
    except (SinkscopeError, MemoryError):
        raise
    except Exception as error:
        if isinstance(error, RuntimeError) and is_out_of_memory(error):
            raise
        raise SinkscopeError(f"{type(model).__name__} cannot be run on {given}: {all_lines(error)}") from error


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


def _seen_map(model: nn.Module, call: InlineCall) -> Seen | None:
    """The record of an inline call. None where its softmax is not taken for attention: it has one query, or a head
    count that the model does not name, or, where the model names none, unequal numbers of queries and keys."""
    heads = call.seen.probabilities.shape[-3]
    counts = head_counts(model, call.module)
    seen = call.unfolded(heads)
    queries, keys = seen.probabilities.shape[-2:]
    if queries < 2 or (heads not in counts if counts else queries != keys):
        return None
    return Seen(
        module=call.module,
        rows=seen.probabilities.shape[0],
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
        width = None if record.value_dim is None else record.heads * record.value_dim
        sites.append(
            Site(
                stream=stream,
                layer=layer,
                module=record.module,
                call=calls[record.module],
                kind=kind_of(model.get_submodule(record.module), record.window, stream == "cross", layer),
                heads=record.heads,
                kv_groups=record.kv_groups,
                head_dim=record.head_dim,
                value_dim=record.value_dim,
                causal=record.causal,
                block=block[0] if block else None,
                projection=None if width is None else output_projection(model, record.module, width),
                path=record.path,
                score=record.score,
                kernel=record.kernel,
            )
        )
        calls[record.module] += 1
    return _with_unique_layers(sites)


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


# Finds the attention calls of a dry run that are not one map of a sequence's queries and keys.


@dataclass(frozen=True)
class Seen:
    """One attention call of the dry run. `heads` and the fields after it are as in Site."""

    module: str
    rows: int
    queries: int
    keys: int
    heads: int
    kv_groups: int
    head_dim: int | None
    value_dim: int | None
    causal: bool
    path: str
    window: int | None = None
    score: str = "softmax"
    kernel: str | None = None


def no_maps(
    model: nn.Module, seen: list[Seen], unmatched: set[str], given: dict[str, torch.Size], rows: int = 1
) -> set[str]:
    """Paths of modules whose calls are only parts of an attention map, or no attention; `rows`: sequences of the pass.

    `unmatched`: modules with a softmax whose product with values was not seen. `given`: as `hidden_states`.
    """
    calls = Counter(record.module for record in seen)

    def part(record: Seen, name: str) -> bool:
        square = record.queries == record.keys
        of_image = _of_image(model, record)
        return (
            (record.module in unmatched and not square)  # banded attention with global tokens
            or record.rows != rows  # windows folded into the batch: several rows for one sequence
            or (of_image and calls[record.module] > 1)  # windows: one call for each, their number depends on the image
            or (of_image and not square)  # pooled keys
            or _padded_to_window(record, given.get(name))
            or _reads_windowed_cache(model, record)
        )

    return {record.module for record, name in zip(seen, _names(seen), strict=True) if part(record, name)}


def _names(seen: Iterable[Seen]) -> Iterator[str]:
    """The name of each call, as its site's."""
    calls: Counter[str] = Counter()
    for record in seen:
        yield call_name(record.module, calls[record.module])
        calls[record.module] += 1


@contextmanager
def hidden_states(model: nn.Module, calls: Counter[str]) -> Iterator[dict[str, torch.Size]]:
    """Collects the shape of the hidden states that each module receives, by the name of a call of the module. `calls`
    gets how often each is called."""
    shapes: dict[str, torch.Size] = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            hidden = kwargs.get("hidden_states", args[0] if args else None)
            if isinstance(hidden, Tensor) and hidden.dim() == 3:
                shapes[call_name(name, calls[name])] = hidden.shape
            calls[name] += 1

        return hook

    with ExitStack() as stack:
        for name, module in model.named_modules():
            if name:
                stack.enter_context(hooked(module, pre=keep(name), with_kwargs=True))
        yield shapes


def _reads_windowed_cache(model: nn.Module, one: Seen) -> bool:
    """Whether a diffusion model's canvas reads its prompt from a sliding-window cache, whose first key may not be the
    sequence's first position."""
    return (
        one.window is not None and one.queries != one.keys and hasattr(getattr(model, "config", None), "canvas_length")
    )


def _of_image(model: nn.Module, one: Seen) -> bool:
    return stream_of(model, one.module, False) == "vision"


def _padded_to_window(one: Seen, given: torch.Size | None) -> bool:
    """Whether an attention module pads its positions to a whole window: it gets (B, T, D) and has more than T queries.

    False where it gets channels first (B, D, T) or positions first (T, B, D): these sizes do not show padding.
    """
    if given is None or one.queries != one.keys or given[2] == one.queries:
        return False
    if tuple(given[:2]) == (one.queries, one.rows):
        return False
    return 1 < given[1] < one.queries
