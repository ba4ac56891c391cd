"""The arrays that every table is made of: the values of one attention site over all sequences of a domain."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from sinkscope.capture import Site
from sinkscope.inputs.corpus import same_documents
from sinkscope.inputs.rules import shared_tokens, token_text

if TYPE_CHECKING:
    from sinkscope.inputs import Corpus
    from sinkscope.metrics.quantities import QuantitySet


@dataclass
class SiteValues:
    """One attention site over all sequences of one domain.

    Attributes:
        quantities: the quantities measured; their metrics name the columns of `heads`, `layers` and the measurements.
        arrays: float64 array of every quantity, by name. NaN is a missing value; a quantity without any value is left
            out. A quantity by position has no sequence axis: it is the mean over sequences. Events are rows.
        lengths: prefix lengths of the length curve.
        count: number of sequences, N below.
        causal: whether the attention call is causal.
        queries, keys: number of queries and keys of the longest sequence.
    """

    quantities: QuantitySet
    arrays: dict[str, np.ndarray]
    lengths: list[int]
    count: int
    causal: bool
    queries: int
    keys: int

    def without(self, names: Collection[str]) -> SiteValues:
        """The values less those of the per-sequence metrics of these names."""
        if not names:
            return self
        metrics = self.quantities.metrics.without(names)
        arrays = dict(self.arrays)
        for table, columns in self.quantities.metrics.tables.items():
            if table in arrays:
                kept = [index for index, name in enumerate(columns) if name in metrics.tables[table]]
                arrays[table] = arrays[table][..., kept]
        return replace(self, quantities=replace(self.quantities, metrics=metrics), arrays=arrays)

    @property
    def heads(self) -> np.ndarray:
        """[N, H, metric]: every head metric."""
        return self.arrays["heads"]

    @property
    def layers(self) -> np.ndarray:
        """[N, metric]: every layer metric."""
        return self.arrays["layers"]

    @property
    def alpha(self) -> np.ndarray:
        """[H, K]: mean over sequences of alpha_k; NaN where no query may see the key in one of them."""
        unseen = self.arrays.get("unseen_keys")
        if unseen is None:
            return self.arrays["alpha"]
        alpha = self.arrays["alpha"].copy()
        alpha[:, : unseen.shape[1]][unseen > 0] = np.nan
        return alpha

    @property
    def ranked(self) -> np.ndarray:
        """[H | 1, K]: the keys that enough queries see, in some sequence, for a peak: n_k >= n_max/4."""
        rows = self.arrays["ranked_keys"]
        shared = np.isnan(rows[:, 1])
        if shared.all():
            return _covered(rows, np.zeros(len(rows)), 1, self.keys)
        by_head = _covered(rows[~shared], rows[~shared, 1], self.heads.shape[1], self.keys)
        return by_head | _covered(rows[shared], np.zeros(shared.sum()), 1, self.keys)

    @property
    def counted(self) -> np.ndarray:
        """[N, K]: the keys that enough queries see, in some head, to be a sink of sinks.parquet: n_k >=
        max(16, n_max/16)."""
        rows = self.arrays["counted_keys"]
        return _covered(rows, rows[:, 0], self.count, self.keys)

    @property
    def seeing(self) -> np.ndarray | None:
        """[K]: n_k, the number of queries that may see each key; None where sequences or heads differ in it."""
        counts, squares = self.arrays.get("seeing_queries", np.full((2, 1), np.nan))
        return counts if (squares == counts**2).all() else None

    @property
    def hides(self) -> bool:
        """Whether the mask hides some key from a query that the causal order, if there is one, lets see it."""
        return bool(self.arrays["hidden_keys"].any())

    @property
    def first_unit(self) -> np.ndarray | None:
        """[N, D]: x_0 / norm x_0; None where the block's input was not seen."""
        return self.arrays.get("first_unit")

    @property
    def massive(self) -> Counter[tuple[int, int]]:
        """Number of sequences in which an element of x is massive, by (position, channel)."""
        rows = self.arrays.get("massive")
        return Counter() if rows is None else Counter((int(place), int(channel)) for place, channel in rows)

    @property
    def events(self) -> dict[str, np.ndarray]:
        """[event, field] by kind: rows of sinks.parquet, whose sequences count in the domain; see EVENT_FIELDS."""
        shown = self.quantities.shown_in("sinks")
        return {kind: self.arrays[quantity.name] for kind, quantity in shown.items() if quantity.name in self.arrays}

    @property
    def measured(self) -> dict[str, np.ndarray]:
        """[N, H, metric] of every table by head that a measurement writes, by the table's name."""
        by_head = [
            quantity.name for quantity in self.quantities.quantities if quantity.dims == ("sequence", "head", "metric")
        ]
        return {name: self.arrays[name] for name in by_head if name != "heads" and name in self.arrays}

    def head(self, name: str) -> np.ndarray:
        """[N, H]: the values of one head metric."""
        return self.heads[:, :, self.quantities.metrics.names("heads").index(name)]

    def layer(self, name: str) -> np.ndarray:
        """[N]: the values of one layer metric."""
        return self.layers[:, self.quantities.metrics.names("layers").index(name)]


