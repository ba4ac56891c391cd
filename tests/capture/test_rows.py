"""Rows of tokens in the shapes in which modules read and return them."""

from __future__ import annotations

import pytest
import torch

from sinkscope.capture.axes import by_sequence

SHAPES = [
    *(((3, 5), leading) for leading in ((3, 5), (15,), (3, 1, 5), (3, 5, 1), (1, 3, 5), (1, 15), (3, 1, 5, 1))),
    *(((1, 5), leading) for leading in ((1, 5), (5,), (1, 1, 5), (1, 5, 1))),
    *(((3, 1), leading) for leading in ((3, 1), (3,), (1, 3), (3, 1, 1))),
    *(((1, 1), leading) for leading in ((1, 1), (1,), (1, 1, 1))),
]


@pytest.mark.parametrize(("batch", "leading"), SHAPES)
def test_rows_of_tokens_stand_by_sequence_and_are_no_copy(batch: tuple[int, int], leading: tuple[int, ...]) -> None:
    tokens = torch.arange(batch[0] * batch[1] * 2.0).view(*batch, 2)
    rows = tokens.reshape(*leading, 2)
    found = by_sequence(rows, *batch)
    assert found is not None
    assert torch.equal(found, tokens)
    assert found.data_ptr() == rows.data_ptr()


@pytest.mark.parametrize("leading", [(5, 3), (5, 1, 3), (3,), (5,), (3, 1), (14,), (15, 1), (4, 3, 5), (2, 15), ()])
def test_what_are_no_rows_of_tokens(leading: tuple[int, ...]) -> None:
    assert by_sequence(torch.zeros(*leading, 2), 3, 5) is None


@pytest.mark.parametrize("sequences", [1, 3])
def test_tokens_that_come_first_are_refused_in_any_batch(sequences: int) -> None:
    assert by_sequence(torch.zeros(5, sequences, 2), sequences, 5) is None
    assert by_sequence(torch.zeros(5 * sequences, 1, 2), sequences, 5) is None
