"""What a pass under an arm costs beside the unablated one on a long text. Not part of the default run:

    pytest -s -o addopts= tests/benchmarks/benchmark_arms.py

Runs one sequence of 4,096 tokens of prose through Gemma-3-270M, with its next-token head, under each arm and under none
as `arms` does. Each of two rounds runs all of them, the second in reverse; the ratios are of the same round.
Counts the processor's time of this process on one thread. A mask of all queries and keys ends the benchmark. Prints
seconds and ratios, median and range over rounds.

The second benchmark measures ARMS arms as `arms` does, with all that it compares. Each zeroes a neuron: of layer 0, of
a layer of its own from the first to the last, or of the last layer. It divides the time by that of as many plain
passes, `model(ids).logits`, one for each arm, and one for the unablated model. `-k gemma` and `-k small` choose one;
`small` has random weights, 30 layers of 576 channels and a vocabulary of 49,152.
"""

from __future__ import annotations

import os
import statistics
import time
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from sinkscope.capture.masks import lazy
from sinkscope.checkpoints import LoadOptions, wrap_model
from sinkscope.experiments.arms.arm import Arm, Pass, Setting, Unablated
from sinkscope.experiments.arms.engine import measure, run
from sinkscope.experiments.arms.experiment import opened, planned
from sinkscope.experiments.arms.grammar import read_arm
from sinkscope.experiments.arms.readings import SinkCount
from sinkscope.experiments.arms.text import Text

LENGTH, ROUNDS, BOUND = 4096, 2, 3.0
SEQUENCES, SHORT, ARMS = 2, 256, int(os.environ.get("ARMS", "20"))
NAMES = ("window:256+4", "window:256+4/full", "window:256+4/random9", "keys:first1", "kv:4", "kv:4+first1")


def seconds_of(setting: Setting, arm: Arm) -> float:
    began = time.process_time()
    run(Pass(setting, setting.ids[:1]), arm, SinkCount(setting.epsilon))
    return time.process_time() - began


def test_a_long_pass_under_an_arm(benchmark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("a mask of all queries and keys was made")

    monkeypatch.setattr(lazy._Source, "materialise", refuse)
    torch.set_num_threads(1)
    text = Text("prose", LENGTH, num_sequences=2)
    setting, _ = opened("example:gemma-3-270m", None, None, LoadOptions(head=True), text, lambda *_: None)
    arms: dict[str, Arm] = {"unablated": Unablated(), **{name: read_arm(name).ready(setting) for name in NAMES}}

    def rounds() -> dict[str, list[float]]:
        taken: dict[str, list[float]] = {name: [] for name in arms}
        for number in range(ROUNDS):
            for name in list(arms)[:: 1 if number % 2 == 0 else -1]:
                taken[name].append(seconds_of(setting, arms[name]))
        return taken

    taken = benchmark.pedantic(rounds, rounds=1, iterations=1)
    print(f"\n1 x {LENGTH} tokens, {ROUNDS} interleaved rounds, 1 thread")
    ratios = {name: [own / alone for own, alone in zip(taken[name], taken["unablated"], strict=True)] for name in arms}
    for name, own in ratios.items():
        print(f"{name:>21} {statistics.median(taken[name]):7.2f} s  {statistics.median(own):.3f} "
              f"({min(own):.3f} to {max(own):.3f})")  # fmt: skip
    assert max(statistics.median(own) for own in ratios.values()) < BOUND


def small() -> Setting:
    torch.manual_seed(0)
    config = LlamaConfig(
        num_hidden_layers=30, hidden_size=576, intermediate_size=1536, num_attention_heads=9, num_key_value_heads=3,
        vocab_size=49152,
    )  # fmt: skip
    checkpoint = wrap_model(LlamaForCausalLM(config).eval(), None, head=True)
    base, calls = planned(checkpoint)
    return Setting(checkpoint, base, calls, torch.randint(3, 49152, (SEQUENCES, SHORT)), None, 0, 0.3)


def gemma() -> Setting:
    text = Text("prose", SHORT, num_sequences=SEQUENCES)
    return opened("example:gemma-3-270m", None, None, LoadOptions(head=True), text, lambda *_: None)[0]


def plain(setting: Setting) -> None:
    with torch.no_grad():
        for _ in range(ARMS + 1):
            setting.model(setting.ids, use_cache=False)


@pytest.mark.parametrize("model", [small, gemma])
def test_many_arms_beside_plain_passes(model: Any, benchmark: Any) -> None:
    torch.set_num_threads(1)
    setting = model()
    last = max(site.layer for site in setting.sites)
    spread = [round(last * number / (ARMS - 1)) for number in range(ARMS)]
    layers = {"layer 0": [0] * ARMS, "all layers": spread, "last layer": [last] * ARMS}

    def arms(name: str) -> None:
        named = [read_arm(f"neuron:{layer}.{number}").ready(setting) for number, layer in enumerate(layers[name])]
        measure(setting, named, 2, lambda *_: None)

    def rounds() -> dict[str, list[float]]:
        taken: dict[str, list[float]] = {name: [] for name in ("plain", *layers)}
        for number in range(ROUNDS):
            for name in list(taken)[:: 1 if number % 2 == 0 else -1]:
                began = time.process_time()
                arms(name) if name in layers else plain(setting)
                taken[name].append(time.process_time() - began)
        return taken

    taken = benchmark.pedantic(rounds, rounds=1, iterations=1)
    print(f"\n{model.__name__}: {SEQUENCES} x {SHORT} tokens, {ARMS} arms, {ROUNDS} interleaved rounds, 1 thread")
    for name, own in taken.items():
        ratios = [each / alone for each, alone in zip(own, taken["plain"], strict=True)]
        print(f"{name:>12} {statistics.median(own):7.2f} s  {statistics.median(ratios):.3f} "
              f"({min(ratios):.3f} to {max(ratios):.3f})")  # fmt: skip
