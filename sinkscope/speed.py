"""What a scan costs on this machine beside the passes it stands for: seconds, tokens a second, memory, what fits."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sinkscope.capture import Capture, Plan, plan
from sinkscope.checkpoints import Checkpoint, LoadOptions, open_checkpoint, wrap_model
from sinkscope.checkpoints.causal import NotCausal
from sinkscope.checkpoints.loading import unwrapped
from sinkscope.errors import SinkscopeError
from sinkscope.forward import Forward
from sinkscope.loop import Progress, chosen_batch, memory_needed
from sinkscope.measured import Collector
from sinkscope.peak import free_bytes, peak_bytes
from sinkscope.reading import DRY_RUN_TOKENS, check_length
from sinkscope.selfcheck import eager

PLAIN, BACKBONE, SCAN, EAGER = "plain", "backbone", "scan", "eager"
CONTENDERS = {
    PLAIN: "model(ids), with logits",
    BACKBONE: "the same without the language-model head",
    SCAN: "backbone, capture and every metric of a scan's batch",
    EAGER: "backbone with eager attention and output_attentions=True",
}
SEQ_LEN, ROUNDS = 1024, 5
SHORTEST = 32


@dataclass(frozen=True)
class Cost:
    """One contender over all rounds.

    Attributes:
        seconds: of each round, all contenders by turns within a round.
        tokens_per_second: from the median round.
        peak_bytes: most memory above what was held before, of one pass; None where it cannot be had.
        longest: tokens of the longest single sequence that fits, extrapolated; None where unknown.
    """

    seconds: list[float]
    tokens_per_second: float
    peak_bytes: int | None
    longest: int | None


@dataclass(frozen=True)
class Speed:
    """The outcome of `bench`. `ratios[a][b]`: median, least and most over rounds of seconds of a / seconds of b.

    `left_out`: contenders whose maps or logits alone would not fit into `free_bytes`, and the bytes they take.
    """

    model: str
    device: str
    dtype: str
    threads: int
    seq_len: int
    batch_size: int
    set_up: float
    positions: int | None
    free_bytes: int | None
    costs: dict[str, Cost]
    left_out: dict[str, int]

    @property
    def ratios(self) -> dict[str, dict[str, tuple[float, float, float]]]:
        return {a: {b: ratio(self.costs[a].seconds, self.costs[b].seconds) for b in self.costs} for a in self.costs}

    def as_dict(self) -> dict[str, Any]:
        """For JSON: all of it, with what each contender is."""
        what = {name: CONTENDERS[name] for name in self.costs}
        return asdict(self) | {"ratios": self.ratios, "contenders": what}


def bench(
    model: Any, *, seq_len: int | None = None, batch_size: int | None = None, rounds: int = ROUNDS,
    options: LoadOptions = LoadOptions(), progress: Progress | None = None,
) -> Speed:  # fmt: skip
    """Times plain forward, backbone, scan and eager attention maps by turns, on random token ids.

    Args:
        model: a name or a model already loaded, as for `sinkscope.scan`. The plain contender is left out where the
            checkpoint is no causal language model.
        seq_len: tokens a sequence; None = 1024, or the model's positions where they are fewer.
        batch_size: None = what a scan would choose.

    Raises SinkscopeError for a model that does not read token ids, and where a pass does not fit into memory.
    """
    report = progress or (lambda stage, done, total: None)
    if rounds < 1:
        raise SinkscopeError(f"--rounds {rounds}: at least 1 is needed")
    if batch_size is not None and batch_size < 1:
        raise SinkscopeError(f"--batch-size {batch_size}: at least 1 is needed")
    report("loading", 0, 0)
    checkpoint, has_head = _open(model, options)
    length = min(SEQ_LEN, checkpoint.max_positions or SEQ_LEN) if seq_len is None else seq_len
    if length < SHORTEST:
        raise SinkscopeError(f"--seq-len {length}: at least {SHORTEST} tokens are needed for a timing")
    check_length(checkpoint, length)
    began = time.perf_counter()
    passes = Passes.of(checkpoint.model, has_head, random_ids(checkpoint, 1, length))
    set_up = time.perf_counter() - began
    size = batch_size or chosen_batch(length, checkpoint.device)
    ids = random_ids(checkpoint, size, length)
    free = free_bytes(checkpoint.device)
    left_out = passes.leave_out(size, length, checkpoint.vocabulary, free)
    with memory_needed(f"passes of {size} x {length} tokens (a smaller --seq-len or --batch-size may fit)"):
        seconds = passes.timed(ids, rounds, lambda done: report("timing", done, rounds))
        costs = {
            name: _cost(passes, name, times, ids, free, checkpoint.max_positions) for name, times in seconds.items()
        }
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
    )


def _open(model: Any, options: LoadOptions) -> tuple[Checkpoint, bool]:
    """With the head where the checkpoint has one for the next token."""
    checkpoints: list[Checkpoint] = []
    for head in (True, False):
        chosen = LoadOptions(**asdict(options) | {"head": head})
        try:
            checkpoints = [open_checkpoint(model, chosen) if isinstance(model, str) else wrap_model(model, head=head)]
            break
        except NotCausal:
            continue
    checkpoint = checkpoints[0]
    if checkpoint.task is not None or Forward(unwrapped(checkpoint.model)).signal is not None:
        raise SinkscopeError(f"{checkpoint.name} does not read token ids: bench times text models")
    return checkpoint, head


def random_ids(checkpoint: Checkpoint, count: int, length: int) -> Tensor:
    """Token ids [count, length] drawn with seed 0: what a pass costs does not hang on them."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(checkpoint.vocabulary, (count, length), generator=generator).to(checkpoint.device)


