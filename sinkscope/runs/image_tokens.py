"""The attention of text heads on image tokens."""

from __future__ import annotations

import numpy as np

from sinkscope.capture import Site
from sinkscope.runs.averages import mean
from sinkscope.runs.schema.summary import ImageTokens
from sinkscope.runs.values import Domain


def image_tokens(domain: Domain, sites: list[Site], image_id: int | None) -> ImageTokens | None:
    """Attention mass of each text head on the image tokens, mean over all queries: the sum of alpha_k (T - k) / T.

    None where no sequence has image tokens, or where sequences have them at different positions: alpha_k is a mean
    over sequences and would mix image tokens with words. `uniform`: the mass that uniform causal attention puts there.
    """
    places = domain.ids == image_id
    if not places.any() or (places != places[0]).any() or (domain.ids < 0).any():
        return None
    keys = np.flatnonzero(places[0])
    length = domain.ids.shape[1]
    heads: list[tuple[int, int, float]] = []
    causal = True
    for site in sites:
        values = domain.sites[site.name]
        if site.stream != "text" or values.keys != length:
            continue
        columns = column_sums(values.alpha, values.queries, values.causal)
        causal &= values.causal
        heads += [(site.layer, head, float(mass)) for head, mass in enumerate(columns[:, keys].sum(1) / length)]
    seen = np.cumsum(places[0]) / np.arange(1, length + 1)
    return ImageTokens(
        id=image_id,
        positions=(int(keys[0]), int(keys[-1])),
        count=len(keys),
        uniform=float(seen.mean()) if causal else None,
        mean_mass=float(mean(np.array([mass for *_, mass in heads]))),
        heads=heads,
    )


def column_sums(alpha: np.ndarray, queries: int, causal: bool) -> np.ndarray:
    """Column sums of the attention map, [H, K], from alpha_k."""
    rows = np.arange(queries, queries - alpha.shape[1], -1) if causal else queries
    return np.asarray(alpha * rows)
