"""Parts that time a scan's pass against the plain forward pass, which attends with torch's own fused attention."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel

from sinkscope.capture.kernels.attend import TRITON
from sinkscope.experiments.bench import Passes, peak_bytes
from sinkscope.runs.saved.speed import BACKBONE, SCAN

DTYPES = ("bfloat16", "float32")
AIM, FROM = 1.15, 2048
"""The largest ratio that is aimed at, in bfloat16, from so many tokens on."""
WARM = 256
"""Tokens of the first passes, which compile the kernels."""
ROUNDS, BUDGET = 5, 240.0
"""Timed rounds, as far as they fit into so many seconds; at least one."""
LAUNCHES = ("row_sums", "column_sums")
Figures = dict[str, Any]


@dataclass(frozen=True)
class Shape:
    """A model's configuration. `heads`: (query heads, key/value heads, width)."""

    model_type: str
    settings: dict[str, Any]

    @property
    def heads(self) -> tuple[int, int, int]:
        own = self.settings
        return own["num_attention_heads"], own["num_key_value_heads"], own["head_dim"]


LONGEST = 131_072
SHAPES = {
    "llama3-8b": Shape("llama", {
        "vocab_size": 128_256, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": LONGEST,
    }),
    "gemma3-4b": Shape("gemma3_text", {
        "vocab_size": 262_208, "hidden_size": 2560, "intermediate_size": 10_240, "num_hidden_layers": 34,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 1024,
        "max_position_embeddings": LONGEST,
    }),
    "gemma3-270m": Shape("gemma3_text", {
        "vocab_size": 262_144, "hidden_size": 640, "intermediate_size": 2048, "num_hidden_layers": 18,
        "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "sliding_window": 512,
        "max_position_embeddings": LONGEST,
    }),
}  # fmt: skip
TINY = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 16,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}  # fmt: skip


def shape_of(name: str, is_tiny: bool) -> Shape:
    """The shape of that name; tiny, it keeps its model type alone."""
    shape = SHAPES[name]
    return Shape(shape.model_type, shape.settings | TINY) if is_tiny else shape


def model_of(shape: Shape, dtype: str, device: str) -> nn.Module:
    """A model of random weights, made on the device, whose attention is torch's."""
    config = AutoConfig.for_model(shape.model_type, **shape.settings)
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModel.from_config(config, dtype=getattr(torch, dtype), attn_implementation="sdpa")
    return model.eval().requires_grad_(False)


def ratio(name: str, dtype: str, length: int, device: str, is_tiny: bool) -> tuple[Figures, bool]:
    """Seconds and peak memory of the plain pass and of the scan's, their ratio, and the column sums' share of the
    kernels. The bound holds for bfloat16 alone; a device that is no GPU has none."""
    shape = shape_of(name, is_tiny)
    model = model_of(shape, dtype, device)
    ids = torch.randint(shape.settings["vocab_size"], (1, length), generator=torch.Generator().manual_seed(0))
    ids = ids.to(device)
    passes = Passes.of(model, False, ids)
    run = {each: passes.run[each] for each in (BACKBONE, SCAN)}
    with torch.no_grad():
        seconds = timed(run, ids)
        peaks = {each: peak_bytes(lambda each=each: run[each](ids), ids.device) for each in run}
        share = column_share(lambda: run[SCAN](ids), ids.device)
    ratios = [ours / plain for plain, ours in zip(seconds[BACKBONE], seconds[SCAN], strict=True)]
    figures: Figures = {
        "ratio": statistics.median(ratios), "lowest": min(ratios), "highest": max(ratios), "rounds": len(ratios),
        "plain s": statistics.median(seconds[BACKBONE]), "scan s": statistics.median(seconds[SCAN]),
        **{f"{each} MiB": None if peak is None else peak / 2**20 for each, peak in peaks.items()},
        "column sums' share": share, "kernels": "+".join(sorted({str(site.kernel) for site in passes.found.sites})),
        **({"Triton failed": passes.found.failures[0]} if passes.found.failures else {}),
    }  # fmt: skip
    return figures, kept(figures, dtype, length) if ids.is_cuda else True


def kept(figures: Figures, dtype: str, length: int) -> bool:
    """Whether a GPU keeps the bounds: every call read by Triton, and the ratio that is aimed at."""
    bound = dtype == "bfloat16" and length >= FROM
    return figures["kernels"] == TRITON and "Triton failed" not in figures and (not bound or figures["ratio"] <= AIM)


def timed(run: dict[str, Callable[[Tensor], Any]], ids: Tensor) -> dict[str, list[float]]:
    """Seconds of each pass, round by round. A round runs each pass once; the first counts only if no other fits."""
    for each in run.values():
        each(ids[:, :WARM])
    settle(ids.device)
    began = time.perf_counter()
    rounds = [_round(run, ids)]
    fitting = int(BUDGET / max(time.perf_counter() - began, 1e-6)) - 1
    if fitting >= 1:
        rounds = [_round(run, ids) for _ in range(min(ROUNDS, fitting))]
    return {name: [each[name] for each in rounds] for name in run}


def _round(run: dict[str, Callable[[Tensor], Any]], ids: Tensor) -> dict[str, float]:
    spent = {}
    for name, each in run.items():
        began = time.perf_counter()
        each(ids)
        settle(ids.device)
        spent[name] = time.perf_counter() - began
    return spent


def column_share(scan: Callable[[], Any], device: torch.device) -> float | None:
    """The share of the column sums in the time of both kernels; None where no kernel was launched."""
    with clocked(device) as spent:
        scan()
    total = sum(map(sum, spent.values()))
    return sum(spent["column_sums"]) / total if total else None


@contextmanager
def clocked(device: torch.device) -> Iterator[dict[str, list[float]]]:
    """Seconds of each launch of each kernel, each awaited."""
    try:
        from sinkscope.capture.kernels import triton_kernels as kernels
    except ImportError:
        yield {name: [] for name in LAUNCHES}
        return
    plain = {name: getattr(kernels, name) for name in LAUNCHES}
    spent: dict[str, list[float]] = {name: [] for name in LAUNCHES}
    try:
        for name, kernel in plain.items():
            setattr(kernels, name, Clocked(kernel, device, spent[name]))
        yield spent
    finally:
        for name, kernel in plain.items():
            setattr(kernels, name, kernel)


@dataclass
class Clocked:
    """Launches a kernel and waits for its end, to add its seconds to `spent`."""

    kernel: Any
    device: torch.device
    spent: list[float]

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*given: Any, **flags: Any) -> None:
            settle(self.device)
            began = time.perf_counter()
            self.kernel[grid](*given, **flags)
            settle(self.device)
            self.spent.append(time.perf_counter() - began)

        return launch


def settle(device: torch.device) -> None:
    """Waits until the device has done its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