@dataclass(frozen=True)
class Passes:
    """The contenders on one model, each a function of token ids [sequence, T]."""

    model: nn.Module
    found: Plan
    run: dict[str, Callable[[Tensor], Any]]

    @classmethod
    def of(cls, model: nn.Module, has_head: bool, ids: Tensor) -> Passes:
        """`has_head`: a plain pass gives logits. `ids`: some to plan by."""
        base = unwrapped(model)
        forward, whole = Forward(base), Forward(model)
        found = plan(base, lambda: forward(ids[:1, :DRY_RUN_TOKENS]))
        holder: list[Collector] = []
        capture = Capture(base, found, lambda view, row: holder[0].add(view))

        def scan(ids: Tensor) -> None:
            holder[:] = [Collector(ids.shape[1])]
            holder[0].begin()
            with capture.watching(None, ids.shape[1]):
                forward(ids)
            holder[0].commit()

        def maps(ids: Tensor) -> Any:
            with eager(base):
                return forward(ids, output_attentions=True)

        run: dict[str, Callable[[Tensor], Any]] = {PLAIN: whole} if has_head else {}
        return cls(model, found, run | {BACKBONE: forward, SCAN: scan, EAGER: maps})

    def leave_out(self, count: int, length: int, vocabulary: int, free: int | None) -> dict[str, int]:
        """Takes away the contenders that would end in the machine's memory, and says what they would take."""
        size = next(parameter.element_size() for parameter in self.model.parameters())
        takes = {PLAIN: count * length * vocabulary * size, EAGER: count * self.map_bytes(length)}
        out = {
            name: needed for name, needed in takes.items() if name in self.run and free is not None and needed > free
        }
        for name in out:
            del self.run[name]
        return out

    def timed(self, ids: Tensor, rounds: int, done: Callable[[int], None]) -> dict[str, list[float]]:
        """Seconds of each contender in each round, by turns, so that a machine's moods hit all alike."""
        seconds: dict[str, list[float]] = {name: [] for name in self.run}
        with torch.no_grad():
            for number in range(rounds + 1):
                done(number)
                for name, run in self.run.items():
                    began = time.perf_counter()
                    run(ids)
                    _finish(ids.device)
                    if number:  # the first round warms up
                        seconds[name].append(time.perf_counter() - began)
        return seconds

    def peak(self, name: str, ids: Tensor) -> int | None:
        """Most bytes above what was held before."""
        with torch.no_grad():
            return peak_bytes(lambda: self.run[name](ids), ids.device)

    def map_bytes(self, length: int) -> int:
        """What eager attention maps of one sequence take: heads x T x T in every layer, in the model's dtype."""
        size = next(parameter.element_size() for parameter in self.model.parameters())
        return sum(site.heads for site in self.found.sites) * length * length * size


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
    """Memory grows with a straight line in T: drawn through the peaks of one sequence and of one half as long."""
    row = ids[:1].repeat(1, 2) if positions is None or 2 * ids.shape[1] <= positions else ids[:1]
    length = row.shape[1]
    half, whole = (passes.peak(name, row[:, :stop]) for stop in (length // 2, length))
    if half is None or whole is None or not half < whole < free:
        return None
    return int((free - whole) / (whole - half) * (length - length // 2)) + length


def _finish(device: torch.device) -> None:
    """Waits for an accelerator: its work is queued."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize()


def ratio(times: list[float], others: list[float]) -> tuple[float, float, float]:
    """Median, least and most of what the one takes over the other in the same round."""
    pairs = [a / b for a, b in zip(times, others, strict=True)]
    return statistics.median(pairs), min(pairs), max(pairs)
