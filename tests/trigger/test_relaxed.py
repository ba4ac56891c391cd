"""Section 7 as an experiment: constructions against loops, searches against closed forms and the paper's bounds."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from tiers import slow_but
from typer.testing import CliRunner

from sinkscope.cli.trigger import app
from sinkscope.errors import SinkscopeError
from sinkscope.trigger.relaxed.search import Least, least_rest, least_scores
from sinkscope.trigger.relaxed.study import COLUMNS, NAMES, draw_relaxed, relaxed, render_relaxed, tasks
from sinkscope.trigger.relaxed.task import PATTERNS, Block, Relaxed, construction, margin, missed

GRID = [Relaxed(*each) for each in itertools.product((1, 3), (1, 4), (64,), (4.0,), (0.25, 1.0), (1.0, 0.7))]


@pytest.mark.parametrize("task", GRID[::3], ids=str)
def test_tokens_have_the_paper_s_lengths(task: Relaxed) -> None:
    """Signal lambda sqrt(d) on the group's axis, |eta|^2 = delta^2 d orthogonal to it, BOS orthogonal to all others."""
    x = task.tokens * task.width**0.5
    squares = (x**2).sum(1)
    dormant = slice(1, 1 + task.dormant)
    assert squares[dormant] == pytest.approx(task.width * (task.scale**2 + task.delta**2))
    assert np.delete(squares, np.arange(1, 1 + task.dormant)) == pytest.approx(task.width)
    assert not (x[1:] @ x[0]).any()
    assert np.linalg.matrix_rank(task.nuisance) == task.rank == pytest.approx(task.effective_rank)
    pairs = itertools.combinations(task.nuisance, 2)
    assert min(((a - b) ** 2).sum() for a, b in pairs) * task.width == pytest.approx(task.gap)
    assert task.gap == pytest.approx(2 * (task.rank + 1) / task.rank * task.delta**2 * task.width)


def leads(task: Relaxed, pattern: str, weights: np.ndarray) -> list[float]:
    """q^T W (right - wrong) / sqrt(d) over every query, right key and wrong key, token by token."""
    d, x = task.width, task.tokens * task.width**0.5
    found = []
    for query in range(1, len(x)):
        is_copy = query > task.dormant
        for good in range(len(x)):
            group = [k for k in range(1, 1 + task.dormant) if task.group[k] == task.group[query]]
            right = group if is_copy else [query if pattern == "diagonal" else 0]
            if good not in right:
                continue
            for bad in range(len(x)):
                if bad not in right:
                    found.append(float(x[query] @ weights @ (x[good] - x[bad])) / d**0.5)
    return found


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("task", GRID, ids=str)
def test_the_constructions_do_what_is_asked(task: Relaxed, pattern: str) -> None:
    block = construction(task, pattern)
    by_hand = leads(task, pattern, block.scores)
    assert len(by_hand) == len(task.requirements(pattern))
    assert min(by_hand) == pytest.approx(margin(task, pattern, block.scores))
    assert min(by_hand) >= task.kappa * (1 - 1e-9)
    assert missed(task, pattern, block) < 1e-12
    other = PATTERNS[pattern == "sink"]
    assert min(leads(task, other, block.scores)) < 0, "the two patterns are not the same"


def cost_by_hand(block: Block) -> float:
    """The factors themselves, each split evenly, and their squares summed entry by entry in float64."""
    total = 0.0
    for product in (block.scores, block.values):
        left, sizes, right = np.linalg.svd(product)
        one, other = left * np.sqrt(sizes), np.sqrt(sizes)[:, None] * right
        np.testing.assert_allclose(one @ other, product, atol=1e-12)
        total += sum(float(entry) ** 2 for entry in [*one.flat, *other.flat])
    return total + sum(float(entry) ** 2 for entry in [*block.up.flat, *block.down.flat])


@pytest.mark.parametrize("task", GRID, ids=str)
def test_costs_in_closed_form_lie_between_the_paper_s_bounds(task: Relaxed) -> None:
    unit, bounds = task.kappa / task.width**0.5, task.bounds()
    c, r, s = task.groups, task.rank, task.scale
    blocks = {pattern: construction(task, pattern) for pattern in PATTERNS}
    for block in blocks.values():
        assert block.cost_scores + block.cost_rest == pytest.approx(cost_by_hand(block))
    assert blocks["sink"].cost_rest == pytest.approx(3 * c + 4 * r)
    assert blocks["diagonal"].cost_rest == pytest.approx(2 * (c + r))
    nuisance = 4 * task.kappa * task.width**0.5 * r / task.gap
    diagonal = 2 * unit * (1 + c * (1 / s**4 + 4 / s**2) ** 0.5) + nuisance
    sink = 2 * unit * ((1 + c / s**2) ** 0.5 + c / s)
    assert blocks["diagonal"].cost_scores == pytest.approx(diagonal)
    assert blocks["sink"].cost_scores == pytest.approx(sink)
    for pattern, short in (("sink", "sink"), ("diagonal", "diag")):
        block = blocks[pattern]
        assert bounds[f"L_{short}"] <= block.cost_scores <= bounds[f"U_{short}_qk"]
        assert block.cost_rest <= bounds[f"U_{short}_rest"]


