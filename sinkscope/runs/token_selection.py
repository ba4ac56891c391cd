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
    if run.tokens is None:
        raise SinkscopeError(f"{run.path or 'the run'} holds no tokens.csv: an older sinkscope wrote it; scan it again")
    chosen = run.tokens[run.tokens["kind"] == KINDS[selection]]
    found = {}
    for stream in run.heads["stream"].unique():
        rows = chosen[chosen["stream"] == stream]
        ids = rows["id"].dropna().drop_duplicates()
        found[str(stream)] = {"ids": [int(each) for each in ids], "tokens": _plain(rows)}
    return found


def _plain(rows: pd.DataFrame) -> list[dict[str, Any]]:
    named = [name for name in FIELDS if name in rows]
    return [
        {name: None if pd.isna(value) else value for name, value in row.items()}
        for row in rows[named].astype(object).to_dict("records")
    ]
