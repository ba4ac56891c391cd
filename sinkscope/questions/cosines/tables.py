"""cosine_curve.csv, the table of `--measure cosines`: mean cosines of each layer over prefixes of the sequences."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from sinkscope.capture import Site
from sinkscope.questions.cosines.columns import COSINES
from sinkscope.runs.statistics import mean, sem
from sinkscope.tables.columns import RUN_COLUMNS, run_column
from sinkscope.tables.frames import measured_curve
from sinkscope.tables.values import Domain

TABLE = "cosine_curve"
LAMPERT = "Lampert et al. 2605.08453"


@dataclass(frozen=True)
class CurveRun:
    """What the columns are computed from, for one site and domain: per-sequence values [N, length], by column."""

    values: dict[str, np.ndarray]


def quantity_name(column: str) -> str:
    """The name of the quantity that holds a column's per-sequence values."""
    return f"prefix_{column}"


def _declare(name: str, formula: str, figure: str) -> None:
    def average(run: CurveRun) -> np.ndarray:
        return mean(run.values[name])

    def error(run: CurveRun) -> np.ndarray:
        return sem(run.values[name])

    average.__name__, error.__name__ = name, f"{name}_sem"
    average.__doc__ = f"{formula} Empty at a length that no sequence reaches."
    error.__doc__ = f"Standard error of {name} over sequences."
    run_column(TABLE, unit="cosine", range="[-1, 1]", source=f"{LAMPERT} {figure}")(average)
    run_column(TABLE, unit="cosine", range="[0, inf)", source="ours")(error)


_declare(
    "avg_cos_residual",
    "Mean of cos(x_i, x_j) over all pairs of different tokens i, j >= 1 in the prefix.",
    "fig. 2, 4, 6",
)
_declare(
    "avg_cos_input", "Mean of cos(z_i, z_j) over all pairs of different tokens i, j >= 1 in the prefix.", "fig. 2, 4, 6"
)
_declare("cos_first_residual", "Mean of cos(x_0, x_j) over the tokens j >= 1 in the prefix.", "fig. 1")
_declare("cos_first_input", "Mean of cos(z_0, z_j) over the tokens j >= 1 in the prefix.", "fig. 1")


def cosine_table(domains: list[Domain], sites: list[Site]) -> pd.DataFrame:
    """cosine_curve.csv: one row per (stream, layer, length), for each domain where there are several."""

    def columns(values: dict[str, np.ndarray]) -> dict[str, object]:
        run = CurveRun({name: values[quantity_name(name)] for name in COSINES})
        return {name: column.compute(run) for name, column in RUN_COLUMNS[TABLE].items()}

    return measured_curve([quantity_name(name) for name in COSINES], domains, sites, columns)
