"""What one forward pass computes and holds, what watching it adds, and how fast a machine computes."""

from __future__ import annotations

import time
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
from sinkscope.capture.sites import Site
from sinkscope.engine.collector import prefixes
from sinkscope.errors import SinkscopeError, did_you_mean
from sinkscope.metrics import stretches
from sinkscope.metrics.quantities import STRETCHED, UNSEEN, WHOLE, Quantity, QuantitySet
from sinkscope.runs.forecast import Time

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
    totals = call.sinks is not None or call.score != "softmax"
    return sums_bytes(batch, heads, queries, keys, totals) + BLOCK_COPIES * rows * row


def sums_bytes(batch: int, heads: int, queries: int, keys: int, totals: bool) -> int:
    """Bytes of `AttentionSums` of a call: seven numbers and a truth value for each query, one for each key, and how
    many queries see each key, where all sequences and heads share one mask. `totals`: whether rows do not sum to 1 over
    their keys, so that a total of each is kept, too."""
    by_query = 5 * 4 + 1 + (2 * 4 if queries == keys else 0) + (4 if totals else 0)
    early = min(EARLY, keys) if queries >= EARLY else 0
    return batch * heads * (queries * by_query + (keys + early) * 4) + (keys + early) * 8


def kept_bytes(quantities: QuantitySet, sites: list[Site], sequences: int, length: int, width: int) -> int:
    """Bytes that the record of one domain holds of all its sequences, but for events, whose number depends on the
    text. `width`: channels of the residual stream."""
    curve = len(prefixes(length, quantities.lengths))
    return sum(
        _kept(quantity, quantities, site, sequences, length, width, curve)
        for site in sites
        for quantity in quantities.quantities
    )


def _kept(
    each: Quantity, quantities: QuantitySet, site: Site, sequences: int, length: int, width: int, curve: int
) -> int:
    rare = each.dims[0] in ("event", "element") or each.dims[-1] == "element" or each.name in UNSEEN.values()
    if rare or (each.name == "first_unit" and not width):
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


# How fast a machine computes: measured by a matrix product, or taken from a small table of peak rates.


GPU_BYTES, MARGIN = 80 * 10**9, 0.9
"""Bytes of the GPU that numbers of GPUs are told in, and the share of it that a model may fill: torch's own context,
its allocator's gaps and the communication take the rest."""

FACTOR = 3.0
"""What the estimate may be off by, to either side."""

UTILISATION = 0.4
"""The share of a machine's peak rate that a watched pass is counted on to reach."""

SHARE_HERE = 0.6
"""The share of a matrix product's rate, measured here, that a watched pass is counted on to reach: 0.5 to 0.8 in scans
of Gemma-3-270M on a CPU."""

CALL_SECONDS = 0.01
"""Seconds that Python, hooks and metrics take for each attention call of a watched pass, whatever its size: 0.007 to
0.010 in scans of models of three layers on one core."""

MEASURED, SIZE = 0.25, 1024
"""Seconds of the measurement, and rows of its square matrices."""


@dataclass(frozen=True)
class Machine:
    """A machine's name, and its peak rates in FLOP/s by dtype: dense products, without sparsity."""

    name: str
    rates: dict[str, float]


MACHINES = {
    "h100": Machine("H100", {"bfloat16": 989e12, "float16": 989e12, "float32": 67e12, "float64": 67e12}),
    "a100": Machine("A100", {"bfloat16": 312e12, "float16": 312e12, "float32": 19.5e12, "float64": 19.5e12}),
}
"""NVIDIA's data sheets of the SXM boards. float32 is without TF32, as torch computes it unless it is asked for more."""

HERE = "here"


def check_machine(name: str | None) -> None:
    """Raises SinkscopeError for a machine that is not in the table."""
    if name is not None and name.lower() not in (*MACHINES, HERE):
        machines = (HERE, *MACHINES)
        raise SinkscopeError(f"--machine {name!r}: choose one of {', '.join(machines)}{did_you_mean(name, machines)}")


def estimated(flops: int, calls: int, dtype: str, machine: str | None, device: torch.device) -> Time:
    """The time of so many operations and watched attention calls, on a machine of the table or on this one.

    Raises SinkscopeError for an unknown machine.
    """
    check_machine(machine)
    listed = None
    if machine is None or machine.lower() == HERE:
        rate, share, name = measured_rate(getattr(torch, dtype), device), SHARE_HERE, f"this machine ({device})"
    else:
        listed = MACHINES[machine.lower()]
        rate, share, name = listed.rates[dtype], UTILISATION, listed.name
    rate *= share
    return Time(name, rate, share, listed is None, flops / rate + calls * CALL_SECONDS, FACTOR)


def measured_rate(dtype: torch.dtype, device: torch.device, seconds: float = MEASURED) -> float:
    """FLOP/s of square matrix products in a dtype on a device: the fastest of those that fit into `seconds`."""
    left, right = (torch.ones(SIZE, SIZE, dtype=dtype, device=device) for _ in range(2))
    end, best = time.perf_counter() + seconds, 0.0
    while best == 0.0 or time.perf_counter() < end:
        began = time.perf_counter()
        product = left @ right
        float(product[0, 0])  # waits for the device
        best = max(best, 2 * SIZE**3 / (time.perf_counter() - began))
    return best
