"""The result of a benchmark: seconds, memory and ratios of each contender."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Cost:
    """One contender over all rounds.

    Attributes:
        seconds: seconds of each round; a round runs every contender once.
        tokens_per_second: tokens per second in the median round.
        peak_bytes: peak memory of one pass above what was held before it; None where it cannot be measured.
        longest: tokens of the longest single sequence that fits, extrapolated; None where unknown.
    """

    seconds: list[float]
    tokens_per_second: float
    peak_bytes: int | None
    longest: int | None


@dataclass(frozen=True)
class Speed:
    """The result of `bench`.

    Attributes:
        set_up: seconds to find the attention calls, once per model: the dry run.
        start: what else a scan does before its first batch, in seconds: `loading` in all, of which `wait_for_hash` for
            the thread that hashes the weights for `hash` seconds beside it (none for a model object); `self_check`.
        first_batches: how many batches of a default scan cost as much as `scan`; the others cost as much as `later`.
        positions: tokens per sequence that the model allows; None where it names no limit.
        left_out: bytes needed by each contender whose maps or logits alone would not fit into `free_bytes`.
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
    start: dict[str, float] = field(default_factory=dict)
    first_batches: int = 1

    @property
    def ratios(self) -> dict[str, dict[str, tuple[float, float, float]]]:
        """`ratios[a][b]`: median, minimum and maximum over rounds of the seconds of a over those of b."""
        return {a: {b: ratio(self.costs[a].seconds, self.costs[b].seconds) for b in self.costs} for a in self.costs}

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON, with the ratios and a description of each contender."""
        descriptions = {name: CONTENDERS[name] for name in self.costs}
        return asdict(self) | {"ratios": self.ratios, "contenders": descriptions}


def ratio(times: list[float], others: list[float]) -> tuple[float, float, float]:
    """Median, minimum and maximum over rounds of `times` over `others`."""
    pairs = [a / b for a, b in zip(times, others, strict=True)]
    return statistics.median(pairs), min(pairs), max(pairs)


PLAIN, BACKBONE, SCAN, LATER, EAGER = "plain", "backbone", "scan", "later", "eager"
CONTENDERS = {
    PLAIN: "model(ids), with logits",
    BACKBONE: "the same without the language-model head",
    SCAN: "backbone, capture and every metric of a scan's first batch",
    LATER: "the same of a later batch, without matrix_entropy",
    EAGER: "backbone with eager attention and output_attentions=True",
}
