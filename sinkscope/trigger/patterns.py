"""Where a head's attention lies in rows without a trigger. This page is the one definition of the verdicts.

All means are over evaluation sequences and over rows i >= 1 without a trigger. With a[i,t] >= 0 as below,

- `none`: the mean of sum_t a[i,t] is below 0.1, so that the rows are (next to) empty;
- `sink`: otherwise, the mean of a[i,0] is 0.9 or more;
- `diagonal`: otherwise, the mean of a[i,i] is 0.9 or more;
- `spread`: anything else, also where both means reach 0.9, which only rows of sum above 1 can do.

Each head gets two verdicts. `pattern` takes a = |A|, the attention as the model uses it: mass for softmax, a raw score
for relu and sigmoid. `pattern_share` takes Gu et al.'s proxy a = |A[i,t]| / sum_t |A[i,t]|, 0 in a row of zeros. They
differ where rows do not sum to 1: in relu, sigmoid, softmax1 and learned-sink. The bound 0.9 is the paper's for heads
with a sink, 0.1 its counterpart; both are conventions.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from sinkscope.trigger.as_input import SINK

EMPTY = 0.1
"""Rows whose mean sum is below this hold no attention."""

COLUMNS = {
    "total_mean": "mean over non-trigger rows of sum_t |A[i,t]|",
    "self_share_mean": "mean over non-trigger rows of |A[i,i]| / sum_t |A[i,t]|, 0 in a row of zeros",
    "filled_mean": "share of non-trigger rows that are not all zero",
    "pattern": "sink, diagonal, spread or none, by |A|",
    "pattern_share": "sink, diagonal, spread or none, by each row's shares",
}


@dataclass(frozen=True)
class Pattern:
    """One head's verdicts, and the means of COLUMNS that `Evaluation.heads` lacks."""

    layer: int
    head: int
    total_mean: float
    self_share_mean: float
    filled_mean: float
    pattern: str
    pattern_share: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def name_pattern(total: float, first: float, own: float) -> str:
    """The verdict by the means of a row's sum, of its first entry and of its own entry; see the module's docstring."""
    if total < EMPTY:
        return "none"
    if (first >= SINK) == (own >= SINK):
        return "spread"
    return "sink" if first >= SINK else "diagonal"


def head_pattern(layer: int, head: int, weights: Float[Tensor, "batch query key"], trigger: int) -> Pattern:
    """The verdicts on one head's attention A, whose trigger stands at one position in all sequences."""
    rows = torch.tensor([i for i in range(1, weights.shape[1]) if i != trigger])
    a = weights[:, rows].abs()
    total, first, own = a.sum(-1), a[..., 0], a.gather(-1, rows.expand(len(a), -1)[..., None])[..., 0]

    def share(part: Tensor) -> float:
        return float(torch.where(total > 0, part / total, 0.0).mean())

    filled = float((total > 0).to(a.dtype).mean())
    return Pattern(
        layer,
        head,
        float(total.mean()),
        share(own),
        filled,
        name_pattern(float(total.mean()), float(first.mean()), float(own.mean())),
        name_pattern(filled, share(first), share(own)),
    )


def join_patterns(names: list[str]) -> str:
    """A model's verdict from its heads': `sink`, or `diagonal + sink` where they differ."""
    return " + ".join(sorted(set(names)))
