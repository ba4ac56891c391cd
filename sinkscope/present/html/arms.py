"""Arms in the HTML report: a row an arm with its interval beside its random control, in numbers and drawn."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from markupsafe import Markup, escape

from sinkscope.present.html.svg import ticks
from sinkscope.present.numbers import MISSING, estimate, fixed, interval, is_missing, probability, significant
from sinkscope.present.text import printable
from sinkscope.runs.saved.arms_table import UNABLATED
from sinkscope.runs.words import sequences_of_tokens

if TYPE_CHECKING:
    import pandas as pd

    from sinkscope.runs.saved.arms import SavedArms

WIDTH, EDGE, HEIGHT = 260, 14, 24
"""Size of a row's drawing in pixels, and the margin at both of its sides."""


def arms_view(arms: SavedArms) -> dict[str, Any]:
    """What the template shows of a measurement: its arms from the one that costs most to the one that costs least."""
    table = arms.table
    controls = {row["arm"]: row for row in table.to_dict("records")}
    chosen = table[(table["arm"] != UNABLATED) & ~table["arm"].isin(table["control"].dropna())]
    chosen = chosen.sort_values("increase", ascending=False, kind="stable", na_position="last")
    scale = Scale(table)
    data, loss = arms.facts.data, table.iloc[0]
    return {
        "folder": arms.path.name,
        "loss": estimate(loss["loss"], loss["loss_sem"], 4),
        "text": f"{data.spec}, {sequences_of_tokens(data.sequences, data.seq_len)}",
        "held_out": arms.facts.run is not None,
        "computed": f"{arms.facts.model.dtype} on {arms.facts.model.device}",
        "rows": [
            _row(row, None if is_missing(row["control"]) else controls[row["control"]], scale)
            for row in chosen.to_dict("records")
        ],
        "axis": scale.axis(),
        "words": arms.facts.in_words,
        "warnings": arms.facts.warnings,
    }


def _row(row: dict[Any, Any], control: dict[Any, Any] | None, scale: Scale) -> dict[str, Any]:
    return {
        "arm": _named(row), "destroyed": row["destroyed"] is True, "knee": row["knee"] is True,
        "increase": fixed(row["increase"], 4, sign=True),
        "interval": interval(row["increase_low"], row["increase_high"], 4),
        "control": "" if control is None else _named(control),
        "random": MISSING if control is None else fixed(control["increase"], 4, sign=True),
        "against": estimate(row["versus_random"], row["versus_random_sem"], 4, sign=True),
        "p": "" if control is None else probability(row["versus_random_p"]),
        "kl": fixed(row["kl"], 4), "top1": fixed(row["top1"], 3), "drawing": scale.drawing(row, control),
    }  # fmt: skip


def _named(row: dict[Any, Any]) -> str:
    return f"{row['arm']} ({row['draws']} draws)" if row["draws"] > 1 else str(row["arm"])


class Scale:
    """One scale for the drawings of all rows, from the lowest end of an interval to the highest; 0 is on it."""

    def __init__(self, table: pd.DataFrame) -> None:
        ends = table[["increase", "increase_low", "increase_high"]].to_numpy(float)
        bounds = ends[ends == ends]
        self.low, self.high = min(0.0, *bounds, 0.0), max(0.0, *bounds, 0.0)
        if self.low == self.high:
            self.high = 1.0

    def x(self, value: float) -> float:
        """The place of a number in pixels from the left."""
        return EDGE + (WIDTH - 2 * EDGE) * (value - self.low) / (self.high - self.low)

    def axis(self) -> Markup:
        """The numbers above the drawings."""
        marks = [
            f'<text class="tick mid" x="{self.x(value):.1f}" y="11">{significant(value, 3)}</text>'
            for value in ticks(self.low, self.high)
        ]
        return _svg("".join(marks), 14)

    def drawing(self, row: dict[Any, Any], control: dict[Any, Any] | None) -> Markup:
        """An arm's increase with its 95 % interval; its random control's below it."""
        parts = [f'<path class="axis" d="M{self.x(0.0):.1f} 0V{HEIGHT}"/>']
        if control is not None:
            parts.append(self._mark(control, "control", 17))
        return _svg("".join([*parts, self._mark(row, "arm", 8)]), HEIGHT)

    def _mark(self, row: dict[Any, Any], kind: str, y: int) -> str:
        if is_missing(row["increase"]):
            return ""
        words = f"{_named(row)}: {fixed(row['increase'], 4, sign=True)}"
        line = ""
        if not is_missing(row["increase_low"]):
            line = f'<path d="M{self.x(row["increase_low"]):.1f} {y}H{self.x(row["increase_high"]):.1f}"/>'
            words += f", 95 % interval {interval(row['increase_low'], row['increase_high'], 4)}"
        dot = f'<circle cx="{self.x(row["increase"]):.1f}" cy="{y}" r="3.5"/>'
        return f'<g class="{kind}"><title>{escape(printable(words))}</title>{line}{dot}</g>'


def _svg(inside: str, height: int) -> Markup:
    return Markup(
        f'<svg class="forest" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" aria-hidden="true">'
        f"{inside}</svg>"
    )
