"""What a module reads or returns of every token, as rows of sequences, in whatever shape the model keeps them."""

from __future__ import annotations

from torch import Tensor


def by_sequence(rows: Tensor, sequences: int, length: int) -> Tensor | None:
    """A row for each token as [sequence, token, feature], without a copy; None where `rows` holds something else.

    They may come as [sequence, token, feature] or, one sequence behind the other, as [sequence * token, feature], with
    axes of size 1 among those: latent attention holds [sequence, 1, token, feature].
    """
    leading, count = list(rows.shape[:-1]), sequences * length
    sizes = [size for size in leading if size != 1]
    apart = sizes == [size for size in (sequences, length) if size != 1]
    in_one_row = sizes == [count] and leading[-1] == count
    # [token, 1, feature] is how a model that puts its tokens first holds a single sequence. It is refused like several
    # of them, or what is read of a model would hang on the size of a batch.
    tokens_first = sequences == 1 < length and len(leading) > 1 and leading[0] == length
    if not leading or tokens_first or not (apart or in_one_row):
        return None
    return rows.reshape(sequences, length, rows.shape[-1])
