"""`sinkscope bench` at the terminal: seconds, ratios, memory, and what fits into this machine."""

from __future__ import annotations

import statistics

from sinkscope.present.numbers import fixed, memory
from sinkscope.present.terminal.table import fitted
from sinkscope.present.text import printable, wrapped
from sinkscope.runs.saved.speed import BACKBONE, CONTENDERS, EAGER, LATER, PLAIN, SCAN, Speed

SEQUENCES = 32


def render_bench(speed: Speed) -> str:
    """One row per contender, then what each computes, how long a scan takes and what fits into memory."""
    threads = f", {speed.threads} thread{'s' * (speed.threads != 1)}" if speed.device == "cpu" else ""
    rounds = len(speed.costs[SCAN].seconds)
    lines = [
        *wrapped(
            f"{printable(speed.model)}, {speed.dtype} on {speed.device}{threads}: {speed.batch_size} x "
            f"{speed.seq_len} random tokens, {rounds} round{'s' * (rounds != 1)} of all contenders"
        ),
        "",
        *_table(speed),
        "",
    ]
    wide = max(map(len, speed.costs)) + 2
    for name in speed.costs:
        lines += wrapped(f"{name:{wide}}{CONTENDERS[name]}", rest=" " * wide)
    lines += ["", *wrapped(f"ratios: median over rounds (least-most). {_scan_time(speed)}")]
    lines += wrapped(_start(speed))
    for name, needed in speed.left_out.items():
        what = "attention maps" if name == EAGER else "logits"
        lines += wrapped(f"{name} is left out: its {what} alone would take {memory(needed, 'GiB')}.")
    lines += wrapped(_what_fits(speed))
    return "\n".join([*lines, ""])


def _table(speed: Speed) -> list[str]:
    bases = [name for name in (PLAIN, BACKBONE) if name in speed.costs]
    rows = [["", "seconds", "tokens/s", *(f"/ {base}" for base in bases), "peak memory"]]
    for name, cost in speed.costs.items():
        ratios = [_ratio(speed.ratios[name][base]) if name != base else "1" for base in bases]
        seconds, speed_of = fixed(statistics.median(cost.seconds), 3), f"{cost.tokens_per_second:,.0f}"
        rows.append([name, seconds, speed_of, *ratios, memory(cost.peak_bytes, "MiB")])
    return fitted(rows)


def _ratio(spread: tuple[float, float, float]) -> str:
    return "{:.2f} ({:.2f}-{:.2f})".format(*spread)


def _scan_time(speed: Speed) -> str:
    batches = -(-SEQUENCES // speed.batch_size)
    first, later = (statistics.median(speed.costs[name].seconds) for name in (SCAN, LATER))
    spectra = min(batches, speed.first_batches) * max(0.0, first - later)
    seconds = batches * min(first, later) + spectra
    return (
        f"A scan of {SEQUENCES} sequences of {speed.seq_len} tokens takes {_about(seconds)} here after its start, "
        f"of which {spectra / seconds:.0%} for matrix_entropy."
    )


def _about(seconds: float) -> str:
    return f"about {seconds:.0f} s" if seconds >= 1 else "less than 1 s"


def _start(speed: Speed) -> str:
    """Seconds before a scan's first batch."""
    told = [f"dry run {speed.set_up:.1f} s"]
    if "loading" in speed.start:
        hashed, waited = speed.start["hash"], speed.start["wait_for_hash"]
        told.insert(0, f"loading {speed.start['loading']:.1f} s")
        told.append(f"hash of the weights {hashed:.1f} s beside the loading, which waits {waited:.1f} s for it")
    if "self_check" in speed.start:
        told.append(f"self-check {speed.start['self_check']:.1f} s")
    return f"Start: {', '.join(told)}."


def _what_fits(speed: Speed) -> str:
    if speed.free_bytes is None:
        return "What fits is not known: this device does not tell its memory."
    longest = [f"{name} {_tokens(cost.longest, speed.positions)}" for name, cost in speed.costs.items()]
    return (
        f"Longest single sequence in the {memory(speed.free_bytes, 'GiB', 1)} free now, extrapolated: "
        f"{', '.join(longest)} (a straight line through two peaks; eager: heads x T x T)."
    )


def _tokens(longest: int | None, positions: int | None) -> str:
    if longest is None:
        return "unknown"
    return f"{longest:,} tokens" + (" (the model's own limit)" if longest == positions else "")
