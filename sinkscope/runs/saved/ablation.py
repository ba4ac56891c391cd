"""The result of an ablation: each arm paired by sequence with the unablated model and with random heads; sentences."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from sinkscope.runs.saved.arms_table import UNABLATED, beside_random, loss_cells, named, versus_random
from sinkscope.runs.saved.result import Result, result_folder

RANDOM, HIDDEN = "random", "first token hidden"
NAN = float("nan")
COLUMNS = {
    "loss": "next-token cross-entropy, nats per token: mean over positions 1..T-1, then over sequences (and draws)",
    "increase": "loss minus the unablated model's on the same sequence; its error and p from the paired t-test; p = 1 "
    "where the difference is rounding, as in the unablated model itself",
    "versus_random": "loss minus the mean loss of the random draws of as many heads, paired by sequence; its error "
    "joins the sequences' and that of the draws' mean, p by Welch and Satterthwaite; empty where no head is zeroed",
    "spread": "standard deviation of the draws' mean losses",
    "sink_rate_first": "share of (sequence, head) with alpha_0 > epsilon",
    "sink_rate_any": "share of (sequence, head) with alpha_k > epsilon at any key k with n_k >= n_max/4; n_k counts "
    "the queries that may see key k in this pass",
    "first token hidden": "no query i >= 1 sees key 0, in any layer; query 0 keeps it",
}

ABLATION_FOLDER = result_folder("ablation", "ablation", ("ablation", "losses", "arms"))

Heads = dict[str, list[int]]
"""Numbers of the heads to zero, by the name of the attention site."""


@dataclass
class ZeroedArm:
    """The heads that a score, or one random draw, zeroes at a fraction, and the losses, [sequence].

    The unablated model and the one without the first key have no fraction and no heads. `sinks`: their sink rates.
    """

    name: str
    fraction: float = NAN
    draw: int | None = None
    heads: Heads = field(default_factory=dict)
    losses: np.ndarray = field(default_factory=lambda: np.empty(0))
    sinks: dict[str, float] = field(default_factory=dict)


@dataclass
class Ablation(Result):
    """The result of `ablate`.

    Attributes:
        table: one row per arm (the random draws of a fraction share a row); columns as in COLUMNS, standard errors in
            `<name>_sem`.
        losses: one row per arm, draw and sequence.
        heads: the zeroed heads as [module, head] pairs, by score and then by fraction.
        facts: model, run, data and seeds.
        words: the result in sentences.
        arms: the same arms with all that the engine of arms measures, in its own form (arms.csv).
    """

    table: pd.DataFrame
    losses: pd.DataFrame
    heads: dict[str, dict[str, list[list[Any]]]]
    facts: dict[str, Any]
    words: list[str]
    warnings: list[str]
    arms: pd.DataFrame = field(default_factory=pd.DataFrame)

    FOLDER, RECORD = ABLATION_FOLDER, "ablation"

    def tables(self) -> dict[str, pd.DataFrame]:
        return {"ablation": self.table, "losses": self.losses, "arms": self.arms}

    def choices(self) -> dict[str, Any]:
        return {"heads": self.heads}

    def conventions(self) -> dict[str, str]:
        return COLUMNS


ROW = (
    "arm", "fraction", "heads", "draws", "loss", "loss_sem", "increase", "increase_sem", "increase_p", "versus_random",
    "versus_random_sem", "versus_random_p", "spread", "sink_rate_first", "sink_rate_any",
)  # fmt: skip


def summarise(arms: list[ZeroedArm], documents: list[str], facts: dict[str, Any], warnings: list[str]) -> Ablation:
    """Computes the table and the sentences from every arm's losses; the first arm must be the unablated model."""
    base = arms[0]
    draws: dict[tuple[str, float | None], list[ZeroedArm]] = defaultdict(list)
    for arm in arms:
        draws[arm.name, None if math.isnan(arm.fraction) else arm.fraction].append(arm)
    losses = {place: np.stack([arm.losses for arm in drawn]) for place, drawn in draws.items()}
    heads: dict[str, dict[str, list[list[Any]]]] = {}
    rows: list[dict[str, Any]] = []
    words: list[str] = []
    for (name, fraction), drawn in draws.items():
        row = _row(drawn, losses[name, fraction], base)
        rows.append(row)
        if name == HIDDEN:
            words.append(_hidden_sentence(row, base))
        elif name not in (UNABLATED, RANDOM):
            if not row["heads"]:
                words.append(f"{_at(row)}, nothing zeroed.")
                continue
            gap = versus_random(drawn[0].losses, losses[RANDOM, fraction])
            row |= named("versus_random", gap)
            words.append(f"{_at(row)}; {beside_random(gap, losses[RANDOM, fraction].shape, 'random heads')}.")
            pairs = [[module, head] for module, numbers in drawn[0].heads.items() for head in numbers]
            heads.setdefault(name, {})[f"{fraction:g}"] = pairs
    sequences = pd.concat([_per_sequence(arm, documents) for arm in arms], ignore_index=True)
    return Ablation(
        pd.DataFrame(rows, columns=list(ROW)), sequences.astype({"draw": "Int64"}), heads, facts, words, warnings
    )


def _row(own: list[ZeroedArm], losses: np.ndarray, base: ZeroedArm) -> dict[str, Any]:
    """A row from the draws of an arm, whose losses are [draw, sequence]."""
    arm, count = own[0], sum(map(len, own[0].heads.values()))
    row: dict[str, Any] = dict.fromkeys(ROW, NAN)
    row |= {"arm": arm.name, "fraction": arm.fraction, "heads": count, "draws": len(own), **arm.sinks}
    return row | loss_cells(losses, base.losses)


def _at(row: dict[str, Any]) -> str:
    """How the sentence of a score begins: the share of heads, and the loss."""
    zeroed = f"{row['heads']} head{'s' * (row['heads'] != 1)}"
    return f"{row['arm']} at {100 * row['fraction']:g} % ({zeroed}): loss {row['increase']:+.4f}"


def _hidden_sentence(row: dict[str, Any], base: ZeroedArm) -> str:
    loss = f"First token hidden from later queries: loss {row['increase']:+.4f} ± {row['increase_sem']:.4f}"
    if math.isnan(row["sink_rate_first"]):
        return f"{loss}."
    first, anywhere = (
        f"{100 * base.sinks[name]:.1f} % before, {100 * row[name]:.1f} % after"
        for name in ("sink_rate_first", "sink_rate_any")
    )
    return f"{loss}; sink rate at the first token {first}; at any token {anywhere}."


def _per_sequence(arm: ZeroedArm, documents: list[str]) -> pd.DataFrame:
    return pd.DataFrame({
        "arm": arm.name, "fraction": arm.fraction, "draw": arm.draw, "sequence": np.arange(len(arm.losses)),
        "document": documents, "loss": arm.losses,
    })  # fmt: skip
