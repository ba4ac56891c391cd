"""Lists of the tokens that are sinks, for other tools: masks of sparse autoencoders, prefix tokens of quantisers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pandas as pd

from sinkscope.errors import SinkscopeError

if TYPE_CHECKING:
    from sinkscope.runs.run import Run

KINDS = {"sink": "attention", "state": "state", "massive": "massive"}
"""The kind of row of tokens.csv, by selection."""

FIELDS = (
    "domain", "token", "id", "region", "first", "occurrences", "sinks", "rate", "heads", "first_layer", "last_layer",
)  # fmt: skip


def selected_tokens(run: Run, selection: str) -> dict[str, dict[str, Any]]:
    """The tokens that are sinks, by stream: `ids`, each once, those that lead tokens.csv first; `tokens`, its rows.

    Raises SinkscopeError where `selection` is none of KINDS, and for a run of an older sinkscope.
    """
    if selection not in KINDS:
        raise SinkscopeError(f"--tokens {selection!r}: one of {', '.join(KINDS)}")
    chosen = _rows(run, KINDS[selection])
    found = {}
    for stream in run.heads["stream"].unique():
        rows = chosen[chosen["stream"] == stream]
        ids = rows["id"].dropna().drop_duplicates()
        found[str(stream)] = {"ids": [int(each) for each in ids], "tokens": _plain(rows)}
    return found


def sink_ids(run: Run) -> tuple[list[int], list[int]]:
    """Ids of the tokens that are attention sinks in tokens.csv: those that are one at position 0, and those that are
    one elsewhere. Raises SinkscopeError for a run of an older sinkscope, and where there is none."""
    rows = _rows(run, KINDS["sink"]).dropna(subset="id")
    if rows.empty:
        raise SinkscopeError(f"no token is an attention sink in tokens.csv of {run.path or 'the run'}")
    first = rows["first"].astype(bool)
    return sorted({int(each) for each in rows["id"][first]}), sorted({int(each) for each in rows["id"][~first]})


def _rows(run: Run, kind: str) -> pd.DataFrame:
    """The rows of tokens.csv of one kind. Raises SinkscopeError for a run of an older sinkscope."""
    if run.tokens is None:
        raise SinkscopeError(f"{run.path or 'the run'} holds no tokens.csv: an older sinkscope wrote it; scan it again")
    return run.tokens[run.tokens["kind"] == kind]


def _plain(rows: pd.DataFrame) -> list[dict[str, Any]]:
    named = [name for name in FIELDS if name in rows]
    return [
        {name: None if pd.isna(value) else value for name, value in row.items()}
        for row in rows[named].astype(object).to_dict("records")
    ]
