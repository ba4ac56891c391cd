"""The tables of arms: numbers and cosines, each a mean over sequences with its error, paired with the unablated model
and with the random control."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from sinkscope.runs.statistics import SIGNIFICANT, Difference, from_means, from_moments, mean, paired_difference, sem

UNABLATED = "unablated"
"""The name of the model as it is, which every measurement begins with."""

MEASURES = ("loss", "kl", "kl_last", "top1", "top5", "sink_rate_first", "sink_rate_any", "size")
"""The numbers of each sequence, in the order of the tables' columns."""

NAN = float("nan")
DESTROYED = math.log(10.0)
"""An increase of the loss past this is a perplexity more than 10 times the unablated model's."""

ENOUGH = 1.96 + 0.84
"""Standard errors from 0 at which a two-sided test at 5 % finds a difference in 80 % of all samples."""
TOO_MANY = 100
"""A sample larger than this many times the measured one is no advice."""

BESIDE = ("kl", "kl_last", "top1", "top5", "sink_rate_first", "sink_rate_any")


@dataclass(frozen=True)
class ArmNumbers:
    """The numbers of one arm, or of one draw of a random arm: by name of MEASURES, [sequence] float64.

    `name`, `family` and `kept` are the arm's. `cosines`: avg_cos_output by layer, [sequence]; empty where not asked
    for.
    """

    name: str
    family: str | None
    kept: int | None
    draw: int | None
    values: dict[str, np.ndarray]
    cosines: dict[int, np.ndarray] = field(default_factory=dict)


def versus_random(losses: np.ndarray, control: np.ndarray) -> Difference:
    """`losses`, [N], minus the mean over draws of `control`, [draw, N], paired by sequence.

    The control is a sample of draws as well as of sequences. So the standard error combines that of the paired
    differences with that of the mean over draws. Beside the losses themselves, a difference may be rounding: so draws
    of the same heads are equal to them.
    """
    paired = losses - control.mean(0)
    averages = control.mean(1)
    gap = from_moments(
        np.zeros(()), sem(averages), np.array(len(averages)), mean(paired), sem(paired), np.array(len(paired))
    )
    return from_means(mean(control.mean(0)), mean(losses), gap.difference, gap.sem, np.asarray(gap.freedom))


def beside_random(gap: Difference, shape: tuple[int, ...], control: str) -> str:
    """What a difference from random draws says, as the second half of a sentence. `shape`: draws and sequences.

    A difference that is not significant is no sign of equality: its interval is given instead, and how many sequences
    and draws would show a difference as large as the observed one.
    """
    if gap.p == 1:  # exactly: see Difference
        return f"costs the same as {control}, up to rounding"
    p = f"p = {float(gap.p):.2g}"
    if gap.p < SIGNIFICANT:
        size = f"{abs(float(gap.difference)):.4f} ± {float(gap.sem):.4f}"
        word, side = ("less", "below") if gap.difference < 0 else ("MORE", "above")
        return f"costs {word} than random ({size} {side} {control}, {p})"
    ends = ", ".join(
        [f"against {control}: 95 % interval {float(gap.low):+.4f} to {float(gap.high):+.4f}", p, *_needed(gap, shape)]
    )
    return f"cannot be told from random ({ends})"


def _needed(gap: Difference, shape: tuple[int, ...]) -> list[str]:
    """The sample that would show a difference of the observed size in 80 % of all measurements: both errors fall with
    the root of their number. Empty where no number would, as of a difference that is rounding, or where the error is
    not known."""
    factor = float((ENOUGH * gap.sem / gap.difference) ** 2) if gap.p < 1 else math.inf
    if not math.isfinite(factor) or factor <= 1:
        return []
    draws, sequences = (math.ceil(number * factor) for number in shape)
    if factor > TOO_MANY:
        return [f"more than {TOO_MANY} times the sequences and draws would be needed to tell"]
    return [f"about {sequences} sequences and {draws} draws could tell a difference of this size"]


