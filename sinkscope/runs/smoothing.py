"""The smoothing table of a scan that asked for it: means of every head, verdicts, their counts and a sentence."""

from __future__ import annotations

import pandas as pd

from sinkscope.capture import Site
from sinkscope.capture.wiring.trace import Wiring
from sinkscope.runs.columns import VERDICTS, SmoothingRun
from sinkscope.runs.schema.stream import StreamSummary
from sinkscope.runs.tables import measured_table
from sinkscope.runs.values import Domain

NOTHING = Wiring(None, None, None, None)

UNREAD = {
    "rank_w": "no single linear layer makes their values of the normalised tokens, none reads their outputs, or W is 0",
    "rank_qk": "no single linear layer makes their queries or their keys of the normalised tokens, or the product is 0",
}
"""Why a rank of weights is missing, by column."""


def smoothing_table(domains: list[Domain], sites: list[Site], wirings: dict[str, Wiring]) -> pd.DataFrame:
    """smoothing.csv: one row per (stream, layer, head), for each domain where there are several."""
    return measured_table(
        "smoothing", domains, sites,
        lambda domain, site, means: SmoothingRun(means, wirings.get(site.name, NOTHING)),
    )  # fmt: skip


def add_verdicts(streams: dict[str, StreamSummary], table: pd.DataFrame) -> None:
    """Adds the counts of verdicts, and a sentence about them, to the summary of each stream."""
    for name, stream in streams.items():
        rows = table[table["stream"] == name]
        stream.smoothing = counts = _counts(rows)
        stream.ranks_missing = _missing(rows)
        heads = len(rows.groupby(["module", "head"]))
        stream.in_words += [_words(counts, heads), *_missing_words(stream.ranks_missing, heads)]


def _counts(rows: pd.DataFrame) -> dict[str, int]:
    """Number of heads by verdict. `differs`: not the same in every domain; `missing`: W could not be read."""
    counts = dict.fromkeys((*VERDICTS, "differs", "missing"), 0)
    for _, verdicts in rows.groupby(["module", "head"], sort=False)["verdict"]:
        if verdicts.isna().any():
            counts["missing"] += 1
        else:
            counts[verdicts.iloc[0] if verdicts.nunique() == 1 else "differs"] += 1
    return counts


def _missing(rows: pd.DataFrame) -> dict[str, int]:
    """Number of heads without a value, for each rank of weights that some head lacks."""
    heads = rows.groupby(["module", "head"], sort=False)
    counts = {name: int(heads[name].apply(lambda values: values.isna().any()).sum()) for name in UNREAD}
    return {name: count for name, count in counts.items() if count}


def _missing_words(missing: dict[str, int], heads: int) -> list[str]:
    return [f"{name} is empty in {count} of {heads} heads: {UNREAD[name]}." for name, count in missing.items()]


def _words(counts: dict[str, int], heads: int) -> str:
    if counts["missing"] == heads:
        return "Smoothing: no head's W_V could be read."
    text = (
        f"Smoothing: {counts['smooths']} of {heads} heads make tokens more alike the denser they attend, "
        f"{counts['sharpens']} less alike, {counts['neither']} neither"
    )
    if counts["differs"]:
        text += f", {counts['differs']} differ between domains"
    return text + (f"; {counts['missing']} could not be read." if counts["missing"] else ".")