def _covered(stretches: np.ndarray, row: np.ndarray, rows: int, keys: int) -> np.ndarray:
    """[rows, keys] bool: where a stretch (.., .., first key, one past the last) of that row lies."""
    change = np.zeros((rows, keys + 1), dtype=np.int32)
    np.add.at(change, (row.astype(int), stretches[:, 2].astype(int)), 1)
    np.add.at(change, (row.astype(int), stretches[:, 3].astype(int)), -1)
    return np.asarray(change.cumsum(1)[:, :-1] > 0)


@dataclass
class Domain:
    """The sequences of one domain (a SPEC with a BOS mode).

    `sites`: the values of each attention site, by its name. `others`: those of what a measurement reads besides, by the
    name it gives them.
    """

    corpus: Corpus
    sites: dict[str, SiteValues] = field(default_factory=dict)
    others: dict[str, SiteValues] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Its name in the tables."""
        return self.corpus.domain

    @property
    def ids(self) -> np.ndarray:
        """[sequence, T]: the token ids."""
        return self.corpus.ids

    @property
    def documents(self) -> list[str]:
        """What each sequence was read from, for people to read."""
        return self.corpus.documents

    def reaching(self, values: SiteValues) -> np.ndarray:
        """[K]: how many of the measured sequences reach each key position of a site; all of them where keys are no
        tokens."""
        ids = self.ids[: values.count]
        return (ids >= 0).sum(0) if ids.shape[1] == values.keys else np.full(values.keys, values.count)

    def reads_as(self, other: Domain, count: int) -> bool:
        """Whether its first `count` sequences read the same documents as the other domain's, one by one."""
        return same_documents(self.corpus, other.corpus, count)


def as_one(domains: list[Domain], names: Collection[str]) -> Domain:
    """The sequences of all domains in one, with the arrays of these names; each has an axis of sequences first."""
    sites = {}
    for site in dict.fromkeys(name for domain in domains for name in domain.sites):
        parts = [domain.sites[site] for domain in domains if site in domain.sites]
        arrays = {name: np.concatenate([values.arrays[name] for values in parts]) for name in names}
        sites[site] = replace(parts[0], arrays=arrays, count=sum(values.count for values in parts))
    return Domain(domains[0].corpus, sites)