def table_of(measured: Sequence[ArmNumbers], controls: dict[str, str]) -> tuple[pd.DataFrame, dict[str, Difference]]:
    """One row for each arm, the draws of a random one together, and each arm's difference from its control, by name.

    `controls`: the control's name by that of its arm. The first of `measured` must be the unablated model. An arm that
    touches nothing in any sequence, as its control does, has no difference: there is nothing to compare.
    """
    by_arm = _by_arm(measured)
    idle = _idle(by_arm)
    stacks = {name: stacked(draws) for name, draws in by_arm.items()}
    base = stacks[measured[0].name]["loss"][0]
    rows, gaps = [], {}
    for name, draws in by_arm.items():
        row = _row(draws, stacks[name], base)
        control = controls.get(name)
        if control is not None:
            row["control"] = control
            if not {name, control} <= idle:
                gaps[name] = versus_random(stacks[name]["loss"][0], stacks[control]["loss"])
                row |= named("versus_random", gaps[name])
        if f"{name}+sinks" not in idle:
            row |= _d_sink(stacks, name)
        rows.append(row)
    table = pd.DataFrame(rows, columns=list(COLUMNS))
    table["knee"] = _knees(table)
    return table, gaps


def stacked(own: Sequence[ArmNumbers]) -> dict[str, np.ndarray]:
    """The numbers of an arm's draws, [draw, sequence] by measure."""
    return {name: np.stack([numbers.values[name] for numbers in own]) for name in own[0].values}


def _by_arm(measured: Sequence[ArmNumbers]) -> dict[str, list[ArmNumbers]]:
    by_arm: dict[str, list[ArmNumbers]] = defaultdict(list)
    for numbers in measured:
        by_arm[numbers.name].append(numbers)
    return by_arm


def _idle(by_arm: dict[str, list[ArmNumbers]]) -> set[str]:
    """The arms that touch nothing in any sequence, such as the sinks of sequences that have none."""
    return {name for name, draws in by_arm.items() if not any(one.values["size"].any() for one in draws)}


def _row(own: Sequence[ArmNumbers], values: dict[str, np.ndarray], base: np.ndarray) -> dict[str, Any]:
    arm = own[0]
    row: dict[str, Any] = dict.fromkeys(COLUMNS, NAN)
    row |= {"arm": arm.name, "control": None, "family": arm.family, "kept": arm.kept, "draws": len(own)}
    row |= {"size": float(values["size"].mean()), **loss_cells(values["loss"], base)}
    for name in BESIDE:
        sequences = values[name].mean(0)
        row |= {name: float(mean(sequences)), f"{name}_sem": float(sem(sequences))}
    row["destroyed"] = bool(row["increase"] > DESTROYED)
    return row


def loss_cells(losses: np.ndarray, base: np.ndarray) -> dict[str, float]:
    """The loss of an arm from its draws, [draw, sequence], its increase over the losses `base`, [sequence], each with
    its error, and the draws' spread."""
    average = losses.mean(0)
    spread = float(losses.mean(1).std(ddof=1)) if len(losses) > 1 else NAN
    cells = {"loss": float(mean(average)), "loss_sem": float(sem(average)), "spread": spread}
    return cells | named("increase", paired_difference(base, average))


def _d_sink(stacks: dict[str, dict[str, np.ndarray]], name: str) -> dict[str, float]:
    """What sinks cost an arm that rounds activations: its loss minus that with the sinks in 16 bits, by sequence."""
    kept = f"{name}+sinks"
    if not name.startswith("acts:") or kept not in stacks:
        return {}
    gap = paired_difference(stacks[kept]["loss"][0], stacks[name]["loss"][0])
    return named("d_sink", gap) | {"d_sink_low": float(gap.low), "d_sink_high": float(gap.high)}


def _knees(table: pd.DataFrame) -> pd.Series:
    """Whether an arm is its family's knee: the least number kept whose increase is within the standard error of the
    family's lowest."""
    knee = pd.Series(pd.NA, index=table.index, dtype="boolean")
    for _, rows in table[table["family"].notna()].groupby("family"):
        if len(rows) < 2:
            continue
        best = rows.loc[rows["increase"].idxmin()]
        within = rows[rows["increase"] <= best["increase"] + best["increase_sem"]]
        knee[rows.index] = False
        knee[within["kept"].astype(int).idxmin()] = True
    return knee


