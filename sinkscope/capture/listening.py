"""Hears every attention call of a model that somebody else runs, and changes none.

The model's own functions compute its attention: outputs and gradients are those of the model alone. What passes by is
kept until the pass has ended, and measured then.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sinkscope.capture.alone import measuring
from sinkscope.capture.attention_names import uncompiled
from sinkscope.capture.calls import AttentionCall
from sinkscope.capture.cuts import Cut
from sinkscope.capture.ears import Ears
from sinkscope.capture.heard import Around, Heard, Kept, Pass, detached, padding
from sinkscope.capture.inline.calls import InlineCall, SdpaCall, mask_of
from sinkscope.capture.inline.mode import InlineWatch, is_function
from sinkscope.capture.interface import call_of
from sinkscope.capture.keywords import unknown_keywords
from sinkscope.capture.output_projection import output_projection
from sinkscope.capture.overheard import overheard
from sinkscope.capture.plan import INLINE, INTERFACE
from sinkscope.capture.registries import READ, is_own
from sinkscope.capture.sites import head_counts
from sinkscope.capture.views import Views
from sinkscope.errors import SinkscopeError, first_line

FLEX = "flex_attention"
CACHES = ("cache", "past_key_values", "past_key_value", "cache_params")
"""What models call a cache that they are given or return: the first from transformers 5.24 on."""
PADDING = ("attention_mask",)
HIDDEN = ("src_key_padding_mask", "key_padding_mask")
"""torch's own padding masks: True = padding."""


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
    raised an error (`failed`). `views` sums the maps that a model forms itself. `keywords` gets the unknown keywords.
    """

    def __init__(
        self, model: nn.Module, begins: Callable[[Pass], bool], ended: Callable[[Pass, bool], None], views: Views,
    ) -> None:  # fmt: skip
        self.model, self._begins, self._ended, self._views = model, begins, ended, views
        self.keywords: dict[str, str] = {}
        self._frames: list[_Frame] = []
        self._now: Pass | None = None
        self._inline = InlineWatch(self._found)
        self._projections: dict[tuple[str, int], str | None] = {}
        self._error: BaseException | None = None
        self._ears = Ears(model, self._entering, self._leaving)

    def rest(self) -> None:
        """Takes the hooks off the modules before `listening` ends: no later pass is heard, and none costs anything."""
        self._ears.off()

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Hears every pass in this thread until the block ends. No hook is left behind, also after an exception."""
        self._names = {module: name for name, module in self.model.named_modules()}
        with ExitStack() as stack:
            stack.callback(self._reset)
            stack.enter_context(uncompiled(self.model))
            stack.enter_context(overheard(self._wrapped))
            stack.enter_context(self._ears.on())
            yield

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
            if self._frames and name == self._frames[0].path == "":
                self._reset()
            if not self._frames:
                self._begin(name, args, kwargs)
            if self._now is None:
                self._frames.append(_Frame(name, None, 0))
                return
            if self._now.idle is None:
                self._now.entered.add(name)
            if not function:
                self._inline.modules.append(name)
            given = kwargs.get("hidden_states", args[0] if args else None)
            joint = isinstance(kwargs.get("encoder_hidden_states"), Tensor)
            self._frames.append(_Frame(name, given, len(self._now.heard), joint))
            if args and isinstance(args[0], Tensor):
                self._keep_read(name, args[0])

        return enter

    def _leaving(self, name: str, module: nn.Module) -> Callable[..., None]:
        function = is_function(name, module)

        def leave(module: nn.Module, args: Any, output: Any) -> None:
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
                        Around(name, frame.first, len(now.heard), frame.kept, _stream(hidden), frame.joint)
                    )
            if not self._frames:
                self._end(output)

        return leave

    # passes

    def _begin(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if measuring():
            return
        now = _facts(name, args, kwargs)
        if not self._begins(now):
            return
        try:
            now.spans = None if now.cache is not None and now.before else _spans(now)
        except ValueError as error:
            now.refused = str(error)
        self._now, self._error = now, sys.exc_info()[1]
        self._ears.without(now.idle or frozenset())
        self._clear_inline()
        if now.idle is None:
            self._inline.__enter__()

    def _end(self, output: Any) -> None:
        now, self._now = self._now, None
        if now is None:
            return
        now.unmatched = {module for module, count in self._inline.unmatched.items() if count > 0}
        now.split = set(self._inline.split)
        self._leave_torch(now)
        if now.cache is None:
            now.cache = _returned(output)
        self._ended(now, sys.exc_info()[1] is not self._error)
        self._error = None

    # attention calls

    def _wrapped(self, name: str | None, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function that transformers' interface gives a model, with an ear beside it.

        A function that the user registered may compute anything: its torch calls are heard instead.
        """
        if self._now is None or not is_own(function) or function.__module__.startswith("sinkscope."):
            return function
        if name not in (*READ, FLEX):
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
        for name in unknown_keywords(keywords):
            self.keywords.setdefault(name, path)
        given = dict(keywords)
        query, key, value = tensors
        if mask is not None and not isinstance(mask, Tensor):  # flex attention's BlockMask
            mask = mask_of(mask.mask_mod, (query.shape[0], query.shape[1]), query.shape[2], key.shape[2], query.device)
        call = detached(call_of(module, query, key, value, mask, given.pop("is_causal", None), given))
        self._keep(path, INTERFACE, call, output.detach(), dropped=bool(keywords.get("dropout")))

    def _found(self, found: InlineCall | SdpaCall) -> None:
        self._aside(self._sdpa if isinstance(found, SdpaCall) else self._map, found)

    def _sdpa(self, found: SdpaCall) -> None:
        assert self._now is not None
        heads = self._heads(found.module, found.call.query, self._now.batch)
        call = detached(found.unfolded(heads))
        output = found.unfolded_output(heads or call.query.shape[1]).detach()
        self._keep(found.module, INLINE, call, output, found.dropped, found.feeds_projection)

    def _heads(self, path: str, tensor: Tensor, rows: int | None) -> int | None:
        """The heads of a tensor whose batch and heads may be one axis."""
        if tensor.dim() == 4:
            return int(tensor.shape[1])
        known = [count for count in head_counts(self.model, path) if tensor.shape[0] % count == 0]
        if len(known) == 1:
            return known[0]
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
        known = head_counts(self.model, found.module)
        if queries < 2 or (heads not in known if known else queries != keys):
            return
        spans = self._now.spans
        cuts = None if spans is None else [Cut(row, span, queries) for row, span in enumerate(spans)]
        parts = self._views.of_map(found.module, seen, cuts)
        heard = self._keep(found.module, INLINE, None, seen.output, found.dropped, found.feeds_projection, seen=seen)
        heard.parts = parts

    def _keep(
        self, module: str, path: str, call: AttentionCall | None, output: Tensor | None, dropped: bool = False,
        feeds: bool = False, seen: Any = None,
    ) -> Heard:  # fmt: skip
        now = self._now
        assert now is not None
        for frame in self._frames:
            if frame.kept is None and isinstance(frame.given, Tensor):
                frame.kept = _stream(frame.given)
            frame.given = None
        record = call if call is not None else seen
        probabilities = None if call is not None else seen.probabilities
        shape = record.query.shape if probabilities is None else probabilities.shape
        keys = record.key.shape[2] if probabilities is None else shape[3]
        width = None if record.value is None else shape[1] * record.value.shape[-1]
        tensors = (record.query, record.key, record.value, output)
        kept = tuple(Kept.of(each) for each in tensors if each is not None)
        heard = Heard(
            module, now.counts[module], path, call, None, *tensors,
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
        if heard.projection != name or heard.output is None or read.numel() != heard.output.numel():
            return
        self._aside(self._keep_projected, heard, heard.output, read)

    def _keep_projected(self, heard: Heard, output: Tensor, read: Tensor) -> None:
        kept = Kept.of(read.reshape(output.shape))
        # The interface fixes the layout (B, T, H * dv). A model's own code may use another, so values are compared.
        if heard.path != INLINE or torch.allclose(kept.tensor, output, rtol=1e-3, atol=1e-6):
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


def undisturbing() -> AbstractContextManager[Any]:
    """Computes without gradients and without autocast until the block ends."""
    kinds = [kind for kind in ("cpu", "cuda", "mps") if torch.is_autocast_enabled(kind)]
    if not kinds:
        return torch.no_grad() if torch.is_grad_enabled() else nullcontext()
    stack = ExitStack()
    stack.enter_context(torch.no_grad())
    for kind in kinds:
        stack.enter_context(torch.autocast(kind, enabled=False))
    return stack


def _facts(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Pass:
    now = Pass(name)
    for each in args:  # sentence-transformers hands its features over as one dict
        kwargs = {**each, **kwargs} if isinstance(each, Mapping) else kwargs
    first = next((each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)), None)
    given = kwargs.get("input_ids", args[0] if args and isinstance(args[0], Tensor) else first)
    if isinstance(given, Tensor) and given.dim() == 2 and not given.is_floating_point():
        now.ids = given.detach()
    main = given if isinstance(given, Tensor) else kwargs.get("inputs_embeds", first)
    now.batch = main.shape[0] if isinstance(main, Tensor) and main.dim() > 1 else None
    now.second = main.shape[1] if isinstance(main, Tensor) and main.dim() > 1 else None
    for names, hides in ((PADDING, False), (HIDDEN, True)):
        mask = next((kwargs[each] for each in names if isinstance(kwargs.get(each), Tensor)), None)
        if mask is not None and mask.dim() == 2 and mask.shape[0] == now.batch:
            now.mask = mask.detach() == 0 if hides and mask.dtype == torch.bool else mask.detach()
    now.cache = next((found for each in CACHES if (found := _cache_in(kwargs.get(each))) is not None), None)
    now.before = 0 if now.cache is None else int(now.cache.get_seq_length())
    return now


def _cache_in(given: Any) -> Any:
    return given if hasattr(given, "get_seq_length") else None


def _returned(output: Any) -> Any:
    """The cache that a model returns; None where it returns none. transformers warns of outputs' old names, so only
    names that an output holds are read."""
    named = output if isinstance(output, Mapping) else {name: getattr(output, name, None) for name in CACHES}
    return next((found for name in CACHES if (found := _cache_in(named.get(name))) is not None), None)


def _spans(now: Pass) -> Any:
    return None if now.mask is None else padding(now.mask, now.mask.shape[1])


def _stream(hidden: Any) -> Kept | None:
    """Keeps hidden states [B, T, D]; None for anything else: hyper-connections have several residual streams."""
    plain = isinstance(hidden, Tensor) and hidden.dim() == 3 and hidden.is_floating_point()
    return Kept.safe(hidden) if plain else None
