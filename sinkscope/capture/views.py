"""Reads attention calls, whole or cut into the sequences of a padded batch, and makes a LayerView of each part."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from sinkscope.capture.bits import mark
from sinkscope.capture.calls import AttentionCall, MaskReadings
from sinkscope.capture.hooks import first_returned
from sinkscope.capture.inline.calls import as_output, check_axes, sequences_first, turned_fold
from sinkscope.capture.kernels.attend import read
from sinkscope.capture.kernels.map_walk import AttentionMap, map_sums, shown_keys
from sinkscope.capture.kernels.sums import AttentionSums
from sinkscope.capture.learned_keys import added_output
from sinkscope.capture.output_projection import factors_of, projection_weight
from sinkscope.capture.plan import INLINE
from sinkscope.capture.sites import Site, shown_name
from sinkscope.capture.view import LayerView
from sinkscope.errors import SinkscopeError

Span = tuple[int, int]
"""The first valid position of a sequence, and the one after its last."""


UNDERSTOOD = frozenset({"query", "key", "value", "mask", "bias", "sinks", "learned"})
"""The tensors of a call that are cut, or that all sequences share."""


class Cut:
    """Cuts the valid positions of one sequence out of a padded batch's tensors, so that no padding is measured.

    `queries`, `keys`: the valid positions of each axis, and how many positions the batch has there; None where none is
    padding. An axis of another length (compressed keys) does not hold these positions and is not cut.
    """

    def __init__(self, index: int, queries: tuple[Span, int] | None, keys: tuple[Span, int] | None) -> None:
        self.index, self.batch_row = index, slice(index, index + 1)
        self._valid = {side: None if part is None else (slice(*part[0]), part[1])
                       for side, part in (("queries", queries), ("keys", keys))}  # fmt: skip

    def valid(self, keys: int) -> tuple[int, int, int]:
        """The first valid key, the one after the last, and how many keys there are, padding included."""
        valid = self._valid["keys"]
        return (0, keys, keys) if valid is None else (valid[0].start, valid[0].stop, valid[1])

    def keys_alone(self, index: int) -> Cut:
        """The cut of a sequence whose keys alone are padded, as those of this one."""
        start, stop, length = self.valid(0)
        return Cut(index, None, ((start, stop), length) if length else None)

    def check(self, name: str, batch: int, sizes: tuple[int, int], sequences: int) -> None:
        """Raises SinkscopeError where padding cannot be located: the queries are not the batch's positions, keys that
        are another sequence's are not that one's, or more keys than positions are two sequences' in one. `sizes`:
        numbers of queries and of keys."""
        own, other = self._valid["queries"], self._valid["keys"]
        compressed = other == own and sizes[1] <= sizes[0]
        checked = [("queries", sizes[0], own), ("keys", sizes[1], None if compressed else other)]
        for what, size, valid in checked:
            length = size if valid is None else valid[1]
            if batch != sequences or size != length:
                raise SinkscopeError(
                    f"{shown_name(name)} has {batch} x {size} {what} for {sequences} padded sequences of {length}: "
                    "padding cannot be told from text there; give sequences of equal length, or no attention mask"
                )

    def rows(self, size: int, side: str = "queries") -> slice:
        """The valid part of an axis of this size."""
        valid = self._valid[side]
        return slice(None) if valid is None or size != valid[1] else valid[0]

    def axis(self, tensor: Tensor, axis: int, side: str = "queries") -> Tensor:
        """This sequence's row of the batch (or the row that all sequences share), cut along one axis."""
        row = tensor[self.batch_row] if tensor.shape[0] > 1 else tensor
        place = axis % tensor.dim()
        return row[(slice(None),) * place + (self.rows(tensor.shape[axis], side),)]

    def square(self, tensor: Tensor | None) -> Tensor | None:
        """This sequence's row, cut along the last two axes (queries and keys)."""
        return None if tensor is None else self.axis(self.axis(tensor, -1, "keys"), -2)

    def call(self, call: AttentionCall) -> AttentionCall:
        """The call for this sequence alone. Raises SinkscopeError where a field is a tensor that it cannot cut."""
        unknown = [name for name in call.beyond(UNDERSTOOD) if isinstance(getattr(call, name), Tensor)]
        if unknown:
            raise SinkscopeError(
                f"{', '.join(unknown)} of an attention call cannot be cut to one sequence of a padded batch: give "
                "sequences of equal length"
            )
        return replace(
            call,
            query=self.axis(call.query, 2),
            key=self.axis(call.key, 2, "keys"),
            value=self.axis(call.value, 2, "keys"),
            mask=self.square(None if call.mask is None else call.mask[..., : call.key.shape[2]]),
            bias=self.square(call.bias),
            sinks=None if call.sinks is None else self.axis(call.sinks, 2),
        )

    def map(self, seen: AttentionMap) -> AttentionMap:
        """This sequence's probabilities, logits and values, not the other tensors. Learned sinks' logits are kept."""
        keys = seen.probabilities.shape[-1]
        logits = self.square(None if seen.logits is None else seen.logits[..., :keys])
        if seen.logits is not None and logits is not None and seen.logits.shape[-1] > keys:
            logits = torch.cat([logits, self.axis(seen.logits[..., keys:], -2)], -1)
        probabilities = self.square(seen.probabilities)
        assert probabilities is not None
        return AttentionMap(
            probabilities, logits, value=None if seen.value is None else self.axis(seen.value, 2, "keys")
        )


