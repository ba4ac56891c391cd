"""first.csv: does a head's sink follow the BOS token, or does it stay at the first position whatever stands there?"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd

from sinkscope.capture import Site
from sinkscope.runs.schema.stream import StreamSummary
from sinkscope.runs.statistics import mean, sem
from sinkscope.tables.frames import site_keys
from sinkscope.tables.values import Domain, SiteValues

VERDICTS = ("token", "position", "both", "none")
BOS_FIRST, OTHER_FIRST, BOS_LATER = "bos_first", "other_first", "bos_later"

Chosen = tuple[Domain, np.ndarray]
"""A domain, and which of its sequences count, [sequence]."""


def bos_places(ids: np.ndarray, bos_id: int) -> np.ndarray:
    """[sequence]: the position of the first BOS in each sequence of `ids` [sequence, T]; -1 where it holds none."""
    held = ids == bos_id
    return np.where(held.any(1), held.argmax(1), -1)


def bos_place(ids: np.ndarray, bos_id: int | None) -> int | None:
    """The position of the first BOS in every sequence of `ids` [sequence, T]; -1 where no sequence holds one.

    None where the sequences differ, and where the tokenizer has no BOS.
    """
    if bos_id is None:
        return None
    places = bos_places(ids, bos_id)
    return int(places[0]) if (places == places[0]).all() else None


def scattered(domain: Domain, bos_id: int | None) -> int:
    """In how many sequences of a domain BOS stands later, where it does not stand at one place in all of them."""
    if bos_id is None or bos_place(domain.ids, bos_id) is not None:
        return 0
    return int((bos_places(domain.ids, bos_id) > 0).sum())


def _kinds(domain: Domain, bos_id: int | None) -> dict[str, np.ndarray]:
    """Which sequences of a domain are of each kind, [sequence]; none without a BOS. Those in which BOS stands later are
    of none unless it stands at one place in all sequences."""
    if bos_id is None:
        return {}
    places = bos_places(domain.ids, bos_id)
    later = (places > 0) & (scattered(domain, bos_id) == 0)
    kinds = {BOS_FIRST: places == 0, OTHER_FIRST: places < 0, BOS_LATER: later}
    return {kind: chosen for kind, chosen in kinds.items() if chosen.any()}


def first_table(domains: list[Domain], sites: list[Site], bos_id: int | None, epsilon: float) -> pd.DataFrame:
    """One row per (stream, layer, head), over all domains: see `schema.measures` for the columns."""
    kinds: dict[str, list[Chosen]] = defaultdict(list)
    for domain in domains:
        for kind, chosen in _kinds(domain, bos_id).items():
            kinds[kind].append((domain, chosen))
    columns: dict[str, tuple[str, Callable[[SiteValues], np.ndarray | None]]] = {
        "alpha_0_bos_first": (BOS_FIRST, _alpha_0),
        "alpha_0_other_first": (OTHER_FIRST, _alpha_0),
        "alpha_bos_later": (BOS_LATER, lambda values: values.arrays.get("alpha_bos")),
        "alpha_0_bos_later": (BOS_LATER, _alpha_0),
    }
    frames = []
    for site in sites:
        rows: dict[str, Any] = site_keys(site) | {"head": np.arange(site.heads), "module": site.name}
        arrays = {name: _of_texts(kinds[kind], site, values) for name, (kind, values) in columns.items()}
        for name, values in arrays.items():
            rows |= {name: mean(values), f"{name}_sem": sem(values), f"{name}_rate": _rate(values, epsilon)}
        later, other = rows["alpha_bos_later"], rows["alpha_0_other_first"]
        verdicts = [verdict(*pair, epsilon) for pair in zip(later, other, strict=True)]
        frames.append(pd.DataFrame(rows | {"verdict": pd.array(verdicts, dtype="string")}))
    return pd.concat(frames, ignore_index=True)


def verdict(alpha_bos_later: float, alpha_0_other_first: float, epsilon: float) -> str | None:
    """`token`: the sink follows BOS; `position`: it is at position 0 whatever stands there; `both`; `none`.

    None where one of the two was not measured.
    """
    if np.isnan(alpha_bos_later) or np.isnan(alpha_0_other_first):
        return None
    token, position = alpha_bos_later > epsilon, alpha_0_other_first > epsilon
    return {(True, False): "token", (False, True): "position", (True, True): "both"}.get((token, position), "none")


def add_first(streams: dict[str, StreamSummary], table: pd.DataFrame, epsilon: float) -> None:
    """Adds the number of heads by verdict, and what they say in words, to the summary of each stream."""
    for name, stream in streams.items():
        rows = table[table["stream"] == name]
        sinks = rows[rows["alpha_0_bos_first"] > epsilon]
        counts = {answer: int((rows["verdict"] == answer).sum()) for answer in VERDICTS}
        stream.measured["first"] = counts | {
            "heads": len(rows),
            "missing": int(rows["verdict"].isna().sum()),
            "sinks_on_bos": len(sinks) if rows["alpha_0_bos_first"].notna().any() else None,
            "of_sinks_on_bos": {answer: int((sinks["verdict"] == answer).sum()) for answer in VERDICTS},
            "in_words": _words(rows, sinks, counts),
        }


def _words(rows: pd.DataFrame, sinks: pd.DataFrame, counts: dict[str, int]) -> str:
    if rows[[name for name in rows if name.startswith("alpha_")]].isna().all(axis=None):
        return (
            "Position or token: not measured, since no BOS is known (it is the tokenizer's), or it stands elsewhere in "
            "each sequence; scan text with --first bos --first random --prepend 0 --prepend 8."
        )
    if rows["alpha_0_other_first"].isna().all():
        return "Position or token: every text was read with BOS; scan with --first random as well."
    if rows["alpha_bos_later"].isna().all():
        return (
            "Position or token: BOS never stood at a later position; scan with --first bos --prepend 0 --prepend 8 as "
            "well."
        )
    heads, whose = rows, f"head{'s' * (len(rows) != 1)}"
    if rows["alpha_0_bos_first"].notna().any():
        heads, whose = sinks, f"head{'s' * (len(sinks) != 1)} with a sink on BOS at position 0"
        if sinks.empty:
            return f"Position or token: no head of {len(rows)} has a sink on BOS at position 0."
        counts = {answer: int((sinks["verdict"] == answer).sum()) for answer in VERDICTS}
    return (
        f"Position or token: of {len(heads)} {whose}, {counts['token']} follow BOS to a later position (token), "
        f"{counts['position']} stay at position 0 whatever stands there (position), {counts['both']} do both, "
        f"{counts['none']} neither."
    )


def _alpha_0(values: SiteValues) -> np.ndarray:
    return values.arrays["alpha_first"]


def _of_texts(domains: list[Chosen], site: Site, read: Callable[[SiteValues], np.ndarray | None]) -> np.ndarray:
    """[N, H] values of the chosen sequences: the mean over the domains that read the same text, then all texts.

    Domains of one SPEC hold the same texts, so their sequences are no independent samples.
    """
    by_text: dict[str, list[tuple[np.ndarray, np.ndarray]]] = defaultdict(list)
    for domain, rows in domains:
        values = read(domain.sites[site.name]) if site.name in domain.sites else None
        if values is not None:
            by_text[domain.corpus.source].append((values, rows))
    texts = []
    for readings in by_text.values():
        count = min(len(values) for values, _ in readings)  # an interrupted scan has measured fewer of the last domain
        chosen = np.array([rows[:count] for _, rows in readings])
        read_any = chosen.any(0)
        sums = np.sum([np.where(rows[:count, None], values[:count], 0) for values, rows in readings], axis=0)
        texts.append(sums[read_any] / chosen.sum(0)[read_any, None])
    texts = [text for text in texts if len(text)]
    return np.concatenate(texts) if texts else np.full((1, site.heads), np.nan)


def _rate(values: np.ndarray, epsilon: float) -> np.ndarray:
    """[H]: the share of sequences above epsilon; NaN without sequences."""
    return np.where(np.isnan(values).all(0), np.nan, (values > epsilon).mean(0))
