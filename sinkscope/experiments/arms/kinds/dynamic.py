"""Heads zeroed in each sequence by itself, where a score crosses the run's quantile."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from sinkscope.errors import SinkscopeError
from sinkscope.experiments.arms.arm import Arm, Pass, Setting
from sinkscope.experiments.arms.changes import check_sites, projections, zeroed_by_sequence
from sinkscope.experiments.arms.head_choice import Score, read_scored
from sinkscope.runs.run import Run


@dataclass(frozen=True)
class DynamicHeads(Arm):
    """In each sequence, the heads whose score in that sequence is at the dormant end of `share` of all (sequence, head)
    pairs of the run. `bound`: that quantile, once the arm is ready; `chosen`: bool [sequence, head] by site, once the
    sequences have been scored."""

    score: Score
    share: float
    bound: float = float("nan")
    chosen: dict[str, Tensor] | None = None

    @property
    def name(self) -> str:
        return f"dynamic:{self.score.name}{100 * self.share:g}%"

    @property
    def from_run(self) -> str:
        return "its threshold is a quantile of a run"

    def ready(self, setting: Setting) -> Arm:
        check_sites(setting)
        assert setting.run is not None  # `check_run` saw to it
        read, length = setting.run.manifest.data, setting.ids.shape[1]
        lengths = {tokens for data in read for tokens in (data.shortest or data.seq_len, data.seq_len)}
        if len(lengths) > 1:
            raise SinkscopeError(
                f"--arm {self.name}: its threshold is one of scores over {min(lengths)} to {max(lengths)} tokens, the "
                f"run's, and scores change with the length: give a run whose sequences all have {length} tokens"
            )
        if lengths != {length}:
            raise SinkscopeError(
                f"--arm {self.name}: its threshold is one of scores over {max(lengths)} tokens, the run's, and scores "
                f"change with the length: leave out --seq-len {length}, or give a run of that length"
            )
        return replace(self, bound=threshold(setting.run, self.score, self.share))

    @property
    def reads_first(self) -> bool:
        return True

    def foreseen(self) -> Arm:
        return replace(self, chosen={})

    def prepared(self, setting: Setting) -> Arm:
        scores = scored(setting, self.score.column)
        return replace(self, chosen=crossing(scores, self.score, self.bound))

    def applied(self, forward: Pass) -> AbstractContextManager[Any]:
        masks = self._own(forward)
        forward.touches(torch.cat(list(masks.values()), 1).sum(1))
        return zeroed_by_sequence(forward.setting.base, forward.setting.sites, masks)

    def changes(self, forward: Pass) -> Iterable[str] | None:
        if not self.chosen:  # the arm is only counted
            return None
        return projections(forward.setting.sites, {name for name, mask in self._own(forward).items() if mask.any()})

    def _own(self, forward: Pass) -> dict[str, Tensor]:
        assert self.chosen is not None
        return {name: mask[forward.start : forward.start + len(forward.ids)] for name, mask in self.chosen.items()}

    def control(self) -> Arm | None:
        assert self.chosen is not None
        return RandomDynamicHeads(self.name, self.chosen)


@dataclass(frozen=True)
class RandomDynamicHeads(Arm):
    """In each sequence as many random heads as an arm of DynamicHeads zeroes there."""

    of: str
    chosen: dict[str, Tensor]

    @property
    def random(self) -> bool:
        return True

    @property
    def name(self) -> str:
        return f"random as {self.of}"

    def applied(self, forward: Pass) -> AbstractContextManager[Any]:
        masks = self._own(forward)
        forward.touches(torch.cat(list(masks.values()), 1).sum(1))
        return zeroed_by_sequence(forward.setting.base, forward.setting.sites, masks)

    def changes(self, forward: Pass) -> Iterable[str] | None:
        if not self.chosen:
            return None
        return projections(forward.setting.sites, {name for name, mask in self._own(forward).items() if mask.any()})

    def _own(self, forward: Pass) -> dict[str, Tensor]:
        widths = [mask.shape[1] for mask in self.chosen.values()]
        drawn = torch.zeros(len(forward.ids), sum(widths), dtype=torch.bool)
        counts = sum(mask.sum(1) for mask in self.chosen.values())
        assert isinstance(counts, Tensor)
        for row in range(len(forward.ids)):
            heads = forward.generator(row).permutation(sum(widths))[: int(counts[forward.start + row])]
            drawn[row, heads] = True
        return dict(zip(self.chosen, drawn.split(widths, 1), strict=True))


def threshold(run: Run, score: Score, share: float) -> float:
    """The quantile of the run's (sequence, head) scores that has `share` of them on the dormant side.

    Raises SinkscopeError where the score is not one of each sequence, or so many scores are equal that more than twice
    `share` of them lie at the quantile or beyond: an arm would be named after a share that it does not zero.
    """
    table = run.sequences
    if score.column not in table or not pd.api.types.is_float_dtype(table[score.column]):
        raise SinkscopeError(
            f"--arm dynamic:{score.column}: the run has no such score of each sequence; `sinkscope metrics` lists the "
            "columns"
        )
    values = table.loc[table["head"].notna(), score.column].dropna()
    if values.empty:
        raise SinkscopeError(f"--arm dynamic:{score.column}: no head of the run has a value")
    bound = float(np.quantile(values, share if score.low else 1 - share))
    beyond = float((values <= bound if score.low else values >= bound).mean())
    if beyond > 2 * share + 1 / len(values):
        raise SinkscopeError(
            f"--arm dynamic:{score.column}: {100 * beyond:.3g}% of the run's values are {bound:g} or "
            f"{'less' if score.low else 'more'}, so no threshold has {100 * share:g}% on its side: give another score "
            "or share"
        )
    return bound


def crossing(scores: dict[str, Tensor], score: Score, bound: float) -> dict[str, Tensor]:
    """Which scores lie at the bound or on its dormant side, bool [sequence, head] by site; a missing score does not."""
    return {name: values <= bound if score.low else values >= bound for name, values in scores.items()}


def scored(setting: Setting, column: str) -> dict[str, Tensor]:
    """The scores of the sequences that the loss is measured on, without any head zeroed, [sequence, head] by site."""
    from sinkscope.engine.scan import scan

    run = scan(setting.model, data=setting.ids, self_check=False, epsilon=setting.epsilon)
    table = run.sequences[run.sequences["head"].notna()]
    if column not in table:
        raise SinkscopeError(f"--arm dynamic:{column}: a scan of the model does not measure this score by itself")
    scores = {}
    for site in setting.sites:
        rows = table[table["module"] == site.name].sort_values(["sequence", "head"])
        scores[site.name] = torch.from_numpy(rows[column].to_numpy(float).reshape(len(setting.ids), site.heads).copy())
    return scores


def read_dynamic(rest: str) -> Arm:
    """Reads what follows `dynamic:`."""
    return DynamicHeads(*read_scored(rest))
