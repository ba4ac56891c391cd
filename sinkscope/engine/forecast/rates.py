"""How fast a machine computes: measured by a matrix product, or taken from a small table of peak rates."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from sinkscope.errors import SinkscopeError, did_you_mean
from sinkscope.runs.forecast import Time

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
        known = (HERE, *MACHINES)
        raise SinkscopeError(f"--machine {name!r}: choose one of {', '.join(known)}{did_you_mean(name, known)}")


def estimated(flops: int, calls: int, dtype: str, machine: str | None, device: torch.device) -> Time:
    """The time of so many operations and watched attention calls, on a machine of the table or on this one.

    Raises SinkscopeError for an unknown machine.
    """
    check_machine(machine)
    found = None
    if machine is None or machine.lower() == HERE:
        rate, share, name = measured_rate(getattr(torch, dtype), device), SHARE_HERE, f"this machine ({device})"
    else:
        found = MACHINES[machine.lower()]
        rate, share, name = found.rates[dtype], UTILISATION, found.name
    rate *= share
    return Time(name, rate, share, found is None, flops / rate + calls * CALL_SECONDS, FACTOR)


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