def named(name: str, difference: Difference) -> dict[str, float]:
    """A difference as three cells: itself, its standard error, its p."""
    return {
        name: float(difference.difference),
        f"{name}_sem": float(difference.sem),
        f"{name}_p": float(difference.p),
    }


COLUMNS = (
    "arm", "control", "family", "kept", "draws", "size", "loss", "loss_sem", "increase", "increase_sem", "increase_p",
    "versus_random", "versus_random_sem", "versus_random_p", "spread",
    *(column for name in BESIDE for column in (name, f"{name}_sem")), "destroyed", "d_sink", "d_sink_sem", "d_sink_p",
    "d_sink_low", "d_sink_high", "knee",
)  # fmt: skip
"""The columns of arms.csv; runs/schema/other_tables.py says what each is."""


# The table of how similar arms make tokens: after each layer, beside the unablated model and the random control.


COSINE_COLUMNS = (
    "arm", "layer", "control", "draws", "avg_cos_output", "avg_cos_output_sem", "change", "change_sem", "change_p",
    "versus_random", "versus_random_sem", "versus_random_p",
)  # fmt: skip


def cosine_table(measured: Sequence[ArmNumbers], controls: dict[str, str]) -> pd.DataFrame:
    """One row for each arm and layer, the draws of a random one together. The first of `measured` must be the unablated
    model, `controls` is the control's name by that of its arm; every arm must have cosines."""
    by_arm = _by_arm(measured)
    idle = _idle(by_arm)
    stacks = {  # draw, sequence, layer
        name: np.stack([np.stack(list(one.cosines.values()), 1) for one in draws]) for name, draws in by_arm.items()
    }
    layers = list(measured[0].cosines)
    base = stacks[measured[0].name][0]
    rows = []
    for name, draws in stacks.items():
        control = controls.get(name)
        average = draws.mean(0)
        change = paired_difference(base, average)
        for place, layer in enumerate(layers):
            row = {"arm": name, "layer": layer, "control": control, "draws": len(draws)}
            row |= {"avg_cos_output": float(mean(average[:, place]))}
            row |= {"avg_cos_output_sem": float(sem(average[:, place]))}
            row |= {"change": change.difference[place], "change_sem": change.sem[place], "change_p": change.p[place]}
            if control is not None and not {name, control} <= idle:
                gap = versus_random(draws[0, :, place], stacks[control][..., place])
                row |= named("versus_random", gap)
            rows.append(row)
    return pd.DataFrame(rows, columns=list(COSINE_COLUMNS))


def compared_layers(cosines: pd.DataFrame) -> pd.DataFrame:
    """One row for each arm that is compared with a control: at how many layers its tokens are more and less similar
    than without it (`more`, `less`) and than under the control (`more_than_random`, `less_than_random`), each where p
    < 0.05, not adjusted for the number of layers; and the largest change with its layer."""
    rows = []
    for name, layers in cosines[cosines["versus_random"].notna()].groupby("arm", sort=False):
        row = {"arm": name, "layers": len(layers)}
        for column, suffix in (("change", ""), ("versus_random", "_than_random")):
            told = layers[f"{column}_p"] < SIGNIFICANT
            row |= {f"more{suffix}": int((told & (layers[column] > 0)).sum())}
            row |= {f"less{suffix}": int((told & (layers[column] < 0)).sum())}
        sizes = layers["change"].abs()
        if sizes.notna().any():
            largest = layers.loc[sizes.idxmax()]
            rows.append(row | {"layer": int(largest["layer"]), **largest[["change", "change_sem"]].to_dict()})
    return pd.DataFrame(rows)


def in_words(cosines: pd.DataFrame) -> list[str]:
    """A sentence for each arm that has a control."""
    return [
        f"{row['arm']}: tokens are more similar than in the unablated model after {row['more']} of {row['layers']} "
        f"layers and less similar after {row['less']}; more than under random ones after {row['more_than_random']}, "
        f"less after {row['less_than_random']} (cosines of pairs, each at p < 0.05)."
        for row in compared_layers(cosines).to_dict("records")
    ]