def checked(task: Relaxed, pattern: str, seed: int = 0) -> Least:
    found, written = least_scores(task, pattern, seed), construction(task, pattern).cost_scores
    assert found.violation < 1e-5
    assert found.bound <= found.cost <= written * (1 + 1e-5)
    assert found.bound > 0.95 * found.cost, "the certificate is close"
    return found


@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_least_scores_are_certified_and_scale_with_kappa_over_root_d(pattern: str) -> None:
    one, other = checked(Relaxed(1, 1), pattern), checked(Relaxed(1, 1, width=16, kappa=1.0), pattern, seed=1)
    assert one.cost / 4 * 8 == pytest.approx(other.cost / 1 * 4, rel=1e-3)
    bounds = Relaxed(1, 1).bounds()
    assert one.bound >= bounds["L_diag" if pattern == "diagonal" else "L_sink"] / 1.05


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize(
    "sizes",
    slow_but(
        [{"rank": 1, "delta": 0.01}, {"groups": 2, "rank": 1, "delta": 0.02}], {"groups": 2, "rank": 1, "delta": 0.02}
    ),
)
def test_a_small_nuisance_is_found_no_dearer_than_what_is_written_down(sizes: dict[str, Any], pattern: str) -> None:
    """Its diagonal costs thousands: the search ended at a dearer one, and without a bound."""
    checked(Relaxed(**{"groups": 1, **sizes}), pattern)


def test_the_certificate_is_a_bound_of_every_solution() -> None:
    """Blocks that meet the requirements otherwise cost more."""
    task = Relaxed(1, 1)
    found, written = checked(task, "sink"), construction(task, "sink").scores
    generator = np.random.default_rng(0)
    for _ in range(20):
        other = written + 0.3 * np.abs(written).max() * generator.normal(size=written.shape)
        lead = margin(task, "sink", other)
        if lead > 0:
            assert 2 * np.linalg.norm(other * task.kappa / lead, "nuc") >= found.bound


@pytest.mark.slow
@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_search_finds_values_and_an_mlp_no_dearer_than_those_written_down(pattern: str) -> None:
    task = Relaxed(1, 2)
    found = least_rest(task, pattern)
    assert found.violation < 1e-5
    assert 0 < found.cost <= construction(task, pattern).cost_rest


def test_an_output_that_is_missed_is_seen() -> None:
    task = Relaxed(2, 2)
    block = construction(task, "sink")
    assert missed(task, "sink", Block(block.scores, 0 * block.values, block.up, block.down)) == pytest.approx(1)
    assert missed(task, "diagonal", block) > 0.4


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((0, 2), "groups 0"), ((1, 13), "rank 13"), ((2, 3, 7), "width 7: the tokens span 8"),
        ((1, 1, 64, 0.0), "kappa 0"), ((1, 1, 64, 1.0, -1.0), "delta -1"),
    ],
)  # fmt: skip
def test_impossible_tasks_are_refused(sizes: tuple[float, ...], message: str) -> None:
    with pytest.raises(SinkscopeError, match=message):
        Relaxed(*sizes)  # type: ignore[arg-type]


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The searches' numbers are those of the tables; a search that missed its outputs is no number."""
    monkeypatch.setattr("sinkscope.trigger.relaxed.study.least_scores", lambda *_: Least(3.0, 2.5, 0.0))
    rests = {0: Least(5.0, 0.0, 1e-9), 1: Least(4.0, 0.0, 0.5), 2: Least(6.0, 0.0, 1e-9)}
    monkeypatch.setattr("sinkscope.trigger.relaxed.study.least_rest", lambda task, pattern, seed: rests[seed])
    out = tmp_path / "out"
    call = CliRunner().invoke(app, ["relaxed", "--out", str(out), "--rank", "2"])
    assert call.exit_code == 0, call.stderr
    table = pd.read_csv(out / "relaxed.csv")
    assert list(table) == list(COLUMNS)
    assert table["pattern"].tolist() == ["sink", "diagonal"] * 4
    assert (table[["found_rest", "found_rest_worst", "rest_seeds"]] == [5, 6, 2]).all().all()
    assert call.stdout == render_relaxed(table)
    first = dict(zip(NAMES, call.stdout.splitlines()[2].strip("| ").split(" | "), strict=True))
    assert (first["L"], first["found, total"], first["U"]) == ("0.25", "8", "21")
    assert draw_relaxed(table).startswith(b"\x89PNG")
    with pytest.raises(SinkscopeError, match="seeds 0"):
        relaxed(out, tasks([1], [1], [64], [1.0], [1.0]), 0)
    with pytest.raises(SinkscopeError, match="is a file"):
        relaxed(out / "relaxed.csv", [])
