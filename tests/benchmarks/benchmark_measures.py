"""What `--measure` adds to the time of a scan. Not part of the default run:

    pytest -s -o addopts= tests/benchmarks/benchmark_measures.py

Scans 32 sequences of 256 tokens of prose with the first 6 of Gemma-3-270M's 18 layers (five with a window, one
without), from the loaded model to the finished tables: about five minutes. LAYERS=18 in the environment takes the whole
model, ROUNDS=5 another number of rounds. Each round makes a plain scan and one with each set of measurements, every
other round in reverse, so that a change in the machine's speed affects all of them; the ratios are of the same round.
Counts the processor's time of this process on one thread, which other processes change by a tenth. Prints the ratio of
the least times, which they only ever raise, then the median and the range of the ratios of a round.
"""

from __future__ import annotations

import os
import statistics
import time
from typing import Any

import pytest
import torch
from torch import nn

import sinkscope
from sinkscope.checkpoints import Checkpoint, open_checkpoint
from sinkscope.inputs import read_corpus, token_rules
from sinkscope.runs.defaults import NUM_SEQUENCES

LAYERS, ROUNDS = int(os.environ.get("LAYERS", "6")), int(os.environ.get("ROUNDS", "3"))
PLAIN = "plain"
WITHOUT_STREAMING = ("smoothing", "switch", "modules", "spikes", "cosines")
"""`all` also holds `first` and `regions`, which need text of their own."""
ASKED: dict[str, tuple[str, ...]] = {
    PLAIN: (), **{name: (name,) for name in WITHOUT_STREAMING}, "all but streaming": WITHOUT_STREAMING,
}  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    opened = open_checkpoint("example:gemma-3-270m")
    for module in opened.model.modules():
        layers = getattr(module, "layers", None)
        if isinstance(layers, nn.ModuleList):
            del layers[LAYERS:]
    opened.model.config.num_hidden_layers = LAYERS
    return opened


def seconds_of(checkpoint: Checkpoint, ids: torch.Tensor, measure: tuple[str, ...]) -> float:
    began = time.process_time()
    sinkscope.scan(checkpoint.model, data=ids, tokenizer=checkpoint.tokenizer, measure=measure, self_check=False)
    return time.process_time() - began


def test_cost_of_measurements(benchmark: Any, checkpoint: Checkpoint) -> None:
    torch.set_num_threads(1)
    rules = token_rules(checkpoint.tokenizer, checkpoint.vocabulary)
    ids = torch.from_numpy(read_corpus("prose", checkpoint.tokenizer, rules, 256, NUM_SEQUENCES).ids)

    def rounds() -> dict[str, list[float]]:
        seconds_of(checkpoint, ids[:8], WITHOUT_STREAMING)  # the first of each is slower
        taken: dict[str, list[float]] = {name: [] for name in ASKED}
        for number in range(ROUNDS):
            for name in list(ASKED)[:: 1 if number % 2 == 0 else -1]:
                taken[name].append(seconds_of(checkpoint, ids, ASKED[name]))
        return taken

    taken = benchmark.pedantic(rounds, rounds=1, iterations=1)
    print(f"\n{len(ids)} x 256 tokens, {LAYERS} layers, {ROUNDS} interleaved rounds, 1 thread")
    for name, times in taken.items():
        ratios = [own / plain for own, plain in zip(times, taken[PLAIN], strict=True)]
        print(f"{name:>17} {min(times):7.2f} s  {min(times) / min(taken[PLAIN]):.3f}   {statistics.median(ratios):.3f} "
              f"({min(ratios):.3f} to {max(ratios):.3f})")  # fmt: skip
    benchmark.extra_info.update({name: min(times) for name, times in taken.items()})
