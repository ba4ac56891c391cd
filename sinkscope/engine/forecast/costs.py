"""What one forward pass computes and holds, and what watching it adds: counted on shapes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sinkscope.capture.calls import AttentionCall
from sinkscope.capture.hooks import hooked
from sinkscope.capture.interface import shadowed
from sinkscope.capture.kernels.sums import EARLY, block_edges
from sinkscope.capture.shapes import Shapes, shape_of
from sinkscope.capture.site import Site
from sinkscope.engine.collector import prefixes
from sinkscope.metrics import stretches
from sinkscope.metrics.quantities import STRETCHED, WHOLE, Quantity, QuantitySet

BLOCK_COPIES = 4
"""Tensors of a block's size that are held at once while a block of logits becomes sums: logits, probabilities, a mask,
and one result."""


@dataclass(frozen=True)
class PassCosts:
    """One forward pass of `sequences` of `length`.

    Attributes:
        linear: floating-point operations outside attention, which grow with the number of tokens.
        attention: those of the attention interface, 2 x queries x keys x (query width + value width) for each head.
        activations: most bytes that results held at once.
        watching: bytes of the largest call's sums, with the block of logits that they are taken from.
        layers: the operations within each of some layers, those of attention counted in.
    """

    sequences: int
    length: int
    linear: int
    attention: int
    activations: int
    watching: int
    layers: tuple[int, ...] = ()

    def flops(self, sequences: int, length: int) -> int:
        """Operations of a pass of another size, where every query sees every key."""
        linear = self.linear * sequences * length / (self.sequences * self.length)
        square = self.attention * sequences * length**2 / (self.sequences * self.length**2)
        return round(linear + square)


def counted(
    model: nn.Module, forward: Callable[[], Any], sequences: int, length: int, device: torch.device,
    layers: Sequence[nn.Module] = (),
) -> PassCosts:  # fmt: skip
    """Runs `forward` on shapes. `layers`: those that are counted by themselves. Raises RuntimeError where the model
    needs the numbers of its weights."""
    attention = watching = 0
    within = dict.fromkeys(layers, 0)

    def attend(module: nn.Module, call: AttentionCall) -> Tensor:
        nonlocal attention, watching
        attention += attention_flops(call)
        watching = max(watching, watching_bytes(call, device))
        return shape_of(call)

    def begins(layer: nn.Module, *_: Any) -> None:
        within[layer] -= shapes.flops + attention

    def ends(layer: nn.Module, *_: Any) -> None:
        within[layer] += shapes.flops + attention

    with torch.no_grad(), Shapes() as shapes, shadowed(model, attend), hooked(layers, begins, ends):
        forward()
    return PassCosts(sequences, length, shapes.flops, attention, shapes.peak, watching, tuple(within.values()))


def attention_flops(call: AttentionCall) -> int:
    """Operations of both products of a call, whatever its mask hides."""
    batch, heads, queries, width = call.query.shape
    return 2 * batch * heads * queries * call.key.shape[2] * (width + call.value.shape[-1])


def watching_bytes(call: AttentionCall, device: torch.device) -> int:
    """Bytes of what `read` makes of a call beside its output: the sums, and a block of logits in float32."""
    batch, heads, queries, _ = call.query.shape
    keys = call.key.shape[2]
    row = batch * heads * keys * 4
    rows = max(stop - start for start, stop in block_edges(queries, row, device))
    return sums_bytes(batch, heads, queries, keys) + BLOCK_COPIES * rows * row


def sums_bytes(batch: int, heads: int, queries: int, keys: int) -> int:
    """Bytes of `AttentionSums` of a softmax call: seven numbers and a truth value for each query, one for each key, and
    how many queries see each key, where all sequences and heads share one mask."""
    by_query = 5 * 4 + 1 + (2 * 4 if queries == keys else 0)
    early = min(EARLY, keys) if queries >= EARLY else 0
    return batch * heads * (queries * by_query + (keys + early) * 4) + (keys + early) * 8


def kept_bytes(quantities: QuantitySet, sites: list[Site], sequences: int, length: int, width: int) -> int:
    """Bytes that the record of one domain holds of all its sequences, but for events, whose number depends on the
    text. `width`: channels of the residual stream."""
    curve = len(prefixes(length, quantities.lengths))
    return sum(
        _kept(each, quantities, site, sequences, length, width, curve)
        for site in sites
        for each in quantities.quantities
    )


def _kept(
    each: Quantity, quantities: QuantitySet, site: Site, sequences: int, length: int, width: int, curve: int
) -> int:
    if each.dims[0] in ("event", "element") or each.dims[-1] == "element" or (each.name == "first_unit" and not width):
        return 0
    long = min(length, stretches.EVERY) if each.long and each.name not in WHOLE else length
    if each.dims == STRETCHED:
        return site.heads * (len(stretches.edges(length)) - 1) * len(stretches.PARTS) * 8
    sizes = {
        "sequence": 1 if each.summed else sequences,
        "head": site.heads,
        "metric": len(quantities.metrics.names(each.name)),
        "key": long,
        "query": long,
        "early": EARLY if length >= EARLY else 0,
        "length": curve,
        "channel": width,
        "coordinate": 1 if each.dims == ("sequence", "coordinate") else 2,
    }
    count = 1
    for dim in each.dims:
        count *= sizes[dim]
    return count * (8 if each.summed or each.dims[-1] in ("metric", "coordinate") else 4)
