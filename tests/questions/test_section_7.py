"""Section 7 of Lampert et al. 2605.08453, built as weights: the unit of its bounds, and what of them holds.

Known of the paper: the task's tokens, the requirements (each right score above each wrong one by kappa), the four
bounds, and W_QK = Pi^T M_diag Pi + alpha P_eta of the diagonal with s, a, b and alpha as below. Assumed here: where s,
a and b stand in M_diag, that copies and BOS need no more than that, the sink's own M_sink, and Delta_diag = the
smallest |eta_i - eta_j|^2 over the tokens of a group."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pytest
import torch

from sinkscope.questions.smoothing.columns import (
    cost_diagonal_lower_groups,
    cost_diagonal_lower_paper,
    cost_diagonal_lower_qk,
    cost_sink_upper_groups,
    cost_sink_upper_qk,
    group_span,
    token_groups,
)
from sinkscope.wiring.folded import FoldedHeads

LAMBDA, ETA = 1.0, 0.5
"""lambda, and |eta|^2 over d."""


@dataclass(frozen=True)
class Task:
    """C groups of dormant tokens d_ci = lambda dbar_c + eta_ci, a copy token for each group, and BOS.

    Rows and columns of `signal`, the matrix of coordinates: 0 is BOS, 1 .. C are groups, C + 1 .. 2 C copy tokens. The
    nuisance of a group spans `rank` dimensions orthogonal to them: vectors to the corners of a simplex.
    """

    groups: int
    width: int
    kappa: float
    rank: int

    @cached_property
    def tokens(self) -> dict[str, np.ndarray]:
        axes, size = np.eye(self.width), self.width**0.5
        corners = np.eye(self.rank + 1) - 1 / (self.rank + 1)  # rank + 1 corners span `rank` dimensions
        flat = np.linalg.svd(corners)[2][: self.rank]
        nuisance = (corners @ flat.T) / np.linalg.norm(corners[0]) * (ETA * self.width) ** 0.5
        first = 2 * self.groups + 1
        place = np.zeros((self.rank + 1, self.width))
        place[:, first : first + self.rank] = nuisance
        dormant = [LAMBDA * size * axes[1 + c] + row for c in range(self.groups) for row in place]
        copies = [size * axes[1 + self.groups + c] for c in range(self.groups)]
        return {"bos": size * axes[:1], "dormant": np.array(dormant), "copies": np.array(copies)}

    @property
    def group(self) -> np.ndarray:
        """The group of each dormant token."""
        return np.repeat(np.arange(self.groups), self.rank + 1)

    @property
    def gap(self) -> float:
        """Delta_diag: the smallest |eta_i - eta_j|^2."""
        rows = self.tokens["dormant"][self.group == 0]
        return min(float(((a - b) ** 2).sum()) for a, b in itertools.combinations(rows, 2))

    def diagonal(self) -> np.ndarray:
        """W_QK of the diagonal, as the paper gives it: s on the groups, a on BOS, b from copies to groups."""
        size, weights = self.width**0.5, np.zeros((self.width, self.width))
        for c in range(self.groups):
            weights[1 + c, 1 + c] = self.kappa / (LAMBDA**2 * size)
            weights[1 + self.groups + c, 1 + c] = 2 * self.kappa / (LAMBDA * size)
        weights[0, 0] = self.kappa / size
        first = 2 * self.groups + 1
        span = range(first, first + self.rank)
        weights[span, span] = 2 * self.kappa * size / self.gap
        return weights

    def sink(self) -> np.ndarray:
        """W_QK of the sink, ours: dormant tokens and BOS read BOS, copies their group."""
        size, weights = self.width**0.5, np.zeros((self.width, self.width))
        for c in range(self.groups):
            weights[1 + c, 0] = self.kappa / (LAMBDA * size)
            weights[1 + self.groups + c, 1 + c] = self.kappa / (LAMBDA * size)
        weights[0, 0] = self.kappa / size
        return weights

    def scores(self, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """q W k / sqrt(d) of dormant and of copy tokens with all keys: BOS, dormant tokens, copies."""
        tokens = self.tokens
        read = weights @ np.concatenate([tokens["bos"], tokens["dormant"], tokens["copies"]]).T / self.width**0.5
        return tokens["dormant"] @ read, tokens["copies"] @ read

    def dormant_margin(self, weights: np.ndarray, diagonal: bool) -> float:
        """The smallest margin of each dormant token's right key, itself or BOS, over each wrong one."""
        scores, _ = self.scores(weights)
        right = np.arange(len(scores)) + 1 if diagonal else np.zeros(len(scores), dtype=int)
        return _least(scores, [{int(one)} for one in right])

    def copy_margin(self, weights: np.ndarray) -> float:
        """The smallest margin of a copy token's group over each key of no such group."""
        _, scores = self.scores(weights)
        return _least(scores, [{1 + int(at) for at in np.flatnonzero(self.group == c)} for c in range(self.groups)])


