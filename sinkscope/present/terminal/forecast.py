"""A dry run at the terminal, in 80 columns: what would be read, memory, passes, time."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from sinkscope.present.numbers import memory
from sinkscope.present.terminal.table import aligned
from sinkscope.present.text import printable
from sinkscope.runs.forecast import CONFIGURATION, Forecast

WIDTH = 80
UNREAD = 5
"""Most modules that are named among those that are not read."""

PATHS = {"interface": "attention interface", "inline": "the model's own code", None: "not known"}


def render_forecast(found: Forecast) -> str:
    """The forecast as text, which ends with what it is: an estimate."""
    lines = [
        *_wrapped(
            f"Dry run of {found.command}: {printable(found.model)}, {found.family}, {found.parameters:,} parameters in "
            f"{found.dtype}. Nothing was loaded and nothing is written."
        ),
        "",
        *_attention(found),
        "",
        *_memory(found),
        "",
        *_passes(found),
        "",
        *_time(found),
    ]
    for note in found.notes:
        lines += _wrapped(f"note: {printable(note)}")
    return "\n".join([*lines, ""])


def _attention(found: Forecast) -> list[str]:
    rows = [("attention", "calls", "heads", "KV heads", "read by")]
    for each in found.attention:
        score = "" if each.score in ("softmax", "unknown") else f", {printable(each.score)}"
        rows.append(
            (
                printable(f"{each.stream} {each.kind}") + score, str(each.calls), str(each.heads), str(each.kv_groups),
                PATHS.get(each.path, printable(str(each.path))),
            )
        )  # fmt: skip
    lines = aligned(rows) if found.attention else ["The configuration names no count of attention layers and heads."]
    lines += [f"{found.layers} attention calls, {found.heads:,} heads, found by {found.found_by}"]
    if found.found_by == CONFIGURATION and found.why is not None:
        lines += _wrapped(f"why not by a pass: {printable(found.why)}")
    if found.unread:
        more = f" and {len(found.unread) - UNREAD} more" if len(found.unread) > UNREAD else ""
        lines += _wrapped(
            f"not read, as their attention is no single map of queries and keys: "
            f"{', '.join(map(printable, found.unread[:UNREAD]))}{more}"
        )
    return lines


def _memory(found: Forecast) -> list[str]:
    held = found.memory
    piece = f"{found.batch_size} x {found.seq_len} tokens"
    rows = [
        ("memory", ""),
        (f"weights, {found.dtype}", _size(held.weights)),
        (f"most that a pass of {piece} holds", _size(held.activations)),
        ("what watching adds to it", _size(held.watching)),
    ]
    if held.logits:
        rows.append(("logits of the unablated model", _size(held.logits)))
    if held.kept is not None:
        rows.append(("kept of all sequences, on the CPU", _size(held.kept)))
    if held.files is not None:
        rows.append(("(weight files)", _size(held.files)))
    lines = aligned(rows)
    if held.free is not None and found.fits is not None:
        fits = "fits" if found.fits else "does not fit"
        lines += _wrapped(f"{fits} on {held.device}, where {_size(held.free)} are free now")
    if found.gpus is not None:
        cards, each, hold = ("GPU", "", "holds") if found.gpus == 1 else ("GPUs", "each ", "hold")
        lines += _wrapped(
            f"{found.gpus} {cards} of {found.gpu_bytes / 1e9:g} GB, {each}filled to {found.margin:.0%}, {hold} "
            "weights, pass and sums"
        )
    return lines


def _passes(found: Forecast) -> list[str]:
    rows = [("forward passes", "passes", "sequences", "tokens each", "tokens")]
    rows += [
        (printable(each.what), f"{each.passes:,}", f"{each.sequences:,}", f"{each.length:,}", f"{each.tokens:,}")
        for each in found.passes
    ]
    lines = aligned(rows)
    if found.trials is not None:
        lines += _wrapped(
            f"each sequence is read {found.trials} times: once unablated, once under each arm, and once for each draw "
            "of a control"
        )
    return lines


def _time(found: Forecast) -> list[str]:
    if found.time is None or found.flops is None:
        return ["The time cannot be estimated from the configuration alone."]
    time = found.time
    rate = f"{time.rate / 1e12:.3g} TFLOP/s"
    source = f"{time.utilisation:.0%} of {'the rate measured for a matrix product' if time.measured else 'the peak'}"
    return _wrapped(
        f"An estimate: {found.flops:.3g} FLOP on {printable(time.machine)} at {rate} ({source}) take about "
        f"{duration(time.seconds)}, without loading; it may be off by a factor of {time.factor:g} "
        f"({duration(time.least)} to {duration(time.most)})."
    )


def render_total(found: Sequence[Forecast], notes: Sequence[str]) -> str:
    """The passes and the time of several forecasts together, and what they leave out."""
    passes = sum(each.passes for forecast in found for each in forecast.passes)
    words = f"{len(found)} measurements in all, {passes:,} forward passes"
    if times := [forecast.time for forecast in found if forecast.time is not None]:
        least, most = (sum(getattr(each, end) for each in times) for end in ("least", "most"))
        words += f", about {duration(sum(each.seconds for each in times))} ({duration(least)} to {duration(most)})"
    lines = ["", *_wrapped(f"{words}.")] if found else ["Nothing would be measured."]
    for note in notes:
        lines += _wrapped(f"note: {printable(note)}")
    return "\n".join([*lines, ""])


def duration(seconds: float) -> str:
    """A time in the unit that suits it."""
    for size, unit in ((86400, "days"), (3600, "hours"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}" if seconds >= 10 * size else f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"


def _size(count: int | None) -> str:
    if count is None:
        return "not known"
    return memory(count, "GiB", 1) if count >= 2**30 else memory(count, "MiB", 1)


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent="  ", break_on_hyphens=False)
