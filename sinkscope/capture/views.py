"""Reads attention calls, whole or cut into the sequences of a padded batch, and makes a LayerView of each part."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from torch import Tensor, nn

from sinkscope.capture.calls import AttentionCall, MaskReadings
from sinkscope.capture.cuts import Cut, Part, Pending, Readers, readings
from sinkscope.capture.kernels.attend import read
from sinkscope.capture.kernels.map_walk import AttentionMap, map_sums
from sinkscope.capture.marks import mark
from sinkscope.capture.output_projection import factors_of, projection_weight
from sinkscope.capture.site import Site
from sinkscope.capture.view import LayerView


@dataclass(frozen=True)
class Stream:
    """The residual stream around an attention call, each [B, T, D] or None where it was not seen: what enters its block
    (x), what its module reads (z), and what leaves the block (e)."""

    entering: Tensor | None = None
    read: Tensor | None = None
    leaving: Tensor | None = None


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
    _factors: dict[str, tuple[object, Tensor]] = field(default_factory=dict)

    def of_call(
        self, name: str, call: AttentionCall, masks: MaskReadings, cuts: list[Cut] | None
    ) -> tuple[Tensor, list[Part]]:
        """The output of a call (B, Tq, H, dv), zero at padding, and its parts: the whole batch, or each sequence of a
        padded one. `name` is the site's, for errors."""
        if cuts is None:
            call = masks.read(call)
            output, sums = read(call, self.failures)
            return output, [(slice(0, call.query.shape[0]), None, sums, readings(self.readers, call))]
        batch, heads, queries, _ = call.query.shape
        output, parts = call.query.new_zeros(batch, queries, heads, call.value.shape[-1]), list[Part]()
        for cut in cuts:
            cut.check(name, batch, queries, len(cuts))
            part = masks.read(cut.call(call), call.mask, cut.index)
            rows, sums = read(part, self.failures)
            output[cut.index, cut.rows(queries)] = rows[0]
            parts.append((cut.batch_row, cut, sums, readings(self.readers, part)))
        return output, parts

    def of_map(self, name: str, seen: AttentionMap, cuts: list[Cut] | None) -> list[Part]:
        """The parts of a map that the model computed itself."""
        cut_map = _cut_map(name, seen, cuts)
        return [(rows, cut, map_sums(part), readings(self.readers, part)) for rows, cut, part in cut_map]

    def view(self, pending: Pending, own: Part, stream: Stream) -> LayerView:
        """The view of one part of a call."""
        site, (_, cut, sums, found) = pending.site, own

        def part(tensor: Tensor | None, axis: int) -> Tensor | None:
            return tensor if cut is None or tensor is None else cut.axis(tensor, axis)

        time_first = getattr(self.model.get_submodule(site.module), "batch_first", True) is False

        def tokens(tensor: Tensor | None) -> Tensor | None:
            # A model's own code may put channels or time first. Then x is left out, rather than read wrongly.
            fits = tensor is not None and tensor.shape[:2] == pending.rows and not time_first
            valid = part(tensor, 1) if fits else None
            return None if valid is None else valid.to(sums.first.device)  # the previous layer may use another device

        return LayerView(
            site=site,
            epsilon=self.epsilon,
            attention=sums,
            output=part(pending.output, 1),
            raw_query=part(pending.query, 2),
            raw_key=part(pending.key, 2),
            raw_value=part(pending.value, 2),
            raw_projected=part(pending.projected, 1),
            raw_written=part(pending.written, 1),
            factors=self._head_factors(site),
            residual_in=tokens(stream.entering),
            attention_input=tokens(stream.read),
            residual_out=tokens(stream.leaving),
            head_mean=self.head_mean,
            readings=found,
            layer_heads=site.heads if self.layer_heads is None else self.layer_heads(site),
        )

    def _head_factors(self, site: Site) -> Tensor | None:
        if site.projection is None or site.value_dim is None:
            return None
        known = self._factors.get(site.projection)
        if known is not None and not self.weights_change:
            return known[1]
        weight = projection_weight(self.model.get_submodule(site.projection), site.heads * site.value_dim)
        bits = mark(weight) if self.weights_change else None
        if known is None or known[0] != bits:
            known = bits, factors_of(weight, site.heads, site.value_dim)
            self._factors[site.projection] = known
        return known[1]


def _cut_map(name: str, seen: AttentionMap, cuts: list[Cut] | None) -> Iterator[tuple[slice, Cut | None, AttentionMap]]:
    batch, _, queries, _ = seen.probabilities.shape
    if cuts is None:
        yield slice(0, batch), None, seen
        return
    for cut in cuts:
        cut.check(name, batch, queries, len(cuts))
        yield cut.batch_row, cut, cut.map(seen)
