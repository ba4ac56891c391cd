"""Measures a scan and the passes it is compared with: seconds, tokens per second, peak memory, longest sequence."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sinkscope.capture import Capture, Plan, plan
from sinkscope.capture.alone import alone
from sinkscope.checkpoints import Checkpoint, LoadOptions, open_checkpoint, wrap_model
from sinkscope.checkpoints.checkpoint import check_length, default_length
from sinkscope.checkpoints.checks import NotCausal
from sinkscope.checkpoints.classes import unwrapped
from sinkscope.checkpoints.forward import DRY_RUN_TOKENS, Forward, eager
from sinkscope.engine.batch_size import chosen_batch, free_bytes, memory_needed, return_freed
from sinkscope.engine.collector import Collector
from sinkscope.engine.self_check import self_check
from sinkscope.errors import SinkscopeError
from sinkscope.metrics.spectra import cheap_spectra
from sinkscope.runs.defaults import EPSILON, NUM_SEQUENCES, check_not_too_large
from sinkscope.runs.saved.speed import BACKBONE, EAGER, LATER, PLAIN, SCAN, Cost, Speed

if TYPE_CHECKING:
    from sinkscope.engine.loop import Progress

# Peak memory of a function call, on the GPU that a model is on or on this machine's CPU.


STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def peak_bytes(run: Callable[[], Any], device: torch.device) -> int | None:
    """Peak memory of `run` in bytes, above what was held before: allocated on a CUDA device, resident on a CPU.

    Memory that was freed before is none that is held: on a CPU, `run` would take it again without a trace in the peak.
    None where no peak can be measured: other accelerators, systems without Linux's /proc.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        return torch.cuda.max_memory_allocated(device) - before
    return_freed()  # before the reset, which sets the peak to what is resident
    if device.type != "cpu" or not _reset():
        return None
    before = _resident("VmRSS")
    run()
    return max(0, _resident("VmHWM") - before)


def _reset() -> bool:
    """Resets the process's peak resident memory; False where the system has no such counter or forbids it."""
    try:
        RESET.write_text("5")
    except OSError:
        return False
    return True


def _resident(field: str) -> int:
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


# The passes that a scan is compared with: with logits, without them, scanned, and with eager attention maps.


@dataclass(frozen=True)
class Passes:
    """The contenders on one model; each is a function of token ids, [sequence, T]."""

    model: nn.Module
    found: Plan
    run: dict[str, Callable[[Tensor], Any]]

    @classmethod
    def of(cls, model: nn.Module, has_head: bool, ids: Tensor) -> Passes:
        """`has_head`: whether the model gives logits. `ids`: token ids for the dry run that finds attention calls."""
        base = unwrapped(model)
        forward, whole = Forward(base), Forward(model)
        calls = plan(base, lambda: forward(ids[:1, :DRY_RUN_TOKENS]))
        capture = Capture(base, calls, lambda view, row: None, EPSILON)

        def scan(ids: Tensor, sampled: int | None = None) -> None:
            collector = Collector(ids.shape[1], sampled=sampled)
            collector.begin()
            capture.on_layer = collector.add
            with capture.watching(None, ids.shape[1]):
                forward(ids)
            collector.commit()

        def maps(ids: Tensor) -> Any:
            with eager(base):
                return forward(ids, output_attentions=True)

        run: dict[str, Callable[[Tensor], Any]] = {PLAIN: whole} if has_head else {}
        run |= {BACKBONE: forward, SCAN: scan, LATER: partial(scan, sampled=0), EAGER: maps}
        return cls(model, calls, run)

    def leave_out(self, count: int, length: int, vocabulary: int, free: int | None) -> dict[str, int]:
        """Removes the contenders that would not fit into memory; returns the bytes that each would need."""
        size = next(parameter.element_size() for parameter in self.model.parameters())
        needs = {PLAIN: count * length * vocabulary * size, EAGER: count * self.map_bytes(length)}
        left_out = {
            name: needed for name, needed in needs.items() if name in self.run and free is not None and needed > free
        }
        for name in left_out:
            del self.run[name]
        return left_out

    def timed(self, ids: Tensor, rounds: int, done: Callable[[int, int], None]) -> dict[str, list[float]]:
        """Seconds of each contender in each round. A round runs every contender once, so that a slow phase of the
        machine affects them all. `done` is called before each pass with the number of passes done, and of all."""
        seconds: dict[str, list[float]] = {name: [] for name in self.run}
        with torch.no_grad():
            for number in range(rounds + 1):
                for place, (name, run) in enumerate(self.run.items()):
                    done(number * len(self.run) + place, (rounds + 1) * len(self.run))
                    began = time.perf_counter()
                    run(ids)
                    _finish(ids.device)
                    if number:  # the first round warms up
                        seconds[name].append(time.perf_counter() - began)
        return seconds

    def peak(self, name: str, ids: Tensor) -> int | None:
        """Peak memory of one pass in bytes, above what was held before it; None where it cannot be measured."""
        with torch.no_grad():
            return peak_bytes(lambda: self.run[name](ids), ids.device)

    def map_bytes(self, length: int) -> int:
        """Bytes of the eager attention maps of one sequence: heads x T x T in every layer, in the model's dtype."""
        size = next(parameter.element_size() for parameter in self.model.parameters())
        return sum(site.heads for site in self.found.sites) * length * length * size


