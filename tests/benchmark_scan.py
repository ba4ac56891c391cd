"""What a scan costs beside the forward passes it replaces. Not part of the default run:

    pytest -n 0 -s tests/benchmark_scan.py

One process, Gemma-3-270M, one batch as a scan cuts it (2,048 tokens or one longer sequence). All contenders by turns in
each of five rounds, so that a machine's moods hit all alike. Prints seconds, ratios (median, range over rounds) and
the peak memory of each.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import sinkscope
from sinkscope.capture import Capture, plan
from sinkscope.checkpoints.examples import example_folder
from sinkscope.forward import Forward
from sinkscope.loop import CPU_BATCH_TOKENS
from sinkscope.measured import Collector
from sinkscope.selfcheck import eager

ROUNDS = 5
STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


@pytest.fixture(scope="module")
def model() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(example_folder("gemma-3-270m"), attn_implementation="sdpa").eval()


def contenders(model: Any, ids: torch.Tensor, with_eager: bool) -> dict[str, Callable[[], Any]]:
    """`metrics` is one batch's share of a scan (forward, capture, all metrics); `scan` adds set-up and tables."""
    base = model.base_model
    forward = Forward(base)
    found = plan(base, lambda: forward(ids[:1, :16]))
    holder: list[Collector] = []
    capture = Capture(base, found, lambda view, row: holder[0].add(view))

    def measured() -> None:
        holder[:] = [Collector(ids.shape[1])]
        holder[0].begin()
        with capture.watching():
            forward(ids)
        holder[0].commit()

    def eager_maps() -> None:
        with eager(model):
            base(ids, use_cache=False, output_attentions=True)

    runs: dict[str, Callable[[], Any]] = {
        "plain, logits": lambda: model(ids, use_cache=False),
        "backbone": lambda: base(ids, use_cache=False),
        "metrics": measured,
        "scan": lambda: sinkscope.scan(base, data=ids, self_check=False),
    }
    return runs | ({"eager maps": eager_maps} if with_eager else {})


def peak_memory(run: Callable[[], Any]) -> float | None:
    """Highest resident memory during a run, MiB above what was resident before; None where the kernel counts none."""
    if not RESET.exists():
        return None
    RESET.write_text("5")
    before = _resident("VmRSS")
    run()
    return (_resident("VmHWM") - before) / 1024


def _resident(field: str) -> float:
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(field))
    return float(line.split()[1])


@pytest.mark.parametrize("length", [256, 1024, 2048, 4096])
def test_cost_of_a_scan(benchmark: Any, model: Any, length: int) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = max(1, CPU_BATCH_TOKENS // length)
    ids = torch.randint(4, 200_000, (rows, length), generator=generator)
    ids[:, 0] = 2
    runs = contenders(model, ids, with_eager=length <= 2048)
    seconds: dict[str, list[float]] = {name: [] for name in runs}

    def one_round() -> None:
        with torch.no_grad():
            for name, run in runs.items():
                began = time.perf_counter()
                run()
                seconds[name].append(time.perf_counter() - began)

    benchmark.pedantic(one_round, rounds=ROUNDS, warmup_rounds=1, iterations=1)
    with torch.no_grad():
        memory = {name: peak_memory(run) for name, run in runs.items()}
    print(f"\nT = {length}, batch {rows}, {ROUNDS} interleaved rounds, {torch.get_num_threads()} threads")
    print(f"{'':>16} {'seconds':>8} {'/ plain':>20} {'/ backbone':>20} {'peak MiB':>9}")
    for name, times in seconds.items():
        kept = times[-ROUNDS:]
        ratios = [_ratio(kept, seconds[other][-ROUNDS:]) for other in ("plain, logits", "backbone")]
        mib = "" if memory[name] is None else f"{memory[name]:9.0f}"
        print(f"{name:>16} {statistics.median(kept):8.3f} {ratios[0]:>20} {ratios[1]:>20} {mib}")
    benchmark.extra_info.update({name: statistics.median(times[-ROUNDS:]) for name, times in seconds.items()})


def _ratio(times: list[float], others: list[float]) -> str:
    pairs = [a / b for a, b in zip(times, others, strict=True)]
    return f"{statistics.median(pairs):.2f} ({min(pairs):.2f}-{max(pairs):.2f})"
