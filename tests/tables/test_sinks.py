"""sinks.parquet stays small, also where every head has as many sinks as it can have."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from sinkscope.capture import Site
from sinkscope.capture.sites import AttentionKind
from sinkscope.inputs import Corpus
from sinkscope.metrics.quantities import EVENT_FIELDS, quantity_set
from sinkscope.tables.sinks import _beyond, sink_table
from sinkscope.tables.values import Domain, Places, SiteValues, text_regions

LAYERS, HEADS, SEQUENCES, TOKENS, MOST = 32, 32, 32, 4096, 53


@pytest.mark.slow
def test_the_largest_table_that_can_be(tmp_path: Path) -> None:
    """32 layers x 32 heads x 32 x 4096 tokens, each head with its 16 / 0.3 sinks: below 50 MB."""
    generator = np.random.default_rng(0)
    ids = generator.integers(0, 32000, (SEQUENCES, TOKENS))
    domain = Domain(Corpus("random", ids, [("",)] * SEQUENCES))
    sites = [
        Site("text", layer, f"layers.{layer}", 0, AttentionKind("full"), HEADS, HEADS, 64, 64, True, None, None)
        for layer in range(LAYERS)
    ]
    count = SEQUENCES * HEADS * MOST
    for site in sites:
        events = np.empty((count, len(EVENT_FIELDS)))
        events[:, 0] = np.repeat(np.arange(SEQUENCES), HEADS * MOST)
        events[:, 1] = np.tile(np.repeat(np.arange(HEADS), MOST), SEQUENCES)
        events[:, 2] = generator.integers(0, TOKENS - 255, count)
        events[:, 3:] = generator.uniform(0.3, 1, (count, 4))
        arrays = {"attention_sinks": events}
        domain.sites[site.name] = SiteValues(quantity_set(), arrays, [TOKENS], SEQUENCES, True, TOKENS, TOKENS)
    places = Places(text_regions(ids, frozenset()), ids)
    table = sink_table([domain], sites, {("random", site.name): places for site in sites})
    assert len(table) == LAYERS * count
    table.to_parquet(tmp_path / "sinks.parquet", index=False)
    assert (tmp_path / "sinks.parquet").stat().st_size < 50e6


def test_layers_are_those_of_all_sinks_beyond_the_first() -> None:
    """Three are named. A fourth is the first to be one, and the fifth the last."""
    rows = [("a", 2, 3), ("b", 2, 2), ("c", 3, 3), ("d", 1, 1), ("e", 2, 4)]
    events = pd.DataFrame(
        {
            "kind": "attention", "token": token, "id": number, "region": "text", "occurrences": 9, "sinks": 9,
            "heads": 1, "first_layer": first, "last_layer": last,
        } for number, (token, first, last) in enumerate(rows)
    )  # fmt: skip
    beyond = _beyond(events, [0, 1, 2, 3, 4, 5])
    assert [token.token for token in beyond.tokens] == ["a", "b", "c"]
    assert (beyond.others, beyond.created, beyond.gone) == (2, 1, 5)
