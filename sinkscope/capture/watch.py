"""The context manager that watches a model's forward passes and produces a LayerView for each attention call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from sinkscope.capture.axes import by_sequence_and_position, channels_last, hidden_given
from sinkscope.capture.calls import AttentionCall, MaskReadings
from sinkscope.capture.hooks import first_returned, hooked
from sinkscope.capture.inline.calls import InlineCall, SdpaCall, turned_fold
from sinkscope.capture.inline.mode import InlineWatch
from sinkscope.capture.interface import Passed, shadowed
from sinkscope.capture.kernels.attend import read
from sinkscope.capture.kernels.map_walk import AttentionMap
from sinkscope.capture.learned_keys import Record, not_read
from sinkscope.capture.masks.lazy import lazy_masks
from sinkscope.capture.output_projection import projection_bias
from sinkscope.capture.parts import of_part
from sinkscope.capture.plan import INLINE, Plan
from sinkscope.capture.read_inside import ReadInside, reading_path
from sinkscope.capture.sites import Site
from sinkscope.capture.uncalled import Uncalled, is_stream
from sinkscope.capture.view import LayerView
from sinkscope.capture.views import Cut, Pending, Readers, Span, Stream, Views
from sinkscope.errors import SinkscopeError


class NotTogether(SinkscopeError):
    """Raised where attention calls hold fewer sequences than the batch: one at a time may be read."""


@dataclass
class Capture:
    """Watches forward passes of `model` and calls `on_layer` with one LayerView for each site and sequence group.

    `on_call` receives each call before it is measured; it must not keep the call's tensors. `readers` read each call,
    or each sequence's part of a padded one. `head_mean`, `layer_heads`: see LayerView. `writing`: keep `raw_written`.
    Use as `with capture.watching(): model(...)`. On exit, also after an exception, hooks are removed and the attention
    registry is restored. A layer's tensors are released when its block ends.
    """

    model: nn.Module
    plan: Plan
    on_layer: Callable[[LayerView, int], None]
    epsilon: float
    on_call: Callable[[Site, AttentionCall | AttentionMap], None] | None = None
    head_mean: Callable[[Site, Tensor], Tensor] | None = None
    readers: Readers = field(default_factory=dict)
    layer_heads: Callable[[Site], int] | None = None
    writing: bool = False

    def __post_init__(self) -> None:
        self._views = Views(
            self.model, self.epsilon, self.plan.failures, self.head_mean, self.readers, self.layer_heads
        )

    @contextmanager
    def watching(
        self, spans: list[Span] | None = None, length: int = 0, sequences: int | None = None
    ) -> Iterator[None]:
        """Watches until the block ends.

        `spans` gives the valid positions of each sequence where the batch is padded; `length` is the padded length;
        `sequences`, where given, how many each call has to have. Raises SinkscopeError where the model makes other
        attention calls than in the dry run.
        """
        self._sequences, self._length = sequences, length or None
        self.cuts = None
        if spans is not None:
            self.cuts = [Cut(row, (span, length), (span, length)) for row, span in enumerate(spans)]
        self._reset()
        self._watch = InlineWatch(self._inline, self.model)
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            stack.enter_context(shadowed(self.model, self._dispatched, Passed(self.plan.keywords, self.plan.declared)))
            stack.enter_context(lazy_masks())
            for hooks in self._hooks():
                stack.enter_context(hooks)
            stack.callback(self._reset)
            stack.enter_context(self._watch.watched(self.model) if self.plan.inline else nullcontext())
            yield
            self._watch.flush()
            self._finish([pending for waiting in self._waiting.values() for pending in waiting])
            self._check_calls()

    def _reset(self) -> None:
        self._calls: Counter[str] = Counter()
        self._waiting: dict[str | None, list[Pending]] = {}
        self._inputs: dict[str, Tensor] = {}
        self._last: dict[str, bool] = {}
        self._inside: dict[str, ReadInside] = {}
        self._reading: dict[str, str] = {}
        self._masks = MaskReadings()
        self._latest: dict[str, Pending] = {}

    def _check_calls(self) -> None:
        for site in self.plan.sites:
            if self._calls[site.module] <= site.call:
                raise SinkscopeError(f"attention module {site.name!r} was called in the dry run, but not on this input")

    def _hooks(self) -> Iterator[AbstractContextManager[None]]:
        self._names = {module: name for name, module in self.model.named_modules()}
        self._by_call = {(site.module, site.call): site for site in self.plan.sites}
        blocks = {site.block for site in self.plan.sites if site.block is not None}
        self._uncalled = Uncalled(self.model, blocks, self._begin_uncalled, self._end_uncalled)
        yield from self._uncalled.hooks()
        attentions = {site.module for site in self.plan.sites}
        inline = {site.module for site in self.plan.sites if site.path == INLINE}
        self._reading = {path: reading_path(self.model, path) for path in inline}
        for path in sorted(blocks | attentions | {*self._reading.values()}):
            module = self.model.get_submodule(path)
            yield hooked(module, pre=self._keep_input(path), with_kwargs=True)
        for path in sorted(blocks):
            yield hooked(self.model.get_submodule(path), post=self._end_block(path))
        yield from self._readers(inline)
        for site in self.plan.sites:
            if site.projection is not None and site.call == 0:
                projection = self.model.get_submodule(site.projection)
                if self.writing and site.value_dim is not None:
                    bias = projection_bias(projection, site.heads * site.value_dim)
                    attention = self.model.get_submodule(site.module)
                    # torch's own attention calls no module to project, and returns what the projection gives.
                    writer = attention if isinstance(attention, nn.MultiheadAttention) else projection
                    yield hooked(writer, post=self._keep_written(site.module, bias))
                yield hooked(projection, pre=self._keep_read(site.module))

    def _keep_input(self, path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            hidden = hidden_given(args, kwargs)
            if path in self._inside:
                self._inside[path] = ReadInside()
            if isinstance(hidden, Tensor) and hidden.dim() == 3:
                self._inputs[path] = hidden

        return hook

    def _readers(self, paths: set[str]) -> Iterator[AbstractContextManager[None]]:
        """Hooks on the layers inside modules that compute attention themselves: they show which axis of the hidden
        states holds channels."""

        def telling(path: str, of_layer: str, last: bool) -> Callable[..., None]:
            def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
                if not args:
                    return
                given = self._inputs.get(path)
                if (last and self._inside[path].add(given, of_layer, args[0])) or args[0] is given:
                    self._last[path] = last

            return hook

        for path in sorted({*paths, *self._reading.values()}):
            self._inside[path] = ReadInside()
            for name, layer in self.model.get_submodule(path).named_modules():
                if (last := channels_last(layer)) is not None:
                    yield hooked(layer, pre=telling(path, name, last))

    def _keep_read(self, path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            if path in self._latest:
                self._latest[path].keep_read(args)

        return self._while_paused(hook)

    def _keep_written(self, path: str, bias: Tensor) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if path in self._latest:
                turned = isinstance(module, nn.MultiheadAttention) and not module.batch_first
                self._latest[path].keep_written(output, bias, turned)

        return self._while_paused(hook)

    def _while_paused(self, hook: Callable[..., None]) -> Callable[..., None]:
        def paused(*args: Any) -> None:
            with self._watch.paused():
                hook(*args)

        return paused

    def _end_block(self, path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            hidden = first_returned(output)
            plain = isinstance(hidden, Tensor) and hidden.dim() == 3  # hyper-connections have several residual streams
            self._finish(self._waiting.pop(path, []), hidden if plain else None)
            self._inputs.pop(path, None)

        return self._while_paused(hook)

    def _begin_uncalled(self, path: str, given: Any) -> None:
        if is_stream(given):
            self._inputs[path] = given

    def _end_uncalled(self, path: str, leaving: Any) -> None:
        entered = self._inputs.get(path)
        same = entered is not None and is_stream(leaving) and leaving.shape == entered.shape
        with self._watch.paused():
            self._finish(self._waiting.pop(path, []), leaving if same else None)
        self._inputs.pop(path, None)

    def _next_site(self, path: str, rows: int, lengths: tuple[int, int]) -> Site:
        """The site of the next call of a module. Raises SinkscopeError where it is no whole map of each sequence,
        NotTogether where it holds fewer sequences than the batch."""
        site, sequences = self._by_call.get((path, self._calls[path])), self._sequences
        if site is None and lengths[0] == 1:
            raise SinkscopeError(
                f"attention module {path!r} attends from one position in some of its calls, which is not read: watch "
                "the model, which leaves out such calls alone"
            )
        if site is None or (sequences is not None and rows < sequences):
            raise NotTogether(
                f"attention module {path!r} was called more often than in the dry run: if for one sequence after "
                "another, --batch-size 1 reads them; if for pieces of longer sequences, they are not read"
            )
        given = None if path not in self._inputs else self._inputs[path].shape
        if rows != (sequences or rows) or of_part((rows, *lengths), given, self._length):
            raise SinkscopeError(
                f"attention module {site.name!r} attends in parts of sequences as long as these, such as windows, "
                "which are not read: give shorter ones, or watch the model, which leaves out such layers alone"
            )
        if path in self.plan.learned and not site.cross and lengths[0] != lengths[1]:
            raise SinkscopeError(not_read(path, "their number changes with that of the tokens"))
        self._calls[path] += 1
        return site

    def _dispatched(self, module: nn.Module, call: AttentionCall) -> Tensor:
        if not self.plan.of_positions(self._names.get(module), call):
            with self._watch.paused():
                return read(self._masks.read(call), self.plan.failures)[0]
        call = self._of_tokens(self._names.get(module, ""), call)
        site = self._next_site(self._names.get(module, ""), call.query.shape[0], call.lengths)
        with self._watch.paused():
            pending = self._of_call(site, call)
        self._keep(pending)
        assert pending.output is not None
        return pending.output

    def _inline(self, found: InlineCall | SdpaCall) -> None:
        if (found.module, 0) not in self._by_call:
            return  # the dry run found that this module is no attention
        heads = self._by_call[found.module, 0].heads
        if isinstance(found, SdpaCall):
            call = self._of_tokens(found.module, found.unfolded(heads))
            site = self._next_site(found.module, len(call.query), call.lengths)
            pending = self._of_call(site, call)
            pending.output = found.unfolded_output(heads)
        else:
            seen = self._of_tokens(found.module, found.unfolded(heads))
            site = self._next_site(found.module, len(seen.probabilities), seen.lengths)
            pending = self._of_map(site, seen)
        pending.projected = pending.output if found.feeds_projection else None
        pending.folded = found.folded and not found.feeds_projection and pending.rows[0] > 1 and site.heads > 1
        self._keep(pending)

    def _of_tokens(self, path: str, record: Record) -> Record:
        with self._watch.paused():
            return self.plan.of_tokens(path, record)

    def _of_map(self, site: Site, seen: AttentionMap) -> Pending:
        if self.on_call is not None:
            self.on_call(site, seen)
        parts = self._views.of_map(site.name, seen, self.cuts)
        rows = (seen.probabilities.shape[0], seen.probabilities.shape[-2])
        return Pending(site, parts, rows, seen.query, seen.key, seen.value, seen.output, of_tokens=seen.of_tokens)

    def _of_call(self, site: Site, call: AttentionCall) -> Pending:
        if self.on_call is not None:
            self.on_call(site, call)
        outputs, parts = self._views.of_call(site.name, call, self._masks, self.cuts)
        rows = outputs.whole.shape[0], outputs.whole.shape[1]
        return Pending(site, parts, rows, call.query, call.key, call.value, outputs.whole, of_tokens=outputs.of_tokens)

    def _keep(self, pending: Pending) -> None:
        waiting = self._waiting.get(pending.site.block, [])
        self._uncalled.attends(pending.site.block, any(one.site.module == pending.site.module for one in waiting))
        pending.read = self._read_of(pending.site.module)  # a looped module is given something else the next time
        self._waiting.setdefault(pending.site.block, []).append(pending)
        self._latest[pending.site.module] = pending

    def _finish(self, ended: list[Pending], residual_out: Tensor | None = None) -> None:
        for pending in ended:
            site = pending.site
            if pending.folded:
                raise SinkscopeError(turned_fold(site.name, False))
            stream = self._stream(pending, residual_out)
            for part in pending.parts:
                self.on_layer(self._views.view(pending, part, stream), part[0].start)
        for pending in ended:  # releases the layer's tensors
            self._latest.pop(pending.site.module, None)
            self._inputs.pop(pending.site.module, None)

    def _read_of(self, path: str) -> Tensor | None:
        """What the projections of an attention module read."""
        path = self._reading.get(path, path)
        given, inside = self._inputs.get(path), self._inside.get(path)
        return given if inside is None else inside.tensor(given)

    def _stream(self, pending: Pending, leaving: Tensor | None) -> Stream:
        site = pending.site
        last = self._last.get(site.module, True if pending.reads_channels_last else None)
        given = (self._inputs.get(site.block or ""), pending.read, leaving)
        return Stream(*(by_sequence_and_position(tensor, pending.rows, last) for tensor in given))
