"""What a module reads or returns of every token, as rows of sequences, in whatever shape the model keeps them."""

from __future__ import annotations

from torch import Tensor


def by_sequence(rows: Tensor, sequences: int, length: int) -> Tensor | None:
    """A row for each token as [sequence, token, feature], without a copy; None where `rows` holds something else.

    They may come as [sequence, token, feature] or, one sequence behind the other, as [sequence * token, feature].
    """
    if rows.dim() == 2 and len(rows) == sequences * length:
        return rows.unflatten(0, (sequences, length))
    return rows if rows.dim() == 3 and rows.shape[:2] == (sequences, length) else None
