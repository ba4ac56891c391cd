"""What the Triton kernels must do for one causal call, how long a GPU would take for it, and how long it takes.

python tests/gpu/roofline.py      # prints the table of docs/speed.md
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
from ratios import ROUNDS, clocked, settle, shape_of
from torch.nn.functional import scaled_dot_product_attention

from sinkscope.capture.calls import AttentionCall
from sinkscope.capture.kernels.attend import TRITON, kernel_of, read

EXTRA = {"row_sums": 10, "column_sums": 8}
"""Float32 instructions for each pair beside the products. Of `row_sums`, those that FlashAttention-2 does not have:
two of the spread, four of logit_gap, four of the mask and of key 0. Of `column_sums`: scale, three of the mask,
difference, exp, product, sum."""
LENGTHS = (2048, 8192, 32_768)
SHAPE = "llama3-8b"


@dataclass(frozen=True)
class Peak:
    """A GPU's published peaks: operations a second in bfloat16 (dense) and in float32 without tensor cores, where a
    multiplication with an addition counts as two; bytes a second from memory; the share of the bfloat16 peak that
    FlashAttention-2's forward pass reaches."""

    bfloat16: float
    float32: float
    memory: float
    flash: float


PEAKS = {
    "A100": Peak(312e12, 19.5e12, 2.039e12, 0.73),
    "H100": Peak(989e12, 67e12, 3.35e12, 0.35),
    "H200": Peak(989e12, 67e12, 4.8e12, 0.35),
}
"""Peaks: NVIDIA's data sheets of A100 80GB SXM, H100 SXM and H200 SXM. Shares: at best 73 % of an A100 (Dao 2023,
arXiv:2307.08691) and 35 % of an H100 (Shah and others 2024, arXiv:2407.08608)."""


@dataclass(frozen=True)
class Layer:
    """One causal attention call of one sequence. `width`: of queries, keys and values; `bytes`: of one number."""

    heads: int
    groups: int
    width: int
    tokens: int
    bytes: int

    @property
    def pairs(self) -> int:
        """Pairs of a query and a key up to it, in all heads."""
        return self.heads * self.tokens * (self.tokens + 1) // 2


@dataclass(frozen=True)
class Work:
    """`products`: operations of matrix products; `extra`: float32 instructions beside them; `bytes`: read and written
    if each tensor is moved once."""

    products: int
    extra: int
    bytes: int


def work(layer: Layer) -> dict[str, Work]:
    """What each kernel does for a call, and FlashAttention-2 for its output alone."""
    queries = layer.heads * layer.tokens * layer.width * layer.bytes
    keys = layer.groups * layer.tokens * layer.width * layer.bytes
    number = layer.heads * layer.tokens * 4  # one float32 for each query, or key, of each head
    one = 2 * layer.width * layer.pairs  # a product of queries with keys, or of weights with values
    return {
        "flash": Work(2 * one, 0, 2 * queries + 2 * keys + number),
        "row_sums": Work(2 * one, EXTRA["row_sums"] * layer.pairs, 2 * queries + 2 * keys + 10 * number),
        "column_sums": Work(one, EXTRA["column_sums"] * layer.pairs, queries + keys + 4 * number),
    }


def seconds(done: Work, peak: Peak, dtype: str) -> float:
    """Predicted seconds: products at FlashAttention-2's share of the peak, then the instructions beside them at
    the full rate (half of the float32 operations); at least the time of the bytes. Float32 products run without
    tensor cores, at the full float32 peak, since nobody has published a share."""
    rate = peak.bfloat16 * peak.flash if dtype == "bfloat16" else peak.float32
    return max(done.products / rate + done.extra / (peak.float32 / 2), done.bytes / peak.memory)


def predicted(layer: Layer, device: str, dtype: str) -> dict[str, float]:
    """Predicted seconds of each kernel on the device of that name; empty for a device without published peaks here."""
    peak = next((peak for name, peak in PEAKS.items() if name in device), None)
    return {} if peak is None else {name: seconds(done, peak, dtype) for name, done in work(layer).items()}


def table() -> str:
    """The table of docs/speed.md."""
    heads, groups, width = shape_of(SHAPE, False).heads
    lines = [
        "| GPU | tokens | kernel | 10⁹ operations | 10⁹ beside | MB | predicted ms | FlashAttention-2 ms |",
        "|---|---:|---|---:|---:|---:|---:|---:|",
    ]
    for name in PEAKS:
        for tokens in LENGTHS:
            layer = Layer(heads, groups, width, tokens, 2)
            times = predicted(layer, name, "bfloat16")
            for kernel in EXTRA:
                done = work(layer)[kernel]
                lines.append(
                    f"| {name} | {tokens:,} | `{kernel}` | {done.products / 1e9:,.0f} | {done.extra / 1e9:,.1f} "
                    f"| {done.bytes / 1e6:,.0f} | {times[kernel] * 1e3:,.2f} | {times['flash'] * 1e3:,.2f} |"
                )
    return "\n".join(lines) + "\n"


def roofline(name: str, dtype: str, length: int, device: str, is_tiny: bool) -> tuple[dict[str, Any], bool]:
    """Milliseconds of each kernel and of torch's fused attention for one causal call, predicted beside measured."""
    heads, groups, width = shape_of(name, is_tiny).heads
    kind = getattr(torch, dtype)
    layer = Layer(heads, groups, width, length, kind.itemsize)
    draw = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(1, count, length, width, generator=draw).to(device, kind) for count in (heads, groups, groups)
    )
    call = AttentionCall(query, key, value, causal=True, scaling=width**-0.5)
    failures: list[str] = []
    read(call, failures)  # compiles
    found = measured(call)
    hoped = predicted(layer, torch.cuda.get_device_name() if query.is_cuda else "", dtype)
    figures: dict[str, Any] = {}
    for kernel, spent in found.items():
        figures |= {f"{kernel} ms": spent * 1e3}
        if kernel in hoped:
            figures |= {f"{kernel} predicted ms": hoped[kernel] * 1e3, f"{kernel} ratio": spent / hoped[kernel]}
    figures |= {"kernel": kernel_of(call)} | ({"Triton failed": failures[0]} if failures else {})
    return figures, not failures and (kernel_of(call) == TRITON or not query.is_cuda)


def measured(call: AttentionCall) -> dict[str, float]:
    """Median seconds of one call's launches of each kernel, and of torch's fused attention under the name `flash`."""
    rounds: dict[str, list[float]] = {}
    for _ in range(ROUNDS):
        with clocked(call.query.device) as spent:
            read(call)
        settle(call.query.device)
        began = time.perf_counter()
        with torch.no_grad():
            scaled_dot_product_attention(call.query, call.key, call.value, is_causal=True, enable_gqa=True)
        settle(call.query.device)
        for kernel, times in {**spent, "flash": [time.perf_counter() - began]}.items():
            if times:
                rounds.setdefault(kernel, []).append(sum(times))
    return {kernel: statistics.median(times) for kernel, times in rounds.items()}


if __name__ == "__main__":
    print(table(), end="")
