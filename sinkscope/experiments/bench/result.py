"""What a benchmark found: seconds, memory and ratios of each contender."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Cost:
    """One contender over all rounds.

    Attributes:
        seconds: of each round, all contenders by turns within a round.
        tokens_per_second: from the median round.
        peak_bytes: most memory above what was held before, of one pass; None where it cannot be had.
        longest: tokens of the longest single sequence that fits, extrapolated; None where unknown.
    """

    seconds: list[float]
    tokens_per_second: float
    peak_bytes: int | None
    longest: int | None


@dataclass(frozen=True)
class Speed:
    """The outcome of `bench`. `ratios[a][b]`: median, least and most over rounds of seconds of a / seconds of b.

    `left_out`: contenders whose maps or logits alone would not fit into `free_bytes`, and the bytes they take.
    """

    model: str
    device: str
    dtype: str
    threads: int
    seq_len: int
    batch_size: int
    set_up: float
    positions: int | None
    free_bytes: int | None
    costs: dict[str, Cost]
    left_out: dict[str, int]

    @property
    def ratios(self) -> dict[str, dict[str, tuple[float, float, float]]]:
        return {a: {b: ratio(self.costs[a].seconds, self.costs[b].seconds) for b in self.costs} for a in self.costs}

    def as_dict(self) -> dict[str, Any]:
        """For JSON: all of it, with what each contender is."""
        what = {name: CONTENDERS[name] for name in self.costs}
        return asdict(self) | {"ratios": self.ratios, "contenders": what}


def ratio(times: list[float], others: list[float]) -> tuple[float, float, float]:
    """Median, least and most of what the one takes over the other in the same round."""
    pairs = [a / b for a, b in zip(times, others, strict=True)]
    return statistics.median(pairs), min(pairs), max(pairs)


PLAIN, BACKBONE, SCAN, EAGER = "plain", "backbone", "scan", "eager"
CONTENDERS = {
    PLAIN: "model(ids), with logits",
    BACKBONE: "the same without the language-model head",
    SCAN: "backbone, capture and every metric of a scan's first batch",
    EAGER: "backbone with eager attention and output_attentions=True",
}
