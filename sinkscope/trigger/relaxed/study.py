"""Costs of both patterns over a grid of tasks: written down, found, and the paper's bounds; as a table and a figure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from sinkscope.errors import SinkscopeError
from sinkscope.present.colors import LINES
from sinkscope.present.figures.canvas import drawn
from sinkscope.present.numbers import significant
from sinkscope.runs.folder import write_files
from sinkscope.trigger.relaxed.search import least_rest, least_scores
from sinkscope.trigger.relaxed.task import PATTERNS, Relaxed, construction
from sinkscope.trigger.saving import making, one_thread

if TYPE_CHECKING:
    from matplotlib.figure import Figure


COLUMNS = {
    "groups": "C, groups of dormant tokens, and copy tokens",
    "rank": "r_eta, dimensions of the nuisance",
    "width": "d",
    "kappa": "by how much a right score leads each wrong one",
    "delta": "|eta|^2 = delta^2 d",
    "pattern": "sink or diagonal",
    "written_qk": "|W_Q|^2 + |W_K|^2 of the block that is written down",
    "written_rest": "|W_V|^2 + |W_O|^2 + |W_1|^2 + |W_2|^2 of it",
    "found_qk": "least |W_Q|^2 + |W_K|^2 that was found, over seeds",
    "found_qk_worst": "the largest over seeds",
    "bound_qk": "no W_Q, W_K that meet the requirements cost less: from the multipliers, largest over seeds",
    "found_rest": "least cost of values and MLP that was found, over seeds",
    "found_rest_worst": "the largest over seeds that met the outputs",
    "rest_seeds": "seeds whose values and MLP met the outputs to 1e-5",
    "seeds": "starts of each search",
    "lower": "L_sink or L_diag, the paper's lower bound",
    "upper_qk": "the query-key part of U_sink or U_diag",
    "upper_rest": "its rest, 5 (r_eta + C) or 3 (r_eta + C)",
}
"""Of relaxed.csv, one row per task and pattern."""

MET = 1e-5


def tasks(
    groups: Sequence[int], ranks: Sequence[int], widths: Sequence[int], kappas: Sequence[float],
    deltas: Sequence[float],
) -> list[Relaxed]:  # fmt: skip
    """Every combination. Raises SinkscopeError as `Relaxed` does."""
    return [Relaxed(*sizes) for sizes in dict.fromkeys(product(groups, ranks, widths, kappas, deltas))]


def relaxed(
    out: Path,
    planned: list[Relaxed],
    seeds: int = 3,
    begin: Callable[[str, int], None] = lambda name, number: None,
    draw: Callable[[pd.DataFrame], bytes] | None = None,
) -> pd.DataFrame:
    """Searches both patterns of every task, and writes relaxed.csv after each task, with what `draw` makes of it as
    relaxed.png: both files or none. Returns the table.

    Raises SinkscopeError where `out` is a file or cannot be written, and for seeds < 1.
    """
    if seeds < 1:
        raise SinkscopeError(f"seeds {seeds}: at least 1 is needed")
    if out.exists() and not out.is_dir():
        raise SinkscopeError(f"{out} is a file: give another --out")
    rows: list[dict[str, Any]] = []
    with making(out):
        for number, task in enumerate(planned):
            begin(f"C {task.groups}, r_eta {task.rank}, delta {task.delta:g}", number)
            with one_thread():
                rows += [row_of(task, pattern, seeds) for pattern in PATTERNS]
            table = pd.DataFrame(rows)[list(COLUMNS)]
            files: dict[Path, str | bytes] = {
                out / "relaxed.csv": table.to_csv(index=False, float_format="%.8g", lineterminator="\n")
            }
            if draw is not None:
                files[out / "relaxed.png"] = draw(table)
            write_files(files)
    return table


def row_of(task: Relaxed, pattern: str, seeds: int) -> dict[str, Any]:
    """One row of relaxed.csv."""
    written, bounds = construction(task, pattern), task.bounds()
    short = "diag" if pattern == "diagonal" else "sink"
    scores = [least_scores(task, pattern, seed) for seed in range(seeds)]
    rest = [least_rest(task, pattern, seed) for seed in range(seeds)]
    met = [least.cost for least in rest if least.violation < MET]
    missing = float("nan")
    return {
        "groups": task.groups, "rank": task.rank, "width": task.width, "kappa": task.kappa, "delta": task.delta,
        "pattern": pattern, "written_qk": written.cost_scores, "written_rest": written.cost_rest,
        "found_qk": min(least.cost for least in scores), "found_qk_worst": max(least.cost for least in scores),
        "bound_qk": max(least.bound for least in scores),
        "found_rest": min(met, default=missing), "found_rest_worst": max(met, default=missing),
        "rest_seeds": len(met), "seeds": seeds,
        "lower": bounds[f"L_{short}"], "upper_qk": bounds[f"U_{short}_qk"], "upper_rest": bounds[f"U_{short}_rest"],
    }  # fmt: skip


# relaxed.csv in Markdown, and as a figure.


NAMES = (
    "C", "r_eta", "d", "kappa", "delta", "pattern", "L", "no less than", "found, query-key", "written, query-key",
    "found, rest", "written, rest", "found, total", "written, total", "U",
)  # fmt: skip


def render_relaxed(table: pd.DataFrame) -> str:
    """One line per task and pattern: the paper's lower bound, costs found and written down, its upper bound."""
    lines = ["| " + " | ".join(NAMES) + " |", "|" + "---|" * len(NAMES)]
    for row in table.to_dict("records"):
        costs = (
            row["lower"], row["bound_qk"], row["found_qk"], row["written_qk"], row["found_rest"], row["written_rest"],
            row["found_qk"] + row["found_rest"], row["written_qk"] + row["written_rest"],
            row["upper_qk"] + row["upper_rest"],
        )  # fmt: skip
        sizes = (row["groups"], row["rank"], row["width"], f"{row['kappa']:g}", f"{row['delta']:g}", row["pattern"])
        lines.append("| " + " | ".join([*map(str, sizes), *(significant(cost, 4) for cost in costs)]) + " |")
    return "\n".join(lines) + "\n"


