"""An ablation as a table for the terminal."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sinkscope.present.text import printable

if TYPE_CHECKING:
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
