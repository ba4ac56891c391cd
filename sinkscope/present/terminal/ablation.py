"""An ablation as a table for the terminal, and its figure: loss against the share of heads zeroed."""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sinkscope.present.text import printable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from sinkscope.experiments.ablation.result import Ablation


HEADER = ("arm", "heads", "loss", "increase", "versus random")
WIDTH = 100


def render_ablation(ablation: Ablation, written: Iterable[Path] = ()) -> str:
    """Rows in the order of fractions, then what they mean, then where it is written."""
    data = ablation.facts["data"]
    lines = [
        f"{printable(ablation.facts['model']['id'])}: loss in nats a token on {printable(data['spec'])}, "
        f"{data['sequences']} sequences of {data['seq_len']} tokens that the run did not read",
        "",
    ]
    rows = [HEADER, *(_cells(row) for row in ablation.table.to_dict("records"))]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADER))]
    for row in rows:
        first, rest = (
            row[0].ljust(widths[0]),
            [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)],
        )
        lines.append("  ".join([first, *rest]).rstrip())
    lines.append("")
    for sentence in ablation.words:
        lines += textwrap.wrap(sentence, WIDTH, subsequent_indent="  ")
    paths = list(written)
    if paths:
        names = ", ".join(path.name for path in paths)
        lines += ["", *textwrap.wrap(f"written to {printable(str(paths[0].parent))}: {names}", WIDTH)]
    return "\n".join([*lines, ""])


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    share = "" if math.isnan(row["fraction"]) else f" {100 * row['fraction']:g} %"
    draws = f" ({row['draws']} draws)" if row["draws"] > 1 else ""
    return (
        f"{row['arm']}{share}{draws}",
        str(row["heads"]),
        _number(row["loss"], row["loss_sem"], ""),
        _number(row["increase"], row["increase_sem"], "+"),
        _number(row["versus_random"], row["versus_random_sem"], "+"),
    )


def _number(value: float, error: float, sign: str) -> str:
    return "" if math.isnan(value) else f"{value:{sign}.4f} ± {error:.4f}"


def draw_ablation(ablation: Ablation) -> dict[str, bytes]:
    """ablation.png and ablation.svg: increase of the loss over the unablated model, one line a score and the control.

    Bars are standard errors over sequences; the band is the random draws' standard deviation.
    """
    from sinkscope.present.figures import COLORS, saved

    def paint(canvas: Figure) -> None:
        axes = canvas.subplots()
        rows = ablation.table[ablation.table["fraction"].notna()]
        for color, (name, own) in zip(itertools.cycle(COLORS), rows.groupby("arm", sort=False), strict=False):
            share = 100 * own["fraction"]
            style: dict[str, Any] = {"linestyle": "--", "marker": "s"} if name == "random" else {"marker": "o"}
            axes.errorbar(
                share, own["increase"], own["increase_sem"], label=name, color=color, capsize=2, ms=3, **style
            )
            if name == "random":
                low, high = own["increase"] - own["spread"], own["increase"] + own["spread"]
                axes.fill_between(share, low, high, color=color, alpha=0.15, linewidth=0)
        axes.axhline(0.0, color="grey", linewidth=0.6)
        axes.set(xlabel="heads zeroed, %", ylabel="loss increase, nats a token")
        axes.set_title(printable(ablation.facts["model"]["id"]), parse_math=False)
        canvas.legend(frameon=False, ncols=2, loc="outside lower center")

    about = f"sinkscope ablation of {ablation.facts['model']['id']}"
    return {f"ablation.{form}": saved(paint, about, form, "column", 0.85) for form in ("png", "svg")}
