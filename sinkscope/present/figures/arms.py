"""Figures of arms: the increase of each beside its random control, a grid's families, an ablation's loss."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from sinkscope.present.colors import CONTROL, LINES
from sinkscope.present.figures.canvas import drawn, inches
from sinkscope.present.text import printable
from sinkscope.runs.saved.ablation import RANDOM

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from sinkscope.runs.saved.ablation import Ablation
    from sinkscope.runs.saved.arms import Arms


INCREASE = "loss increase, nats per token"
POINTS: dict[str, Any] = {"linestyle": "-", "marker": "o", "capsize": 2, "ms": 3}
BESIDE = 0.04
"""How far a control's points stand beside those of its arm, in steps of the axis."""


def draw_arms(arms: Arms) -> dict[str, bytes]:
    """arms.png and arms.svg: a point for each arm with its standard error, its random control in grey on its line."""
    table = arms.table.iloc[1:]
    chosen = table[~table["arm"].isin(table["control"].dropna())]

    def paint(canvas: Figure) -> None:
        axes = canvas.subplots()
        rows = list(enumerate(chosen.to_dict("records")))
        for place, row in rows:
            control = table[table["arm"] == row["control"]]
            if len(control):
                _point(axes, control.iloc[0], place, CONTROL, "s")
            _point(axes, row, place, LINES[0], "o")
        axes.set_yticks([place for place, _ in rows], [printable(str(row["arm"])) for _, row in rows], parse_math=False)
        axes.invert_yaxis()
        axes.axvline(0.0, color="grey", linewidth=0.6)
        axes.set(xlabel=f"{INCREASE} (grey: random control)")
        axes.set_title(printable(arms.facts["model"]["id"]), parse_math=False)

    return _forms(arms, paint, max(0.5, 0.25 + 0.055 * len(chosen)))


def draw_grid(arms: Arms, kept: str) -> dict[str, bytes]:
    """arms.png and arms.svg: the increase against the number kept, a line for each family, its control dotted.

    The control's points are open squares, a little to the right: a single point has no line that tells it apart, and
    its bar would hide the other.
    """
    table = arms.table
    families = table[table["family"].notna()]

    def paint(canvas: Figure) -> None:
        axes = canvas.subplots()
        colors = itertools.cycle(LINES)
        numbers = sorted({int(number) for number in families["kept"]})
        places = {number: place for place, number in enumerate(numbers)}
        for name, rows in families.sort_values("kept", kind="stable").groupby("family", sort=False):
            color = next(colors)
            at = [places[int(number)] for number in rows["kept"]]
            axes.errorbar(at, rows["increase"], rows["increase_sem"], label=printable(str(name)), color=color, **POINTS)
            controlled = rows[rows["control"].notna()]
            random = table.set_index("arm").loc[list(controlled["control"])]
            if len(random):
                beside = [places[int(number)] + BESIDE for number in controlled["kept"]]
                axes.errorbar(
                    beside, random["increase"], random["increase_sem"], label=f"{printable(str(name))}, random",
                    color=color, **POINTS | {"linestyle": ":", "marker": "s", "markerfacecolor": "white"},
                )  # fmt: skip
        axes.axhline(0.0, color="grey", linewidth=0.6)
        axes.set_xticks(list(places.values()), [str(number) for number in numbers])
        axes.set(xlabel=kept, ylabel=INCREASE)
        axes.set_title(printable(arms.facts["model"]["id"]), parse_math=False)
        canvas.legend(frameon=False, ncols=2, loc="outside lower center")

    return _forms(arms, paint, 0.85)


def _point(axes: Any, row: Any, place: int, color: str, marker: str) -> None:
    axes.errorbar(row["increase"], place, xerr=row["increase_sem"], color=color, marker=marker, capsize=2, ms=3)


def _forms(arms: Arms, paint: Any, ratio: float) -> dict[str, bytes]:
    about = f"sinkscope arms of {arms.facts['model']['id']}"
    return {f"arms.{form}": drawn(paint, about, form, inches("column", ratio)) for form in ("png", "svg")}


# An ablation's figure: loss against the share of heads zeroed.


def draw_ablation(ablation: Ablation) -> dict[str, bytes]:
    """ablation.png and ablation.svg: the loss increase over the unablated model, a line for each score and the control.

    Bars are standard errors over sequences; the band is the random draws' standard deviation.
    """

    def paint(canvas: Figure) -> None:
        axes = canvas.subplots()
        rows = ablation.table[ablation.table["fraction"].notna()]
        colors = itertools.cycle(LINES)
        for name, arm in rows.groupby("arm", sort=False):
            share, random = 100 * arm["fraction"], name == RANDOM
            color, line, marker = (CONTROL, "--", "s") if random else (next(colors), "-", "o")
            axes.errorbar(
                share, arm["increase"], arm["increase_sem"], label=name, color=color, linestyle=line, marker=marker,
                capsize=2, ms=3,
            )  # fmt: skip
            if random:
                low, high = arm["increase"] - arm["spread"], arm["increase"] + arm["spread"]
                axes.fill_between(share, low, high, color=color, alpha=0.15, linewidth=0)
        axes.axhline(0.0, color="grey", linewidth=0.6)
        measured = sorted({100 * fraction for fraction in rows["fraction"]})
        axes.set_xticks(measured, [f"{share:g}" for share in measured])
        axes.set(xlabel="heads zeroed, %", ylabel="loss increase, nats per token")
        axes.set_title(printable(ablation.facts["model"]["id"]), parse_math=False)
        canvas.legend(frameon=False, ncols=2, loc="outside lower center")

    about = f"sinkscope ablation of {ablation.facts['model']['id']}"
    return {f"ablation.{form}": drawn(paint, about, form, inches("column", 0.85)) for form in ("png", "svg")}
