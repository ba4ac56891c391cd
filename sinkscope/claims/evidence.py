"""A run as claims read it: one row a head and a layer, of one text, with every column that was measured."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from sinkscope.claims.claim import Found, NotTested, Number, mean
from sinkscope.runs.words import says_nothing

if TYPE_CHECKING:
    from sinkscope.runs.run import Run

PLACE = ["stream", "layer", "head", "module"]
LAYER = ["stream", "layer", "module"]
NO_LANGUAGE = "the claim is about language models"
NO_PROBABILITIES = "its attention is not normalised, and the threshold is one on probabilities"
NO_TEXT = ("random", "repeated")
"""The SPECs of token ids that are drawn: controls of a text, and none themselves."""
EPSILON = 0.3
"""A head has a sink where alpha_0 exceeds this (Gu et al. 2410.10781)."""
TOO_SHORT = f"in so short sequences uniform attention gives the first token more than {EPSILON}, too"
"""Why `Evidence.telling` has no rows."""


class Evidence:
    """The tables of a run's first text; of its first random tokens where it read no text."""

    def __init__(self, run: Run) -> None:
        """Raises NotTested where nothing was measured."""
        self.run = run
        there = set(run.sequences["domain"])
        named = [data for data in run.manifest.data if data.domain in there]
        if not named:
            raise NotTested("the run holds no sequence")
        self.data = next((data for data in named if data.spec not in NO_TEXT), named[0])

    def sequences_of(self, domain: str) -> pd.DataFrame:
        """The rows of one domain: a head's, and a layer's where `head` is missing."""
        return self.run.sequences[self.run.sequences["domain"] == domain]

    @cached_property
    def sequences(self) -> pd.DataFrame:
        """The rows of the claim's domain: a head's, and a layer's where `head` is missing."""
        return self.sequences_of(self.data.domain)

    @cached_property
    def heads(self) -> pd.DataFrame:
        """A row for each head: means over sequences, and the columns that are known for the run as a whole."""
        rows = self.sequences[self.sequences["head"].notna()].astype({"head": int})
        table = _means(rows, PLACE)
        for name, extra in self.run.measured.items():
            if {*PLACE} <= {*extra.columns}:
                table = self._joined(table, name)
        return table

    def _joined(self, table: pd.DataFrame, name: str) -> pd.DataFrame:
        """With the columns of a table that has one row for each head; other tables add nothing."""
        extra = self.of_text(name)
        kept = [column for column in extra if column not in table or column in PLACE]
        return table if extra.duplicated(PLACE).any() else table.merge(extra[kept], on=PLACE, how="left")

    @cached_property
    def layers(self) -> pd.DataFrame:
        """A row for each layer: means over sequences, `sink_heads` and `mean_bos_mass`."""
        table = _means(self.sequences[self.sequences["head"].isna()].drop(columns="head"), LAYER)
        per = self.heads.groupby(LAYER, sort=False)
        summary = per.agg(
            heads=("head", "size"), mean_bos_mass=("bos_mass", "mean"),
            sink_heads=("sink_score", lambda values: int((values > EPSILON).sum())),
        ).reset_index()  # fmt: skip
        return table.merge(summary, on=LAYER)

    def of_text(self, name: str) -> pd.DataFrame:
        """A table of a question, the rows of this text. Raises NotTested where the run has none."""
        if name not in self.run.measured:
            raise NotTested(f"the run has no table {name}")
        return self.rows_of_text(self.run.measured[name])

    def rows_of_text(self, table: pd.DataFrame) -> pd.DataFrame:
        """The rows of this text in one of the run's tables."""
        if "domain" not in table:
            return table
        return table[table["domain"] == self.data.domain].drop(columns="domain")

    def need(self, *columns: str) -> pd.DataFrame:
        """The heads that have a value in each of these columns. Raises NotTested where there is none."""
        return _known(self.heads, columns)

    def need_layers(self, *columns: str) -> pd.DataFrame:
        """The layers. Raises NotTested as `need` does."""
        return _known(self.layers, columns)

    def telling(self, rows: pd.DataFrame) -> pd.DataFrame:
        """The rows of the streams in which an alpha_0 above EPSILON is a sign of a sink: uniform attention has less."""
        own = self.run.summary.domains.get(self.data.domain, self.run.summary)
        short = [name for name, stream in own.streams.items() if says_nothing(stream.uniform_alpha_0.T, EPSILON)]
        return rows[~rows["stream"].isin(short)]

    def least(self, layers: pd.DataFrame, column: str) -> pd.Series:
        """The smallest value of any sequence in each of these layers."""
        return layers["module"].map(self.sequences.groupby("module")[column].min())

    def of_heads(self, column: str, domain: str | None = None) -> Number:
        """The mean over heads, with the error over sequences."""
        rows = self.sequences if domain is None else self.sequences_of(domain)
        return mean(rows[rows["head"].notna()].groupby("sequence")[column].mean())

    def of_layers(self, column: str) -> Number:
        """The mean over layers, with the error over sequences."""
        rows = self.sequences
        return mean(rows[rows["head"].isna()].groupby("sequence")[column].mean())

    def of_head(self, row: pd.Series, column: str) -> Number:
        """The mean of one head, with its error."""
        rows = self.sequences
        return mean(rows[(rows["module"] == row["module"]) & (rows["head"] == row["head"])][column])

    @property
    def causal(self) -> bool:
        """Whether no query of any layer sees a later key."""
        return all(site.causal for site in self.run.manifest.attention)

    @property
    def scores(self) -> set[str]:
        """What the layers turn logits into attention by: softmax, or names of `capture.scores`."""
        return {site.score for site in self.run.manifest.attention}

    @property
    def normalised(self) -> bool:
        """Whether every layer divides the rows of its attention by their sum, as a softmax does."""
        scores = self.scores - {"softmax"}
        if not scores:  # what knows of others needs torch, which a saved run of softmax must not load
            return True
        from sinkscope.trigger.model import AttentionForm

        return all(AttentionForm(score).normalised for score in scores)

    @property
    def of_language(self) -> bool:
        """Whether what was read is text: no pictures, no sound, and no vectors drawn from a task."""
        streams = {site.stream for site in self.run.manifest.attention}
        return not streams & {"vision", "audio"} and not (self.run.summary.task or {}).get("name")


def head_name(row: pd.Series) -> Number:
    """A head as layer.head."""
    return Number(f"{row['layer']}.{row['head']}")


def not_tested(reason: str, figures: dict[str, Number] | None = None) -> Found:
    """What a claim finds where there is nothing to judge, with the numbers that say so."""
    return Found(None, None, figures or {}, reason)


def _known(table: pd.DataFrame, columns: Sequence[str]) -> pd.DataFrame:
    """The rows without a missing value in these columns: a comparison with one would count as false."""
    for name in columns:
        if name not in table or table[name].isna().all():
            raise NotTested(f"{name} could not be measured in this model")
    known = table[table[list(columns)].notna().all(axis=1)]
    if known.empty:
        raise NotTested(f"{' and '.join(columns)} were not measured together in this model")
    return known


def _means(rows: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
    """Means over sequences of the columns that have a value."""
    numbers = [name for name in rows.select_dtypes(np.number) if name not in (*keys, "sequence")]
    there = rows[numbers].notna().any()
    return rows.groupby(keys, sort=False)[[name for name in numbers if there[name]]].mean().copy().reset_index()
