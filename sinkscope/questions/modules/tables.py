"""The modules table of a scan that asked for it: one row for each linear module, and a sentence about them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from sinkscope.capture import Site
from sinkscope.metrics import Metric
from sinkscope.questions.modules.columns import INPUT_COLUMNS
from sinkscope.runs.schema.stream import StreamSummary
from sinkscope.runs.statistics import mean, most_frequent, sem
from sinkscope.runs.words import dataset_of, on_dataset
from sinkscope.tables.columns import RUN_COLUMNS, run_column
from sinkscope.tables.values import Domain

TABLE, PREFIX = "modules", "modules:"
VALUES, PLACES = "module_values", "module_places"


@dataclass
class ModuleRun:
    """The input of one module over the sequences: columns by name [sequence], positions of the largest entry
    [sequence], and the token there as text, where it has one."""

    values: dict[str, np.ndarray]
    places: list[int]
    tokens: list[str | None]


def _declare(name: str, column: Metric) -> None:
    """Declares a mean over sequences and its standard error."""

    def average(run: ModuleRun) -> float:
        return float(mean(run.values[name]))

    def error(run: ModuleRun) -> float:
        return float(sem(run.values[name]))

    RUN_COLUMNS[TABLE][name] = replace(column, per="run", compute=average)
    RUN_COLUMNS[TABLE][f"{name}_sem"] = replace(
        column, name=f"{name}_sem", range="[0, inf)", formula=f"Standard error of {name} over sequences.", per="run",
        compute=error,
    )  # fmt: skip


for _name, _column in INPUT_COLUMNS.items():
    _declare(_name, _column)


@run_column(TABLE, unit="position", range="[0, T)")
def amax_position(run: ModuleRun) -> int:
    """Position of the token with the largest |x|, in a tie the lowest; of several sequences, the most frequent one. If
    several are equally frequent, the one whose first sequence comes first in the dataset."""
    return most_frequent(run.places)


@run_column(TABLE, unit="name", range="a token")
def amax_token(run: ModuleRun) -> str | None:
    """Token with the largest |x|; of several sequences, the most frequent one, chosen as in amax_position. It need not
    be the token at amax_position. Where positions hold no tokens, as in pictures, the name of the position's kind.
    Empty where token ids are read without a tokenizer."""
    return most_frequent(run.tokens)


def name_of(module: str, call: int) -> str:
    """The name under which the values of a module's call are kept."""
    return f"{PREFIX}{module}" if call == 0 else f"{PREFIX}{module}[{call}]"


def module_table(domains: list[Domain], sites: list[Site], spelled: Callable[[int], str | None]) -> pd.DataFrame:
    """modules.csv: one row per linear module, for each dataset where there are several. `spelled`: a token's text."""
    rows = []
    for domain in domains:
        for name, values in domain.others.items():
            if VALUES not in values.arrays:
                continue
            module = name.removeprefix(PREFIX)
            run = _of(domain, values.arrays, spelled)
            site = next((site for site in sites if site.block and module.startswith(f"{site.block}.")), None)
            rows.append({
                "domain": domain.name, "stream": None if site is None else site.stream,
                "layer": None if site is None else site.layer, "module": module,
                **{column_name: column.compute(run) for column_name, column in RUN_COLUMNS[TABLE].items()},
            })  # fmt: skip
    keys = ["domain", "stream", "layer", "module"]
    table = pd.DataFrame(rows, columns=[*keys, *RUN_COLUMNS[TABLE]])
    words = dict.fromkeys(("domain", "stream", "module", "amax_token"), "string")
    table = table.astype({**words, "layer": "Int64", "amax_position": "Int64"})
    places = table["domain"].map({domain.name: place for place, domain in enumerate(domains)})
    order = np.lexsort((table["module"], table["layer"].fillna(-1), table["stream"].fillna(""), places))
    table = table.iloc[order].reset_index(drop=True)
    return table if len(domains) > 1 else table.drop(columns="domain")


def _of(domain: Domain, arrays: dict[str, np.ndarray], spelled: Callable[[int], str | None]) -> ModuleRun:
    places = arrays[PLACES].astype(int).tolist()
    values = {name: arrays[VALUES][:, index] for index, name in enumerate(INPUT_COLUMNS)}
    width = domain.ids.shape[1]
    ids = [int(domain.ids[row, place]) if place < width else -1 for row, place in enumerate(places)]
    return ModuleRun(values, places, [spelled(token) for token in ids])


def add_modules(streams: dict[str, StreamSummary], table: pd.DataFrame) -> None:
    """Adds to the summary of each stream which module's input loses most in 8 bits."""
    for name, stream in streams.items():
        rows: Any = table[(table["stream"] == name) & table["underflow_tensor"].notna()]
        if len(rows) == 0:
            stream.in_words.append("Modules: no linear module reads this stream's tokens one by one.")
            continue
        worst = rows.loc[rows["underflow_tensor"].idxmax()]
        named = dataset_of(worst, rows)
        stream.measured[TABLE] = named | {
            "modules": int(rows["module"].nunique()), "worst": str(worst["module"]),
            "underflow_tensor": float(worst["underflow_tensor"]), "underflow_token": float(worst["underflow_token"]),
        }  # fmt: skip
        token = "" if pd.isna(worst["amax_token"]) else f", most often the token {worst['amax_token']!r}"
        stream.in_words.append(
            f"Modules{on_dataset(named)}: with per-tensor quantisation to 8 bits, {worst['module']} loses most: "
            f"{_percent(worst['underflow_tensor'])} of its input rounds to 0, with per-token quantisation "
            f"{_percent(worst['underflow_token'])}; its largest entry is most often at position "
            f"{worst['amax_position']}{token}."
            if worst["underflow_tensor"] > 0
            else "Modules: with per-tensor quantisation to 8 bits, no entry of any module's input rounds to 0."
        )


def _percent(share: float) -> str:
    """A share in whole percent; one that is not 0 is not called so."""
    return f"{100 * share:.0f} %" if share == 0 or share >= 0.005 else "less than 1 %"
