"""Screens and pages of claims: what stands where, nothing unescaped, and the same from a CSV as from the table."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from sinkscope.claims.claim import CLAIMS, chosen_claims
from sinkscope.claims.findings import COLUMNS, read_csv, to_csv
from sinkscope.claims.page import in_html, in_markdown, make_page, parts, render_claims
from sinkscope.present.paper.formats.csv import without_formulas

HARMFUL = "<script>x</script>|`y`\x1b[31m"


def rows(subject: str, claim: str = "hard-switch", verdict: str = "fails", value: float = 0.25) -> list[dict]:
    key = {"claim": claim, "subject": subject, "value": float("nan"), "low": float("nan"), "high": float("nan"),
           "sem": float("nan"), "n": 0}  # fmt: skip
    if verdict == "not tested":
        return [key | {"row": "verdict", "quantity": "no head has a sink", "shown": verdict}]
    return [
        key | {"row": "verdict", "quantity": "", "shown": verdict},
        key | {"row": "deciding", "quantity": "share", "shown": "3 of 12", "value": value, "low": 0.1, "high": 0.5},
        key | {"row": "contrast", "quantity": "other rows", "shown": "0.012", "value": 0.012},
        key | {"row": "figure", "quantity": "its `off_rate`", "shown": "0.136 ± 0.010", "value": 0.136},
    ]


def table(*found: list[dict]) -> pd.DataFrame:
    return pd.DataFrame([row for each in found for row in each], columns=list(COLUMNS))


def test_one_subject_on_the_screen() -> None:
    claims = chosen_claims(["hard-switch", "first-token"])
    shown = render_claims(table(rows("m"), rows("m", "first-token", "not tested")), claims)
    assert (
        shown
        == """\
Claims put to m

Lampert et al. 2605.08453
  hard-switch  fails           3 of 12 (0.10 to 0.50) / 0.012

Gu et al. 2410.10781
  first-token  not tested      no head has a sink

After /: the contrast. If the claim told nothing about the model, both numbers
would be similar.
±: standard error. In brackets: 95 % interval.
"""
    )


def test_several_subjects_side_by_side() -> None:
    claims = chosen_claims(["hard-switch"])
    shown = render_claims(table(*(rows(f"model-{n}", verdict="holds in part") for n in range(5))), claims)
    assert "A: model-0\nB: model-1\nC: model-2\nD: model-3\n" in shown
    assert "hard-switch in part 0.25 in part 0.25 in part 0.25 in part 0.25\n" in shown
    assert "E: model-4\n" in shown
    last = "-: not tested. The number decided the verdict; --out FOLDER writes what it is,\nits error and contrast.\n"
    assert shown.endswith(f"\n{last}")


def test_the_screen_names_the_folder_that_was_written() -> None:
    found = table(rows("m"), rows("n", verdict="not tested"))
    shown = render_claims(found, chosen_claims(["hard-switch"]), Path("runs/claims"))
    assert "decided the verdict; runs/claims/claims.md says what" in shown


def test_no_line_is_wider_than_the_screen() -> None:
    every = chosen_claims()
    for verdict in ("holds in part", "not tested"):
        for subjects in (1, 6):
            found = table(*(rows(f"m{n}" * 40, each.name, verdict) for n in range(subjects) for each in every))
            assert max(map(len, render_claims(found, every).split("\n"))) <= 80


def test_a_long_name_of_a_package_leaves_room_for_the_number() -> None:
    claim = replace(CLAIMS["hard-switch"], name="a-claim-" * 9)
    shown = render_claims(table(rows("m", claim.name)), [claim])
    assert "3 of 12" in shown


def test_a_page_says_all_of_a_claim() -> None:
    claim = CLAIMS["hard-switch"]
    page = in_markdown(make_page(table(rows("m"), rows("n", verdict="not tested")), [claim]))
    assert "| claim | by | m | n |" in page
    assert "| verdict | fails | not tested |" in page
    assert "| contrast: other rows | 0.012 | - |" in page
    assert "| its `off_rate` | 0.136 ± 0.010 | - |" in page
    assert "**Not tested.** No head has a sink (n)." in page
    assert "### A sink is a hard switch, with output 0" in page
    assert "<h3>A sink is a hard switch, with output 0</h3>" in in_html(make_page(table(rows("m")), [claim]))
    flat = " ".join(page.split())
    for words in (claim.rule.words.partition(":")[2].strip(), "Not shown", "Assumed", "Source"):
        assert words in flat
    abstract = CLAIMS["relu-needs-none"]
    assert "**Source.** Abstract." in in_markdown(make_page(table(rows("m", abstract.name)), [abstract]))


@pytest.mark.parametrize("figures", [{}, {"switch": ("claims-switch.png", f"A caption {HARMFUL}.")}])
def test_names_and_texts_are_escaped(figures: dict[str, tuple[str, str]]) -> None:
    found = table(rows(HARMFUL))
    found.loc[3, "quantity"] = f"of {HARMFUL}"
    page = make_page(found, [CLAIMS["hard-switch"]], figures)
    html = in_html(page, {"claims-switch.png": b"\x89PNG"})
    assert "<script>x" not in html
    assert "\x1b" not in html
    assert ("data:image/png;base64,iVBORw==" in html) == bool(figures)
    assert "<script src" not in html
    assert "img-src data:" in html
    text = in_markdown(page)
    assert "<script>" not in re.sub(r"`[^`]*`", "", text)
    assert "\x1b" not in text
    assert "\x1b" not in render_claims(found, [CLAIMS["hard-switch"]])


def test_a_command_that_measures_is_code() -> None:
    page = in_markdown(make_page(table(rows("m", "value-is-not-needed")), [CLAIMS["value-is-not-needed"]]))
    assert "**Measured.** `sinkscope arms MODEL --arm keys:first1 --arm value:first1 --draws 2`." in page


def test_pieces_of_code_are_told_apart() -> None:
    assert parts("its `a_b` of `c`") == [("its ", False), ("a_b", True), (" of ", False), ("c", True)]


def test_the_csv_holds_the_page() -> None:
    found = table(rows("m"), rows("m", "first-token", "not tested"))
    again = read_csv(io.StringIO(to_csv(found)))
    claims = chosen_claims(["hard-switch", "first-token"])
    assert in_markdown(make_page(again, claims)) == in_markdown(make_page(found, claims))
    assert render_claims(again, claims) == render_claims(found, claims)


def test_a_page_s_csv_is_read_without_its_apostrophes() -> None:
    """A negative number is guarded against spreadsheets in the file, and shown bare; other apostrophes stay."""
    found = table(rows("it's"))
    found["shown"] = ["-", "-0.43", "'quoted'", "3 of 12"]
    written = to_csv(without_formulas(found))
    assert ",'-0.43," in written
    again = read_csv(io.StringIO(written))
    assert again["shown"].tolist() == found["shown"].tolist()
    assert again["subject"].tolist() == ["it's"] * 4
