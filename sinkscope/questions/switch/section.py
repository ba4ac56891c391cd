"""The report's part on heads as switches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sinkscope.present.html.section import Section, head_scatter
from sinkscope.present.html.svg import number

if TYPE_CHECKING:
    from sinkscope.runs.run import Run


def section(run: Run, dense: bool) -> Section | None:
    """Every head's share of rows in the sink against its share of rows that are off."""
    table = run.measured.get("switch")
    if table is None:
        return None
    charts = head_scatter(
        table, "sink_rows", "off_rate", ("rows with A[i,0] >= 0.9 (share)", "rows that are off (share)"),
        lambda row: f"layer {row['layer']}, head {row['head']}: sink rows {number(row['sink_rows'])}, off "
        f"{number(row['off_rate'])}, phi {number(row['switch_phi'])}", dense, reach=(1.0, 1.0),
    )  # fmt: skip
    hint = "Right: the head rests in the sink. Up: it writes nothing. Upper right: the sink switches it off."
    return Section("Sinks as switches, one dot a head", hint, charts)
