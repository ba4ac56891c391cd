"""What is taken of each pass over a cache for the sequences that go on.

Between two passes the cache's owner may put the sequences in another order (beam search goes on with some of them,
several times or not at all), and may take the newest tokens back (assisted generation).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Taken:
    """What is taken of one pass: `rows` of its batch, one for each sequence of the last pass (None = all, in their
    order), and its first `tokens` tokens (None = all)."""

    rows: Tensor | None
    tokens: int | None

    @property
    def whole(self) -> bool:
        """Whether all is taken, as it was."""
        return self.rows is None and self.tokens is None

    def of(self, tensor: Tensor, axis: int) -> Tensor:
        """What is taken of a tensor whose first axis is the batch and whose `axis` is the pass's tokens."""
        return self._first(self.batch(tensor), axis)

    def batch(self, tensor: Tensor) -> Tensor:
        """The sequences of a tensor whose first axis is the batch."""
        return tensor if self.rows is None else tensor.index_select(0, self.rows.to(tensor.device))

    def shared(self, tensor: Tensor, axis: int) -> Tensor:
        """The same of a tensor that has one row for all sequences, or one for each."""
        return self.of(tensor, axis) if tensor.shape[0] > 1 else self._first(tensor, axis)

    def _first(self, tensor: Tensor, axis: int) -> Tensor:
        return tensor if self.tokens is None else tensor.narrow(axis, 0, self.tokens)


class Taking:
    """What is taken of the passes so far. `length`: tokens of a sequence so far."""

    def __init__(self) -> None:
        self.length = 0
        self._tokens: list[int] = []
        self._cut: list[bool] = []
        self._moves: list[Tensor | None] = []

    def add(self, tokens: int) -> None:
        """A pass over so many tokens has ended."""
        self.length += tokens
        self._tokens.append(tokens)
        self._cut.append(False)
        self._moves.append(None)

    def move(self, rows: Tensor) -> None:
        """The sequences that go on are those that the last pass had at `rows`."""
        last = self._moves[-1]
        self._moves[-1] = rows if last is None else last[rows]

    def take_back(self, length: int) -> None:
        """The tokens from `length` on are no part of the sequences any more."""
        start = 0
        for number, tokens in enumerate(self._tokens):
            self._tokens[number] = max(0, min(tokens, length - start))
            self._cut[number] |= self._tokens[number] < tokens
            start += tokens
        self.length = min(self.length, length)

    def of_last(self) -> list[Taken]:
        """What is taken of each pass for the sequences that the last pass read.

        An order that no pass came after is left out: no sequence went on in it.
        """
        return self._taken(self._moves[:-1])

    def of_next(self) -> list[Taken]:
        """What is taken of each pass for the sequences that go on."""
        return self._taken(self._moves)

    def _taken(self, moves: list[Tensor | None]) -> list[Taken]:
        taken, rows = list[Taken](), None
        for number in reversed(range(len(self._tokens))):
            move = moves[number] if number < len(moves) else None
            if move is not None:
                rows = move if rows is None else move[rows]
            taken.append(Taken(rows, self._tokens[number] if self._cut[number] else None))
        return taken[::-1]


def joined(stacks: list[Tensor], taken: list[Taken], axis: int) -> Tensor:
    """The tokens of all passes along an axis, in the last pass's order of sequences. `stacks`: the tensors of passes
    that followed one another, along a first axis that `axis` does not count."""
    kept, start = list[Tensor](), 0
    for stack in stacks:
        parts = taken[start : start + len(stack)]
        start += len(stack)
        if all(part.whole for part in parts):
            kept.append(stack.movedim(0, axis).flatten(axis, axis + 1))
        else:
            kept += [part.of(piece, axis) for piece, part in zip(stack, parts, strict=True)]
    if start != len(taken):
        raise ValueError(f"the tensors of {start} passes are joined as if they were of {len(taken)}")
    return kept[0] if len(taken) == 1 else torch.cat(kept, axis)
