"""What `--measure` adds to the time of a scan. Not part of the default run:

    pytest -s -o addopts= tests/benchmarks/benchmark_measures.py
    pytest -s -o addopts= tests/benchmarks/benchmark_measures.py -k command
    pytest -s -o addopts= "tests/benchmarks/benchmark_measures.py::test_cost_of_measurements[B]"

The first takes an hour, the others take one part of it.

`command` types `sinkscope scan example:gemma-3-270m` in a new process each time, on all cores, and takes wall time and
processor time. The others scan 32 sequences of 256 tokens with the first 6 layers of benchmark_scan's models, from the
loaded model to the finished tables, and take the processor time of one thread: A and B have random weights and read
random tokens, C is Gemma-3-270M and reads prose. Each round makes a plain scan and one with each set of measurements,
every other round in reverse, so that a change in the machine's speed affects all of them; the ratios are of the same
round. Other processes on the machine change one time by a tenth. Printed are the least time, then the mean of the
rounds' ratios with its 95 % interval.

In the environment, ROUNDS=12 takes another number of rounds, LAYERS=18 more layers, and MEASURES="switch all" some of
the sets alone.
"""

from __future__ import annotations

import math
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from benchmark_scan import model_of
from scipy.special import stdtrit
from torch import nn

import sinkscope
from sinkscope.checkpoints import open_checkpoint
from sinkscope.inputs import read_corpus, token_rules
from sinkscope.runs.defaults import NUM_SEQUENCES

LAYERS, ROUNDS = int(os.environ.get("LAYERS", "6")), int(os.environ.get("ROUNDS", "5"))
PLAIN, LENGTH = "plain", 256
WITHOUT_STREAMING = ("smoothing", "switch", "modules", "spikes", "cosines")
"""`all` also holds `first` and `regions`, which need text of their own."""
SETS: dict[str, tuple[str, ...]] = {**{name: (name,) for name in WITHOUT_STREAMING}, "all": WITHOUT_STREAMING}
Seconds = TypeVar("Seconds", float, tuple[float, float])
ASKED = {PLAIN: (), **{name: SETS[name] for name in os.environ.get("MEASURES", " ".join(SETS)).split()}}


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


def rounds(seconds_of_one: Callable[[tuple[str, ...]], Seconds]) -> dict[str, list[Seconds]]:
    """The seconds of every set in each round."""
    taken: dict[str, list[Seconds]] = {asked: [] for asked in ASKED}
    for number in range(ROUNDS):
        for asked in list(ASKED)[:: 1 if number % 2 == 0 else -1]:
            taken[asked].append(seconds_of_one(ASKED[asked]))
    return taken


def processor_time_of_commands() -> float:
    """Seconds that the processes started from here have used, of all cores."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def show(what: str, taken: dict[str, list[float]]) -> None:
    print(f"\n{what}, {ROUNDS} interleaved rounds")
    for asked, times in taken.items():
        ratios = [own / plain for own, plain in zip(times, taken[PLAIN], strict=True)]
        mean, half = statistics.mean(ratios), math.nan
        if ROUNDS > 1:
            half = float(stdtrit(ROUNDS - 1, 0.975)) * statistics.stdev(ratios) / ROUNDS**0.5
        print(f"{asked:>10} {min(times):7.2f} s   {mean:.3f} ({mean - half:.3f} to {mean + half:.3f})")


@pytest.mark.parametrize("name", ["A", "B", "C"])
def test_cost_of_measurements(benchmark: Any, name: str) -> None:
    torch.set_num_threads(1)
    model, tokenizer, ids = model_and_text(name)
    cut(model)
    seconds_of(model, tokenizer, ids[:8], WITHOUT_STREAMING)  # the first of each is slower
    taken = benchmark.pedantic(rounds, (lambda measure: seconds_of(model, tokenizer, ids, measure),), rounds=1)
    show(f"{name}: {len(ids)} x {LENGTH} tokens, {LAYERS} layers, processor time on 1 thread", taken)


def test_cost_of_measurements_in_a_command(benchmark: Any, tmp_path: Path) -> None:
    def seconds_of_command(measure: tuple[str, ...]) -> tuple[float, float]:
        asked = [word for name in measure for word in ("--measure", name)]
        out = ("--out", str(tmp_path / "run"), "--force", "--quiet")
        began, busy = time.monotonic(), processor_time_of_commands()
        subprocess.run([sys.executable, "-m", "sinkscope", "scan", "example:gemma-3-270m", *out, *asked], check=True)
        return time.monotonic() - began, processor_time_of_commands() - busy

    seconds_of_command(WITHOUT_STREAMING)  # compiles what is not compiled yet
    taken = benchmark.pedantic(rounds, (seconds_of_command,), rounds=1)
    for place, clock in enumerate(("wall time", "processor time on all cores")):
        chosen = {asked: [both[place] for both in times] for asked, times in taken.items()}
        show(f"sinkscope scan example:gemma-3-270m, {clock}", chosen)
