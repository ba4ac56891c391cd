"""relaxed.csv in Markdown, and as a figure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sinkscope.present.colors import LINES
from sinkscope.present.figures.canvas import drawn
from sinkscope.present.numbers import significant

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

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
