"""The result of an ablation: each arm paired by sequence with the unablated model and with random heads; sentences."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

import sinkscope
from sinkscope.comparison.differences import paired_difference
from sinkscope.experiments.arms.head_choice import Heads
from sinkscope.experiments.arms.result import write_table
from sinkscope.experiments.arms.statistics import named, versus_random
from sinkscope.runs.averages import mean, sem
from sinkscope.runs.folder import FolderKind, sha256_of_files
from sinkscope.runs.strict_json import plain, to_json

UNABLATED, RANDOM, HIDDEN = "unablated", "random", "first token hidden"
SIGNIFICANT = 0.05
NAN = float("nan")
COLUMNS = {
    "loss": "next-token cross-entropy, nats a token: mean over positions 1..T-1, then over sequences (and draws)",
    "increase": "loss minus the unablated model's on the same sequence; its error and p from the paired t-test",
    "versus_random": "loss minus the mean loss of the random draws of as many heads, paired by sequence; its error "
    "joins the sequences' and that of the draws' mean, p by Welch and Satterthwaite",
    "spread": "standard deviation of the draws' mean losses",
    "sink_rate_first": "share of (sequence, head) with alpha_0 > epsilon",
    "sink_rate_any": "share of (sequence, head) with alpha_k > epsilon at any key with at least T/4 query rows",
    "first token hidden": "no query i >= 1 sees key 0, in any layer; query 0 keeps it",
}


@dataclass
class Arm:
    """One way to run the model, and its losses, [sequence]."""

    name: str
    fraction: float = NAN
    draw: int | None = None
    heads: Heads = field(default_factory=dict)
    losses: np.ndarray = field(default_factory=lambda: np.empty(0))
    sinks: dict[str, float] = field(default_factory=dict)


@dataclass
class Ablation:
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

    def as_dict(self) -> dict[str, Any]:
        """The content of ablation.json: everything but the per-sequence losses."""
        return {
            "schema_version": 1,
            "sinkscope": sinkscope.__version__,
            "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            **self.facts,
            "table": [plain(row) for row in self.table.to_dict("records")],
            "heads": self.heads,
            "in_words": self.words,
            "warnings": self.warnings,
            "conventions": COLUMNS,
        }

    def save(
        self, folder: str | Path, force: bool = False, draw: Callable[[Ablation], dict[str, bytes]] | None = None,
        resume: bool = False,
    ) -> list[Path]:  # fmt: skip
        """Writes ablation.csv, losses.csv, arms.csv, ablation.json and the figures of `draw`, by file name: all or
        nothing. `resume`: in the place of the batches that were kept there.

        Raises SinkscopeError as `Run.save` does.
        """
        figures = {} if draw is None else draw(self)

        def fill(work: Path) -> None:
            for name, table in (("ablation", self.table), ("losses", self.losses), ("arms", self.arms)):
                write_table(work / f"{name}.csv", table)
            for name, content in figures.items():
                (work / name).write_bytes(content)
            facts = self.as_dict() | {"files": sha256_of_files(work)}
            (work / "ablation.json").write_text(to_json(facts), encoding="utf-8")

        return ABLATION_FOLDER.write(folder, force, fill, resume)


def _state(folder: Path) -> bool | None:
    try:
        found = json.loads((folder / "ablation.json").read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return True if isinstance(found, dict) and {"schema_version", "sinkscope", "table"} <= found.keys() else None


ABLATION_FOLDER = FolderKind(
    "ablation",
    frozenset(
        {"ablation.csv", "losses.csv", "arms.csv", "ablation.json", "ablation.png", "ablation.svg", "ablation.pdf"}
    ),
    _state,
)


def summarise(arms: list[Arm], documents: list[str], facts: dict[str, Any], warnings: list[str]) -> Ablation:
    """Computes the table and the sentences from every arm's losses; the first arm must be the unablated model."""
    base = arms[0]
    rows: list[dict[str, Any]] = []
    words: list[str] = []
    for arm in arms:
        if arm.name == RANDOM:
            if arm.draw == 0:
                rows.append(_row(arm, base, _draws(arms, arm.fraction)))
            continue
        row = _row(arm, base, arm.losses[None])
        if arm.name not in (UNABLATED, HIDDEN):
            control = _draws(arms, arm.fraction)
            difference = versus_random(arm.losses, control)
            row |= named("versus_random", difference)
            words.append(_sentence(row))
        rows.append(row)
        if arm.name == HIDDEN:
            words.append(_hidden_sentence(row, base))
    losses = pd.concat([_per_sequence(arm, documents) for arm in arms], ignore_index=True)
    heads: dict[str, dict[str, list[list[Any]]]] = {}
    for arm in arms:
        if arm.heads and arm.name != RANDOM:
            pairs = [[module, head] for module, numbers in arm.heads.items() for head in numbers]
            heads.setdefault(arm.name, {})[f"{arm.fraction:g}"] = pairs
    return Ablation(
        pd.DataFrame(rows, columns=list(ROW)), losses.astype({"draw": "Int64"}), heads, facts, words, warnings
    )