def _least(scores: np.ndarray, right: list[set[int]]) -> float:
    return min(
        float(row[good] - row[bad])
        for row, own in zip(scores, right, strict=True)
        for good in own
        for bad in range(len(row))
        if bad not in own
    )


def nuclear(weights: np.ndarray) -> float:
    return float(np.linalg.norm(weights, "nuc"))


def factored(weights: np.ndarray) -> float:
    """|W_Q|^2 + |W_K|^2 of the cheapest W_Q, W_K with W_Q^T W_K = W."""
    left, values, right = np.linalg.svd(weights)
    query, key = np.sqrt(values)[:, None] * left.T, np.sqrt(values)[:, None] * right
    assert np.allclose(query.T @ key, weights)
    return float((query**2).sum() + (key**2).sum())


def bounds(task: Task) -> dict[str, float]:
    """The query-key terms of the four bounds, with the paper's symbols. delta^2 d = |eta|^2."""
    unit, rows = task.kappa * task.groups / task.width**0.5, task.tokens["dormant"][task.group == 0]
    covariance = np.cov(rows.T)
    effective, delta = np.trace(covariance) / np.linalg.eigvalsh(covariance)[-1], np.trace(covariance) / task.width
    return {
        "sink_upper": 12 * unit,
        "sink_lower": unit / 2,
        "diagonal_upper": 13 * unit + 4 * task.kappa * task.width**0.5 * task.rank / task.gap,
        "diagonal_lower": task.kappa * effective / (delta * task.width**0.5) + unit / 2,
    }


GRID = [Task(*each) for each in itertools.product((1, 2, 3), (16, 64), (0.5, 4.0), (2, 5))]


@pytest.mark.parametrize("task", GRID, ids=str)
def test_the_constructions_do_what_is_asked(task: Task) -> None:
    """Every dormant token has squared length d (1 + |eta|^2/d), its right key leads by kappa, copies read their
    group."""
    assert task.dormant_margin(task.diagonal(), diagonal=True) == pytest.approx(task.kappa)
    assert task.dormant_margin(task.sink(), diagonal=False) == pytest.approx(task.kappa)
    assert task.copy_margin(task.diagonal()) >= task.kappa - 1e-9
    assert task.copy_margin(task.sink()) == pytest.approx(task.kappa)
    assert task.dormant_margin(task.sink(), diagonal=True) < 0, "the two patterns are not the same"


@pytest.mark.parametrize("task", GRID, ids=str)
def test_the_measured_costs_lie_between_all_bounds(task: Task) -> None:
    found = bounds(task)
    for name, weights in (("sink", task.sink()), ("diagonal", task.diagonal())):
        cost = factored(weights)
        assert cost == pytest.approx(2 * nuclear(weights))
        assert found[f"{name}_lower"] <= cost <= found[f"{name}_upper"]


