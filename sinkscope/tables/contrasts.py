"""Compares the BOS mass of every head between domains, with the false discovery rate controlled.

A head that puts its mass on the first token in one domain and attends to other tokens in another is active-dormant
(Guo et al. 2410.13835). Where two domains read the same documents, each sequence is its own control (a paired t-test);
otherwise the samples are separate (Welch's test). Each difference comes with the 95 % interval of its test.
"""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pandas as pd

from sinkscope.capture import Site
from sinkscope.runs.schema.summary import DomainContrast, HeadContrast
from sinkscope.runs.statistics import SIGNIFICANT, false_discovery, paired_difference, welch_difference
from sinkscope.tables.values import Domain

METRIC = "bos_mass"
SHOWN = ["stream", "layer", "head", "difference", "low", "high", "q"]


def contrast_table(domains: list[Domain], sites: list[Site]) -> pd.DataFrame:
    """domains.csv: one row per (pair of domains, stream, layer, head).

    `bos_mass_a`, `bos_mass_b`: means over sequences. `difference`: b - a. `sem`, `low`, `high`: its standard error and
    95 % interval (Student's t). `p`: two-sided t-test. `q`: Benjamini-Hochberg over all heads of the pair.
    `differs`: q < 0.05, where the interval leaves out 0 too; empty where a head has no p-value.
    """
    frames = [_contrast(a, b, sites) for a, b in combinations(domains, 2)]
    return pd.concat(frames, ignore_index=True)


def contrast_summary(table: pd.DataFrame) -> list[DomainContrast]:
    """One entry per pair of domains: number of heads tested, and the heads that differ, largest difference first."""
    entries = []
    for (a, b), rows in table.groupby(["domain_a", "domain_b"], sort=False):
        differing = rows[rows["differs"].fillna(False).astype(bool)]
        order = differing["difference"].abs().sort_values(ascending=False, kind="stable").index
        heads = [HeadContrast.model_validate(row) for row in differing.loc[order, SHOWN].to_dict("records")]
        entries.append(
            DomainContrast(
                a=str(a), b=str(b), paired=bool(rows["paired"].iloc[0]), metric=METRIC,
                heads_tested=int(rows["q"].notna().sum()), heads_that_differ=len(differing),
                false_discovery_rate=SIGNIFICANT, heads=heads,
            )
        )  # fmt: skip
    return entries


def _contrast(a: Domain, b: Domain, sites: list[Site]) -> pd.DataFrame:
    shared = [site for site in sites if site.name in a.sites and site.name in b.sites]
    first = np.concatenate([a.sites[site.name].head(METRIC) for site in shared], axis=1)
    second = np.concatenate([b.sites[site.name].head(METRIC) for site in shared], axis=1)
    paired = len(first) == len(second) and a.reads_as(b, len(first))
    found = paired_difference(first, second) if paired else welch_difference(first, second)
    q = false_discovery(found.p)
    differs = pd.arrays.BooleanArray(q < SIGNIFICANT, np.isnan(q))
    places = pd.DataFrame(
        [(site.stream, site.layer, head, site.name) for site in shared for head in range(site.heads)],
        columns=["stream", "layer", "head", "module"],
    )
    names = pd.DataFrame({"domain_a": a.name, "domain_b": b.name, "paired": paired}, index=places.index)
    numbers = {
        "bos_mass_a": found.a, "bos_mass_b": found.b, "difference": found.difference, "sem": found.sem,
        "low": found.low, "high": found.high, "p": found.p, "q": q, "differs": differs,
    }  # fmt: skip
    return pd.concat([names, places, pd.DataFrame(numbers)], axis=1)
