"""The numbers by which weights and cached keys are told apart: the same for the same bits, others for other bits."""

from __future__ import annotations

import pytest
import torch

from sinkscope.capture.still_cached import mark, row_marks

WIDTHS = [1, 3, 8, 12]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int8])
def test_changed_signs(dtype: torch.dtype, width: int) -> None:
    """The sign is the upper bit of an element, and of some elements that of a word of 64 bits: no two cancel."""
    rows = (torch.arange(width) % 5 + 1).to(dtype).expand(4, width).clone()
    rows[1, 0] *= -1
    rows[2] *= -1
    rows[3, -2:] *= -1
    different = 2 if width == 1 else 4
    assert len(set(row_marks(rows).tolist())) == different


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_places_do_not_matter(dtype: torch.dtype, width: int) -> None:
    """A row's number is that of its bits, wherever it lies in memory."""
    rows = torch.randn(5, width, generator=torch.Generator().manual_seed(0)).to(dtype)
    expected = row_marks(rows)
    wide = torch.zeros(5, 2 * width + 3, dtype=dtype)
    wide[:, 1 : width + 1] = rows
    assert torch.equal(row_marks(wide[:, 1 : width + 1]), expected)
    assert torch.equal(row_marks(rows.mT.contiguous().mT), expected)
    assert torch.equal(row_marks(rows.flip(0)), expected.flip(0))


def test_order_of_elements_and_rows() -> None:
    matrix = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
    marks = [mark(matrix), mark(matrix.flip(0)), mark(matrix.flip(1)), mark(matrix.double()), mark(matrix.clone())]
    assert len(set(marks)) == 4
    assert marks[0] == marks[4]
