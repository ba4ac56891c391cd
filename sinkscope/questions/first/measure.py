"""`--measure first`: does the sink follow the BOS token or the first position? Asked for by --first and --prepend."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pandas as pd
from torch import Tensor

from sinkscope.capture import LayerView, Missing
from sinkscope.engine.measurement import Findings, Measurement, Subject
from sinkscope.inputs.batches import Batch
from sinkscope.metrics.mass import alpha, sink_score
from sinkscope.metrics.quantities import Quantity
from sinkscope.questions.first.tables import add_first, bos_place, first_table, scattered
from sinkscope.runs.schema.stream import StreamSummary


class First(Measurement):
    """Measures alpha at BOS's place, wherever that is, and holds the domains of a scan against each other."""

    name = "first"

    def __init__(self, subject: Subject) -> None:
        super().__init__(subject)
        self._place: int | None = None
        self._epsilon = np.nan
        self._scattered: dict[str, int] = {}

    def quantities(self) -> tuple[Quantity, ...]:
        dims = ("sequence", "head")
        return Quantity("alpha_bos", dims, self._alpha_bos), Quantity("alpha_first", dims, alpha_first)

    @contextmanager
    def watching(self, batch: Batch, ids: np.ndarray) -> Iterator[None]:
        place = bos_place(ids, self.subject.bos_id)
        self._place = None if place is None or place < 0 else place
        yield

    def _alpha_bos(self, view: LayerView) -> Tensor:
        """alpha_k of the key k at which BOS stands first, [sequence, head]."""
        # A decoder reads other tokens than the sequence's: BOS stands elsewhere there.
        if self._place is None or view.site.stream == "decoder":
            raise Missing
        return alpha(view)[..., self._place]

    def tables(self, findings: Findings) -> dict[str, pd.DataFrame]:
        self._epsilon = findings.request.epsilon
        bos_id = findings.reading.rules.bos_id
        self._scattered = {domain.corpus.domain: scattered(domain, bos_id) for domain in findings.domains}
        return {"first": first_table(findings.domains, findings.sites, bos_id, self._epsilon)}

    def left_out(self, tables: dict[str, pd.DataFrame]) -> list[str]:
        return [
            f"--measure {self.name} leaves out {count} sequence{'s' * (count != 1)} of {domain}: BOS stands at a later "
            "position in them, but not at one position in all sequences"
            for domain, count in self._scattered.items()
            if count
        ]

    def summarise(self, streams: dict[str, StreamSummary], tables: dict[str, pd.DataFrame]) -> None:
        add_first(streams, tables["first"], self._epsilon)


def alpha_first(view: LayerView) -> Tensor:
    """alpha_0, [sequence, head]; NaN where no query may see key 0."""
    share = view.queries / view.attention.seen_by[..., 0].to(view.attention.first.dtype)
    return (sink_score(view) * share).expand(view.batch, view.heads)


MEASUREMENT = First
