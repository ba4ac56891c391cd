"""What a scan costs beside the forward passes it replaces. Not part of the default run:

    pytest -s -o addopts= tests/benchmarks/benchmark_scan.py

Runs Gemma-3-270M in one process, with batches as a scan forms them (2,048 tokens, or one longer sequence). Each of five
rounds times every contender, so that a change in the machine's speed affects all of them. Prints seconds per batch,
ratios (median and range over rounds) and the peak memory of one batch.
"""

from __future__ import annotations

import statistics
from typing import Any

import pytest
import torch

import sinkscope
from sinkscope.checkpoints.examples import example_folder
from sinkscope.engine.batch_size import chosen_batch
from sinkscope.experiments.bench.contenders import Passes
from sinkscope.experiments.bench.result import EAGER, ratio
from sinkscope.runs.defaults import NUM_SEQUENCES

ROUNDS = 5
WHOLE = "whole scan"


@pytest.fixture(scope="module")
def model() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(example_folder("gemma-3-270m"), attn_implementation="sdpa").eval()


def contenders(model: Any, ids: torch.Tensor, with_eager: bool) -> Passes:
    """Those of `sinkscope bench`, and `whole scan`: set-up, all batches of a default scan's sequences, and tables.

    The longest would take an hour so: there one batch alone is timed."""
    passes = Passes.of(model, True, ids)
    several = ids.repeat(NUM_SEQUENCES // len(ids), 1)
    if ids.shape[1] <= 2048:
        passes.run[WHOLE] = lambda ids: sinkscope.scan(model, data=several, batch_size=len(ids), self_check=False)
    if not with_eager:
        del passes.run[EAGER]
    return passes


@pytest.mark.parametrize("length", [256, 1024, 2048, 4096])
def test_cost_of_a_scan(benchmark: Any, model: Any, length: int) -> None:
    rows = chosen_batch(length, torch.device("cpu"))
    ids = torch.randint(4, 200_000, (rows, length), generator=torch.Generator().manual_seed(0))
    ids[:, 0] = 2
    passes = contenders(model, ids, with_eager=length <= 2048)
    seconds = benchmark.pedantic(lambda: passes.timed(ids, ROUNDS, lambda done: None), rounds=1, iterations=1)
    if WHOLE in seconds:
        seconds[WHOLE] = [each * rows / NUM_SEQUENCES for each in seconds[WHOLE]]  # of a batch, as the others'
    print(f"\nT = {length}, batch {rows}, {ROUNDS} interleaved rounds, {torch.get_num_threads()} threads")
    print(f"{'':>12} {'s a batch':>9} {'/ plain':>20} {'/ backbone':>20} {'peak MiB':>9}")
    for name, times in seconds.items():
        ratios = ["{:.2f} ({:.2f}-{:.2f})".format(*ratio(times, seconds[other])) for other in ("plain", "backbone")]
        peak = passes.peak(name, ids)
        mib = "" if peak is None else f"{peak / 2**20:9.0f}"
        print(f"{name:>12} {statistics.median(times):9.3f} {ratios[0]:>20} {ratios[1]:>20} {mib}")
    benchmark.extra_info.update({name: statistics.median(times) for name, times in seconds.items()})
