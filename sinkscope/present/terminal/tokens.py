"""The tokens that are attention sinks, as a table for the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.text import Text

from sinkscope.present.numbers import fixed, is_missing
from sinkscope.present.terminal.table import more, table
from sinkscope.present.text import printable, shortened

if TYPE_CHECKING:
    from sinkscope.runs.run import Run

SHOWN, WIDEST = 6, 20
"""Most tokens that are shown, and most characters of each."""
MEANS = (
    "sinks: occurrences that are sinks; of: all occurrences; heads: in which any is a sink; share: part of the "
    "attention on all sinks"
)


def token_rows(run: Run, stream: str, domain: str | None = None) -> list[RenderableType]:
    """The tokens with the most attention on them as sinks; nothing where there are none, or in an older run."""
    if run.tokens is None:
        return []
    found = run.tokens[(run.tokens["stream"] == stream) & (run.tokens["kind"] == "attention")]
    if domain is not None:
        found = found[found["domain"] == domain]
    if found.empty:
        return []
    headers = ("token", "region", "place", "sinks", "of", "rate", "heads", "layers", "alpha_k", "share")
    rows = [
        (shortened("-" if is_missing(row["token"]) else printable(str(row["token"])), WIDEST), printable(row["region"]),
         "first" if row["first"] else "later", str(row["sinks"]), str(row["occurrences"]), fixed(row["rate"], 3),
         str(row["heads"]), f"{row['first_layer']}-{row['last_layer']}", fixed(row["mean_alpha"], 3),
         fixed(row["sink_share"], 3))
        for row in found.head(SHOWN).to_dict("records")
    ]  # fmt: skip
    where = f" on {printable(domain)}" if domain else ""
    title = f"\ntokens that are sinks{where}: alpha_k > {run.summary.epsilon:g} in some head"
    return [
        table(title, headers, rows, left=headers[:3]),
        *more(len(found) - SHOWN, "token", "tokens.csv"),
        Text(MEANS),
    ]
