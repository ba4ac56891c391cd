"""`--measure cosines`: how similar the tokens of each prefix are, all prefixes from one pass."""

from __future__ import annotations

import pandas as pd

from sinkscope.engine.measurement import Findings, Measurement
from sinkscope.metrics.quantities import Quantity
from sinkscope.questions.cosines.columns import COSINES
from sinkscope.questions.cosines.tables import TABLE, cosine_table, quantity_name
from sinkscope.runs.schema.stream import StreamSummary


class Cosines(Measurement):
    """Measures the columns of cosine_curve.csv."""

    name = "cosines"

    def quantities(self) -> tuple[Quantity, ...]:
        return tuple(
            Quantity(quantity_name(name), ("sequence", "length"), compute) for name, compute in COSINES.items()
        )

    def tables(self, findings: Findings) -> dict[str, pd.DataFrame]:
        return {TABLE: cosine_table(findings.domains, findings.sites)}

    def summarise(self, streams: dict[str, StreamSummary], tables: dict[str, pd.DataFrame]) -> None:
        """Says nothing: the table is read as curves, and the whole sequence's values stand in layers.csv."""


MEASUREMENT = Cosines