Readers = Mapping[str, Callable[[AttentionCall | AttentionMap], Any]]
"""Functions that read each attention call besides its sums; a LayerView has what they return, by the same names."""

Part = tuple[slice, Cut | None, AttentionSums, dict[str, Any]]
"""Rows of a batch, their cut, their sums and what readers returned: the whole batch (no cut), or one sequence of a
padded batch."""


def readings(readers: Readers, call: AttentionCall | AttentionMap) -> dict[str, Any]:
    """What each reader makes of a call, by its name."""
    return {name: read(call) for name, read in readers.items()}


@dataclass
class Outputs:
    """The output of a call, (B, Tq, H, dv). `of_tokens`: that of its tokens' values alone; None where no learned value
    adds to it."""

    whole: Tensor
    of_tokens: Tensor | None = None

    def put(self, place: Any, own: Outputs) -> None:
        """Writes the output of one sequence in its place."""
        self.whole[place] = own.whole[0]
        if self.of_tokens is not None and own.of_tokens is not None:
            self.of_tokens[place] = own.of_tokens[0]


@dataclass
class Pending:
    """One attention call of the current pass, kept until its block has ended.

    `rows` is (sequences, queries). Tensors have the shapes of AttentionMap; `projected` that of `output`. `written` is
    what the output projection adds, (B, T, D). `time_first`: it reads and adds [T, B]. `factors`: as in LayerView,
    where they were kept when the call was made; None takes those of the weights as they are now. `of_tokens`: as in
    Outputs. `read`: what the projections of q, k and v read.
    """

    site: Site
    parts: list[Part]
    rows: tuple[int, int]
    query: Tensor | None
    key: Tensor | None
    value: Tensor | None
    output: Tensor | None
    projected: Tensor | None = None
    written: Tensor | None = None
    folded: bool = False
    factors: Tensor | None = None
    time_first: bool = False
    of_tokens: Tensor | None = None
    read: Tensor | None = None

    @property
    def reads_channels_last(self) -> bool:
        """Whether the module is known to have channels on the last axis: transformers' interface has, and a linear
        layer was seen to read the heads so."""
        return self.site.path != INLINE or self.projected is not None

    def keep_read(self, args: tuple[Any, ...]) -> None:
        """Keeps what the output projection reads as w, where it has the shape of the call's output."""
        if self.output is None or not args or args[0].numel() != self.output.numel():
            return
        if self.folded and (first := sequences_first(self.output, args[0])) is not None:
            if not first:
                raise SinkscopeError(turned_fold(self.site.name, True))
            self.folded = False
        elif not self.folded and self.site.path == INLINE:
            check_axes(self.site.name, self.output, args[0])
        # The interface fixes the layout (B, T, H * dv). A model's own code may use another, so values are compared.
        if self.site.path != INLINE:
            self.projected = args[0].reshape(self.output.shape)
        elif (read := as_output(self.output, args[0])) is not None:
            self.projected, self.time_first = read

    def keep_written(self, output: Any, bias: Tensor, time_first: bool = False) -> None:
        """Keeps what the projection returns less its `bias` (D), where what it read was kept: the sum over heads of
        W_O^h w_i. `time_first`: it is known to return [T, B, D]."""
        written = first_returned(output)
        if (self.time_first or time_first) and written.dim() == 3:
            written = written.transpose(0, 1)
        if self.projected is not None and written.shape[:-1] == self.rows:
            self.written = written - bias.to(written.device, written.dtype)


