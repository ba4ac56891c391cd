"""What two runs found beside their heads: massive activations, and the tokens that are attention sinks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from sinkscope.comparison.levels import Pair

if TYPE_CHECKING:
    from sinkscope.runs.run import Run


def massive_rows(a: Run, b: Run) -> pd.DataFrame:
    """One row for each stream that both runs have and whose residual stream was seen.

    Columns, of A and of B: `present` (whether any activation is massive), `max_abs` and `layer` (the largest one, and
    the layer whose input holds it), `massive_tokens` (most tokens of a sequence with a massive activation, mean over
    sequences, over the inputs of all layers).
    """
    rows = []
    for stream in (name for name in a.summary.streams if name in b.summary.streams):
        massive = {"a": _massive(a, stream), "b": _massive(b, stream)}
        if all(row["present"] is not None for row in massive.values()):
            rows.append({"stream": stream} | {f"{key}_{of}": row[key] for of, row in massive.items() for key in row})
    return pd.DataFrame(rows)


def _massive(run: Run, stream: str) -> dict[str, Any]:
    massive = run.summary.streams[stream].massive_activations
    counts = run.layers.loc[run.layers["stream"] == stream].get("massive_tokens", pd.Series(dtype=float))
    return {
        "present": massive.present,
        "max_abs": massive.max_abs,
        "layer": np.nan if massive.layer is None else float(massive.layer),
        "massive_tokens": float(counts.max()),
    }


def sink_token_rows(a: Run, b: Run, pairs: list[Pair]) -> pd.DataFrame:
    """One row for each stream and token that is an attention sink in A or B, at position 0 (`first`) or beyond.

    `pairs`: the domains that are compared; no other is counted. Columns `sinks` and `occurrences`, of A and of B, are
    sums over the rows of tokens.csv; 0 and missing where the run has no such row, which counts no occurrences of what
    is never a sink. Tokens are matched by their text; by their id where no tokenizer gives one. Empty where an older
    sinkscope wrote a run, without tokens.csv.
    """
    if a.tokens is None or b.tokens is None:
        return pd.DataFrame()
    keys = ["stream", "token", "first"]
    tokens_a, tokens_b = (_sink_tokens(run.tokens, {pair[place] for pair in pairs}) for place, run in enumerate((a, b)))
    joined = tokens_a.merge(tokens_b, on=keys, how="outer", suffixes=("_a", "_b"), sort=False)
    joined[["sinks_a", "sinks_b"]] = joined[["sinks_a", "sinks_b"]].fillna(0).astype("int64")
    return joined.sort_values(["stream", "first", "sinks_a", "sinks_b"], ascending=[True, False, False, False],
                              ignore_index=True)  # fmt: skip


def _sink_tokens(table: pd.DataFrame, domains: set[Any]) -> pd.DataFrame:
    if "domain" in table:
        table = table[table["domain"].isin(domains)]
    rows = table[table["kind"] == "attention"]
    named = rows["token"].fillna("id " + rows["id"].astype("string")).fillna(rows["region"])
    groups = rows.assign(token=named).groupby(["stream", "token", "first"], sort=False)
    return groups[["sinks", "occurrences"]].sum().astype(float).reset_index()
