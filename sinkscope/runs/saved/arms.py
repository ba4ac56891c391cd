"""The result of a measurement of arms: the table, the numbers of each sequence, sentences, and the folder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from sinkscope.runs.catalogue import table_columns
from sinkscope.runs.saved.arms_table import MEASURES, UNABLATED, ArmNumbers, table_of
from sinkscope.runs.saved.result import Result, result_folder
from sinkscope.runs.schema.other_tables import ARMS_TABLES
from sinkscope.runs.statistics import SIGNIFICANT

ARMS_FOLDER = result_folder("measurement of arms", "arms", ("arms", "arm_sequences"))


@dataclass
class Arms(Result):
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

    FOLDER, RECORD = ARMS_FOLDER, "arms"

    def tables(self) -> dict[str, pd.DataFrame]:
        return {"arms": self.table, "arm_sequences": self.sequences}

    def conventions(self) -> dict[str, str]:
        return {column.name: column.what for column in table_columns(ARMS_TABLES["arms"])}


def summarise(
    measured: list[ArmNumbers],
    controls: dict[str, str],
    documents: list[str],
    facts: dict[str, Any],
    warnings: list[str],
) -> Arms:
    """Makes tables and sentences of what the engine measured; `controls`: the control's name by that of its arm."""
    table = table_of(measured, controls)
    sequences = pd.concat([_per_sequence(numbers, documents) for numbers in measured], ignore_index=True)
    return Arms(table, sequences.astype({"draw": "Int64"}), facts, in_words(table), warnings)


def _per_sequence(numbers: ArmNumbers, documents: list[str]) -> pd.DataFrame:
    return pd.DataFrame({
        "arm": numbers.name, "draw": numbers.draw, "sequence": np.arange(len(documents)), "document": documents,
        **{name: numbers.values[name] for name in MEASURES},
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
