"""What `--measure` adds to the time of a scan. Not part of the default run:

    pytest -s -o addopts= tests/benchmarks/benchmark_measures.py             three models, a quarter of an hour
    pytest -s -o addopts= tests/benchmarks/benchmark_measures.py -k B        one

Scans 32 sequences of 256 tokens with the first 6 layers of benchmark_scan's models, from the loaded model to the
finished tables: A and B have random weights and read random tokens, C is Gemma-3-270M and reads prose. LAYERS=18 in the
environment takes more layers, ROUNDS=5 another number of rounds. Each round makes a plain scan and one with each set of
measurements, every other round in reverse, so that a change in the machine's speed affects all of them; the ratios are
of the same round. Counts the processor's time of this process on one thread, which other processes change by a tenth.
Prints the ratio of the least times, which they only ever raise, then the median and the range of the ratios of a round.
"""

from __future__ import annotations

import os
import statistics
import time
from typing import Any

import pytest
import torch
from benchmark_scan import model_of
from torch import nn

import sinkscope
from sinkscope.checkpoints import open_checkpoint
from sinkscope.inputs import read_corpus, token_rules
from sinkscope.runs.defaults import NUM_SEQUENCES

LAYERS, ROUNDS = int(os.environ.get("LAYERS", "6")), int(os.environ.get("ROUNDS", "3"))
PLAIN, LENGTH = "plain", 256
WITHOUT_STREAMING = ("smoothing", "switch", "modules", "spikes", "cosines")
"""`all` also holds `first` and `regions`, which need text of their own."""
ASKED: dict[str, tuple[str, ...]] = {
    PLAIN: (), **{name: (name,) for name in WITHOUT_STREAMING}, "all but streaming": WITHOUT_STREAMING,
}  # fmt: skip


def model_and_text(name: str) -> tuple[Any, Any, torch.Tensor]:
    """The model, its tokenizer (None for random weights) and token ids."""
    if name == "C":
        opened = open_checkpoint("example:gemma-3-270m")
        rules = token_rules(opened.tokenizer, opened.vocabulary)
        text = torch.from_numpy(read_corpus("prose", opened.tokenizer, rules, LENGTH, NUM_SEQUENCES).ids)
        return opened.model, opened.tokenizer, text
    model = model_of(name)
    return model, None, torch.randint(4, 40_000, (NUM_SEQUENCES, LENGTH), generator=torch.Generator().manual_seed(0))


def cut(model: Any) -> None:
    """Leaves the first LAYERS layers."""
    for module in model.modules():
        layers = getattr(module, "layers", None)
        if isinstance(layers, nn.ModuleList):
            del layers[LAYERS:]
    model.config.num_hidden_layers = LAYERS


def seconds_of(model: Any, tokenizer: Any, ids: torch.Tensor, measure: tuple[str, ...]) -> float:
    began = time.process_time()
    sinkscope.scan(model, data=ids, tokenizer=tokenizer, measure=measure, self_check=False)
    return time.process_time() - began


@pytest.mark.parametrize("name", ["A", "B", "C"])
def test_cost_of_measurements(benchmark: Any, name: str) -> None:
    torch.set_num_threads(1)
    model, tokenizer, ids = model_and_text(name)
    cut(model)

    def rounds() -> dict[str, list[float]]:
        seconds_of(model, tokenizer, ids[:8], WITHOUT_STREAMING)  # the first of each is slower
        taken: dict[str, list[float]] = {asked: [] for asked in ASKED}
        for number in range(ROUNDS):
            for asked in list(ASKED)[:: 1 if number % 2 == 0 else -1]:
                taken[asked].append(seconds_of(model, tokenizer, ids, ASKED[asked]))
        return taken

    taken = benchmark.pedantic(rounds, rounds=1, iterations=1)
    print(f"\n{name}: {len(ids)} x {LENGTH} tokens, {LAYERS} layers, {ROUNDS} interleaved rounds, 1 thread")
    for asked, times in taken.items():
        ratios = [own / plain for own, plain in zip(times, taken[PLAIN], strict=True)]
        least, middle = min(times) / min(taken[PLAIN]), statistics.median(ratios)
        print(f"{asked:>17} {min(times):7.2f} s  {least:.3f}   {middle:.3f} ({min(ratios):.3f} to {max(ratios):.3f})")
    benchmark.extra_info.update({asked: min(times) for asked, times in taken.items()})
