"""An ablation's figure: loss against the share of heads zeroed."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from sinkscope.present.colors import CONTROL, LINES
from sinkscope.present.figures.canvas import drawn, inches
from sinkscope.present.text import printable
from sinkscope.runs.saved.ablation import RANDOM

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from sinkscope.runs.saved.ablation import Ablation


def draw_ablation(ablation: Ablation) -> dict[str, bytes]:
    """ablation.png and ablation.svg: the loss increase over the unablated model, a line for each score and the control.

    Bars are standard errors over sequences; the band is the random draws' standard deviation.
    """

    def paint(canvas: Figure) -> None:
        axes = canvas.subplots()
        rows = ablation.table[ablation.table["fraction"].notna()]
        colors = itertools.cycle(LINES)
        for name, own in rows.groupby("arm", sort=False):
            share, random = 100 * own["fraction"], name == RANDOM
            color, line, marker = (CONTROL, "--", "s") if random else (next(colors), "-", "o")
            axes.errorbar(
                share, own["increase"], own["increase_sem"], label=name, color=color, linestyle=line, marker=marker,
                capsize=2, ms=3,
            )  # fmt: skip
            if random:
                low, high = own["increase"] - own["spread"], own["increase"] + own["spread"]
                axes.fill_between(share, low, high, color=color, alpha=0.15, linewidth=0)
        axes.axhline(0.0, color="grey", linewidth=0.6)
        measured = sorted({100 * fraction for fraction in rows["fraction"]})
        axes.set_xticks(measured, [f"{share:g}" for share in measured])
        axes.set(xlabel="heads zeroed, %", ylabel="loss increase, nats a token")
        axes.set_title(printable(ablation.facts["model"]["id"]), parse_math=False)
        canvas.legend(frameon=False, ncols=2, loc="outside lower center")

    about = f"sinkscope ablation of {ablation.facts['model']['id']}"
    return {f"ablation.{form}": drawn(paint, about, form, inches("column", 0.85)) for form in ("png", "svg")}
