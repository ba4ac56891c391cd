"""An ablation's figure: loss against the share of heads zeroed."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from sinkscope.present.colors import LINES
from sinkscope.present.figures.canvas import drawn, inches
from sinkscope.present.text import printable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from sinkscope.experiments.ablation.result import Ablation


def draw_ablation(ablation: Ablation) -> dict[str, bytes]:
    """ablation.png and ablation.svg: increase of the loss over the unablated model, one line a score and the control.

    Bars are standard errors over sequences; the band is the random draws' standard deviation.
    """

    def paint(canvas: Figure) -> None:
        axes = canvas.subplots()
        rows = ablation.table[ablation.table["fraction"].notna()]
        for color, (name, own) in zip(itertools.cycle(LINES), rows.groupby("arm", sort=False), strict=False):
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
    return {f"ablation.{form}": drawn(paint, about, form, inches("column", 0.85)) for form in ("png", "svg")}
