"""What the report shows of tables that only some runs have: tokens that are sinks, heads as switches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pandas as pd

from sinkscope.present.colors import CIVIDIS, mixed
from sinkscope.present.html.svg import Dot, legend, number, scatter
from sinkscope.present.numbers import MISSING, fixed, is_missing
from sinkscope.present.text import printable, shortened

if TYPE_CHECKING:
    from sinkscope.runs.run import Run

TOKENS, WIDEST = 12, 40
"""Most tokens of each text, and most characters of each."""


def groups(table: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """Rows by (stream, domain), each with a caption that is empty where there is only one."""
    keys = [key for key in ("stream", "domain") if key in table and table[key].nunique() > 1]
    if not keys:
        return [("", table)]
    return [(", ".join(map(str, name)), rows) for name, rows in table.groupby(keys, sort=False)]


def token_tables(run: Run) -> list[dict[str, Any]]:
    """The tokens with the most attention on them as sinks, for each text; none for a run of an older sinkscope."""
    if run.tokens is None:
        return []
    found = run.tokens[run.tokens["kind"] == "attention"]
    tables = []
    for caption, rows in groups(found):
        shown = [_token(row) for row in rows.head(TOKENS).to_dict("records")]
        if shown:
            tables.append({"caption": caption, "rows": shown, "more": max(0, len(rows) - TOKENS)})
    return tables


def _token(row: dict[Any, Any]) -> dict[str, str]:
    text = MISSING if is_missing(row["token"]) else printable(str(row["token"]))
    return {
        "token": shortened(text, WIDEST), "region": str(row["region"]), "place": "first" if row["first"] else "later",
        "sinks": f"{row['sinks']} of {row['occurrences']}", "rate": fixed(row["rate"], 3),
        "heads": MISSING if is_missing(row["heads"]) else str(row["heads"]),
        "layers": f"{row['first_layer']} to {row['last_layer']}", "alpha": fixed(row["mean_alpha"], 3),
        "share": fixed(row["sink_share"], 3),
    }  # fmt: skip


def switch_charts(run: Run, dense: bool = False) -> list[dict[str, Any]]:
    """Every head's share of rows in the sink against its share of rows that are off; none without `switch`.
    `dense`: the charts are of many heads."""
    table = run.measured.get("switch")
    charts = []
    for caption, rows in groups(table) if table is not None else []:
        top = float(rows["layer"].max())
        dots = [
            Dot(sunk, off, mixed(CIVIDIS, float(layer) / max(top, 1.0)),
                f"layer {layer}, head {head}: sink rows {number(sunk)}, off {number(off)}, phi {number(phi)}")
            for layer, head, sunk, off, phi in zip(
                *(rows[name] for name in ("layer", "head", "sink_rows", "off_rate", "switch_phi")), strict=True)
        ]  # fmt: skip
        chart, found = scatter(dots, "rows with A[i,0] >= 0.9 (share)", "rows that are off (share)", dense)
        charts.append({"caption": caption, "svg": chart, "points": found, "legend": legend((0, top), "layer")})
    return charts
