"""Two one-sided tests and Holm's adjustment against second implementations, and what compare says of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from desk import scanned
from scipy import stats
from typer.testing import CliRunner

from sinkscope.cli import app
from sinkscope.comparison.compare_runs import compare
from sinkscope.errors import SinkscopeError
from sinkscope.present.differences import equivalences
from sinkscope.runs.statistics import equivalence, holm, paired_difference, t_half_width, welch_difference

GENERATOR = np.random.default_rng(5)


def one_sided(a: np.ndarray, b: np.ndarray, margin: float, paired: bool) -> float:
    """Both tests of scipy, each for its own hypothesis."""
    if paired:
        gaps = b - a
        lower = stats.ttest_1samp(gaps, -margin, alternative="greater").pvalue
        upper = stats.ttest_1samp(gaps, margin, alternative="less").pvalue
    else:
        lower = stats.ttest_ind(b + margin, a, equal_var=False, alternative="greater").pvalue
        upper = stats.ttest_ind(b - margin, a, equal_var=False, alternative="less").pvalue
    return float(max(lower, upper))


@pytest.mark.parametrize("paired", [True, False])
@pytest.mark.parametrize("margin", [0.02, 0.3, 2.0])
def test_it_is_the_larger_p_of_scipys_two_tests(paired: bool, margin: float) -> None:
    a = GENERATOR.normal(0.5, 0.2, (9, 7))
    b = GENERATOR.normal(np.linspace(0.3, 0.9, 7), 0.1, (9 if paired else 14, 7))
    found = equivalence(paired_difference(a, b) if paired else welch_difference(a, b), margin)
    expected = [one_sided(a[:, cell], b[:, cell], margin, paired) for cell in range(7)]
    assert found == pytest.approx(expected, rel=1e-9)


def test_it_holds_where_the_90_percent_interval_lies_within_the_margin() -> None:
    a, b = GENERATOR.normal(0, 1, (8, 400)), GENERATOR.normal(0.2, 1, (8, 400))
    found = paired_difference(a, b)
    half = t_half_width(0.90, found.freedom) * found.sem
    within = (found.difference - half > -0.9) & (found.difference + half < 0.9)
    assert ((equivalence(found, 0.9) < 0.05) == within).all()
    assert 0 < within.sum() < 400


def test_a_true_difference_of_the_margin_is_called_equivalent_in_5_percent() -> None:
    """The error that the test bounds, at its worst."""
    generator = np.random.default_rng(0)
    a, b = generator.normal(0, 0.3, (20, 20_000)), generator.normal(1.0, 0.3, (20, 20_000))
    rate = float((equivalence(welch_difference(a, b), 1.0) < 0.05).mean())
    assert rate == pytest.approx(0.05, abs=0.005)


def test_no_spread_and_missing_values() -> None:
    same = np.ones((4, 1))
    assert equivalence(paired_difference(same, same), 0.1) == [0.0]
    assert equivalence(paired_difference(same, same + 0.5), 0.1) == [1.0]
    assert np.isnan(equivalence(paired_difference(same * np.nan, same), 0.1)).all()
    assert np.isnan(equivalence(paired_difference(same[:1], same[:1]), 0.1)).all()


def test_holm_is_the_step_down_procedure() -> None:
    """Adjusted p-values below a level are the hypotheses that the procedure rejects at it."""
    for _ in range(20):
        p = GENERATOR.uniform(0, 0.3, 12) ** 2
        adjusted = holm(p)
        for level in (0.01, 0.05, 0.2):
            rejected: set[int] = set()
            for rank, place in enumerate(np.argsort(p)):
                if p[place] > level / (12 - rank):
                    break
                rejected.add(int(place))
            assert set(np.flatnonzero(adjusted <= level).tolist()) == rejected
    assert holm(np.array([0.01, np.nan, 0.04])) == pytest.approx([0.02, np.nan, 0.04], nan_ok=True)


def test_compare_tests_each_place_with_the_metrics_margin() -> None:
    a, b = scanned(), scanned("noise")
    result = compare(a, b, equivalence_margin={"bos_mass": 0.05})
    heads = result.heads
    own = heads[heads["metric"] == "bos_mass"]
    assert (own["margin"] == 0.05).all()
    assert own["p_equivalent_holm"].to_numpy() == pytest.approx(holm(own["p_equivalent"].to_numpy()))
    of_heads = [run.sequences[run.sequences["head"].notna()] for run in (a, b)]
    values = [
        each.pivot(index="sequence", columns=["layer", "head"], values="bos_mass").to_numpy() for each in of_heads
    ]
    expected = [one_sided(values[0][:, cell], values[1][:, cell], 0.05, True) for cell in range(12)]
    assert own["p_equivalent"].to_numpy() == pytest.approx(expected, rel=1e-6)
    assert (
        heads.loc[heads["metric"] != "bos_mass", ["margin", "p_equivalent", "p_equivalent_holm"]].isna().all(axis=None)
    )
    assert "margin" not in compare(a, b).heads
    (said,) = equivalences(result)
    shown = int((own["p_equivalent_holm"] < 0.05).sum())
    assert said.startswith("equivalence of bos_mass within ±0.05: the mean over all heads is shown to be equivalent (")
    assert said.endswith(f"{shown} of 12 heads are shown to be equivalent (p < 0.05 after Holm's adjustment)")


def test_without_evidence_nothing_is_called_equivalent() -> None:
    a, b = scanned(), scanned(text=1)
    result = compare(a, b, paired=False, metrics=["entropy"], equivalence_margin={"entropy": 1e-6})
    (said,) = equivalences(result)
    assert "the mean over all heads is not shown to be equivalent" in said
    assert "0 of 12 heads" in said


@pytest.mark.parametrize(
    ("a_value", "b_value", "said"),
    [
        (0.5, np.inf, "the mean over all heads cannot be tested: it is infinite in B"),
        (np.inf, 0.5, "the mean over all heads cannot be tested: it is infinite in A"),
        (np.inf, np.inf, "the mean over all heads cannot be tested: no sequence has a finite value in both runs"),
    ],
)
def test_what_is_infinite_is_no_lack_of_sequences(a_value: float, b_value: float, said: str) -> None:
    a, b = scanned(), scanned()
    for run, value in ((a, a_value), (b, b_value)):
        run.sequences = run.sequences.assign(bos_mass=run.sequences["bos_mass"].mask(run.sequences["head"] == 0, value))
    (text,) = equivalences(compare(a, b, equivalence_margin={"bos_mass": 0.05}))
    assert f": {said}; " in text


@pytest.mark.parametrize(
    ("margins", "said"),
    [
        ({"bos_mas": 0.1}, "not compared"),
        ({"bos_mass": 0.0}, "not above 0"),
        ({"bos_mass": float("nan")}, "not above 0"),
    ],
)
def test_margins_that_make_no_test_are_refused(margins: dict[str, float], said: str) -> None:
    with pytest.raises(SinkscopeError, match=said):
        compare(scanned(), scanned(), equivalence_margin=margins)


def test_the_command(tmp_path: Path) -> None:
    scanned().save(tmp_path / "a")
    scanned("noise").save(tmp_path / "b")

    def run(*words: str) -> Any:
        return CliRunner().invoke(app, ["compare", str(tmp_path / "a"), str(tmp_path / "b"), *words])

    shown = run("--equivalence-margin", "bos_mass=0.05", "--csv", str(tmp_path / "c.csv"))
    assert shown.exit_code == 0, shown.output
    assert "equivalence of bos_mass within ±0.05" in shown.stdout
    assert "p_equivalent_holm" in (tmp_path / "c.csv").read_text().splitlines()[0]
    refused = run("--equivalence-margin", "bos_mass")
    assert refused.exit_code == 2
    assert "give METRIC=MARGIN" in refused.stderr
