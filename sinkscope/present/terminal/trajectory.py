"""A training's sinks for the terminal: the model at every step, then the heads whose sinks appeared first."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from sinkscope.present.numbers import estimate, fixed, is_missing
from sinkscope.present.terminal.table import fitted
from sinkscope.present.text import next_command, printable, wrapped
from sinkscope.runs.words import of_heads

if TYPE_CHECKING:
    import pandas as pd

HEADS = 8
"""Heads that are listed; emergence.csv holds all."""
STEPS = 12
NOTE = (
    "alpha_0, bos_mass: attention on the first token, mean over all queries and over queries 1 on; mean over heads and "
    "sequences. ±: standard error over sequences."
)


def render_trajectory(
    trajectory: pd.DataFrame, emerged: pd.DataFrame, epsilon: float, written: Iterable[Path] = ()
) -> str:
    """A line per step, then when sinks appeared, in words and by head; for each dataset and stream on its own."""
    lines = []
    parts = list(trajectory.groupby(["domain", "stream"], sort=False))
    for (domain, stream), steps in parts:
        heads = emerged[(emerged["domain"] == domain) & (emerged["stream"] == stream)]
        lines += ["", *wrapped(printable(f"{domain}, stream {stream}"))] if len(parts) > 1 else []
        lines += [*_steps(steps, epsilon), *wrapped(NOTE), "", *wrapped(_answer(heads, epsilon)), *_heads(heads)]
    paths = list(written)
    if paths:
        names = ", ".join(path.name for path in paths)
        lines += ["", *wrapped(f"written to {printable(str(paths[0].parent))}: {names}")]
        drawn = ("--figure", "trajectory", "-o", "trajectory.pdf")
        lines += [f"next: {next_command('plot', paths[0].parent, *drawn)}"]
    return "\n".join([*lines, ""]).lstrip("\n")


def _heads(emerged: pd.DataFrame) -> list[str]:
    """The heads with a sink: those whose sink appeared, then those that had one at every step."""
    heads = emerged[emerged["emerged"].notna()].assign(there=lambda rows: rows["shape"] == "start")
    heads = heads.sort_values(["there", "emerged", "layer", "head"])
    if not len(heads):
        return []
    rows = [("head", "from step", "alpha_0 first", "last", "shape"), *map(_row, heads.to_dict("records"))]
    more = [f"{len(heads) - HEADS} more heads are in emergence.csv"] if len(heads) > HEADS else []
    return ["", *fitted(rows[: HEADS + 1]), *more]


def _steps(trajectory: pd.DataFrame, epsilon: float) -> list[str]:
    model_rows = trajectory[trajectory["level"] == "model"]
    steps = sorted(model_rows["step"].unique())
    shown = steps if len(steps) <= STEPS else [steps[round(i * (len(steps) - 1) / (STEPS - 1))] for i in range(STEPS)]
    rows = [("step", f"sink rate (eps {epsilon:g})", "alpha_0", "bos_mass", "dormant heads")]
    for step in shown:
        values = model_rows[model_rows["step"] == step].set_index("metric")
        rows.append((
            str(step), "-" if is_missing(rate := values["value"]["sink_rate"]) else f"{rate:.1f} %",
            estimate(values["value"]["sink_score"], values["sem"]["sink_score"], 3),
            estimate(values["value"]["bos_mass"], values["sem"]["bos_mass"], 3), fixed(values["value"]["dormant"], 0),
        ))  # fmt: skip
    more = [f"{len(steps) - STEPS} more steps are in trajectory.csv"] if len(steps) > STEPS else []
    return [*fitted(rows), *more]


def _answer(emerged: pd.DataFrame, epsilon: float) -> str:
    last = emerged[emerged["emerged"].notna()]
    if not len(emerged):
        return "Sinks are not judged: what stands in softmax's place gives no shares that a threshold could fit."
    if not len(last):
        return f"No head has a sink at the last step (alpha_0 > {epsilon:g})."
    early = int((last["shape"] == "start").sum())
    jumps, ramps, back = (int((last["shape"] == shape).sum()) for shape in ("jump", "ramp", "returned"))
    returned = f" In {back} it was there at the first step, was lost and came back." if back else ""
    return (
        f"At the last step, {of_heads(len(last), len(emerged), 'have')} a sink (alpha_0 > {epsilon:g}). In {early} of "
        f"these heads it was there at every step, in {jumps} it came in a jump between two measured steps, and in "
        f"{ramps} it came over more steps.{returned}"
    )


def _row(row: dict[str, object]) -> tuple[str, ...]:
    return (
        f"{row['layer']}.{row['head']}", str(row["emerged"]), f"{row['first']:.3f}", f"{row['last']:.3f}",
        str(row["shape"]),
    )  # fmt: skip
