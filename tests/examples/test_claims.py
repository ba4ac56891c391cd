"""docs/claims.md says what examples/claims.py measured: its tables are those of docs/claims.csv, its sentences too.

The numbers of docs/claims.csv come from 32 sequences of each text. The slow test measures a few of these sequences.
"""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "claims.md").read_text("utf-8")
TABLE = re.compile(r"^\|.*?(?=^[^|]|\Z)", re.M | re.S)
UNREAD = re.compile(r"^```.*?^```$|`[^`]*`|\]\([^)]*\)|\d{4}\.\d{5}", re.M | re.S)
"""Code, links and numbers of papers, in which a number is none that was measured."""
MEASURED = re.compile(r"-?\d+\.\d+|\d+ of \d+")


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "examples" / "claims.py"))


@pytest.fixture(scope="module")
def numbers(script: dict[str, Any]) -> pd.DataFrame:
    return script["read_rows"](ROOT / "docs" / "claims.csv")


def tables_of(text: str) -> list[str]:
    """The tables of a page; that of verdicts, which names claims, is none of numbers."""
    return [found.strip() for found in TABLE.findall(text) if not found.startswith("| claim")]


def unfounded(text: str, tables: list[str]) -> list[str]:
    """The numbers of a page's sentences that stand in none of its tables, and that no paper published."""
    shown = " ".join([*tables, (ROOT / "sinkscope" / "data" / "published.csv").read_text("utf-8")])
    sentences = UNREAD.sub("", TABLE.sub("", text))
    known = {*MEASURED.findall(shown), *re.findall(r"\d+\.\d+", shown)}
    return [each for each in MEASURED.findall(sentences) if each not in known]


def test_every_table_is_what_was_measured(script: dict[str, Any], numbers: pd.DataFrame) -> None:
    measured = [script["as_markdown"](rows) for _, rows in numbers.groupby("table", sort=False)]
    assert sorted(tables_of(PAGE)) == sorted(measured), "run: python examples/claims.py --tables docs/claims.csv"


def test_every_number_of_a_sentence_stands_in_a_table() -> None:
    assert unfounded(PAGE, tables_of(PAGE)) == []


def test_a_number_that_was_not_measured_is_seen() -> None:
    text = "| | a |\n| --- | ---: |\n| b 0.9 | 0.374 ± 0.002 |\n| c | 12 of 72 |\n"
    told = "\nIn 12 of 72 heads it is 0.374 (`x < 0.7`, 2605.08453), above 0.9, in 13 of 72 it is 0.375.\n"
    assert tables_of(text + told) == [text.strip()]
    assert unfounded(text + told, tables_of(text)) == ["13 of 72", "0.375"]


@pytest.mark.slow
@pytest.mark.real
def test_a_few_sequences_say_the_same(
    script: dict[str, Any], numbers: pd.DataFrame, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first two sequences of prose: means lie within five of the errors that two sequences have. The trigger
    models that come with sinkscope are measured whole."""
    from sinkscope.checkpoints import LoadOptions, open_checkpoint

    gemma = open_checkpoint(script["GEMMA"], LoadOptions(head=True))
    folder = script["Folder"](tmp_path, gemma.model, gemma.tokenizer)
    found = script["as_rows"](script["measure_triggers"](folder), script["measure_gemma"](folder, 2, ("prose",)))
    key = ["table", "quantity", "subject"]
    both = found.merge(numbers, on=key, suffixes=("", "_page"), how="left", indicator=True)
    named = both["quantity"].str.startswith(("of head", "head of", "the head", "in layer", "layer of"))
    assert both[(both["_merge"] != "both") & ~named].empty, "the page has a number for each"
    chosen = both["quantity"].str.startswith(("its", "smallest", "largest"))
    means = both[(both["n"] > 1) & (both["n"] < both["n_page"]) & ~chosen]
    assert len(means) >= 20
    spread = means["sem_page"] * np.sqrt(means["n_page"] / means["n"])
    wrong = means[(means["value"] - means["value_page"]).abs() > 5 * spread]
    assert wrong.empty, wrong[[*key, "shown", "shown_page"]].to_string()
    whole = both[both["subject"].str.startswith("trigger-")]
    assert whole["shown"].tolist() == whole["shown_page"].tolist()
