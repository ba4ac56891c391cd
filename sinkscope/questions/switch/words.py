"""The answer of `--measure switch`, as numbers of the summary and as sentences."""

from __future__ import annotations

from typing import Any

import pandas as pd

from sinkscope.questions.switch.tables import CHANCE, FEWEST, TokenTests
from sinkscope.runs.schema.stream import StreamSummary
from sinkscope.runs.statistics import mean
from sinkscope.runs.words import of_heads

SINKING, AS_OFF, SILENT, CANCELLING, SWITCHING = 0.05, 0.9, 0.05, 0.9, 2.0
"""What is counted: heads with this share of sink rows, of which this share is off; heads below this communication;
layers of several heads whose compensation is below this share of compensation_unrelated; tokens with this lift."""
SHOWN_TOKENS = 5


def summarise(
    streams: dict[str, StreamSummary], heads: pd.DataFrame, tokens: pd.DataFrame, layers: pd.DataFrame,
    tests: dict[str, list[TokenTests]],
) -> None:  # fmt: skip
    """Adds what the tables say to each stream's summary, as numbers and as sentences.

    `heads`, `layers`: a row for each head and layer, over all sequences that the summary is of. `tests`: for each
    stream whose queries are the tokens that were counted, what the tests of each domain could find. Of other streams
    nothing is said of tokens, nor of a stream in which no head is known to be on or off.
    """
    for name, stream in streams.items():
        rows = heads[heads["stream"] == name]
        numbers = {
            **_of_heads(rows),
            **_of_layers(layers[layers["stream"] == name]),
            "tokens": _opening(tokens[tokens["stream"] == name]),
        }
        stream.measured["switch"] = numbers
        counted = name in tests and bool(rows["off_rate"].notna().any())
        listed = bool((tokens["stream"] == name).any())
        stream.in_words += _words(numbers, _of_tokens(numbers["tokens"], listed, tests[name]) if counted else "")


def _of_heads(heads: pd.DataFrame) -> dict[str, Any]:
    sinking = heads[heads["sink_rows"] >= SINKING]
    return {
        "heads": len(heads),
        "with_sink_rows": len(sinking),
        "sink_rows_are_off": int((sinking["off_when_sunk"] >= AS_OFF).sum()),
        "silent": int((heads["communication"] < SILENT).sum()),
        "communication_known": int(heads["communication"].notna().sum()),
    }


def _of_layers(layers: pd.DataFrame) -> dict[str, Any]:
    there = layers[layers["compensation"].notna()]
    below = there[there["heads"] > 1]
    return {
        "layers": len(below),
        "cancelling": int((below["compensation"] < CANCELLING * below["compensation_unrelated"]).sum()),
        "compensation": float(mean(below["compensation"].to_numpy())),
        "compensation_unrelated": float(mean(below["compensation_unrelated"].to_numpy())),
    }


def _opening(tokens: pd.DataFrame) -> list[dict[str, Any]]:
    """The tokens that switch most heads on: beyond chance, and at least twice as often as other tokens."""
    by_token = tokens[tokens["lift"] >= SWITCHING].groupby("token", sort=False).agg(
        heads=("head", lambda heads: len(tokens.loc[heads.index, ["module", "head"]].drop_duplicates())),
        lift=("lift", "median"),
    )  # fmt: skip
    order = by_token.sort_values(["heads", "lift"], ascending=False, kind="stable").head(SHOWN_TOKENS)
    return [{"token": str(token), "heads": int(row.heads), "lift": float(row.lift)} for token, row in order.iterrows()]


def _of_tokens(opening: list[dict[str, Any]], listed: bool, tests: list[TokenTests]) -> str:
    """The sentence about the tokens that switch heads on. `listed`: whether switch_tokens.csv has some."""
    if opening:
        named = ", ".join(f"{entry['token']!r} ({entry['heads']})" for entry in opening)
        return f"Tokens that switch heads on: {named}."
    if not listed and not any(test.frequent for test in tests):
        return f"Too little text to tell which tokens switch heads on: no token occurs {FEWEST} times after the first."
    tested = [test for test in tests if test.tests]
    if not listed and tested and all(test.sequences < test.needed for test in tested):
        best = max(tested, key=lambda test: test.sequences - test.needed)
        tests_made = f"{best.tests} test{'s' * (best.tests != 1)}"
        return (
            f"Too few sequences to tell which tokens switch heads on: with {tests_made}, q < {CHANCE:g} needs a "
            f"token that occurs in {best.needed} sequences; the most frequent one occurs in {best.sequences}."
        )
    return "No token switches a head on: none doubles its share of rows that are on."


def _words(figures: dict[str, Any], of_tokens: str) -> list[str]:
    some, heads = figures["with_sink_rows"], figures["heads"]
    whose, among = ("its", "1") if some == 1 else ("their", "them")
    words = [
        f"Switch: {of_heads(some, heads, 'have')} sink rows (A[i,0] >= 0.9 in 5 % of {whose} rows); in "
        f"{figures['sink_rows_are_off']} of {among} these rows are off: the head writes less than 0.1 of a value there."
        if some
        else f"Switch: none of {heads} head{'s' * (heads != 1)} has sink rows (A[i,0] >= 0.9 in 5 % of its rows)."
    ]
    if figures["communication_known"]:
        words.append(
            f"{of_heads(figures['silent'], figures['communication_known'], 'move')} nothing between tokens "
            "(communication below 5 %)."
        )
    if of_tokens:
        words.append(of_tokens)
    if figures["layers"]:
        words.append(
            f"Heads cancel by 10 % or more in {figures['cancelling']} of {figures['layers']} layers: the norm of what "
            f"the heads of a layer write together is {figures['compensation']:.2f} of the sum of their norms "
            f"({figures['compensation_unrelated']:.2f} if they wrote in orthogonal directions)."
        )
    return words
