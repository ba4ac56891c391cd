"""The largest eigenvalue by Lanczos steps against all eigenvalues."""

from __future__ import annotations

import pytest
import torch

from sinkscope.capture.wiring import largest
from sinkscope.capture.wiring.largest import SMALL, largest_eigenvalue

SPECTRA = {
    "falls": torch.logspace(0, -8, 120, dtype=torch.float64),
    "one": torch.nn.functional.one_hot(torch.tensor(7), 120) * 5.0,
    "flat": 1 + 1e-3 * torch.arange(120, dtype=torch.float64) / 120,
    "two alike": torch.cat([torch.tensor([1.0, 1.0 - 1e-12]), torch.linspace(0.99, 0, 118)]),
    "none": torch.zeros(120),
}


@pytest.mark.parametrize("size", [SMALL, 120])
@pytest.mark.parametrize("name", SPECTRA)
def test_the_largest_of_all(name: str, size: int) -> None:
    draw = torch.randn(2, size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    basis = torch.linalg.qr(draw).Q
    values = SPECTRA[name].double()[:size] * torch.tensor([[1.0], [1e-20]], dtype=torch.float64)
    matrices = (basis * values.unsqueeze(1)) @ basis.mT
    expected = values.amax(-1)
    torch.testing.assert_close(largest_eigenvalue(matrices), expected, rtol=1e-9, atol=0.0)


def test_what_does_not_settle_is_solved_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(largest, "STEPS", 8)
    values = SPECTRA["flat"]
    basis = torch.linalg.qr(torch.randn(1, 120, 120, dtype=torch.float64)).Q
    found = largest_eigenvalue((basis * values) @ basis.mT)
    torch.testing.assert_close(found, values[-1:], rtol=1e-12, atol=0.0)
