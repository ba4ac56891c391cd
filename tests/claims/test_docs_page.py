"""docs/claims.md says what `sinkscope claims` found: its tables are those of docs/claims.csv, its sentences too.

The numbers of docs/claims.csv come from 32 sequences. The slow tests measure the trigger models and, in the nightly
run, a few sequences of Gemma.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from tiers import nightly

from sinkscope.claims.claim import CLAIMS, chosen_claims
from sinkscope.claims.findings import number_of, put, read_csv
from sinkscope.claims.subject import Subject

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "claims.md").read_text("utf-8")
NUMBERS = read_csv(ROOT / "docs" / "claims.csv")
UNREAD = re.compile(r"^```.*?^```$|`[^`]*`|\]\([^)]*\)|\d{4}\.\d{5}|Proposition 4\.1", re.M | re.S)
"""Code, links and numbers of papers, in which a number is none that was measured."""
KEY = ["claim", "subject", "row", "quantity"]
MEASURED = re.compile(r"-?\d+\.\d+|\d+ of \d+")


def by_hand(page: str) -> str:
    """What is not written from the table: the introduction and the discussion."""
    return re.sub(r"<!-- `python docs/write_pages.*?<!-- Written by hand", "", page, flags=re.S)


def unfounded(text: str, known: set[str]) -> list[str]:
    """The numbers of sentences that stand in no table."""
    return [each for each in MEASURED.findall(UNREAD.sub("", text)) if each not in known]


def shown() -> set[str]:
    texts = " ".join([*NUMBERS["shown"], *NUMBERS["quantity"], *(each.says for each in chosen_claims())])
    return {*MEASURED.findall(texts), *re.findall(r"\d+\.\d+", texts)}


def test_the_page_has_every_claim_and_every_model() -> None:
    """That its tables are the table's, tests/test_docs.py holds for every generated page."""
    assert set(NUMBERS["claim"]) == {name for name in CLAIMS if CLAIMS.ships(name)}
    assert len(set(NUMBERS["subject"])) == 7
    assert PAGE.count("**Rule.**") == len(set(NUMBERS["claim"]))


def test_every_verdict_is_the_rule_s() -> None:
    """A rule that was changed without measuring again would leave another verdict."""
    for row in NUMBERS[NUMBERS["row"] == "deciding"].itertuples():
        own = NUMBERS[(NUMBERS["claim"] == row.claim) & (NUMBERS["subject"] == row.subject)]
        verdict = own.loc[own["row"] == "verdict", "shown"].item()
        assert CLAIMS[row.claim].rule.verdict(number_of(row).value) == verdict, (row.claim, row.subject)


def test_every_number_of_a_sentence_stands_in_a_table() -> None:
    head_names = {f"head {found}" for found in re.findall(r"head (\d+\.\d+)", " ".join(NUMBERS["quantity"]))}
    assert head_names
    assert unfounded(by_hand(PAGE), shown() | {"0.9", "0.2"}) == []


def test_a_number_that_was_not_measured_is_seen() -> None:
    assert unfounded("In 12 of 72 heads it is 0.374 (`x < 0.7`), in 13 of 72 it is 0.375.", {"12 of 72", "0.374"}) == [
        "13 of 72",
        "0.375",
    ]


def measured(*subjects: Subject) -> pd.DataFrame:
    """What claims say of subjects now, beside the page's rows of the same claim, subject and quantity."""
    rows = put([claim for claim in chosen_claims() if claim.name != "value-is-not-needed"], list(subjects))
    return rows.merge(NUMBERS, on=KEY, suffixes=("", "_page"), how="left", indicator=True)


@pytest.mark.slow
def test_the_trigger_models_say_the_same_to_the_last_digit() -> None:
    rows = measured(*(Subject(name, name) for name in ("example:trigger-softmax", "example:trigger-relu")))
    assert rows["subject"].nunique() == 2
    assert rows["shown"].tolist() == rows["shown_page"].tolist()


@pytest.mark.slow
@pytest.mark.real
@nightly
def test_a_few_sequences_say_the_same() -> None:
    """The first two sequences of prose: means lie within five of the errors that two sequences have."""
    name = "example:gemma-3-270m"
    rows = measured(Subject(name, name, reading={"data": "prose", "num_sequences": 2}))
    known = rows[rows["_merge"] == "both"]
    means = known[(known["sem_page"] > 0) & ~known["quantity"].str.startswith(("its", "smallest", "largest"))]
    assert len(means) >= 15
    spread = means["sem_page"] * np.sqrt(means["n_page"] / means["n"])
    wrong = means[(means["value"] - means["value_page"]).abs() > 5 * spread]
    assert wrong.empty, wrong[[*KEY, "shown", "shown_page"]].to_string()
