"""Measurements of arms read back from the folders that `arms`, `evict`, `quant` and `ablate` wrote."""

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
from sinkscope.runs.saved.ablation import ABLATION_FOLDER
from sinkscope.runs.saved.arms import ARMS_FOLDER
from sinkscope.runs.schema.base import read_record
from sinkscope.runs.schema.manifest import ModelFacts
from sinkscope.runs.schema.other_tables import ARMS_TABLES
from sinkscope.runs.statistics import from_means
from sinkscope.runs.whole import read_file

FILES = {"arms.json": ARMS_FOLDER, "ablation.json": ABLATION_FOLDER}
COLUMNS = [column.name for column in table_columns(ARMS_TABLES["arms"])]
TEXT = [column.name for column in table_columns(ARMS_TABLES["arms"]) if column.type == "string"]


class RunFacts(BaseModel):
    """The run that the arms were given. `data`: fingerprints of its sequences."""

    path: str | None
    data: list[str]


class TextFacts(BaseModel):
    """The held-out text."""

    spec: str
    sequences: int
    seq_len: int


class ArmsFile(BaseModel):
    """What arms.json and ablation.json have in common."""

    schema_version: Literal[1]
    sinkscope: str
    model: ModelFacts
    run: RunFacts | None
    data: TextFacts
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
        found = json.loads(read_file(folder / name))
        facts = read_record(ArmsFile, found, f"{name} in {folder}")
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
    loss, increase, error, known = (table[name].to_numpy(float) for name in numbers)
    found = from_means(np.full(len(table), loss[0]), loss, increase, error, np.full(len(table), sequences - 1.0))
    alike = np.isclose(found.p, known, rtol=1e-3, atol=1e-9)
    ends = {"increase_low": found.low, "increase_high": found.high}
    return table.assign(**{name: np.where(alike, values, math.nan) for name, values in ends.items()})


def placed(saved: Sequence[SavedArms], runs: Sequence[Run]) -> list[list[SavedArms]]:
    """The arms of each run: of the run that they were given, else of the first one of the same model, in the same dtype
    if there is one. Raises SinkscopeError for arms of another model than the runs'."""
    places: list[list[SavedArms]] = [[] for _ in runs]
    for arms in saved:
        fitting = [place for place, run in enumerate(runs) if _same_model(arms.facts.model, run.manifest.model)]
        if not fitting:
            raise SinkscopeError(
                f"the arms in {arms.path} are of {arms.facts.model.shown}, and no run is of that model: give its run"
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
