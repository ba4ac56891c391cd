"""Numbers as text: digits, signs, missing values, and the marks that screens rely on."""

from __future__ import annotations

import ast
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import sinkscope
from sinkscope.present import numbers
from sinkscope.present.numbers import (
    change,
    decimals,
    estimate,
    fixed,
    interval,
    memory,
    parameters,
    probability,
    rounded,
    signed,
    significant,
    uncertainty,
)


@pytest.mark.parametrize("missing", [None, float("nan"), pd.NA, np.float64("nan")])
def test_every_kind_marks_a_missing_value_the_same_way(missing: float | None) -> None:
    texts = {
        significant(missing), signed(missing), uncertainty(missing), change(missing, 0.1), probability(missing),
        fixed(missing, 2), estimate(missing, 0.1, 2), interval(missing, 0.1), interval(0.1, missing),
    }  # fmt: skip
    assert texts == {numbers.MISSING}
    assert rounded(missing) is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (significant(0.123456), "0.1235"), (significant(2.0), "2"), (significant(123456.0), "1.235e+05"),
        (significant(None, missing="missing"), "missing"), (signed(0.0), "+0"), (signed(-0.12345), "-0.123"),
        (uncertainty(0.0123), "0.012"), (change(0.25, 0.0123), "+0.250 ± 0.012"), (change(0.25, None), "+0.25"),
        (change(-0.183, 0.007), "-0.1830 ± 0.0070"), (change(-2.13e-5, 7e-5), "-0.000021 ± 0.000070"),
        (change(5e-9, 2e-9), "+5.0e-09 ± 2.0e-09"), (change(0, 2e-9), "+0 ± 2.0e-09"), (change(0.25, 0), "+0.25 ± 0"),
        (change(1234567.0, 8910.0), "+1234567 ± 8910"), (change(float("inf"), 0.1), "+inf ± 0.10"),
        (probability(0.0123), "0.012"), (probability(1e-10), "<1e-9"), (probability(0.0), "<1e-9"),
        (fixed(0.5, 3), "0.500"), (fixed(0.5, 1, sign=True), "+0.5"), (estimate(0.5, 0.01, 3), "0.500 ± 0.010"),
        (estimate(0.5, float("nan"), 3), "0.500"), (estimate(None, None, 3, missing=""), ""),
        (estimate(0.5, 0.01, 2, sign=True), "+0.50 ± 0.01"), (interval(0.2571, 0.3009, 3), "+0.257 to +0.301"),
        (interval(-0.0008, 0.1288), "-0.001 to +0.129"), (interval(0.00004, 0.13), "+0.00 to +0.13"),
        (interval(0.0, 0.13), "+0.00 to +0.13"), (interval(-0.13, 0.0041), "-0.130 to +0.004"),
        (parameters(999_999), "999,999"), (parameters(268_000_000), "268 M"), (memory(3 * 2**30, "MiB"), "3,072 MiB"),
        (memory(2**34, "GiB", 1), "16.0 GiB"), (memory(None, "MiB"), "-"),
    ],
)  # fmt: skip
def test_digits_and_signs(text: str, expected: str) -> None:
    assert text == expected


@pytest.mark.parametrize(
    ("values", "halves", "places"),
    [([0.5], [0.0123], 3), ([0.5], [12.0], 0), ([0.5], [1e-9], 6), ([0.1234, 5.6], [], 2), ([1.0, 12.0], [], 0),
     ([0.1234], [0.0, float("nan")], 3), ([float("nan")], [], 0), ([], [], 0), ([1234.5], [], 0),
     ([float("inf")], [], 0), ([0.5, -float("inf")], [], 3)],
)  # fmt: skip
def test_decimals_of_a_column(values: list[float], halves: list[float], places: int) -> None:
    assert decimals(values, halves) == places


def test_numbers_for_json() -> None:
    assert [rounded(value) for value in (0.123456, float("inf"), pd.NA, 3, "text", True)] == [
        0.123, None, None, 3, "text", True,
    ]  # fmt: skip


def test_no_screen_takes_helpers_from_another_screen() -> None:
    """Modules share the ones listed here. A screen may also show a part of another, and then imports the function that
    writes the part: `render_...`, `..._view`, `..._rows`, `..._answers`. A notebook shows screens and figures alike."""
    root = Path(sinkscope.__file__).parent / "present"
    shared = {
        "numbers",
        "colors",
        "notation",
        "text",
        "table",
        "head_map",
        "canvas",
        "svg",
        "maps",
        "series",
        "several",
        "head_data",
    }
    shared |= {"verdict", "differences", "gallery", "attention"}
    shared |= {"heat_map", "section", "page", "paper", "cells", "format", "figures"}
    parts = ("render_", "_view", "_rows", "_answers")
    for path in set(root.rglob("*.py")) - {root / "notebook.py"}:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sinkscope.present."):
                if (node.module or "").rpartition(".")[2] in shared:
                    continue
                names = [alias.name for alias in node.names]
                assert all(name.startswith(parts) or name.endswith(parts) for name in names), (path.name, names)
