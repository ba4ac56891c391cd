"""The result of a measurement of arms: the table, the numbers of each sequence, sentences, and the folder that is read
back."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
from pydantic import BaseModel

from sinkscope.errors import SinkscopeError
from sinkscope.runs.catalogue import table_columns
from sinkscope.runs.folder import sha256_of
from sinkscope.runs.run import Run
from sinkscope.runs.saved import arms_table
from sinkscope.runs.saved.ablation import ABLATION_FOLDER
from sinkscope.runs.saved.arms_table import MEASURES, UNABLATED, ArmNumbers, beside_random, table_of
from sinkscope.runs.saved.result import Result, result_folder
from sinkscope.runs.schema.base import read_record
from sinkscope.runs.schema.manifest import ModelFacts
from sinkscope.runs.schema.other_tables import ARMS_TABLES
from sinkscope.runs.statistics import from_means
from sinkscope.runs.whole import read_file

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
        frames = {"arms": self.table, "arm_sequences": self.sequences}
        return frames if self.cosines is None else frames | {"arm_cosines": self.cosines}

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
    cosines = arms_table.cosine_table(measured, controls) if measured[0].cosines else None
    words = in_words(table, beside) + list(told) + ([] if cosines is None else arms_table.in_words(cosines))
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
    words = [_beside_random(row, beside.get(row["arm"])) for row in rows if pd.notna(row["control"])]
    words += [_sinks_cost(row) for row in rows if not np.isnan(row["d_sink"])]
    words += [_knee(row, table) for row in rows if row["knee"] is True]
    return words


def _beside_random(row: dict[str, Any], beside: str | None) -> str:
    start = f"{row['arm']}: loss {row['increase']:+.4f}{', destroyed' if row['destroyed'] else ''}"
    if beside is None:
        return f"{start}; not compared with {row['control']}, because no sequence has what the arm names."
    return f"{start}; {beside}."


def _sinks_cost(row: dict[str, Any]) -> str:
    return (
        f"{row['arm']}: loss minus that with the sinks kept in 16 bits: {row['d_sink']:+.4f} nats per token, 95 % "
        f"interval {row['d_sink_low']:+.4f} to {row['d_sink_high']:+.4f}."
    )


def _knee(row: dict[str, Any], table: pd.DataFrame) -> str:
    family = table[table["family"] == row["family"]]
    best = family.loc[family["increase"].idxmin()]
    count = int(row["kept"])
    kept = f"with {count} token{'s' * (count != 1)} kept"
    if best["kept"] == row["kept"]:
        return f"{row['family']}: the loss is lowest {kept} ({row['increase']:+.4f})."
    fewer = " With fewer it is not." if (family["kept"] < count).any() else ""
    return (
        f"{row['family']}: {kept} the loss is within one standard error of the lowest ({row['increase']:+.4f}; "
        f"{best['increase']:+.4f} with {int(best['kept'])}).{fewer}"
    )


# Measurements of arms read back from the folders that `arms`, `evict`, `quant` and `ablate` wrote.


FILES = {"arms.json": ARMS_FOLDER, "ablation.json": ABLATION_FOLDER}
COLUMNS = [column.name for column in table_columns(ARMS_TABLES["arms"])]
TEXT = [column.name for column in table_columns(ARMS_TABLES["arms"]) if column.type == "string"]


class RunFacts(BaseModel):
    """The run that the arms were given. `data`: fingerprints of its sequences."""

    path: str | None
    data: list[str]


class TextFacts(BaseModel):
    """The held-out text. `fingerprint`: SHA-256 of its token ids."""

    spec: str
    sequences: int
    seq_len: int
    fingerprint: str | None = None


class ArmsFile(BaseModel):
    """What arms.json and ablation.json have in common."""

    schema_version: Literal[1]
    sinkscope: str
    model: ModelFacts
    run: RunFacts | None
    data: TextFacts
    arms: list[str] = []
    draws: int | None = None
    seed: int | None = None
    in_words: list[str]
    warnings: list[str]
    files: dict[str, str]


@dataclass(frozen=True)
class SavedArms:
    """A saved measurement of arms.

    Attributes:
        table: the rows of arms.csv, with `increase_low` and `increase_high`: the 95 % interval of `increase`.
        facts: the model, the run, the text and the sentences.
        path: the folder.
    """

    table: pd.DataFrame
    facts: ArmsFile
    path: Path


def load_arms(path: str | Path) -> SavedArms:
    """Reads the folder of a measurement of arms.

    Raises SinkscopeError where it is none, a newer sinkscope wrote it, or a file is missing, damaged or changed.
    """
    folder = Path(path)
    if not folder.exists():
        raise SinkscopeError(f"no such folder of arms: {folder}")
    for kind in FILES.values():
        kind.settle(folder)
    name = next((name for name in FILES if (folder / name).is_file()), None)
    if name is None:
        raise SinkscopeError(f"{folder} holds no arms: give a folder that arms, evict, quant or ablate wrote")
    try:
        content = json.loads(read_file(folder / name))
        facts = read_record(ArmsFile, content, f"{name} in {folder}")
        if sha256_of(folder / "arms.csv") != facts.files.get("arms.csv"):
            raise ValueError(f"arms.csv was changed: its SHA-256 is not the one in {name}")
        table = pd.read_csv(
            folder / "arms.csv", dtype=dict.fromkeys(TEXT, "string"), keep_default_na=False, na_values=[""]
        )
        if list(table.columns) != COLUMNS or table.empty:
            raise ValueError("arms.csv has no rows or other columns than this sinkscope's")
    except (OSError, ValueError, RecursionError) as error:
        raise SinkscopeError(f"the arms in {folder} are damaged: {str(error).splitlines()[0]}") from None
    return SavedArms(_with_intervals(table, facts.data.sequences), facts, folder)


def _with_intervals(table: pd.DataFrame, sequences: int) -> pd.DataFrame:
    """Adds the 95 % interval of `increase`, by the same paired t-test as its p.

    The table does not say how many sequences have a loss. The interval is missing where the p of a test over all of
    them is not the table's.
    """
    numbers = ("loss", "increase", "increase_sem", "increase_p")
    loss, increase, error, p = (table[name].to_numpy(float) for name in numbers)
    difference = from_means(np.full(len(table), loss[0]), loss, increase, error, np.full(len(table), sequences - 1.0))
    alike = np.isclose(difference.p, p, rtol=1e-3, atol=1e-9)
    ends = {"increase_low": difference.low, "increase_high": difference.high}
    return table.assign(**{name: np.where(alike, values, math.nan) for name, values in ends.items()})


def placed(saved: Sequence[SavedArms], runs: Sequence[Run]) -> list[list[SavedArms]]:
    """The arms of each run: of the run that they were given, else of the first one of the same model, in the same dtype
    if there is one. Raises SinkscopeError for arms of another model than the runs'."""
    places: list[list[SavedArms]] = [[] for _ in runs]
    for arms in saved:
        fitting = [place for place, run in enumerate(runs) if _same_model(arms.facts.model, run.manifest.model)]
        if not fitting:
            raise SinkscopeError(
                f"the arms in {arms.path} are of {arms.facts.model.shown}, and no run is of that model with the same "
                "weights, adapter and quantisation: give its run"
            )
        places[max(fitting, key=lambda place: _nearness(arms.facts, runs[place]))].append(arms)
    return places


def _nearness(facts: ArmsFile, run: Run) -> tuple[bool, bool]:
    data = [data.fingerprint for data in run.manifest.data]
    return facts.run is not None and facts.run.data == data, facts.model.dtype == run.manifest.model.dtype


def _same_model(one: ModelFacts, other: ModelFacts) -> bool:
    """The hashes of the weights decide; where one is missing, everything else that both know of the model."""
    if (one.adapter, one.quantization) != (other.adapter, other.quantization):
        return False
    names: tuple[str, ...] = ("weights_sha256",)
    if one.weights_sha256 is None or other.weights_sha256 is None:
        names = ("id", "revision", "config_sha256", "model_type", "parameters")
    pairs: list[tuple[Any, Any]] = [(getattr(one, name), getattr(other, name)) for name in names]
    return all(a == b for a, b in pairs if a is not None and b is not None)
