"""Largest eigenvalues alone, against all of them and closed forms."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from sinkscope.wiring import mixes
from sinkscope.wiring.mixes import largest_eigenvalue, largest_square


@pytest.fixture(params=["all eigenvalues", "arpack"])
def _computed_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixes, "LARGE", 4 if request.param == "arpack" else 10**6)


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.usefixtures("_computed_by")
@pytest.mark.parametrize("shape", [(5, 9), (9, 5), (2, 3, 30, 40), (260, 270)])
def test_squares_of_singular_values(shape: tuple[int, ...]) -> None:
    rows = draw(*shape)
    expected = np.linalg.svd(rows.double().numpy(), compute_uv=False)[..., 0] ** 2
    np.testing.assert_allclose(largest_square(rows).numpy(), expected, rtol=1e-12)
    gram = rows.double().mT @ rows.double()
    np.testing.assert_allclose(largest_eigenvalue(gram).numpy(), expected, rtol=1e-12)


@pytest.mark.usefixtures("_computed_by")
def test_closed_forms() -> None:
    """A rank of 1, where nothing is left after one step; equal eigenvalues; two that nearly are; zeros."""
    vector = torch.arange(1.0, 9.0, dtype=torch.float64)
    assert float(largest_square(torch.outer(vector, vector))) == pytest.approx(float((vector @ vector) ** 2), rel=1e-12)
    assert float(largest_eigenvalue(3 * torch.eye(8))) == pytest.approx(3, rel=1e-12)
    close = torch.diag(torch.tensor([1.0, 1 - 1e-9, *[0.5] * 6], dtype=torch.float64))
    assert float(largest_eigenvalue(close)) == pytest.approx(1, rel=1e-12)
    assert float(largest_square(torch.zeros(8, 8))) == 0


@pytest.mark.usefixtures("_computed_by")
@pytest.mark.parametrize("hole", [float("nan"), float("inf")])
def test_a_matrix_that_is_not_finite_has_none(hole: float) -> None:
    rows = draw(2, 9, 8)
    rows[1, 3, 2] = hole
    found = largest_square(rows)
    assert float(found[0]) == pytest.approx(float(largest_square(rows[0])), rel=1e-12)
    assert bool(found[1].isnan())
    assert bool(largest_eigenvalue(rows[1].mT @ rows[1]).isnan())


def test_the_same_number_every_time() -> None:
    rows = draw(300, 260)
    assert float(largest_square(rows)) == float(largest_square(rows))
