"""Hears the attention calls of one pass at a time, and keeps what each attended with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from sinkscope.capture.calls import AttentionCall, MaskReadings
from sinkscope.capture.growth import Growth
from sinkscope.capture.heard import Heard, Onward, Pass, detached
from sinkscope.capture.inline.calls import (
    InlineCall,
    SdpaCall,
    as_output,
    check_axes,
    mask_of,
    sequences_first,
    told_by_products,
    turned_fold,
)  # fmt: skip
from sinkscope.capture.inline.mode import InlineWatch
from sinkscope.capture.interface import call_of, is_causal_without_mask
from sinkscope.capture.kept import Kept
from sinkscope.capture.kernels.map_walk import AttentionMap, map_rows
from sinkscope.capture.keywords import unknown_keywords
from sinkscope.capture.learned_keys import LearnedKeys
from sinkscope.capture.output_projection import output_projection
from sinkscope.capture.output_readers import OutputReaders
from sinkscope.capture.parts import counts_up, end_of_map, goes_on
from sinkscope.capture.plan import INLINE, INTERFACE
from sinkscope.capture.precision import undisturbing
from sinkscope.capture.registries import READ, is_own
from sinkscope.capture.sites import call_name, config_alone_counts, head_counts, place_of, stream_of, stream_width
from sinkscope.capture.tape import Tape
from sinkscope.capture.views import begun_cuts, cut_maps
from sinkscope.errors import SinkscopeError, first_line, in_one_line

FLEX, PAGED = "flex_attention", "paged|eager"


class CallHearing:
    """Hears the attention calls of `now`, the pass that runs; None = none runs, and nothing is heard.

    `before_call()` is called before each is kept. `names`: the path of each module; `changes`: how often modules came,
    went or changed places. `keywords` gets the unknown keywords of transformers' interface, each with the path of the
    first module that was given it. `tape`: what is put off until the pass has ended; None where nothing is.
    """

    def __init__(self, model: nn.Module, before_call: Callable[[], None]) -> None:
        self.model, self._before_call = model, before_call
        self.now: Pass | None = None
        self.names: Mapping[nn.Module, str] = {}
        self.changes = 0
        self.keywords: dict[str, str] = {}
        self.tape: Tape | None = None
        self._torch = InlineWatch(self._found, model, lambda error: self.refuse(first_line(error)))
        self._projections: dict[tuple[str, int], str | None] = {}
        self._readers = OutputReaders(self.model)
        self._oblong = set[str]()
        self._learned = LearnedKeys(model)

    @property
    def torch_calls(self) -> InlineWatch:
        """What hears torch's functions, and knows which modules run."""
        return self._torch

    def learn_names(self) -> None:
        """Takes the modules of the model as they are now, and forgets what it knew of their paths."""
        self.names = {module: name for name, module in self.model.named_modules()}
        self.changes += 1
        self._projections.clear()
        self._readers = OutputReaders(self.model)
        self._learned = LearnedKeys(self.model)

    def begin(self, now: Pass) -> None:
        """Hears `now` from here on. Its torch calls are looked at unless they are known to hold no attention."""
        self.now = now
        self._clear()
        if now.idle is None:
            self._torch.__enter__()
        elif self._settled:
            self.tape = Tape(now.root)

    @property
    def _settled(self) -> bool:
        """Whether the output projections of all modules are known, so that no numbers need to be compared."""
        known = self._projections.items()
        return bool(known) and all(
            named is not None or self._readers.of(module) is not None for (module, _), named in known
        )

    def play(self) -> None:
        """Looks at what was put off, and puts nothing off any more in this pass."""
        tape, self.tape = self.tape, None
        if tape is not None:
            tape.play(lambda error: self.refuse(in_one_line(error)))

    def end(self) -> Pass | None:
        """Ends the pass that runs, and returns it with what was seen of softmaxes that are no attention."""
        if self.now is not None:
            self._torch.flush()
            for heard in self.now.heard:
                self._settle(heard)
        now, self.now = self.now, None
        if now is None:
            return None
        now.unmatched = {module for module, count in self._torch.unmatched.items() if count > 0}
        # Where a module names no head count, square maps beside others may be pieces of one map.
        now.split = self._torch.split | self._oblong & {heard.module for heard in now.heard if heard.call is None}
        if now.idle is None:
            self._torch.__exit__(None, None, None)
        self._clear()
        return now

    def _clear(self) -> None:
        self._torch.reset()
        self._torch.tracked.clear()
        self._torch.unmatched.clear()
        self._torch.split.clear()
        self._oblong.clear()
        self._readers.forget_given()
        self.tape = None

    def wrapped(self, name: str | None, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function that transformers' interface gives a model, with an ear beside it.

        A function that the user registered may compute anything: its torch calls are heard instead.
        """
        if self.now is None or not is_own(function) or function.__module__.startswith("sinkscope."):
            return function
        if name not in (*READ, FLEX, PAGED):
            if self.now.shares is not None:
                self.refuse(
                    f"a continuous batch attends through {name!r}, which is not read: only 'sdpa' and 'paged|eager' of "
                    "transformers 5.24 or newer are"
                )
            self.refuse(
                f"the model attends through {name!r}, whose masks cannot be read: load it with "
                "attn_implementation='sdpa' (or call model.set_attn_implementation('sdpa'))"
            )
            return function

        def heard(
            module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None,
            *args: Any, **keywords: Any,
        ) -> Any:  # fmt: skip
            self._torch.pauses += 1
            try:
                result = function(module, query, key, value, attention_mask, *args, **keywords)
            finally:
                self._torch.pauses -= 1
            tensors, output = (query, key, value), result[0]
            call = self._interface, name, module, tensors, attention_mask, keywords, output
            if self.tape is None or not self.tape.attends((*tensors, output), self._aside, *call):
                self.play()
                self._aside(*call)
            return result

        return heard

    def grew(self, growth: Growth) -> None:
        """Notes that a layer of a cache grew."""
        if self.now is not None:
            self.now.growths[id(growth.key)] = growth

    def _interface(
        self, name: str | None, module: nn.Module, tensors: tuple[Tensor, Tensor, Tensor], mask: Any,
        keywords: dict[str, Any], output: Tensor,
    ) -> None:  # fmt: skip
        path = self.names.get(module)
        if path is None:
            self.refuse(f"an attention module outside the model was called: {type(module).__name__}")
            return
        rest = dict(keywords)
        causal = is_causal_without_mask(name, module, rest.pop("is_causal", None))
        for keyword in unknown_keywords(rest):
            self.keywords.setdefault(keyword, path)
        query, key, value = tensors
        assert self.now is not None
        second = self.now.second
        may_be_layers = query.shape[1] == second  # most often not: no record is made to ask
        if may_be_layers and call_of(*tensors, None, causal, {}).over_layers(second, stream_width(self.model)):
            return
        if mask is not None and not isinstance(mask, Tensor):  # flex attention's BlockMask
            mask = mask_of(mask.mask_mod, (query.shape[0], query.shape[1]), query.shape[2], key.shape[2], query.device)
        call = self._learned.without(path, detached(call_of(query, key, value, mask, causal, rest)))
        self._resume(path, call, query.shape[2], partial(_end_of, call))
        heard = self._keep(path, INTERFACE, call, output.detach(), dropped=bool(keywords.get("dropout")))
        if self.now.shares is not None:
            ends = keywords.get("cu_seq_lens_k")
            heard.ends = ends.tolist() if isinstance(ends, Tensor) else None

    def _found(self, found: InlineCall | SdpaCall) -> None:
        self._aside(self._sdpa if isinstance(found, SdpaCall) else self._map, found)

    def _sdpa(self, found: SdpaCall) -> None:
        assert self.now is not None
        heads = self._heads(found.module, found.call.query, self.now.batch)
        call = self._learned.without(found.module, detached(found.unfolded(heads)))
        output = found.unfolded_output(heads or call.query.shape[1]).detach()
        self._resume(found.module, call, call.query.shape[2], partial(_end_of, call))
        heard = self._keep(found.module, INLINE, call, output, found.dropped, found.feeds_projection)
        heard.folded = self._may_be_turned(found, heard)

    def _may_be_turned(self, found: InlineCall | SdpaCall, heard: Heard) -> bool:
        """Whether sequences and heads came as one axis, in which either may be first. Of one sequence, several rows are
        its windows."""
        one = self.now is not None and self.now.batch == 1
        return found.folded and not found.feeds_projection and heard.rows > 1 and heard.heads > 1 and not one

    def _heads(self, path: str, tensor: Tensor, rows: int | None) -> int | None:
        """The heads of a tensor whose batch and heads may be one axis."""
        if tensor.dim() == 4:
            return int(tensor.shape[1])
        counts = [count for count in head_counts(self.model, path) if tensor.shape[0] % count == 0]
        if rows and config_alone_counts(self.model, path):  # of fewer rows than sequences, it is another layer's number
            counts = [count for count in counts if tensor.shape[0] // count >= rows]
        if len(counts) == 1:
            return counts[0]
        return tensor.shape[0] // rows if rows and tensor.shape[0] % rows == 0 else None

    def _map(self, found: InlineCall) -> None:
        """Sums a map that the model formed.

        A softmax is not taken for attention where its head count is none that the model names for the module, or, where
        it names none, where queries and keys differ in number and it fills no slots in order."""
        assert self.now is not None
        heads = self._heads(found.module, found.seen.probabilities, self.now.batch)
        if heads is None:
            return
        whole = found.unfolded(heads)
        counts = head_counts(self.model, found.module)
        if counts and heads not in counts:
            if not (whole.squares and config_alone_counts(self.model, found.module)):
                return
            counts = set()
        seen = self._learned.without(found.module, detached(whole))
        queries, keys = seen.lengths
        self._resume(found.module, seen, queries, partial(end_of_map, seen.probabilities))
        name = call_name(found.module, self.now.counts[found.module])
        pools = self._place(found.module, False) != "cross" and _pools(seen.probabilities)
        told = counts or told_by_products(found)
        oblong = not told and queries != keys and not counts_up(seen.probabilities, 1)
        if self.now.cache is None and (pools or oblong):
            self._pass_over(self.now, found.module, name, seen)
            return
        place = self._place(found.module, queries != keys)
        among = {place} | {self._place(call.module, call.queries != call.keys) for call in self.now.heard}
        among |= self.now.places
        onward = None if self.now.onward is None else self.now.onward(name, keys)
        if onward is None:
            if oblong:
                return
            cuts = self.now.padding.cuts(found.module, place, among)
            if cuts is None and self.now.cache is not None and self._place(found.module, False) != "cross":
                cuts = begun_cuts(seen)
            onward = Onward(cuts, [0] * (1 if cuts is None else len(cuts)))
        maps = zip(cut_maps(found.module, seen, onward.cuts), onward.befores, strict=True)
        parts = [(rows, cut, map_rows(part, before)) for (rows, cut, part), before in maps]
        heard = self._keep(found.module, INLINE, None, seen.output, found.dropped, found.feeds_projection, seen=seen)
        heard.parts, heard.among, heard.folded = parts, frozenset(among), self._may_be_turned(found, heard)
        heard.of_tokens = seen.of_tokens

    def _pass_over(self, now: Pass, module: str, name: str, seen: AttentionMap) -> None:
        """Notes a map that is not kept: it has one query, or no equal numbers of queries and keys."""
        queries = seen.lengths[0]
        if module not in self._oblong and goes_on(seen.probabilities):
            now.over_cache = name, queries
        if queries == 1:
            now.pooled[module] += 1
            now.counts[module] += 1
            return
        self._oblong.add(module)
        if now.over_cache is None:
            now.split.add(module)

    def _resume(self, module: str, record: AttentionCall | AttentionMap, queries: int, ends: Callable[[], int]) -> None:
        """Asks whether the pass goes on over a cache of the model's own; see Pass."""
        assert self.now is not None
        if self.now.resumes is not None and record.key is not None and record.value is not None:
            name = call_name(module, self.now.counts[module])
            self.now.resumes(name, record.key, record.value, queries, ends)

    def _place(self, path: str, cross: bool) -> str:
        return place_of(self.model, stream_of(self.model, path, cross), path)

    def _keep(
        self, module: str, path: str, call: AttentionCall | None, output: Tensor | None, dropped: bool = False,
        feeds: bool = False, seen: Any = None,
    ) -> Heard:  # fmt: skip
        now = self.now
        assert now is not None
        self._before_call()
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
            shape[0], shape[1], shape[2], keys, dropped, self._projection(module, path, width),
            output if feeds else None, kept, of_torch=feeds,
        )  # fmt: skip
        now.heard.append(heard)
        now.counts[module] += 1
        return heard

    def _projection(self, module: str, path: str, width: int | None) -> str | None:
        if width is None:
            return None
        if (module, width) not in self._projections:
            self._projections[module, width] = output_projection(self.model, module, width)
        named = self._projections[module, width]
        return named or self._readers.of(module) if path == INTERFACE else self._readers.projection(module, named)

    def keep_read(self, name: str, read: Tensor, linear: bool) -> None:
        """Keeps what an output projection reads of the last call that it belongs to. `linear`: a linear layer reads."""
        assert self.now is not None
        heard = self.now.heard[-1] if self.now.heard else None
        if linear:
            self._readers.ran(name, None if heard is None else heard.module)
        if heard is None or heard.output is None or read.numel() != heard.output.numel():
            return
        if heard.folded:
            self._aside(self._unfold, heard, heard.output, read)
        elif heard.path == INLINE:
            self._aside(check_axes, heard.shown, heard.output, read)
        if linear and self._is_asked(heard):
            self._aside(self._read_by, heard, heard.output, name, read)
        if heard.projection == name:
            self._aside(self._keep_projected, heard, heard.output, read)

    def _is_asked(self, heard: Heard) -> bool:
        """Whether what a layer reads may tell the output projection of a call."""
        if heard.value is None or self._readers.of(heard.module) is not None:
            return False
        named = self._projections[heard.module, heard.heads * heard.value.shape[-1]]
        return named is None or heard.path == INLINE

    def _read_by(self, heard: Heard, output: Tensor, name: str, read: Tensor) -> None:
        if self._readers.compare(heard.module, output, name, read):
            self._keep_projected(heard, output, read)

    def keep_returned(
        self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        """Looks whether the module around a layer that read heads returns what the layer returned, and whether an
        output projection was given anything beside the heads."""
        if self.now is None:
            return
        if self._readers.awaits(name):
            self._aside(self._readers.returned, name, output)
        self._readers.given(name, module, args, kwargs)

    def _settle(self, heard: Heard) -> None:
        """Decides at the end of a pass which layer is the projection of a call."""
        if heard.value is None or heard.of_torch:
            return
        width = heard.heads * heard.value.shape[-1]
        named = self._projections[heard.module, width]
        if named is None or heard.path != INTERFACE:
            heard.projection = self._projection(heard.module, heard.path, width)
            heard.alone = self._readers.returned_by(heard.module)
            if heard.projection is None or not self._readers.read_by(heard.module, heard.projection):
                heard.projected = None
        heard.steered = self._readers.steered(heard.projection)
        if heard.steered is not None:
            heard.projection = heard.projected = None

    def _unfold(self, heard: Heard, output: Tensor, read: Tensor) -> None:
        first = sequences_first(output, read)
        if first is False:
            raise SinkscopeError(turned_fold(heard.shown, True))
        heard.folded = first is None

    def _keep_projected(self, heard: Heard, output: Tensor, read: Tensor) -> None:
        # The interface fixes the layout (B, T, H * dv). A model's own code may use another, so values are compared.
        found = (read.reshape(output.shape), False) if heard.path != INLINE else as_output(output, read)
        if found is not None:
            kept, heard.time_first = Kept.of(found[0]), found[1]
            heard.projected = kept.tensor
            heard.versions = (*heard.versions, kept)

    def refuse(self, why: str) -> None:
        """Notes why the pass cannot be read, the first time."""
        if self.now is not None and self.now.refused is None:
            self.now.refused = why

    def _aside(self, work: Callable[..., None], *given: Any) -> None:
        """Our own work in the middle of a pass: without gradients, in full precision, unheard. What fails in it is the
        pass's `refused`, never the model's error."""
        self._torch.pauses += 1
        try:
            with undisturbing():
                work(*given)
        except (SinkscopeError, ValueError, RuntimeError, TypeError, IndexError, AttributeError) as error:
            self.refuse(first_line(error))
        finally:
            self._torch.pauses -= 1


def _pools(probabilities: Tensor) -> bool:
    """Whether a single query reads other positions than the first."""
    return probabilities.shape[-2] < 2 and end_of_map(probabilities) > 1


def _end_of(call: AttentionCall) -> int:
    """The key after the last one that any query sees."""
    return int(MaskReadings().read(call).visible.reach[3].max())