@dataclass(frozen=True)
class Stream:
    """The attention sites of one stream that some of the domains measured.

    A watched program may run one part of its model in one domain and another part in the next. `measured`: each site
    with its values in the domains that have some.
    """

    domains: list[Domain]
    measured: list[tuple[Site, list[SiteValues]]]

    @classmethod
    def of(cls, domains: list[Domain], sites: list[Site]) -> Stream:
        """The stream of these sites, which leaves out those that none of the domains measured."""
        by_site = [
            (site, [domain.sites[site.name] for domain in domains if site.name in domain.sites]) for site in sites
        ]
        return cls(domains, [(site, parts) for site, parts in by_site if parts])

    @property
    def parts(self) -> list[SiteValues]:
        """The values of every site in every domain."""
        return [values for _, parts in self.measured for values in parts]

    @property
    def sequences(self) -> int:
        """The sequences of all domains that some of the sites measured."""
        return sum(rows for _, rows in self._rows())

    def heads(self, metric: str) -> np.ndarray:
        """[sequence, head of any layer]: one head metric; NaN where a sequence's domain does not measure the site."""
        return np.concatenate(
            [
                np.concatenate([_head(domain.sites.get(site.name), metric, rows, site) for site, _ in self.measured], 1)
                for domain, rows in self._rows()
            ]
        )

    @property
    def documents(self) -> np.ndarray:
        """[sequence]: a number for what it was read from. Sequences of several domains that read the same documents,
        one by one, share their numbers."""
        numbered: list[tuple[Domain, np.ndarray]] = []
        for domain, rows in self._rows():
            own = np.arange(rows) + sum(len(numbers) for _, numbers in numbered)
            alike = [numbers for other, numbers in numbered if len(numbers) == rows and domain.reads_as(other, rows)]
            numbered.append((domain, alike[0] if alike else own))
        return np.concatenate([numbers for _, numbers in numbered])

    def _rows(self) -> list[tuple[Domain, int]]:
        """Each domain that measured some of the sites, and its sequences."""
        counts = [
            (
                domain,
                max(
                    (domain.sites[site.name].count for site, _ in self.measured if site.name in domain.sites), default=0
                ),
            )
            for domain in self.domains
        ]
        return [(domain, rows) for domain, rows in counts if rows]


def _head(values: SiteValues | None, metric: str, rows: int, site: Site) -> np.ndarray:
    return np.full((rows, site.heads), np.nan) if values is None else values.head(metric)


# What stands at the positions of a stream: the token, and the region it belongs to.


@dataclass(frozen=True)
class Places:
    """The positions of one stream's keys, in one domain.

    Attributes:
        regions: [sequence, position], the name of each position's region; "" past a sequence's end.
        ids: [sequence, position], token ids; None where the positions hold no tokens (patches, frames).
        tokenizer: gives the ids their texts.
    """

    regions: np.ndarray
    ids: np.ndarray | None = None
    tokenizer: Any = None

    @property
    def lengths(self) -> np.ndarray:
        """[sequence]: the number of positions of each sequence."""
        return np.asarray((self.regions != "").sum(1))

    def cut(self, sequences: int) -> Places:
        """The places of the first `sequences`, those that an interrupted scan has measured."""
        return Places(self.regions[:sequences], None if self.ids is None else self.ids[:sequences], self.tokenizer)

    @cached_property
    def shared(self) -> list[str | None]:
        """The token at each position where all sequences have the same one; None elsewhere."""
        if self.ids is None:
            return [None] * self.regions.shape[1]
        return shared_tokens(self.ids, self.tokenizer)

    def texts(self, ids: np.ndarray) -> dict[int, str]:
        """The text of each id, as the vocabulary spells it."""
        return {int(token): token_text(self.tokenizer, int(token)) for token in np.unique(ids)}


PlacesOf = dict[tuple[str, str], Places]
"""The places of the keys of every attention call, by (domain, name of the site); calls of a stream share them."""


def text_regions(ids: np.ndarray, special: frozenset[int]) -> np.ndarray:
    """[sequence, position]: `special` for special tokens, `text` for all others, "" past a sequence's end (id < 0)."""
    regions = np.where(np.isin(ids, list(special)), "special", "text")
    return np.asarray(np.where(ids < 0, "", regions))
