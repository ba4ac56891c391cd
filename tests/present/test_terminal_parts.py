"""Parts that several screens share: the map of heads, and columns of plain text."""

from __future__ import annotations

import re

import pytest

from sinkscope.present.terminal.table import Cells, MapRow, aligned, fitted, head_map, plain, shades
from sinkscope.present.text import wrapped


def test_a_map_wraps_long_layers_and_keeps_notes_that_fit() -> None:
    cells = Cells(1, 4, lambda value: f"{value:.0f}", plain)
    text = head_map("title", [MapRow(0, [1.0] * 6, "sliding:4")], cells, width=40).plain
    assert text == "\ntitle: layers down, heads across\n    0 1111  sliding:4\n      11\n"
    assert "sliding" not in head_map("title", [MapRow(0, [1.0] * 6, "sliding:4")], cells, width=20).plain


def test_a_missing_cell_has_no_background() -> None:
    style = shades(0, 1)
    assert style(float("nan")) == "not bold dim"
    assert re.fullmatch(r"not bold (black|white) on #[0-9a-f]{6}", style(0.5))


def test_plain_columns_stand_below_each_other() -> None:
    assert aligned([["a", "bb"], ["cc", "d"]]) == ["a   bb", "cc   d"]
    assert aligned([["a", ""], ["cc", ""]], gap=" ") == ["a", "cc"]
    assert aligned([["a", "bb"], ["cc", "d"]], left=0, gap=" ") == [" a bb", "cc  d"]


def test_a_table_that_is_too_wide_is_told_row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [("step", "sink rate (eps 0.3)", "dormant heads"), ("0", "0.0 %", ""), ("143000", "51.2 %", "12")]
    told = ["  sink rate (eps 0.3): 0.0 %", "  sink rate (eps 0.3): 51.2 %;", "  dormant heads: 12"]
    for columns, expected in (
        ("80", aligned(rows)),
        ("42", aligned(rows)),
        ("41", ["step: 0", *told[:1], "step: 143000", *told[1:]]),
    ):
        monkeypatch.setenv("COLUMNS", columns)
        assert fitted(rows) == expected
    monkeypatch.setenv("COLUMNS", "40")
    both = fitted([("layer", "head", "mass at the first position", "mean"), ("1", "2", "0.25", "0.5")], keys=2)
    assert both == ["layer: 1, head: 2", "  mass at the first position: 0.25;", "  mean: 0.5"]
    monkeypatch.setenv("COLUMNS", "75")
    assert fitted([("step", "x" * 70), ("0", "1")]) == ["step: 0", f"  {'x' * 70}: 1"]


def test_a_line_is_broken_between_words_alone() -> None:
    text = "written to runs/a-long-name: 95 % of 3 s, 1.5 x"
    assert wrapped(text, 20) == ["written to", "runs/a-long-name:", "95 % of 3 s, 1.5 x"]
    assert wrapped("one of 95 % here", 9, rest="  ") == ["one of", "  95 %", "  here"]
    assert wrapped("a path/longer-than-the-line", 10, first="> ") == ["> a", "> path/longer-than-the-line"]
    assert wrapped("8 sinks", 2) == ["8", "sinks"], "s stands for seconds only where it is a word"