@pytest.mark.parametrize("task", GRID, ids=str)
def test_the_unit_is_the_sum_without_a_half(task: Task) -> None:
    """alpha P_eta alone costs 4 kappa sqrt(d) r_eta / Delta as |W_Q|^2 + |W_K|^2, exactly the bound's term, and half of
    it as a nuclear norm."""
    part = task.diagonal()
    first = 2 * task.groups + 1
    part[:first, :first] = 0
    term = 4 * task.kappa * task.width**0.5 * task.rank / task.gap
    assert factored(part) == pytest.approx(term)
    assert nuclear(part) == pytest.approx(term / 2)


@pytest.mark.parametrize("task", GRID[:4], ids=str)
def test_the_columns_take_the_paper_s_symbols(task: Task) -> None:
    """On one group of the task's dormant tokens, with logits over sqrt(d)."""
    rows = torch.from_numpy(task.tokens["dormant"][task.group == 0])
    margin = torch.full((1, len(rows)), task.kappa, dtype=torch.float64)
    folded = FoldedHeads(1, x=rows, z=rows, pair_margin=margin, scale=task.width**-0.5)
    one = Task(1, task.width, task.kappa, task.rank)
    assert float(cost_diagonal_lower_paper(folded)) == pytest.approx(bounds(one)["diagonal_lower"])
    assert float(folded.token_span) == task.rank
    assert 2 * float(folded.smallest_gap) == pytest.approx(task.gap)
    assert float(cost_diagonal_lower_qk(folded)) <= factored(one.diagonal())


@pytest.mark.parametrize("groups", [1, 2, 5])
def test_clusters_are_the_task_s_groups(groups: int) -> None:
    """All dormant tokens: their groups, the nuisance's dimension without the groups' signals, and a bound of the
    diagonal by pairs of one group. There |B_g|_2 is that of one group's nuisance, delta^2 d / rank by the simplex."""
    task = Task(groups, 64, 3.0, 4)
    rows = torch.from_numpy(task.tokens["dormant"])
    margin = torch.full((1, len(rows)), task.kappa, dtype=torch.float64)
    folded = FoldedHeads(1, x=rows, z=rows, pair_margin=margin, scale=task.width**-0.5)
    assert token_groups(folded).tolist() == [groups]
    assert group_span(folded).tolist() == [task.rank]
    assert float(folded.token_span) == task.rank + groups - 1
    assert cost_sink_upper_groups(folded) == groups * cost_sink_upper_qk(folded)
    top = ETA * task.width / task.rank
    inside = 2 * task.kappa * task.width**0.5 / top * task.rank / (task.rank + 1)
    assert float(cost_diagonal_lower_groups(folded)) == pytest.approx(
        max(inside, float(cost_diagonal_lower_qk(folded)))
    )
    assert inside > float(cost_diagonal_lower_qk(folded)) or groups == 1
    assert float(cost_diagonal_lower_groups(folded)) <= factored(task.diagonal())


def test_tokens_that_stand_alone_or_twice_have_no_bound_of_their_own() -> None:
    """Orthogonal tokens are as many groups; a token and its copy are one group, in which nothing has to be told apart.
    A zero vector is a group of its own."""
    alone = torch.eye(6, dtype=torch.float64)[:4]
    for rows, count in ((alone, 4), (torch.cat([alone, alone]), 4), (torch.cat([alone, 0 * alone[:1]]), 5)):
        margin = torch.ones(1, len(rows), dtype=torch.float64)
        folded = FoldedHeads(1, x=rows, z=rows, pair_margin=margin, scale=0.5)
        assert (token_groups(folded).item(), group_span(folded).item()) == (count, 0)
        assert cost_diagonal_lower_groups(folded) == cost_diagonal_lower_qk(folded)


def test_a_chain_of_alike_tokens_is_one_group() -> None:
    """Neighbours are 50 degrees apart, the ends 100."""
    angles = torch.deg2rad(torch.tensor([0.0, 50.0, 100.0], dtype=torch.float64))
    rows = torch.stack([angles.cos(), angles.sin()], 1)
    assert token_groups(FoldedHeads(1, x=rows, z=rows)).tolist() == [1]
    assert token_groups(FoldedHeads(1, x=rows[::2], z=rows[::2])).tolist() == [2]
