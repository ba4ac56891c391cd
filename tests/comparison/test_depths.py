"""Runs of different depth: profiles over relative depth, and where they part."""

from __future__ import annotations

import re

import numpy as np
import pandas as pd
import pytest
from desk import scanned
from scipy import stats

from sinkscope.comparison.compare_runs import compare
from sinkscope.comparison.levels import Profile, parting, relative_depths
from sinkscope.present.differences import partings
from sinkscope.present.html.report import render_report
from sinkscope.present.terminal.comparison import render_comparison
from sinkscope.runs.run import Run


def with_mass(run: Run, by_layer: list[float]) -> Run:
    """The run with a bos_mass that its layers are given, and a little of the sequence's own."""
    table = run.sequences
    layer, sequence = table["layer"].to_numpy(), table["sequence"].to_numpy()
    own = 1e-3 * np.sin(len(by_layer) * sequence + layer)
    run.sequences["bos_mass"] = np.where(table["head"].notna(), np.array(by_layer)[layer] + own, np.nan)
    return run


def test_a_linear_profile_is_interpolated_exactly() -> None:
    values = np.array([[0.0, 0.5, 1.0], [1.0, 0.0, -1.0]])
    found = Profile(np.arange(3.0), relative_depths(3), values).at(relative_depths(9))
    assert found[0] == pytest.approx(np.linspace(0, 1, 9))
    assert found[1] == pytest.approx(np.linspace(1, -1, 9))
    missing = Profile(np.arange(3.0), relative_depths(3), np.array([[0.0, np.nan, 1.0]])).at(relative_depths(5))
    assert missing[0] == pytest.approx([0, np.nan, np.nan, np.nan, 1], nan_ok=True), "a layer's own value stays"
    assert Profile(np.array([7.0]), relative_depths(1), np.array([[2.0]])).at(relative_depths(3)) == pytest.approx(2)
    assert relative_depths(1).tolist() == [0]


@pytest.mark.slow
def test_every_depth_is_tested_on_the_sequences_own_profiles() -> None:
    a, b = with_mass(scanned(layers=3), [0.1, 0.3, 0.5]), with_mass(scanned(layers=5), [0.1, 0.2, 0.7, 0.4, 0.5])
    result = compare(a, b, metrics=["bos_mass"])
    assert not result.same_shape
    rows = result.depths
    assert rows["depth"].tolist() == [0, 0.25, 0.5, 0.75, 1]
    assert rows["layer_a"].tolist() == [0, 0.5, 1, 1.5, 2]
    assert rows["layer_b"].tolist() == [0, 1, 2, 3, 4]
    of_heads = (run.sequences[run.sequences["head"].notna()] for run in (a, b))
    one, other = (own.groupby(["sequence", "layer"])["bos_mass"].mean().unstack().to_numpy() for own in of_heads)
    along = np.stack([np.interp([0, 0.5, 1, 1.5, 2], [0, 1, 2], row) for row in one])
    assert rows["difference"].to_numpy() == pytest.approx((other - along).mean(0))
    assert rows["p"].to_numpy() == pytest.approx(stats.ttest_rel(other, along).pvalue)
    assert rows["q"].to_numpy() == pytest.approx(stats.false_discovery_control(rows["p"].to_numpy()))
    found = parting(rows)
    assert found is not None
    assert found.peak["layer_b"] == 2
    assert found.stretch["layer_b"].tolist() == [2]
    (said,) = partings(result)
    assert said.startswith(
        "bos_mass: of the depths with q < 0.05, farthest apart at depth 0.50 (layer 1 of A, layer 2 of B): 0.3"
    )
    assert f"q < 0.05 at {found.differing} of 5 depths" in said


def test_the_stretch_ends_where_the_difference_halves_or_turns() -> None:
    rows = pd.DataFrame({
        "difference": [0.1, 0.6, 0.9, 0.5, -0.9, 0.8], "q": [0.001, 0.001, 0.001, 0.2, 0.001, 0.001],
    })  # fmt: skip
    found = parting(rows)
    assert found is not None
    assert found.stretch.index.tolist() == [1, 2]
    assert (found.differing, found.depths) == (5, 6)
    ends = parting(rows.assign(difference=[0.6, 0.9, -0.9, 0.2, 0.7, 1.2]))
    assert ends is not None
    assert ends.stretch.index.tolist() == [4, 5], "to the last depth"
    begins = parting(rows.assign(difference=[0.6, 0.9, -0.8, 0.2, 0.7, 0.2]))
    assert begins is not None
    assert begins.stretch.index.tolist() == [0, 1], "from the first"
    assert parting(rows.assign(q=np.nan)) is None
    assert parting(rows.assign(q=0.5)) is None


@pytest.mark.slow
def test_screen_report_and_json_say_where_they_part() -> None:
    a, b = with_mass(scanned(layers=3), [0.1, 0.3, 0.5]), with_mass(scanned(layers=5), [0.1, 0.2, 0.7, 0.4, 0.5])
    result = compare(a, b)
    screen = render_comparison(result, width=200)
    assert "±: standard error of the difference; p: of its t-test\n\nby" in screen, "no q of heads is shown"
    assert "by relative depth (0: the first layer, 1: the last)" in screen
    assert all(said in screen for said in partings(result))
    page = render_report([a, b], result)
    assert "bos_mass: of the depths with q &lt; 0.05, farthest apart" in page
    assert "A, between layers 0 and 1: 0.2" in page, "halfway between the 0.1 and 0.3 of its layers"
    assert "B, layer 2: 0.7" in page
    assert page.count("relative depth (0: first layer, 1: last)") == len(partings(result))
    assert len(result.as_dict()["depths"]) == len(result.depths) > 5


def test_runs_of_one_shape_are_compared_layer_by_layer() -> None:
    a, b = with_mass(scanned(layers=3), [0.1, 0.3, 0.5]), with_mass(scanned(layers=3, text=1), [0.1, 0.7, 0.8])
    result = compare(a, b, paired=False)
    assert result.depths.empty
    assert "depths" not in result.as_dict()
    assert partings(result) == []
    page = render_report([a, b], result)
    assert "A, layer 1: 0.3" in page
    assert "B, layer 2: 0.8" in page
    assert page.count('<rect class="stretch"') == 1, "of bos_mass alone"


def test_a_chart_shades_the_layers_where_two_runs_part() -> None:
    a, b = with_mass(scanned(layers=5), [0.1] * 5), with_mass(scanned(layers=5, text=1), [0.1, 0.1, 0.9, 0.7, 0.1])
    chart = render_report([a, b], compare(a, b, metrics=["bos_mass"], paired=False)).partition("Layers of A and B")[2]
    shaded = re.search(r'class="stretch" x="([\d.]+)" y="\d+" width="([\d.]+)"', chart)
    places = [float(x) for x in re.findall(r'class="dot c1" cx="([\d.]+)"', chart)]
    assert shaded is not None
    left, width = map(float, shaded.groups())
    assert [left < x < left + width for x in places] == [False, False, True, True, False]


@pytest.mark.slow
def test_profiles_that_chance_explains_do_not_part() -> None:
    a, b = with_mass(scanned(layers=3), [0.2] * 3), with_mass(scanned(layers=5, text=1), [0.2] * 5)
    (said,) = partings(compare(a, b, metrics=["bos_mass"], paired=False))
    assert said == "bos_mass: at none of 5 depths is the difference larger than chance explains (q < 0.05)"
