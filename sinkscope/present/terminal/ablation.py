"""An ablation as a table for the terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sinkscope.present.numbers import estimate, is_missing
from sinkscope.present.terminal.table import aligned
from sinkscope.present.text import next_command, printable

if TYPE_CHECKING:
    from sinkscope.runs.saved.ablation import Ablation


HEADER = ("intervention", "heads", "loss", "increase", "versus random")
WIDTH = 80


def render_ablation(ablation: Ablation, written: Iterable[Path] = ()) -> str:
    """The table with its rows in the order of fractions, then the result in words, then the files written."""
    data = ablation.facts["data"]
    lines = [
        f"{printable(ablation.facts['model']['id'])}: loss in nats a token on {printable(data['spec'])}, "
        f"{data['sequences']} sequences of {data['seq_len']} tokens that the run did not read",
        "",
    ]
    lines += aligned([HEADER, *(_cells(row) for row in ablation.table.to_dict("records"))])
    lines.append("")
    for sentence in ablation.words:
        lines += textwrap.wrap(sentence, WIDTH, subsequent_indent="  ")
    paths = list(written)
    if paths:
        names = ", ".join(path.name for path in paths)
        lines += ["", *textwrap.wrap(f"written to {printable(str(paths[0].parent))}: {names}", WIDTH)]
        run = ablation.facts["run"]["path"]
        if run is not None:
            lines.append(f"next: {next_command('plot', run, '--figure', 'scatter', '-o', 'dormant.png')}")
    return "\n".join([*lines, ""])


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    share = "" if is_missing(row["fraction"]) else f" {100 * row['fraction']:g} %"
    draws = f" ({row['draws']} draws)" if row["draws"] > 1 else ""
    return (
        f"{row['arm']}{share}{draws}",
        str(row["heads"]),
        _loss(row, "loss"),
        _loss(row, "increase", sign=True),
        _loss(row, "versus_random", sign=True),
    )


def _loss(row: dict[str, Any], name: str, sign: bool = False) -> str:
    return estimate(row[name], row[f"{name}_sem"], 4, sign=sign, missing="")
