"""The numbers by which weights and cached keys are told apart: the same for the same bits, others for other bits."""

from __future__ import annotations

import pytest
import torch

from sinkscope.capture.bits import _factors, mark, row_marks

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


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("shape", [(2500, 128), (3, 40, 1200), (130, 1003)])
def test_the_loop_and_torch_agree(dtype: torch.dtype, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also over several strips, in rows of no whole words, and in the transpose of a matrix."""
    rows = torch.randint(-100, 100, shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    several = rows, rows.mT, rows[..., 4:]
    found = [row_marks(each, 1) for each in several]
    monkeypatch.setattr("sinkscope.capture.bits.loops_over", lambda *_: None)
    assert all(torch.equal(row_marks(each, 1), marks) for each, marks in zip(several, found, strict=True))


def test_a_row_s_number_is_a_sum_modulo_two_to_the_64() -> None:
    words = torch.randint(-(2**62), 2**62, (2500, 16), generator=torch.Generator().manual_seed(0))
    factors = zip(words[7].tolist(), *_factors(16, 1, words.device).tolist(), strict=True)
    exact = sum(word * whole + (word >> 32) * upper for word, whole, upper in factors)
    assert (int(row_marks(words, 1)[7]) - exact) % 2**64 == 0


def test_order_of_elements_and_rows() -> None:
    matrix = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
    marks = [mark(matrix), mark(matrix.flip(0)), mark(matrix.flip(1)), mark(matrix.double()), mark(matrix.clone())]
    assert len(set(marks)) == 4
    assert marks[0] == marks[4]