def _finish(device: torch.device) -> None:
    """Waits until an accelerator has done its queued work."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize()


# Measures a scan and the passes it is compared with: seconds, tokens per second, peak memory, longest sequence.


SEQ_LEN, ROUNDS = 1024, 5
SHORTEST = 32


@alone("a benchmark")
def bench(
    model: Any, *, seq_len: int | None = None, batch_size: int | None = None, rounds: int = ROUNDS,
    options: LoadOptions = LoadOptions(), progress: Progress | None = None,
) -> Speed:  # fmt: skip
    """Times a plain forward pass, the backbone, a scan and eager attention maps on random token ids.

    Every round runs each contender once.

    Args:
        model: a name or a loaded model, as for `sinkscope.scan`. A model that is no causal language model has no plain
            contender.
        seq_len: tokens per sequence; None takes 1024, or the model's maximum where that is smaller.
        batch_size: sequences per pass; None takes what a scan would choose.

    Raises SinkscopeError for a model that does not read token ids, and where a pass does not fit into memory.
    """
    report = progress or (lambda stage, done, total: None)
    for option, number in (("--rounds", rounds), ("--batch-size", batch_size)):
        if number is not None and number < 1:
            raise SinkscopeError(f"{option} {number}: at least 1 is needed")
    for name, value in (("rounds", rounds), ("batch-size", batch_size), ("seq-len", seq_len)):
        check_not_too_large(name, value)
    if seq_len is not None:
        _check_timed(seq_len)
    report("loading", 0, 0)
    checkpoint, has_head = _open(model, options, report)
    length = _length(seq_len, checkpoint)
    began = time.perf_counter()
    passes = Passes.of(checkpoint.model, has_head, random_ids(checkpoint, 1, length))
    set_up = time.perf_counter() - began
    size = batch_size or chosen_batch(length, checkpoint.device)
    ids = random_ids(checkpoint, size, length)
    free = free_bytes(checkpoint.device)
    left_out = passes.leave_out(size, length, checkpoint.vocabulary, free)
    with memory_needed(f"passes of {size} x {length} tokens (a smaller --seq-len or --batch-size may fit)"):
        seconds = passes.timed(ids, rounds, lambda done, total: report("timing", done, total))
        costs: dict[str, Cost] = {}
        for name, times in seconds.items():
            report("memory", len(costs), len(seconds))
            costs[name] = _cost(passes, name, times, ids, free, checkpoint.max_positions)
        report("checking", 0, 0)
        start = checkpoint.seconds | {"self_check": _check_seconds(passes, ids)}
    facts = checkpoint.facts
    return Speed(
        model=facts["id"],
        device=str(checkpoint.device),
        dtype=facts["dtype"],
        threads=torch.get_num_threads(),
        seq_len=length,
        batch_size=size,
        set_up=set_up,
        positions=checkpoint.max_positions,
        free_bytes=free,
        costs=costs,
        left_out=left_out,
        start=start,
        first_batches=_first_batches(checkpoint, size, length),
    )


def _open(model: Any, options: LoadOptions, report: Progress) -> tuple[Checkpoint, bool]:
    """Opens the model, with its language-model head where it has one, and tells whether it has one."""
    try:
        checkpoint, has_head = _load(model, replace(options, head=True), report), True
    except NotCausal:
        checkpoint, has_head = _load(model, options, report), False
    if checkpoint.task is not None or Forward(unwrapped(checkpoint.model)).signal is not None:
        raise SinkscopeError(f"{checkpoint.name} does not read token ids: bench times text models")
    return checkpoint, has_head


def _load(model: Any, options: LoadOptions, report: Progress) -> Checkpoint:
    return open_checkpoint(model, options, report) if isinstance(model, str) else wrap_model(model, head=options.head)


def _length(asked: int | None, checkpoint: Checkpoint) -> int:
    """Tokens per sequence. Raises SinkscopeError where they are too few, or more than the model's positions."""
    length = default_length(checkpoint, SEQ_LEN) if asked is None else asked
    _check_timed(length)
    check_length(checkpoint, length)
    return length


