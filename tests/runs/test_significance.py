"""Student's t and the false discovery rate are scipy.stats', to the last bit, and cost no import of it."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
from scipy import stats

from sinkscope.runs.statistics import clustered_sem, false_discovery, sem, t_above, t_half_width

RANDOM = np.random.default_rng(5)


def test_students_t_is_scipys() -> None:
    values, freedom = 20 * RANDOM.standard_normal(500), RANDOM.uniform(1, 300, 500)
    values[:3], freedom[3] = (np.nan, np.inf, -np.inf), np.nan
    np.testing.assert_array_equal(t_above(values, freedom), stats.t.sf(values, freedom))
    np.testing.assert_array_equal(t_half_width(0.95, freedom), stats.t.ppf(0.975, freedom))


def test_false_discovery_is_scipys() -> None:
    p = RANDOM.uniform(size=300) ** 3
    p[:40] = p[40:80]  # ties
    p[:2] = 0.0, 1.0
    np.testing.assert_array_equal(false_discovery(p), stats.false_discovery_control(p))
    holed = np.where(RANDOM.uniform(size=300) < 0.2, np.nan, p).reshape(3, 100)
    known = ~np.isnan(holed)
    np.testing.assert_array_equal(false_discovery(holed)[known], stats.false_discovery_control(holed[known]))
    np.testing.assert_array_equal(np.isnan(false_discovery(holed)), ~known)
    assert false_discovery(np.empty(0)).shape == (0,)


def test_comparing_imports_no_scipy_stats() -> None:
    code = (
        "import sys, numpy as np; from sinkscope.runs.statistics import welch_difference; "
        "welch_difference(np.ones((3, 2)), np.zeros((4, 2))); sys.exit('scipy.stats' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_errors_of_clusters() -> None:
    values = RANDOM.normal(size=12)
    apart = np.arange(12)
    assert clustered_sem(values, apart) == sem(values)
    pairs = apart // 2
    assert np.isclose(clustered_sem(values, pairs), sem(values.reshape(6, 2).mean(1)))
    sums = np.array([values[:5].sum() - 5 * values.mean(), values[5:].sum() - 7 * values.mean()])
    assert np.isclose(clustered_sem(values, apart // 5 > 0), np.sqrt(2 * (sums**2).sum()) / 12)
    holed = np.where(apart == 3, np.nan, values)
    assert np.isclose(clustered_sem(holed, pairs), clustered_sem(holed[apart != 3], pairs[apart != 3]))
    assert np.isnan(clustered_sem(values, np.zeros(12)))
    assert np.isnan(clustered_sem(np.where(apart == 3, np.inf, values), pairs))
