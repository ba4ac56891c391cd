"""The exact statistics against numpy, on values that break careless implementations."""

from __future__ import annotations

import math
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from accelerator import accelerator
from hypothesis import given
from hypothesis import strategies as st

from sinkscope.capture import loops
from sinkscope.metrics import residual
from sinkscope.metrics.residual import median_abs
from sinkscope.metrics.spectra import SpectrumEntropy, cheap_spectra, full, solve, spectrum_entropy
from sinkscope.questions.modules.tables import ModuleRun, amax_position, amax_token
from sinkscope.runs.statistics import mean, most_frequent, pairwise_cosine, sem


@pytest.mark.parametrize("there", ["numpy", "loop", "accelerator", "accelerator, by a sample"])
@given(st.integers(1, 200), st.integers(0, 10_000), st.sampled_from(["normal", "ties", "spread", "zeros", "sorted"]))
def test_median_abs_is_numpy_s(there: str, count: int, seed: int, kind: str) -> None:
    generator = np.random.default_rng(seed)
    values = {
        "normal": generator.normal(size=(8, count)),
        "ties": generator.integers(-2, 3, size=(8, count)).astype(float),
        "spread": generator.normal(size=(8, count)) * 10.0 ** generator.integers(-30, 30, size=(8, count)),
        "zeros": generator.normal(size=(8, count)) * (generator.random((8, count)) > 0.7),
        "sorted": np.arange(8 * count).reshape(8, count),
    }[kind].astype(np.float32)
    if there.startswith("accelerator"):
        with accelerator() as device, pytest.MonkeyPatch.context() as patch:
            patch.setattr(residual, "SAMPLE", 8 if there.endswith("sample") else residual.SAMPLE)
            ours = median_abs(torch.from_numpy(values).to(device)).cpu().numpy()
    else:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loops, "LEAST", 0 if there == "loop" else math.inf)
            ours = median_abs(torch.from_numpy(values)).numpy()
    np.testing.assert_allclose(ours, np.median(np.abs(values).astype(np.float64), axis=1), rtol=1e-6)


@pytest.mark.parametrize("least", [0, math.inf])
def test_median_abs_keeps_nan_and_takes_half_precision(least: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loops, "LEAST", least)
    with_nan = torch.tensor([[1.0, float("nan"), 2.0, 3.0]] * 8)
    assert torch.isnan(median_abs(with_nan)).all()
    with accelerator() as device:
        assert torch.isnan(median_abs(with_nan.to(device)).cpu()).all()
    assert median_abs(torch.tensor([[-1.0, 3.0, 2.0]], dtype=torch.bfloat16)).item() == 2.0


@pytest.mark.parametrize("shape", [(5, 40), (40, 5), (60, 60), (1, 7)])
@pytest.mark.parametrize("outlier", [1.0, 1e4])
def test_spectrum_entropy_is_the_svd_s(shape: tuple[int, int], outlier: float) -> None:
    x = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0))
    x[:, 0] *= outlier
    singular = np.linalg.svd(x.double().numpy(), compute_uv=False) ** 2
    share = singular / singular.sum(-1, keepdims=True)
    expected = -(share * np.log(share, where=share > 0, out=np.zeros_like(share))).sum(-1)
    np.testing.assert_allclose(spectrum_entropy(x).numpy(), expected, rtol=1e-5, atol=1e-7)


def test_one_huge_token_costs_the_entropy_no_digit() -> None:
    """In float32 the squares of its other channels vanish one by one beside that of its massive channel."""
    x = 4 * torch.randn(2, 300, 640, generator=torch.Generator().manual_seed(0))
    x[:, 0], x[:, 0, 0] = 0.6, 3000.0
    squares = torch.linalg.svdvals(x.double()) ** 2
    expected = torch.special.entr(squares / squares.sum(-1, keepdim=True)).sum(-1)
    np.testing.assert_allclose(spectrum_entropy(x.double()).numpy(), expected, rtol=1e-9)
    np.testing.assert_allclose(spectrum_entropy(x).numpy(), expected, rtol=1e-6)


def test_of_values_that_are_as_frequent_the_first_counts() -> None:
    assert most_frequent([7, 2, 2, 7, 5]) == 7
    assert most_frequent([5, 2, 2, 7]) == 2
    run = ModuleRun({}, places=[7, 2, 2, 7], tokens=["b", "a", "c", "a"])
    assert (amax_position(run), amax_token(run)) == (7, "a")


