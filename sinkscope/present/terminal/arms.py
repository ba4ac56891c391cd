"""Measurements of arms and ablations as tables for the terminal, and the grids of the presets."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from sinkscope.present.numbers import estimate, fixed, is_missing
from sinkscope.present.terminal.table import aligned, fitted
from sinkscope.present.text import next_command, printable, screen_width, wrapped
from sinkscope.runs.saved.arms_table import compared_layers
from sinkscope.runs.words import sequences_of_tokens

if TYPE_CHECKING:
    from sinkscope.runs.saved.ablation import Ablation
    from sinkscope.runs.saved.arms import Arms


HEADER = ("intervention", "size", "increase", "versus random", "KL", "top 1", "sinks")
NOTE = (
    "increase: loss minus that of the unablated model, in nats per token. versus random: loss minus that of the random "
    "control. KL: divergence of the next-token distribution from the unablated model's, in nats. top 1: share of "
    "positions with the same most probable token. sinks: share of (sequence, head) pairs with a sink at any key. size: "
    "number of heads zeroed, keys hidden, tokens kept or elements replaced. ±: standard error."
)
DESTROYED = "destroyed: the perplexity is more than 10 times that of the unablated model."
KEPT = {
    "kept": "kept: first tokens whose keys and values stay unrounded; random: as many random tokens instead",
    "sinks": "sinks: first tokens that every query still sees; random: as many random tokens instead",
}
KNEE = "* knee: fewest tokens kept with a loss within one standard error of the lowest"


def render_arms(arms: Arms, written: Iterable[Path] = ()) -> str:
    """The result in words, then a row for each arm, then the files written."""
    return _closed([*_opening(arms), *_every_number(arms.table)], arms, written)


def render_grid(arms: Arms, kept: str, written: Iterable[Path] = ()) -> str:
    """The result in words, then a row for each family of arms and a column for each number kept, with the random
    control below it; then the arms of no family. `kept`: a key of KEPT."""
    families = arms.table[arms.table["family"].notna()]
    numbers = sorted({int(number) for number in families["kept"]})
    rows = []
    for name, members in families.groupby("family", sort=False):
        by_number = {int(row["kept"]): row for row in members.to_dict("records")}
        rows.append((printable(str(name)), *(_increase(by_number.get(number)) for number in numbers)))
        controls = {number: _control(arms.table, row) for number, row in by_number.items()}
        if any(controls.values()):
            rows.append(("  random", *(_increase(controls.get(number)) for number in numbers)))
    header = (
        "loss increase, nats",
        *(f"{number} {kept.removesuffix('s') if number == 1 else kept}" for number in numbers),
    )
    lines = [
        *_opening(arms),
        *_fitted([header, *rows]),
        "",
        *(line for sentence in (KEPT[kept], KNEE) for line in wrapped(sentence, rest="  ")),
        "",
    ]
    others = arms.table[arms.table["family"].isna() & ~arms.table["arm"].isin(families["control"])]
    if len(others) > 1:
        lines += _every_number(others)
    return _closed(lines, arms, written)


def _opening(arms: Arms) -> list[str]:
    data = arms.facts["data"]
    read = "" if arms.facts["run"] is None else " that the run did not read"
    loss = arms.table.iloc[0]
    told = (
        f"{printable(arms.facts['model']['id'])}: loss {estimate(loss['loss'], loss['loss_sem'], 4)} nats per token on "
        f"{printable(data['spec'])}, {sequences_of_tokens(data['sequences'], data['seq_len'])}{read}"
    )
    return [*wrapped(told, rest="  "), "", *_result(arms.words)]


def _result(words: list[str]) -> list[str]:
    """The sentences, and an empty line behind them."""
    lines = [line for sentence in words for line in wrapped(printable(sentence), rest="  ")]
    return [*lines, ""] if lines else []


def _every_number(table: pd.DataFrame) -> list[str]:
    """A row for each arm of the table, and what its columns are."""
    notes = [NOTE, *([DESTROYED] if table["destroyed"].eq(True).any() else [])]
    told = [line for note in notes for line in wrapped(note)]
    return [*_fitted([HEADER, *(_cells(row) for row in table.to_dict("records"))]), "", *told, ""]


def _fitted(rows: list[tuple[str, ...]]) -> list[str]:
    """Rows as lines; where they are too wide, each name on a line of its own above its numbers, or as `fitted` does."""
    lines = aligned(rows)
    if max(map(len, lines)) <= screen_width():
        return lines
    numbers = [f"    {line}" for line in aligned([row[1:] for row in rows], left=0)]
    if max(map(len, numbers)) > screen_width():
        return fitted(rows)
    return [line for row, values in zip(rows, numbers, strict=True) for line in (row[0], values)]


COSINES = ("cosine of tokens", "rises", "falls", "above random", "below random", "largest change", "layer")


def _alike(arms: Arms) -> list[str]:
    """A row for each arm that has a control: after how many layers the mean cosine of its tokens rises, and falls."""
    compared = pd.DataFrame() if arms.cosines is None else compared_layers(arms.cosines)
    names = ("more", "less", "more_than_random", "less_than_random")
    rows = [
        (printable(str(row["arm"])), *(f"{row[name]} of {row['layers']}" for name in names),
         estimate(row["change"], row["change_sem"], 4, sign=True), str(row["layer"]))
        for row in compared.to_dict("records")
    ]  # fmt: skip
    return [*fitted([COSINES, *rows]), ""] if rows else []


def _closed(lines: list[str], arms: Arms, written: Iterable[Path]) -> str:
    return "\n".join([*lines, *_alike(arms), *_files(written)])


def _files(written: Iterable[Path]) -> list[str]:
    paths = list(written)
    if not paths:
        return []
    names = ", ".join(path.name for path in paths)
    return [*wrapped(f"written to {printable(str(paths[0].parent))}: {names}"), ""]


def _control(table: pd.DataFrame, row: dict[str, Any]) -> dict[str, Any] | None:
    controls = table[table["arm"] == row["control"]]
    return None if controls.empty else dict(controls.iloc[0])


def _increase(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    return estimate(row["increase"], row["increase_sem"], 4, sign=True) + (" *" if row["knee"] is True else "")


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    draws = f" ({row['draws']} draws)" if row["draws"] > 1 else ""
    return (
        printable(f"{row['arm']}{draws}"),
        fixed(row["size"], 1),
        estimate(row["increase"], row["increase_sem"], 4, sign=True) + (" destroyed" if row["destroyed"] else ""),
        estimate(row["versus_random"], row["versus_random_sem"], 4, sign=True, missing=""),
        fixed(row["kl"], 4),
        fixed(row["top1"], 3),
        fixed(row["sink_rate_any"], 3),
    )


# An ablation as a table for the terminal.


ABLATION_HEADER = ("intervention", "heads", "loss", "increase", "versus random")
ABLATION_NOTE = (
    "increase: loss minus that of the unablated model. versus random: loss minus that of the random control. ±: "
    "standard error."
)


def render_ablation(ablation: Ablation, written: Iterable[Path] = ()) -> str:
    """The result in words, then the table with its rows in the order of fractions, then the files written."""
    data = ablation.facts["data"]
    told = (
        f"{printable(ablation.facts['model']['id'])}: loss in nats per token on {printable(data['spec'])}, "
        f"{sequences_of_tokens(data['sequences'], data['seq_len'])} that the run did not read"
    )
    rows = [ABLATION_HEADER, *(_ablation_cells(row) for row in ablation.table.to_dict("records"))]
    files, run = _files(written), ablation.facts["run"]["path"]
    if files and run is not None:
        files.insert(-1, f"next: {next_command('plot', run, '--figure', 'scatter', '-o', 'dormant.png')}")
    opening = [*wrapped(told, rest="  "), "", *_result(ablation.words)]
    return "\n".join([*opening, *_fitted(rows), "", *wrapped(ABLATION_NOTE), "", *files])


def _ablation_cells(row: dict[str, Any]) -> tuple[str, ...]:
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
