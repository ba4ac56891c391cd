"""The answer of `--measure switch`, as numbers of the summary and as sentences."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import pandas as pd

from sinkscope.runs.schema.stream import StreamSummary
from sinkscope.runs.statistics import mean

SINKING, AS_OFF, SILENT, CANCELLING, SWITCHING = 0.05, 0.9, 0.05, 0.9, 2.0
"""What is counted: heads with this share of sink rows, of which this share is off; heads below this communication;
layers of several heads whose compensation is below this share of compensation_unrelated; tokens with this lift."""
SHOWN_TOKENS = 5


def summarise(
    streams: dict[str, StreamSummary], heads: pd.DataFrame, tokens: pd.DataFrame, layers: pd.DataFrame,
    reading: Container[str],
) -> None:  # fmt: skip
    """Adds what the tables say to each stream's summary, as numbers and as sentences.

    `reading`: the streams whose queries are the tokens that were counted. Of others nothing is said of tokens, nor of a
    stream in which no head is known to be on or off.
    """
    for name, stream in streams.items():
        rows = heads[heads["stream"] == name]
        found = {
            **_of_heads(rows.groupby(["module", "head"], sort=False).mean(numeric_only=True)),
            **_of_layers(layers[layers["stream"] == name]),
            "tokens": _opening(tokens[tokens["stream"] == name]),
        }
        stream.measured["switch"] = found
        stream.in_words += _words(found, name in reading and bool(rows["off_rate"].notna().any()))


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
    below = there[there["heads"] > 1].groupby("module")[["compensation", "compensation_unrelated"]].mean()
    return {
        "layers": len(below),
        "cancelling": int((below["compensation"] < CANCELLING * below["compensation_unrelated"]).sum()),
        "compensation": float(mean(below["compensation"].to_numpy())),
        "compensation_unrelated": float(mean(below["compensation_unrelated"].to_numpy())),
    }


def _opening(tokens: pd.DataFrame) -> list[dict[str, Any]]:
    """The tokens that switch most heads on: beyond chance, and at least twice as often as other tokens."""
    found = tokens[tokens["lift"] >= SWITCHING].groupby("token", sort=False).agg(
        heads=("head", lambda heads: len(tokens.loc[heads.index, ["module", "head"]].drop_duplicates())),
        lift=("lift", "median"),
    )  # fmt: skip
    order = found.sort_values(["heads", "lift"], ascending=False, kind="stable").head(SHOWN_TOKENS)
    return [{"token": str(token), "heads": int(row.heads), "lift": float(row.lift)} for token, row in order.iterrows()]


def _words(found: dict[str, Any], counted: bool) -> list[str]:
    some = found["with_sink_rows"]
    words = [
        f"Switch: {some} of {found['heads']} heads have sink rows (A[i,0] >= 0.9 in 5 % of their rows); in "
        f"{found['sink_rows_are_off']} of them these rows are off: the head writes less than 0.1 of a value there."
        if some
        else f"Switch: none of {found['heads']} heads has sink rows (A[i,0] >= 0.9 in 5 % of its rows)."
    ]
    if found["communication_known"]:
        words.append(
            f"{found['silent']} of {found['communication_known']} heads move nothing between tokens (communication "
            "below 5 %)."
        )
    shown = ", ".join(f"{each['token']!r} ({each['heads']})" for each in found["tokens"])
    if counted:
        words.append(
            f"Tokens that switch heads on: {shown}."
            if shown
            else "No token switches a head on: none doubles its share of rows that are on."
        )
    if found["layers"]:
        words.append(
            f"Heads cancel in {found['cancelling']} of {found['layers']} layers: the norm of what the heads of a layer "
            f"write together is {found['compensation']:.2f} of the sum of their norms "
            f"({found['compensation_unrelated']:.2f} if they wrote in orthogonal directions)."
        )
    return words