def draw_relaxed(table: pd.DataFrame) -> bytes:
    """Total cost of both patterns, task by task: found and written down, between the paper's bounds. PNG."""
    sizes = ["groups", "rank", "width", "kappa", "delta"]

    def paint(canvas: Figure) -> None:
        axes = canvas.subplots()
        for color, side, (pattern, rows) in zip(
            LINES, (-0.12, 0.12), table.groupby("pattern", sort=False), strict=False
        ):
            place = [number + side for number in range(len(rows))]
            upper = rows["upper_qk"] + rows["upper_rest"]
            axes.vlines(place, rows["lower"], upper, color=color, alpha=0.3, linewidth=5, label=f"{pattern}: L to U")
            found, written = rows["found_qk"] + rows["found_rest"], rows["written_qk"] + rows["written_rest"]
            axes.plot(place, written, color=color, marker="x", linestyle="", label=f"{pattern}: written down")
            axes.plot(place, found, color=color, marker="o", linestyle="", label=f"{pattern}: found")
        names = table[sizes].drop_duplicates().to_dict("records")
        changing = [name for name in sizes if table[name].nunique() > 1] or ["groups"]
        symbols = {"groups": "C", "rank": "r", "width": "d", "kappa": "κ", "delta": "δ"}
        told = ["\n".join(f"{symbols[name]} {row[name]:g}" for name in changing) for row in names]
        axes.set_xticks(range(len(told)), told)
        axes.set(yscale="log", ylabel="sum of squared Frobenius norms")
        axes.legend(fontsize="small", loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)

    return drawn(paint, "sinkscope trigger relaxed, cost of a block by its attention pattern", "png", (6.5, 4))