# Reads attention calls, whole or cut into the sequences of a padded batch, and makes a LayerView of each part.


@dataclass(frozen=True)
class Stream:
    """The residual stream around an attention call, each [B, T, D] or None where it was not seen: what enters its block
    (x), what its module reads (z), and what leaves the block (e). Where B = T, sequences may stand on either axis."""

    entering: Tensor | None = None
    read: Tensor | None = None
    leaving: Tensor | None = None


Factors = dict[tuple[str, int, int], tuple[object, Tensor]]
"""The factors of output projections, and what tells the weights that they are of, by path, heads and head width."""

_LEFT: WeakKeyDictionary[nn.Module, Factors] = WeakKeyDictionary()
"""What the watches of a model on the CPU leave for its later ones, while it lives: there a QR factorisation of every
layer takes as long as a pass over a few dozen tokens. On an accelerator it takes little, and memory is dear."""


@dataclass
class Views:
    """Makes LayerViews of the attention calls of `model`.

    `readers` read each call, or each sequence's part of a padded one. `head_mean`, `layer_heads`: see LayerView.
    `failures` gets a line where Triton fails. `weights_change`: what is derived from the model's weights is derived
    anew where their bits changed since, as in training.
    """

    model: nn.Module
    epsilon: float
    failures: list[str] = field(default_factory=list)
    head_mean: Callable[[Site, Tensor], Tensor] | None = None
    readers: Readers = field(default_factory=dict)
    layer_heads: Callable[[Site], int] | None = None
    weights_change: bool = False
    _factors: Factors = field(default_factory=dict)

    def of_call(
        self, name: str, call: AttentionCall, masks: MaskReadings, cuts: list[Cut] | None
    ) -> tuple[Outputs, list[Part]]:
        """The output of a call, zero at padding, and its parts: the whole batch, or each sequence of one that is padded
        or whose sequences are masked in other ways. `name` is the site's, for errors."""
        own = None
        if cuts is None:
            call = masks.read(call)
            if call.visible.alike:
                outputs, sums = self._read(call)
                return outputs, [(slice(0, call.query.shape[0]), None, sums, readings(self.readers, call))]
            own = call.visible.sequences
            cuts = [Cut(row, None, None) for row in range(len(own))]
        batch, heads, queries, _ = call.query.shape
        outputs, parts = Outputs(call.query.new_zeros(batch, queries, heads, call.value.shape[-1])), list[Part]()
        if call.learned is not None:
            outputs.of_tokens = torch.zeros_like(outputs.whole)
        for cut in cuts:
            cut.check(name, batch, (queries, call.key.shape[2]), len(cuts))
            part = cut.call(call)
            part = masks.read(part, call.mask, cut.index) if own is None else part.with_visible(own[cut.index])
            output, sums = self._read(part)
            outputs.put((cut.index, cut.rows(queries)), output)
            parts.append((cut.batch_row, cut, sums, readings(self.readers, part)))
        return outputs, parts

    def _read(self, call: AttentionCall) -> tuple[Outputs, AttentionSums]:
        output, sums = read(call, self.failures)
        added = added_output(call, sums)
        if added is None:
            return Outputs(output), sums
        return Outputs((output.to(added.dtype) + added).to(output.dtype), output), sums

    def of_map(self, name: str, seen: AttentionMap, cuts: list[Cut] | None) -> list[Part]:
        """The parts of a map that the model computed itself."""
        cut_map = cut_maps(name, seen, cuts)
        return [(rows, cut, map_sums(part), readings(self.readers, part)) for rows, cut, part in cut_map]

    def view(self, pending: Pending, own: Part, stream: Stream) -> LayerView:
        """The view of one part of a call."""
        site, (_, cut, sums, facts) = pending.site, own
        batch_first = self._batch_first(pending)

        def part(tensor: Tensor | None, axis: int, side: str = "queries") -> Tensor | None:
            return tensor if cut is None or tensor is None else cut.axis(tensor, axis, side)

        def tokens(tensor: Tensor | None) -> Tensor | None:
            # A model's own code may put time first. Where nothing shows it, x is left out, rather than read wrongly.
            fits = tensor is not None and tensor.shape[:2] == pending.rows and batch_first
            valid = part(tensor, 1) if fits else None
            return None if valid is None else valid.to(sums.first.device)  # the previous layer may use another device

        projects = site.projects or pending.projected is not None
        return LayerView(
            site=site,
            epsilon=self.epsilon,
            attention=sums,
            output=part(pending.output if pending.of_tokens is None else pending.of_tokens, 1),
            raw_query=part(pending.query, 2),
            raw_key=part(pending.key, 2, "keys"),
            raw_value=part(pending.value, 2, "keys"),
            raw_projected=part(pending.projected, 1),
            raw_written=part(pending.written, 1),
            raw_factors=partial(self._factors_of, pending.site, pending.factors) if projects else None,
            residual_in=tokens(stream.entering),
            attention_input=tokens(stream.read),
            residual_out=tokens(stream.leaving),
            head_mean=self.head_mean,
            readings=facts,
            layer_heads=site.heads if self.layer_heads is None else self.layer_heads(site),
        )

    def _batch_first(self, pending: Pending) -> bool:
        """Whether sequences stand before time in what modules are given: sizes told it, unless both are as many."""
        if pending.rows[0] != pending.rows[1] or pending.site.path != INLINE:
            return True
        told = getattr(self.model.get_submodule(pending.site.module), "batch_first", None)
        return bool(told) or (told is None and pending.projected is not None and not pending.time_first)

    def _factors_of(self, site: Site, known: Tensor | None) -> Tensor | None:
        if known is not None or site.projection is None or site.value_dim is None:
            return known
        return self.factors(site.projection, site.heads, site.value_dim)

    def factors(self, projection: str, heads: int, value_dim: int) -> Tensor:
        """The factors of the weight that the output projection at this path has now; see LayerView."""
        key = projection, heads, value_dim
        if not self.weights_change and key in self._factors:
            return self._factors[key][1]
        weight = projection_weight(self.model.get_submodule(projection), heads * value_dim)
        bits = mark(weight) if self.weights_change else None
        outlast = self.weights_change and weight.device.type == "cpu"
        known = _LEFT.setdefault(self.model, {}) if outlast else self._factors
        entry = known.get(key)
        if entry is None or entry[0] != bits:
            entry = known[key] = bits, factors_of(weight, heads, value_dim)
        return entry[1]


