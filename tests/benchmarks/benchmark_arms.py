"""What a pass under an arm costs beside the unablated one on a long text. Not part of the default run:

    pytest -s -o addopts= tests/benchmarks/benchmark_arms.py

Runs one sequence of 4,096 tokens of prose through Gemma-3-270M, with its next-token head, under each arm and under none
as `arms` does. Each of two rounds runs all of them, the second in reverse; the ratios are of the same round.
Counts the processor's time of this process on one thread. A mask of all queries and keys ends the benchmark. Prints
seconds and ratios, median and range over rounds.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import pytest
import torch

from sinkscope.capture.masks import lazy
from sinkscope.checkpoints import LoadOptions
from sinkscope.experiments.arms.arm import Arm, Pass, Setting, Unablated
from sinkscope.experiments.arms.asked import Text
from sinkscope.experiments.arms.engine import run
from sinkscope.experiments.arms.grammar import read_arm
from sinkscope.experiments.arms.opening import opened
from sinkscope.experiments.arms.sinks import SinkCount

LENGTH, ROUNDS, BOUND = 4096, 2, 3.0
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
