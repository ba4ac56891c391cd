"""The sums of maps that a model formed itself, against float64."""

from __future__ import annotations

import torch

from sinkscope.capture.kernels.map_walk import AttentionMap, map_sums


def logits_of(keys: int, seed: int = 0) -> torch.Tensor:
    """Causal logits of two heads, (1, 2, T, T)."""
    logits = torch.randn(1, 2, keys, keys, generator=torch.Generator().manual_seed(seed))
    return logits.masked_fill(torch.ones(keys, keys, dtype=torch.bool).triu(1), -torch.inf)


def test_a_learned_sink_has_seven_digits_whatever_it_takes() -> None:
    """One minus the sum over the keys has none below 1e-7."""
    for sink in (-40.0, -18.0, -2.0, 30.0):
        logits = torch.cat([logits_of(20), torch.full((1, 2, 20, 1), sink)], -1)
        found = map_sums(AttentionMap(logits.softmax(-1)[..., :-1], logits)).learned_sink
        torch.testing.assert_close(found, logits.double().softmax(-1)[..., -1].float(), rtol=1e-5, atol=0.0)


def test_what_a_row_lacks_is_no_known_sink_where_the_logits_were_not_seen() -> None:
    """A model may scale its map after the softmax, or a sink may have taken the rest."""
    whole = logits_of(20).softmax(-1)
    assert (map_sums(AttentionMap(whole, None)).learned_sink == 0).all()
    assert map_sums(AttentionMap(whole * 0.9995, None)).learned_sink.isnan().all()
    assert map_sums(AttentionMap(whole * 0.5, None)).learned_sink.isnan().all()
