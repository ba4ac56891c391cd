"""What SinkCallback costs a training, as a share of its steps. Not part of the default run:

    pytest -s -o addopts= tests/benchmarks/benchmark_callback.py

Trains a small Llama on rows of 256 tokens, eight at a time, and measures eight sequences of the same length, the
callback's default. Each round times five steps and one measurement, one after the other, so that a change in the
machine's speed affects both. Counts the processor's time of this process on one thread, which other processes hardly
change. Prints seconds (median and range over rounds), and the share that a measurement every 50 steps adds.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import sinkscope

ROUNDS, STEPS, EVERY = 5, 5, 50
BATCH, LENGTH, VOCABULARY = 8, 256, 4096
SIZES = {
    "1 million, 2 layers": (128, 2, 4),
    "10 million, 6 layers": (320, 6, 5),
    "34 million, 8 layers": (512, 8, 8),
}
"""Parameters in words: (width, layers, heads)."""


def model_of(width: int, layers: int, heads: int) -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(
        hidden_size=width, intermediate_size=3 * width, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=heads, vocab_size=VOCABULARY, max_position_embeddings=LENGTH, use_cache=False,
    )).train()  # fmt: skip


def seconds_of(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


@pytest.mark.parametrize("size", SIZES)
def test_cost_of_the_callback(benchmark: Any, size: str) -> None:
    torch.set_num_threads(1)
    model = model_of(*SIZES[size])
    rows = torch.randint(3, VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    callback = sinkscope.SinkCallback(every=EVERY, data=rows)

    def train() -> None:
        for _ in range(STEPS):
            model(input_ids=rows, labels=rows).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    def rounds() -> list[tuple[float, float]]:
        train()
        callback.measure(0, model)  # the first of each is slower
        return [(seconds_of(train) / STEPS, seconds_of(lambda: callback.measure(0, model))) for _ in range(ROUNDS)]

    taken = benchmark.pedantic(rounds, rounds=1, iterations=1)
    shares = [100 * measurement / (EVERY * step) for step, measurement in taken]
    parameters = sum(weight.numel() for weight in model.parameters())
    print(
        f"\n{size} ({parameters:,} parameters), {BATCH} x {LENGTH} tokens, {ROUNDS} rounds of {STEPS} steps, 1 thread"
    )
    for name, values, form in (
        ("s a step", [step for step, _ in taken], ".3f"),
        ("s a measurement", [measurement for _, measurement in taken], ".3f"),
        (f"% at every={EVERY}", shares, ".1f"),
    ):
        print(f"{name:>16}  {statistics.median(values):{form}} ({min(values):{form}} to {max(values):{form}})")
    benchmark.extra_info.update(share=statistics.median(shares))
