"""Hears every attention call of a model that somebody else runs, and changes none.

The model's own functions compute its attention: outputs and gradients are those of the model alone. What passes by is
kept until the pass has ended, and measured then.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from threading import Lock, RLock, get_ident
from typing import Any

from torch import Tensor, nn

from sinkscope.capture.alone import measuring
from sinkscope.capture.batches import Requests, continuous_batches
from sinkscope.capture.calls import AttentionCall
from sinkscope.capture.given import given_digests
from sinkscope.capture.heard import (
    Around,
    Heard,
    Kept,
    Onward,
    Pass,
    Share,
    cache_given,
    cache_returned,
    detached,
    pass_of,
    stream_kept,
)  # fmt: skip
from sinkscope.capture.hooks import Ears
from sinkscope.capture.inline.calls import (
    InlineCall,
    SdpaCall,
    mask_of,
    same_values,
    sequences_first,
    turned_fold,
)  # fmt: skip
from sinkscope.capture.inline.mode import InlineWatch, is_function
from sinkscope.capture.interface import call_of
from sinkscope.capture.kernels.map_walk import map_rows
from sinkscope.capture.keywords import unknown_keywords
from sinkscope.capture.listeners import overheard
from sinkscope.capture.output_projection import output_projection
from sinkscope.capture.padded import Padding
from sinkscope.capture.plan import INLINE, INTERFACE
from sinkscope.capture.precision import undisturbing
from sinkscope.capture.private_doors import in_backward
from sinkscope.capture.registries import READ, is_own, uncompiled
from sinkscope.capture.sites import call_name, head_counts, place_of, stream_of
from sinkscope.capture.views import begun_cuts, cut_maps
from sinkscope.errors import SinkscopeError, first_line

FLEX, PAGED = "flex_attention", "paged|eager"


@dataclass(eq=False)
class _Frame:
    """A module whose forward runs. `first`: the number of the next attention call when it began."""

    path: str
    given: Any
    first: int
    joint: bool = False
    kept: Kept | None = None


class Listener:
    """Hears the passes of `model` while `listening()`.

    `begins(pass)` is asked before each pass whether it is wanted; `ended(pass)` gets each wanted one, also one that
    raised an error (`failed`); `unheard(why)` is told of passes that cannot be heard. `keywords` gets the unknown
    keywords. One thread is heard at a time: the one that listens, and that of a continuous batch while it runs a pass.
    `lock` is held for such a pass. `missed` gets the caches of the passes that were not heard since another thread's
    was; None for a pass without a cache.
    """

    def __init__(
        self, model: nn.Module, begins: Callable[[Pass], bool], ended: Callable[[Pass, bool], None],
        unheard: Callable[[str], None],
    ) -> None:  # fmt: skip
        self.model, self._begins, self._ended, self._tell = model, begins, ended, unheard
        self.keywords: dict[str, str] = {}
        self.missed: list[weakref.ref[Any] | None] = []
        self._frames: list[_Frame] = []
        self._now: Pass | None = None
        self._inline = InlineWatch(self._found)
        self._projections: dict[tuple[str, int], str | None] = {}
        self._oblong = set[str]()
        self._error: BaseException | None = None
        self.lock, self._gate = RLock(), Lock()
        self._home = self._thread = 0
        self._ears: dict[int, Ears] = {}
        self._unheard = Counter[int]()
        self._stack: ExitStack | None = None
        self._rests = False
        self._requests = Requests()
        self._shares: list[Share] | None = None

    def rest(self) -> None:
        """Takes the hooks off the modules before `listening` ends: no later pass is heard, and none costs anything."""
        self._rests = True
        for ears in self._ears.values():
            ears.off()

    def resume(self) -> None:
        """Hears passes again after a rest."""
        if self._rests:
            self._rests = False
            self._ears.clear()
            self._hook()

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Hears every pass in this thread until the block ends. No hook is left behind, also after an exception."""
        self._names = {module: name for name, module in self.model.named_modules()}
        with ExitStack() as stack:
            stack.callback(self._end_all)
            stack.enter_context(uncompiled(self.model))
            stack.enter_context(overheard(self._wrapped))
            stack.enter_context(continuous_batches(self._batch))
            self._stack, self._home = stack, get_ident()
            self._thread = self._home
            self._hook()
            yield

    def _hook(self) -> None:
        """Puts hooks on for this thread, once."""
        if get_ident() not in self._ears and self._stack is not None and not self._rests:
            ears = self._ears[get_ident()] = Ears(self.model, self._entering, self._leaving)
            self._stack.enter_context(ears.on())

    def _end_all(self) -> None:
        self._stack, self._requests, self._shares, self._rests = None, Requests(), None, False
        self._ears.clear()
        self._unheard.clear()
        self._reset()

    @contextmanager
    def _batch(self, batches: Any, model: nn.Module) -> Iterator[None]:
        """Hears one pass of a continuous batch, in whatever thread it runs, until the block ends."""
        with ExitStack() as stack:
            stack.enter_context(self.lock)
            if self._turn_to(batches, model):
                stack.callback(self._turn_back)
                if self._thread != self._home:
                    stack.enter_context(overheard(self._wrapped))
                self._hook()
            else:
                stack.close()
            yield

    def _turn_to(self, batches: Any, model: nn.Module) -> bool:
        """Hears this thread from here on. Returns False, and does not, where a pass is under way in the other one."""
        if self._stack is None or self._rests or model not in self._names:
            return False
        try:
            shares = self._requests.of(batches)
        except SinkscopeError as error:
            self._tell(str(error))
            return False
        with self._gate:
            if self._frames:
                self.missed.extend(weakref.ref(share.pages) for share in shares)
                return False
            self._thread, self._shares = get_ident(), shares
        return True

    def _turn_back(self) -> None:
        if self._frames:
            self._reset()
        self._thread, self._shares = self._home, None

    def _reset(self) -> None:
        """Ends a pass that an interruption (Ctrl-C) cut off: torch calls no hook then."""
        now, self._now = self._now, None
        self._frames.clear()
        if now is not None:
            self._leave_torch(now)

    def _leave_torch(self, now: Pass) -> None:
        if now.idle is None:
            self._inline.__exit__(None, None, None)
        self._clear_inline()

    def _clear_inline(self) -> None:
        self._inline.modules[:] = [""]
        self._inline.tracked.clear()
        self._inline.unmatched.clear()
        self._inline.split.clear()

    # modules

    def _entering(self, name: str, module: nn.Module) -> Callable[..., None]:
        function = is_function(name, module)

        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            with self._gate:
                if self._elsewhere(1, name):
                    if get_ident() == self._home and self._unheard[self._home] == 1 and not measuring():
                        self._miss(kwargs)
                    return
                if self._frames and name == self._frames[0].path == "":
                    self._reset()
                frame, outermost = _Frame(name, None, 0), not self._frames
                self._frames.append(frame)
            if outermost:
                self._begin(name, args, kwargs)
            if self._now is None:
                return
            if self._now.idle is None:
                self._now.entered.add(name)
            if not function:
                self._inline.modules.append(name)
            frame.given = kwargs.get("hidden_states", args[0] if args else None)
            frame.joint = isinstance(kwargs.get("encoder_hidden_states"), Tensor)
            frame.first = len(self._now.heard)
            if args and isinstance(args[0], Tensor):
                self._keep_read(name, args[0])

        return enter

    def _leaving(self, name: str, module: nn.Module) -> Callable[..., None]:
        function = is_function(name, module)

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            if self._elsewhere(-1, name):
                return
            if not self._frames or self._frames[-1].path != name:
                return
            frame = self._frames.pop()
            now = self._now
            if now is not None:
                if not function:
                    self._inline.modules.pop()
                if len(now.heard) > frame.first:
                    hidden = output[0] if isinstance(output, tuple) and output else output
                    now.around.append(
                        Around(name, frame.first, len(now.heard), frame.kept, stream_kept(hidden), frame.joint)
                    )
            if not self._frames:
                self._end(output)

        return leave

    def _elsewhere(self, change: int, name: str) -> bool:
        """Whether another thread is heard than this one, or was when the outermost module of this one was called.

        `change`: 1 where the module at `name` is entered, -1 where it is left.
        """
        thread = get_ident()
        if thread == self._thread and not self._unheard:
            return False
        open_ones = 0 if name == "" and change > 0 else self._unheard.pop(thread, 0)
        if thread == self._thread and not open_ones:
            return False
        if open_ones + change > 0:
            self._unheard[thread] = open_ones + change
        return True

    def _miss(self, kwargs: dict[str, Any]) -> None:
        """Notes a pass of the listening thread that begins while the other one is heard."""
        cache = cache_given(kwargs)
        self.missed.append(None if cache is None else weakref.ref(cache))

    # passes

    def _begin(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if measuring() or in_backward():  # activation checkpointing computes a block again
            return
        now = pass_of(name, args, kwargs)
        now.shares, self._shares = self._shares, None
        if not self._begins(now):
            return
        seq2seq = bool(getattr(getattr(self.model, "config", None), "is_encoder_decoder", False))
        now.given = given_digests(args, kwargs, now.batch, now.ids is not None, seq2seq)
        try:
            later = now.cache is not None and now.before
            now.padding = Padding() if later else Padding.of(now.masks_of_tokens, now.ids is not None)
        except ValueError as error:
            now.refused = str(error)
        self._now, self._error = now, sys.exc_info()[1]
        self._ears[self._thread].without(now.idle or frozenset())
        self._clear_inline()
        self._oblong.clear()
        if now.idle is None:
            self._inline.__enter__()

    def _end(self, output: Any) -> None:
        now, self._now = self._now, None
        if now is None:
            return
        now.unmatched = {module for module, count in self._inline.unmatched.items() if count > 0}
        # Where a module names no head count, square maps beside others may be pieces of one map.
        now.split = self._inline.split | self._oblong & {heard.module for heard in now.heard if heard.call is None}
        self._leave_torch(now)
        if now.cache is None:
            now.cache = cache_returned(output)
        unknown = next((heard.name for heard in now.heard if heard.folded), None)
        if unknown is not None and now.refused is None:
            now.refused = turned_fold(unknown, False)
        self._ended(now, sys.exc_info()[1] is not self._error)
        self._error = None

    # attention calls

    def _wrapped(self, name: str | None, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function that transformers' interface gives a model, with an ear beside it.

        A function that the user registered may compute anything: its torch calls are heard instead.
        """
        heard_here = self._now is not None and get_ident() == self._thread
        if not heard_here or not is_own(function) or function.__module__.startswith("sinkscope."):
            return function
        if name not in (*READ, FLEX, PAGED):
            if self._now is not None and self._now.shares is not None:
                self._refuse(
                    f"a continuous batch attends through {name!r}, which is not read: only 'sdpa' and 'paged|eager' of "
                    "transformers 5.24 or newer are"
                )
            self._refuse(
                f"the model attends through {name!r}, whose masks cannot be read: load it with "
                "attn_implementation='sdpa' (or call model.set_attn_implementation('sdpa'))"
            )
            return function

        def heard(
            module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None,
            *args: Any, **keywords: Any,
        ) -> Any:  # fmt: skip
            self._inline.pauses += 1
            try:
                result = function(module, query, key, value, attention_mask, *args, **keywords)
            finally:
                self._inline.pauses -= 1
            self._aside(self._interface, module, (query, key, value), attention_mask, keywords, result[0])
            return result

        return heard

    def _interface(
        self, module: nn.Module, tensors: tuple[Tensor, Tensor, Tensor], mask: Any, keywords: dict[str, Any],
        output: Tensor,
    ) -> None:  # fmt: skip
        path = self._names.get(module)
        if path is None:
            self._refuse(f"an attention module outside the model was called: {type(module).__name__}")
            return
        rest = dict(keywords)
        causal = rest.pop("is_causal", None)
        for name in unknown_keywords(rest):
            self.keywords.setdefault(name, path)
        query, key, value = tensors
        if mask is not None and not isinstance(mask, Tensor):  # flex attention's BlockMask
            mask = mask_of(mask.mask_mod, (query.shape[0], query.shape[1]), query.shape[2], key.shape[2], query.device)
        call = detached(call_of(module, query, key, value, mask, causal, rest))
        heard = self._keep(path, INTERFACE, call, output.detach(), dropped=bool(keywords.get("dropout")))
        if self._now is not None and self._now.shares is not None:
            ends = keywords.get("cu_seq_lens_k")
            heard.ends = ends.tolist() if isinstance(ends, Tensor) else None

    def _found(self, found: InlineCall | SdpaCall) -> None:
        self._aside(self._sdpa if isinstance(found, SdpaCall) else self._map, found)

    def _sdpa(self, found: SdpaCall) -> None:
        assert self._now is not None
        heads = self._heads(found.module, found.call.query, self._now.batch)
        call = detached(found.unfolded(heads))
        output = found.unfolded_output(heads or call.query.shape[1]).detach()
        heard = self._keep(found.module, INLINE, call, output, found.dropped, found.feeds_projection)
        heard.folded = _may_be_turned(found, heard)

    def _heads(self, path: str, tensor: Tensor, rows: int | None) -> int | None:
        """The heads of a tensor whose batch and heads may be one axis."""
        if tensor.dim() == 4:
            return int(tensor.shape[1])
        counts = [count for count in head_counts(self.model, path) if tensor.shape[0] % count == 0]
        if len(counts) == 1:
            return counts[0]
        return tensor.shape[0] // rows if rows and tensor.shape[0] % rows == 0 else None

    def _map(self, found: InlineCall) -> None:
        """Sums a map that the model formed. A softmax is not taken for attention where its head count is none that the
        model names, or, where it names none, where queries and keys differ in number."""
        assert self._now is not None
        heads = self._heads(found.module, found.seen.probabilities, self._now.batch)
        if heads is None:
            return
        seen = detached(found.unfolded(heads))
        queries, keys = seen.probabilities.shape[-2:]
        counts = head_counts(self.model, found.module)
        if counts and heads not in counts:
            return
        name = call_name(found.module, self._now.counts[found.module])
        if self._now.cache is None and (queries < 2 or (not counts and queries != keys)):
            if found.module not in self._oblong and _goes_on(seen.probabilities):
                self._now.over_cache = name, queries
            if queries > 1:
                self._oblong.add(found.module)
            return
        place = self._place(found.module, queries != keys)
        among = {place} | {self._place(call.module, call.queries != call.keys) for call in self._now.heard}
        onward = None if self._now.onward is None else self._now.onward(name, keys)
        if onward is None:
            if not counts and queries != keys:
                return
            cuts = self._now.padding.cuts(found.module, place, among)
            if cuts is None and self._now.cache is not None and self._place(found.module, False) != "cross":
                cuts = begun_cuts(seen)
            onward = Onward(cuts, [0] * (1 if cuts is None else len(cuts)))
        maps = zip(cut_maps(found.module, seen, onward.cuts), onward.befores, strict=True)
        parts = [(rows, cut, map_rows(part, before)) for (rows, cut, part), before in maps]
        heard = self._keep(found.module, INLINE, None, seen.output, found.dropped, found.feeds_projection, seen=seen)
        heard.parts, heard.among, heard.folded = parts, frozenset(among), _may_be_turned(found, heard)

    def _place(self, path: str, cross: bool) -> str:
        return place_of(stream_of(self.model, path, cross), path)

    def _keep(
        self, module: str, path: str, call: AttentionCall | None, output: Tensor | None, dropped: bool = False,
        feeds: bool = False, seen: Any = None,
    ) -> Heard:  # fmt: skip
        now = self._now
        assert now is not None
        for frame in self._frames:
            if frame.kept is None and isinstance(frame.given, Tensor):
                frame.kept = stream_kept(frame.given)
            frame.given = None
        record = call if call is not None else seen
        probabilities = None if call is not None else seen.probabilities
        shape = record.query.shape if probabilities is None else probabilities.shape
        keys = record.key.shape[2] if probabilities is None else shape[3]
        width = None if record.value is None else shape[1] * record.value.shape[-1]
        keep = Kept.of if call is not None else Kept.safe  # the output shows what was written into a call's tensors
        held = [None if tensor is None else keep(tensor) for tensor in (record.query, record.key, record.value, output)]
        query, key, value, output = (None if entry is None else entry.tensor for entry in held)
        kept = tuple(entry for entry in held if entry is not None)
        heard = Heard(
            module, now.counts[module], path, call, None, query, key, value, output,
            shape[0], shape[1], shape[2], keys, dropped, self._projection(module, width),
            output if feeds else None, kept,
        )  # fmt: skip
        now.heard.append(heard)
        now.counts[module] += 1
        return heard

    def _projection(self, module: str, width: int | None) -> str | None:
        if width is None:
            return None
        if (module, width) not in self._projections:
            self._projections[module, width] = output_projection(self.model, module, width)
        return self._projections[module, width]

    def _keep_read(self, name: str, read: Tensor) -> None:
        """Keeps what an output projection reads of the last call that it belongs to."""
        assert self._now is not None
        if not self._now.heard:
            return
        heard = self._now.heard[-1]
        if heard.output is None or read.numel() != heard.output.numel():
            return
        if heard.folded:
            self._aside(self._unfold, heard, heard.output, read)
        if heard.projection == name:
            self._aside(self._keep_projected, heard, heard.output, read)

    def _unfold(self, heard: Heard, output: Tensor, read: Tensor) -> None:
        first = sequences_first(output, read)
        if first is False:
            raise SinkscopeError(turned_fold(heard.name, True))
        heard.folded = first is None

    def _keep_projected(self, heard: Heard, output: Tensor, read: Tensor) -> None:
        kept = Kept.of(read.reshape(output.shape))
        # The interface fixes the layout (B, T, H * dv). A model's own code may use another, so values are compared.
        if heard.path != INLINE or same_values(kept.tensor, output):
            heard.projected = kept.tensor
            heard.versions = (*heard.versions, kept)

    def _refuse(self, why: str) -> None:
        if self._now is not None and self._now.refused is None:
            self._now.refused = why

    def _aside(self, work: Callable[..., None], *given: Any) -> None:
        """Our own work in the middle of a pass: without gradients, in full precision, unheard. What fails in it is the
        pass's `refused`, never the model's error."""
        self._inline.pauses += 1
        try:
            with undisturbing():
                work(*given)
        except (SinkscopeError, ValueError, RuntimeError, TypeError, IndexError, AttributeError) as error:
            self._refuse(first_line(error))
        finally:
            self._inline.pauses -= 1


def _may_be_turned(found: InlineCall | SdpaCall, heard: Heard) -> bool:
    """Whether sequences and heads came as one axis, in which either may be first."""
    return found.folded and not found.feeds_projection and heard.rows > 1 and heard.heads > 1


def _goes_on(probabilities: Tensor) -> bool:
    """Whether the queries of a map are the last of more keys, in causal order."""
    past = probabilities.shape[-1] - probabilities.shape[-2]
    if past <= 0:
        return False
    return not bool(probabilities.triu(past + 1).any()) and bool((probabilities.diagonal(past, -2, -1) > 0).all())
