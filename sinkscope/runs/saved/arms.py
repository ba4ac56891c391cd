"""The result of a measurement of arms: the table, the numbers of each sequence, sentences, and the folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from sinkscope.runs.catalogue import table_columns
from sinkscope.runs.saved import arms_cosines
from sinkscope.runs.saved.arms_table import MEASURES, UNABLATED, ArmNumbers, beside_random, table_of
from sinkscope.runs.saved.result import Result, result_folder
from sinkscope.runs.schema.other_tables import ARMS_TABLES

ARMS_FOLDER = result_folder("measurement of arms", "arms", ("arms", "arm_sequences", "arm_cosines"))


@dataclass
class Arms(Result):
    """The result of `arms`.

    Attributes:
        table: one row for each arm, the draws of a random one together (arms.csv).
        sequences: one row for each arm, draw and sequence (arm_sequences.csv).
        facts: model, run, data, arms, draws and seed.
        words: the result in sentences.
        cosines: one row for each arm and layer (arm_cosines.csv); None where they were not asked for.
    """

    table: pd.DataFrame
    sequences: pd.DataFrame
    facts: dict[str, Any]
    words: list[str]
    warnings: list[str]
    cosines: pd.DataFrame | None = None

    FOLDER, RECORD = ARMS_FOLDER, "arms"

    def tables(self) -> dict[str, pd.DataFrame]:
        found = {"arms": self.table, "arm_sequences": self.sequences}
        return found if self.cosines is None else found | {"arm_cosines": self.cosines}

    def conventions(self) -> dict[str, str]:
        return {column.name: column.what for column in table_columns(ARMS_TABLES["arms"])}


def summarise(
    measured: list[ArmNumbers],
    controls: dict[str, str],
    documents: list[str],
    facts: dict[str, Any],
    warnings: list[str],
    told: Sequence[str] = (),
) -> Arms:
    """Makes tables and sentences of what the engine measured.

    `controls`: the control's name by that of its arm. `told`: what arms say of themselves.
    """
    table, gaps = table_of(measured, controls)
    draws = dict(zip(table["arm"], table["draws"], strict=True))
    beside = {
        name: beside_random(gap, (int(draws[controls[name]]), len(documents)), controls[name])
        for name, gap in gaps.items()
    }
    sequences = pd.concat([_per_sequence(numbers, documents) for numbers in measured], ignore_index=True)
    cosines = arms_cosines.cosine_table(measured, controls) if measured[0].cosines else None
    words = in_words(table, beside) + list(told) + ([] if cosines is None else arms_cosines.in_words(cosines))
    return Arms(table, sequences.astype({"draw": "Int64"}), facts, words, warnings, cosines)


def _per_sequence(numbers: ArmNumbers, documents: list[str]) -> pd.DataFrame:
    return pd.DataFrame({
        "arm": numbers.name, "draw": numbers.draw, "sequence": np.arange(len(documents)), "document": documents,
        **{name: numbers.values[name] for name in MEASURES},
    })  # fmt: skip


def in_words(table: pd.DataFrame, beside: dict[str, str]) -> list[str]:
    """A sentence for each arm that has a control, for d_sink, and for every knee; `beside`: what is said of each arm
    that has a control."""
    rows = [row for row in table.to_dict("records") if row["arm"] != UNABLATED]
    words = [_beside_random(row, beside[row["arm"]]) for row in rows if row["arm"] in beside]
    words += [_sinks_cost(row) for row in rows if not np.isnan(row["d_sink"])]
    words += [_knee(row, table) for row in rows if row["knee"] is True]
    return words


def _beside_random(row: dict[str, Any], beside: str) -> str:
    return f"{row['arm']}: loss {row['increase']:+.4f}{', destroyed' if row['destroyed'] else ''}; {beside}."


def _sinks_cost(row: dict[str, Any]) -> str:
    return (
        f"{row['arm']}: keeping the sinks in 16 bits saves {row['d_sink']:+.4f} nats a token, 95 % interval "
        f"{row['d_sink_low']:+.4f} to {row['d_sink_high']:+.4f}."
    )


def _knee(row: dict[str, Any], table: pd.DataFrame) -> str:
    family = table[table["family"] == row["family"]]
    best = family.loc[family["increase"].idxmin()]
    count = int(row["kept"])
    kept = f"{row['family']}: keeping {count} token{'s' * (count != 1)} costs"
    if best["kept"] == row["kept"]:
        return f"{kept} least (loss {row['increase']:+.4f})."
    return (
        f"{kept} {row['increase']:+.4f}, within one standard error of the least ({best['increase']:+.4f}, with "
        f"{int(best['kept'])}), and is the smallest number that does."
    )