def _check_timed(length: int) -> None:
    if length < SHORTEST:
        raise SinkscopeError(f"--seq-len {length}: at least {SHORTEST} tokens are needed for a timing")


def random_ids(checkpoint: Checkpoint, count: int, length: int) -> Tensor:
    """Token ids [count, length] drawn with seed 0: the cost of a pass does not depend on them."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(checkpoint.vocabulary, (count, length), generator=generator).to(checkpoint.device)


def _check_seconds(passes: Passes, ids: Tensor) -> float:
    """Seconds of the self-check that precedes a scan."""
    base = unwrapped(passes.model)
    began = time.perf_counter()
    self_check(base, passes.found, Forward(base), ids[:1])
    return time.perf_counter() - began


def _first_batches(checkpoint: Checkpoint, size: int, length: int) -> int:
    """How many batches of a default scan measure matrix_entropy."""
    width = getattr(checkpoint.model.config.get_text_config(), "hidden_size", length)  # type: ignore[union-attr, operator]
    return -(-min(NUM_SEQUENCES, cheap_spectra(length, width)) // size)


def _cost(
    passes: Passes, name: str, seconds: list[float], ids: Tensor, free: int | None, positions: int | None
) -> Cost:
    peak = passes.peak(name, ids)
    longest = None
    if free is not None and name == EAGER:
        longest = math.isqrt(free * 1024 * 1024 // passes.map_bytes(1024))
    elif free is not None and peak is not None:
        longest = _longest(passes, name, ids, free, positions)
    if longest is not None and positions is not None:
        longest = min(longest, positions)
    return Cost(seconds, ids.numel() / statistics.median(seconds), peak, longest)


def _longest(passes: Passes, name: str, ids: Tensor, free: int, positions: int | None) -> int | None:
    """Extrapolates the longest sequence that fits, from the peak memory of one sequence and of one half as long.

    Peak memory grows linearly in T. None where a peak is unknown or the two do not grow.
    """
    row = ids[:1].repeat(1, 2) if positions is None or 2 * ids.shape[1] <= positions else ids[:1]
    length = row.shape[1]
    half, whole = (passes.peak(name, row[:, :stop]) for stop in (length // 2, length))
    if half is None or whole is None or not half < whole < free:
        return None
    return int((free - whole) / (whole - half) * (length - length // 2)) + length