def begun_cuts(seen: AttentionMap) -> list[Cut] | None:
    """How the map of a first pass over a cache is cut where it shows padding before the sequences: the first query that
    sees its own key alone is a sequence's first. None where it shows none. Raises SinkscopeError where a sequence sees
    no key."""
    if seen.logits is None:
        return None
    queries, keys = seen.probabilities.shape[-2:]

    def alone(stop: int) -> Tensor:
        shown = shown_keys(logits[:, :, :stop])[..., :keys]
        return ((shown.sum(-1) == 1) & shown.diagonal(0, -2, -1)).all(1)

    logits = seen.logits
    if queries > keys or bool(alone(1).all()):
        return None
    first = alone(queries)
    if not bool(first.any(1).all()):
        if not bool(shown_keys(logits)[..., :keys].flatten(1).any(1).all()):
            raise SinkscopeError("a sequence has no token in the first pass over a cache: its padding cannot be told")
        return None
    starts = first.int().argmax(1).tolist()
    return [Cut(row, ((start, queries), queries), ((start, keys), keys)) for row, start in enumerate(starts)]


def cut_maps(name: str, seen: AttentionMap, cuts: list[Cut] | None) -> Iterator[tuple[slice, Cut | None, AttentionMap]]:
    """A map of the whole batch, or of each sequence of a padded one. Raises as `Cut.check`."""
    batch, _, queries, keys = seen.probabilities.shape
    if cuts is None:
        yield slice(0, batch), None, seen
        return
    for cut in cuts:
        cut.check(name, batch, (queries, keys), len(cuts))
        yield cut.batch_row, cut, cut.map(seen)