def test_means_and_errors_leave_out_what_is_missing() -> None:
    values = np.array([[1.0, np.nan, np.nan], [2.0, 5.0, np.nan], [6.0, np.nan, np.nan]])
    np.testing.assert_allclose(mean(values), [3.0, 5.0, np.nan])
    np.testing.assert_allclose(sem(values), [np.sqrt(7 / 3), np.nan, np.nan])


def test_pairwise_cosine_is_the_double_loop_s() -> None:
    units = np.random.default_rng(0).normal(size=(6, 4))
    units /= np.linalg.norm(units, axis=1, keepdims=True)
    pairs = [units[i] @ units[j] for i in range(6) for j in range(i)]
    assert pairwise_cosine(units) == pytest.approx(np.mean(pairs))
    assert np.isnan(pairwise_cosine(units[:1]))


def test_the_cosine_of_equal_directions_is_one() -> None:
    """A vector of unit norm in float32 has a norm of 1 within float32's rounding, which a sum of products shows."""
    row = np.random.default_rng(0).normal(size=640).astype(np.float32)
    units = np.tile(row / np.linalg.norm(row) * np.float32(1 + 3e-7), (8, 1))
    assert pairwise_cosine(units) == pytest.approx(1.0, abs=1e-14)


def test_spectra_are_the_same_alone_and_together() -> None:
    """Matrices of two sizes, one with NaN, are solved together: each entropy equals that of the matrix solved alone."""
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(*shape, generator=generator) for shape in ((3, 20, 8), (2, 20, 8), (1, 5, 9))]
    inputs[1][0, 0, 0] = torch.nan
    waiting = [SpectrumEntropy.of(x) for x in inputs]
    solve(waiting)
    assert not any(one.held for one in waiting)
    for x, one in zip(inputs, waiting, strict=True):
        assert torch.equal(one.tensor().nan_to_num(-1.0), spectrum_entropy(x).nan_to_num(-1.0))
    assert waiting[1].tensor().isnan().tolist() == [True, False]


FORK = """
import os, signal, torch
from sinkscope.metrics.spectra import spectrum_entropy

torch.set_num_threads(1)
x = torch.eye(4)[None]
spectrum_entropy(x)  # starts the thread, which a fork does not have
child = os.fork()
if not child:
    signal.alarm(60)
    os._exit(int(not torch.allclose(spectrum_entropy(x).exp(), torch.tensor(4.0))))
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_fork_solves_spectra_in_threads_of_its_own() -> None:
    """A watched program whose child ran the model waited for ever."""
    assert subprocess.run([sys.executable, "-W", "ignore", "-c", FORK], check=False).returncode == 0


def test_spectra_that_the_device_solves_are_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(3, *shape, generator=generator, dtype=torch.float64) for shape in ((20, 8), (8, 20), (6, 6))]
    inputs[0][1, 0, 0] = torch.nan
    inputs[2][2] = 0.0
    expected = [spectrum_entropy(x) for x in inputs]
    monkeypatch.setattr("sinkscope.metrics.spectra.solves", lambda device: True)
    for x, right in zip(inputs, expected, strict=True):
        begun = SpectrumEntropy.of(x)
        assert not begun.under_way
        torch.testing.assert_close(begun.tensor(), right, rtol=1e-12, atol=1e-12, equal_nan=True)


def test_spectra_wait_until_each_thread_has_some(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four for each thread; one where they are large; and fewer where they take up too much memory."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    waiting = [SpectrumEntropy.of(torch.ones(1, 4, 4)) for _ in range(16)]
    assert [count for count in range(1, 17) if full(waiting[:count])] == [16]
    matrix = 16 * 4  # x itself, which takes less than its Gram matrix
    monkeypatch.setattr("sinkscope.metrics.spectra.ROUNDS_BYTES", 2 * matrix)
    assert [count for count in range(1, 17) if full(waiting[:count])] == [*range(4, 17)]
    monkeypatch.setattr("sinkscope.metrics.spectra.WAITING_BYTES", 3 * matrix)
    assert [count for count in range(1, 17) if full(waiting[:count])] == [*range(3, 17)]


def test_spectra_cost_no_more_than_a_few_large_ones() -> None:
    """4 sequences at T = 256 (of a default scan's 32), 2 where T and D are larger, all of a model 64 wide."""
    assert [cheap_spectra(256, 4096), cheap_spectra(1024, 640), cheap_spectra(4096, 4096)] == [4, 2, 2]
    assert cheap_spectra(256, 64) >= 32
