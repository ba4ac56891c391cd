"""A dry run at the terminal, in 80 columns: what would be read, memory, passes, time."""

from __future__ import annotations

from collections.abc import Sequence

from sinkscope.present.numbers import memory
from sinkscope.present.terminal.table import fitted
from sinkscope.present.text import printable, wrapped
from sinkscope.runs.forecast import CONFIGURATION, Forecast

UNREAD = 5
"""Most modules that are named among those that are not read."""

PATHS = {"interface": "attention interface", "inline": "the model's own code", None: "not known"}


def render_forecast(forecast: Forecast) -> str:
    """The forecast as text, which ends with what it is: an estimate."""
    lines = [
        *_hanging(
            f"Dry run of {forecast.command}: {printable(forecast.model)}, {forecast.family}, {forecast.parameters:,} "
            f"parameters in {forecast.dtype}. Nothing was loaded and nothing is written."
        ),
        "",
        *_attention(forecast),
        "",
        *_memory(forecast),
        "",
        *_passes(forecast),
        "",
        *_time(forecast),
    ]
    for note in forecast.notes:
        lines += _hanging(f"note: {printable(note)}")
    return "\n".join([*lines, ""])


def _attention(forecast: Forecast) -> list[str]:
    rows = [("attention", "calls", "heads", "KV heads", "read by")]
    for kind in forecast.attention:
        score = "" if kind.score in ("softmax", "unknown") else f", {printable(kind.score)}"
        rows.append(
            (
                printable(f"{kind.stream} {kind.kind}") + score, str(kind.calls), str(kind.heads), str(kind.kv_groups),
                PATHS.get(kind.path, printable(str(kind.path))),
            )
        )  # fmt: skip
    none = "The configuration names no count of attention layers and heads."
    lines = fitted(rows) if forecast.attention else _hanging(none)
    lines += _hanging(f"{forecast.layers} attention calls, {forecast.heads:,} heads, found by {forecast.found_by}")
    if forecast.found_by == CONFIGURATION and forecast.why is not None:
        lines += _hanging(f"why not by a pass: {printable(forecast.why)}")
    if forecast.unread:
        more = f" and {len(forecast.unread) - UNREAD} more" if len(forecast.unread) > UNREAD else ""
        lines += _hanging(
            f"not read, as their attention is no single map of queries and keys: "
            f"{', '.join(map(printable, forecast.unread[:UNREAD]))}{more}"
        )
    return lines


def _memory(forecast: Forecast) -> list[str]:
    held = forecast.memory
    piece = f"{forecast.batch_size} x {forecast.seq_len} tokens"
    rows = [
        ("memory", ""),
        (f"weights, {forecast.dtype}", _size(held.weights)),
        (f"most that a pass of {piece} holds", _size(held.activations)),
        ("what watching adds to it", _size(held.watching)),
    ]
    if held.logits:
        rows.append(("logits of the unablated model", _size(held.logits)))
    if held.kept is not None:
        rows.append(("kept of all sequences, on the CPU", _size(held.kept)))
    if held.files is not None:
        rows.append(("(weight files)", _size(held.files)))
    lines = fitted(rows)
    if held.free is not None and forecast.fits is not None:
        fits = "fits" if forecast.fits else "does not fit"
        lines += _hanging(f"{fits} on {held.device}, where {_size(held.free)} are free now")
    if forecast.gpus is not None:
        cards, each, hold = ("GPU", "", "holds") if forecast.gpus == 1 else ("GPUs", "each ", "hold")
        lines += _hanging(
            f"{forecast.gpus} {cards} of {forecast.gpu_bytes / 1e9:g} GB, {each}filled to {forecast.margin:.0%}, "
            f"{hold} weights, pass and sums"
        )
    return lines


def _passes(forecast: Forecast) -> list[str]:
    rows = [("forward passes", "passes", "sequences", "tokens each", "tokens")]
    rows += [
        (printable(entry.what), f"{entry.passes:,}", f"{entry.sequences:,}", f"{entry.length:,}", f"{entry.tokens:,}")
        for entry in forecast.passes
    ]
    lines = fitted(rows)
    if forecast.trials is not None:
        lines += _hanging(
            f"each sequence is read {forecast.trials} times: once unablated, once under each arm, and once for each "
            "draw of a control"
        )
    return lines


def _time(forecast: Forecast) -> list[str]:
    if forecast.time is None or forecast.flops is None:
        return ["The time cannot be estimated from the configuration alone."]
    time = forecast.time
    rate = f"{time.rate / 1e12:.3g} TFLOP/s"
    source = f"{time.utilisation:.0%} of {'the rate measured for a matrix product' if time.measured else 'the peak'}"
    return _hanging(
        f"An estimate: {forecast.flops:.3g} FLOP on {printable(time.machine)} at {rate} ({source}) take about "
        f"{duration(time.seconds)}, without loading; it may be off by a factor of {time.factor:g} "
        f"({duration(time.least)} to {duration(time.most)})."
    )


def render_total(forecasts: Sequence[Forecast], notes: Sequence[str]) -> str:
    """The passes and the time of several forecasts together, and what they leave out."""
    passes = sum(entry.passes for forecast in forecasts for entry in forecast.passes)
    words = f"{len(forecasts)} measurements in all, {passes:,} forward passes"
    if times := [forecast.time for forecast in forecasts if forecast.time is not None]:
        least, most = (sum(getattr(time, end) for time in times) for end in ("least", "most"))
        words += f", about {duration(sum(time.seconds for time in times))} ({duration(least)} to {duration(most)})"
    lines = ["", *_hanging(f"{words}.")] if forecasts else ["Nothing would be measured."]
    for note in notes:
        lines += _hanging(f"note: {printable(note)}")
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


def _hanging(text: str) -> list[str]:
    return wrapped(text, rest="  ")
