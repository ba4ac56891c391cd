"""The attention of text heads on image tokens."""

from __future__ import annotations

import numpy as np

from sinkscope.capture import Site
from sinkscope.capture.sites import AttentionKind
from sinkscope.runs.schema.summary import ImageTokens
from sinkscope.runs.statistics import mean
from sinkscope.tables.values import Domain


def image_tokens(domain: Domain, sites: list[Site], image_id: int | None) -> ImageTokens | None:
    """Attention mass of each text head on the image tokens, mean over all queries: the sum of alpha_k n_k / T.

    None where no sequence has image tokens, or where sequences have them at different positions or differ in who may
    see them: alpha_k is a mean over sequences and would mix image tokens with words. `uniform`: the mass that uniform
    causal attention puts there, a mean over the heads.
    """
    places = domain.ids == image_id
    if not places.any() or (places != places[0]).any() or (domain.ids < 0).any():
        return None
    keys = np.flatnonzero(places[0])
    length = domain.ids.shape[1]
    heads: list[tuple[int, int, float]] = []
    uniform: list[float] = []
    causal = True
    for site in sites:
        values = domain.sites[site.name]
        if site.stream != "text" or values.keys != length:
            continue
        seeing = values.seeing
        if seeing is None:
            return None
        columns = values.alpha[:, keys] * seeing[keys]
        causal &= values.causal
        heads += [(site.layer, head, float(mass)) for head, mass in enumerate(columns.sum(1) / length)]
        uniform += [uniform_mass(places[0], site.kind)] * site.heads
    return ImageTokens(
        id=image_id,
        positions=(int(keys[0]), int(keys[-1])),
        count=len(keys),
        uniform=float(np.mean(uniform)) if causal and uniform else None,
        mean_mass=float(mean(np.array([mass for *_, mass in heads]))),
        heads=heads,
    )


def uniform_mass(places: np.ndarray, kind: AttentionKind) -> float:
    """Mean over queries of the share that `places` [T] (bool) have among the keys that a causal query may see: all
    earlier ones, the last W of `sliding:W`, those of the query's own chunk under `chunked:C`."""
    queries = np.arange(len(places))
    starts = np.zeros_like(queries)
    if kind.size is not None:
        starts = queries // kind.size * kind.size if kind.name == "chunked" else (queries - kind.size + 1).clip(0)
    counted = np.concatenate([[0], np.cumsum(places)])
    return float(((counted[queries + 1] - counted[starts]) / (queries + 1 - starts)).mean())
