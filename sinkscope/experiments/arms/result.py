"""The result of a measurement of arms: the table, the numbers of each sequence, sentences, and the folder."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

import sinkscope
from sinkscope.comparison.differences import SIGNIFICANT
from sinkscope.experiments.arms.measured import MEASURES, UNABLATED, Measured
from sinkscope.experiments.arms.statistics import table_of
from sinkscope.runs.folder import FolderKind, sha256_of_files
from sinkscope.runs.schema.arms_tables import ARMS_TABLES
from sinkscope.runs.strict_json import plain, to_json


@dataclass
class Arms:
    """The result of `arms`.

    Attributes:
        table: one row for each arm, the draws of a random one together (arms.csv).
        sequences: one row for each arm, draw and sequence (arm_sequences.csv).
        facts: model, run, data, arms, draws and seed.
        words: the result in sentences.
    """

    table: pd.DataFrame
    sequences: pd.DataFrame
    facts: dict[str, Any]
    words: list[str]
    warnings: list[str]

    def as_dict(self) -> dict[str, Any]:
        """The content of arms.json: everything but the numbers of each sequence."""
        return {
            "schema_version": 1,
            "sinkscope": sinkscope.__version__,
            "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            **self.facts,
            "table": [plain(row) for row in self.table.to_dict("records")],
            "in_words": self.words,
            "warnings": self.warnings,
            "conventions": {column.name: column.what for column in ARMS_TABLES["arms"].columns()},
        }

    def save(
        self, folder: str | Path, force: bool = False, draw: Callable[[Arms], dict[str, bytes]] | None = None,
        resume: bool = False,
    ) -> list[Path]:  # fmt: skip
        """Writes arms.csv, arm_sequences.csv, arms.json and the figures of `draw`, by file name: all or nothing.

        `resume`: the folder holds this measurement's own finished batches, which then go. Raises SinkscopeError as
        `Run.save` does.
        """
        figures = {} if draw is None else draw(self)

        def fill(work: Path) -> None:
            for name, table in (("arms", self.table), ("arm_sequences", self.sequences)):
                write_table(work / f"{name}.csv", table)
            for name, content in figures.items():
                (work / name).write_bytes(content)
            facts = self.as_dict() | {"files": sha256_of_files(work)}
            (work / "arms.json").write_text(to_json(facts), encoding="utf-8")

        return ARMS_FOLDER.write(folder, force, fill, resume)


def write_table(path: Path, table: pd.DataFrame) -> None:
    """Writes a table as CSV, nine significant digits a number."""
    table.to_csv(path, index=False, float_format="%.9g", lineterminator="\n")


def _state(folder: Path) -> bool | None:
    try:
        found = json.loads((folder / "arms.json").read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return True if isinstance(found, dict) and {"schema_version", "sinkscope", "table"} <= found.keys() else None


ARMS_FOLDER = FolderKind(
    "measurement of arms",
    frozenset({"arms.csv", "arm_sequences.csv", "arms.json", "arms.png", "arms.svg", "arms.pdf"}),
    _state,
)


def summarise(
    measured: list[Measured], controls: dict[str, str], documents: list[str], facts: dict[str, Any], warnings: list[str]
) -> Arms:
    """Makes tables and sentences of what the engine measured; `controls`: the control's name by that of its arm."""
    table = table_of(measured, controls)
    sequences = pd.concat([_per_sequence(one, documents) for one in measured], ignore_index=True)
    return Arms(table, sequences.astype({"draw": "Int64"}), facts, in_words(table), warnings)


def _per_sequence(one: Measured, documents: list[str]) -> pd.DataFrame:
    return pd.DataFrame({
        "arm": one.name, "draw": one.draw, "sequence": np.arange(len(documents)), "document": documents,
        **{name: one.values[name] for name in MEASURES},
    })  # fmt: skip


def in_words(table: pd.DataFrame) -> list[str]:
    """A sentence for each arm that has a control, for d_sink, and for every knee."""
    rows = [row for row in table.to_dict("records") if row["arm"] != UNABLATED]
    words = [_beside_random(row) for row in rows if isinstance(row["control"], str)]
    words += [_sinks_cost(row) for row in rows if not np.isnan(row["d_sink"])]
    words += [_knee(row, table) for row in rows if row["knee"] is True]
    return words


def _beside_random(row: dict[str, Any]) -> str:
    gap, error, p = row["versus_random"], row["versus_random_sem"], row["versus_random_p"]
    start = f"{row['arm']}: loss {row['increase']:+.4f}{', destroyed' if row['destroyed'] else ''}"
    beside = f"{abs(gap):.4f} ± {error:.4f} {'below' if gap < 0 else 'above'} {row['control']}, p = {p:.2g}"
    if not p < SIGNIFICANT:
        return f"{start}; no different from random ({beside})."
    return f"{start}; costs {'less' if gap < 0 else 'MORE'} than random ({beside})."


def _sinks_cost(row: dict[str, Any]) -> str:
    return (
        f"{row['arm']}: keeping the sinks in 16 bits saves {row['d_sink']:+.4f} nats a token, 95 % interval "
        f"{row['d_sink_low']:+.4f} to {row['d_sink_high']:+.4f}."
    )


def _knee(row: dict[str, Any], table: pd.DataFrame) -> str:
    family = table[table["family"] == row["family"]]
    best = family.loc[family["increase"].idxmin()]
    kept = f"{row['family']}: of the numbers of tokens kept, {int(row['kept'])}"
    if best["kept"] == row["kept"]:
        return f"{kept} costs least (loss {row['increase']:+.4f})."
    return (
        f"{kept} is the smallest whose loss ({row['increase']:+.4f}) is within an error of the lowest "
        f"({best['increase']:+.4f} with {int(best['kept'])})."
    )
