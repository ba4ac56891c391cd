"""What a scan costs beside the forward passes it replaces. Not part of the default run:

    pytest -s -o addopts= tests/benchmarks/benchmark_scan.py                    all models and lengths
    pytest -s -o addopts= tests/benchmarks/benchmark_scan.py -k "A-256"         model A at 256 tokens

The models: A and B have the shapes of two small language models and random weights, C is Gemma-3-270M. Runs each in one
process, with batches as a scan forms them (2,048 tokens, or one longer sequence). Each of five rounds times every
contender, so that a change in the machine's speed affects all of them. Prints seconds per batch, ratios (median and
range over rounds) and the peak memory of one batch. ROUNDS=2 in the environment sets another number of rounds,
SEQUENCES=8 the sequences of a whole scan, whose set-up then weighs four times as much, and SMOOTHING=1 adds a scan that
also measures smoothing.
"""

from __future__ import annotations

import os
import statistics
from functools import cache
from typing import Any

import pytest
import torch

import sinkscope
from sinkscope.checkpoints.examples import example_folder
from sinkscope.engine.batch_size import chosen_batch
from sinkscope.experiments.bench import Passes
from sinkscope.runs.defaults import NUM_SEQUENCES
from sinkscope.runs.saved.speed import EAGER, ratio

ROUNDS = int(os.environ.get("ROUNDS", "5"))
SEQUENCES = int(os.environ.get("SEQUENCES", NUM_SEQUENCES))
WHOLE, SMOOTHING = "whole scan", "+ smoothing"


def model_a() -> Any:
    """30 layers, 576 channels, 9 query heads and 3 key-value heads of 64, a vocabulary of 49,152."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(
        hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3,
        vocab_size=49_152, max_position_embeddings=8192, tie_word_embeddings=True, use_cache=False,
    ))  # fmt: skip


def model_b() -> Any:
    """24 layers, 896 channels, 14 query heads and 2 key-value heads of 64 with biases, a vocabulary of 151,936."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    return Qwen2ForCausalLM(Qwen2Config(
        hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14, num_key_value_heads=2,
        vocab_size=151_936, max_position_embeddings=8192, tie_word_embeddings=True, use_cache=False,
    ))  # fmt: skip


def model_c() -> Any:
    """Gemma-3-270M: 18 layers, 640 channels, 4 query heads and 1 key-value head of 256, a window of 512."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(example_folder("gemma-3-270m"), attn_implementation="sdpa")


MODELS = {"A": model_a, "B": model_b, "C": model_c}


@cache
def model_of(name: str) -> Any:
    torch.manual_seed(0)
    return MODELS[name]().eval()


def contenders(model: Any, ids: torch.Tensor, with_eager: bool) -> Passes:
    """Those of `sinkscope bench`, and `whole scan`: set-up, all batches of a default scan's sequences, and tables.

    The longest would take an hour so: there one batch alone is timed."""
    passes = Passes.of(model, True, ids)
    several = ids.repeat(SEQUENCES // len(ids), 1)

    def whole(ids: torch.Tensor, **asked: Any) -> None:
        sinkscope.scan(model, data=several, batch_size=len(ids), self_check=False, **asked)

    if ids.shape[1] <= 2048:
        passes.run[WHOLE] = whole
        if os.environ.get("SMOOTHING"):
            passes.run[SMOOTHING] = lambda ids: whole(ids, measure="smoothing")
    if not with_eager:
        del passes.run[EAGER]
    return passes


@pytest.mark.parametrize("length", [256, 1024, 2048, 4096])
@pytest.mark.parametrize("name", MODELS)
def test_cost_of_a_scan(benchmark: Any, name: str, length: int) -> None:
    model = model_of(name)
    rows = chosen_batch(length, torch.device("cpu"))
    ids = torch.randint(4, 49_000, (rows, length), generator=torch.Generator().manual_seed(0))
    ids[:, 0] = 2
    passes = contenders(model, ids, with_eager=length <= 2048)
    seconds = benchmark.pedantic(lambda: passes.timed(ids, ROUNDS, lambda done, total: None), rounds=1, iterations=1)
    for whole in {WHOLE, SMOOTHING} & {*seconds}:
        seconds[whole] = [each * rows / SEQUENCES for each in seconds[whole]]  # of a batch, as the others'
    print(f"\n{name}, T = {length}, batch {rows}, {ROUNDS} interleaved rounds, {torch.get_num_threads()} threads, "
          f"{SEQUENCES} sequences in a whole scan")  # fmt: skip
    print(f"{'':>12} {'s a batch':>9} {'/ plain':>20} {'/ backbone':>20} {'peak MiB':>9}")
    for contender, times in seconds.items():
        ratios = ["{:.2f} ({:.2f}-{:.2f})".format(*ratio(times, seconds[other])) for other in ("plain", "backbone")]
        peak = passes.peak(contender, ids)
        mib = "" if peak is None else f"{peak / 2**20:9.0f}"
        print(f"{contender:>12} {statistics.median(times):9.3f} {ratios[0]:>20} {ratios[1]:>20} {mib}", flush=True)
    benchmark.extra_info.update({contender: statistics.median(times) for contender, times in seconds.items()})
