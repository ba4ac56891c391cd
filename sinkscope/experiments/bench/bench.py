"""Measures a scan and the passes it is compared with: seconds, tokens per second, peak memory, longest sequence."""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sinkscope.capture.alone import alone
from sinkscope.checkpoints import Checkpoint, LoadOptions, open_checkpoint, wrap_model
from sinkscope.checkpoints.checkpoint import check_length
from sinkscope.checkpoints.checks import NotCausal
from sinkscope.checkpoints.forward import Forward
from sinkscope.checkpoints.loading import unwrapped
from sinkscope.engine.batch_size import chosen_batch, free_bytes, memory_needed
from sinkscope.engine.loop import Progress
from sinkscope.engine.self_check import self_check
from sinkscope.errors import SinkscopeError
from sinkscope.experiments.bench.contenders import Passes
from sinkscope.metrics.spectra import cheap_spectra
from sinkscope.runs.defaults import NUM_SEQUENCES, check_not_too_large
from sinkscope.runs.saved.speed import EAGER, Cost, Speed

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
    for name, given in (("rounds", rounds), ("batch-size", batch_size), ("seq-len", seq_len)):
        check_not_too_large(name, given)
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
    length = min(SEQ_LEN, checkpoint.max_positions or SEQ_LEN) if asked is None else asked
    if length < SHORTEST:
        raise SinkscopeError(f"--seq-len {length}: at least {SHORTEST} tokens are needed for a timing")
    check_length(checkpoint, length)
    return length


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
