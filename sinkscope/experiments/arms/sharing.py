"""Cuts a measurement into pieces that several processes measure side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Piece:
    """One batch under some of the trials.

    Attributes:
        start, count: the batch's first sequence, and how many it has.
        trials: numbers of the trials. Trial 0, the unablated model, is in every piece: all others are held against it.
        last: no later piece is of this batch.
    """

    start: int
    count: int
    trials: tuple[int, ...]
    last: bool

    @property
    def rows(self) -> slice:
        """The batch's sequences."""
        return slice(self.start, self.start + self.count)


def pieces(batches: Sequence[tuple[int, int]], trials: int, processes: int) -> list[Piece]:
    """The pieces of batches (first sequence, number of sequences), in their order; each process takes one a round.

    A batch's trials are dealt to as many pieces as end soonest: few pieces leave processes idle, and each runs the
    unablated model again. The sequences of a batch stay together, because a pass rounds by how many it has: so any
    number of processes finds the same numbers to the last bit.
    """
    arms = range(1, trials)

    def passes(parts: int) -> int:
        rounds = -(-len(batches) * parts // processes)
        return rounds * (1 + -(-len(arms) // parts))

    parts = min(range(1, processes + 1), key=passes)
    return [
        Piece(start, count, (0, *arms[part::parts]), part == parts - 1)
        for start, count in batches
        for part in range(parts)
    ]