ROW = (
    "arm", "fraction", "heads", "draws", "loss", "loss_sem", "increase", "increase_sem", "increase_p", "versus_random",
    "versus_random_sem", "versus_random_p", "spread", "sink_rate_first", "sink_rate_any",
)  # fmt: skip


def _draws(arms: list[Arm], fraction: float) -> np.ndarray:
    """Losses of the random draws of one fraction, [draw, sequence]."""
    return np.stack([arm.losses for arm in arms if arm.name == RANDOM and arm.fraction == fraction])


def _row(arm: Arm, base: Arm, draws: np.ndarray) -> dict[str, Any]:
    per_sequence = draws.mean(0)
    several = len(draws) > 1
    row: dict[str, Any] = dict.fromkeys(ROW, NAN)
    row |= {"arm": arm.name, "fraction": arm.fraction, "heads": sum(map(len, arm.heads.values())), "draws": len(draws)}
    row |= {"loss": float(mean(per_sequence)), "loss_sem": float(sem(per_sequence)), **arm.sinks}
    row["spread"] = float(draws.mean(1).std(ddof=1)) if several else NAN
    if arm is not base:
        row |= named("increase", paired_difference(base.losses, per_sequence))
    return row


def _sentence(row: dict[str, Any]) -> str:
    gap, error, p = row["versus_random"], row["versus_random_sem"], row["versus_random_p"]
    start = f"{row['arm']} at {100 * row['fraction']:g} % ({row['heads']} heads): loss {row['increase']:+.4f}"
    if not row["heads"]:
        return f"{start}, nothing zeroed."
    beside = f"{abs(gap):.4f} ± {error:.4f} {'below' if gap < 0 else 'above'} random heads"
    if not p < SIGNIFICANT:
        return f"{start}; no better than random ({beside}, p = {p:.2g})."
    return f"{start}; {'better' if gap < 0 else 'WORSE'} than random ({beside}, p = {p:.2g})."


def _hidden_sentence(row: dict[str, Any], base: Arm) -> str:
    first, anywhere = (
        f"{100 * base.sinks[name]:.1f} % before, {100 * row[name]:.1f} % after"
        for name in ("sink_rate_first", "sink_rate_any")
    )
    return (
        f"First token hidden from later queries: loss {row['increase']:+.4f} ± {row['increase_sem']:.4f}; sink rate "
        f"at the first token {first}; at any token {anywhere}."
    )


def _per_sequence(arm: Arm, documents: list[str]) -> pd.DataFrame:
    return pd.DataFrame({
        "arm": arm.name, "fraction": arm.fraction, "draw": arm.draw, "sequence": np.arange(len(arm.losses)),
        "document": documents, "loss": arm.losses,
    })  # fmt: skip
