"""The dormant-plus-copy task: its tokens, what is asked of scores and of outputs, the four bounds, and blocks that are
written down."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Float, Int

from sinkscope.errors import SinkscopeError

PATTERNS = ("sink", "diagonal")


@dataclass(frozen=True)
class Relaxed:
    """C groups of dormant tokens d_ci = lambda dbar_c + eta_ci, a copy token for each group, and BOS.

    Coordinates are those of the tokens' span, in units of sqrt(d): 0 is BOS, 1 .. C the groups, C + 1 .. 2 C the copy
    tokens, then r_eta of nuisance. The other d - 2 C - 1 - r_eta coordinates are 0 in every token, so that the cheapest
    block is 0 there.

    Attributes:
        groups: C. rank: r_eta; each group has r_eta + 1 dormant tokens. width: d.
        kappa: by how much a right score leads. delta: |eta|^2 is delta^2 d. scale: lambda.
    """

    groups: int = 2
    rank: int = 3
    width: int = 64
    kappa: float = 4.0
    delta: float = 0.5
    scale: float = 1.0

    def __post_init__(self) -> None:
        """Raises SinkscopeError for sizes without a task: C or r_eta < 1, d too small, numbers not above 0."""
        for name, value in (("groups", self.groups), ("rank", self.rank)):
            if not 1 <= value <= LARGEST:
                raise SinkscopeError(f"{name} {value}: one of 1 to {LARGEST} is needed")
        if self.width < self.span:
            raise SinkscopeError(f"width {self.width}: the tokens span {self.span} dimensions, so give at least those")
        for name, number in (("kappa", self.kappa), ("delta", self.delta), ("lambda", self.scale)):
            if not 0 < number < np.inf:
                raise SinkscopeError(f"{name} {number:g}: a number above 0 is needed")

    @property
    def span(self) -> int:
        """Dimensions that the tokens span: 2 C + 1 + r_eta."""
        return 2 * self.groups + 1 + self.rank

    @property
    def dormant(self) -> int:
        """The number of dormant tokens."""
        return self.groups * (self.rank + 1)

    @cached_property
    def nuisance(self) -> Float[np.ndarray, "token rank"]:
        """eta of a group's tokens over sqrt(d): corners of a simplex, which sum to 0."""
        corners = np.eye(self.rank + 1) - 1 / (self.rank + 1)
        flat = np.linalg.svd(corners)[2][: self.rank]
        return corners @ flat.T / np.linalg.norm(corners[0]) * self.delta

    @cached_property
    def tokens(self) -> Float[np.ndarray, "token span"]:
        """Every token over sqrt(d): BOS, the dormant ones group by group, then the copy tokens."""
        axes = np.eye(self.span)
        dormant = np.repeat(self.scale * axes[1 : 1 + self.groups], self.rank + 1, axis=0)
        dormant[:, 2 * self.groups + 1 :] = np.tile(self.nuisance, (self.groups, 1))
        return np.concatenate([axes[:1], dormant, axes[1 + self.groups : 1 + 2 * self.groups]])

    @cached_property
    def group(self) -> Int[np.ndarray, " token"]:
        """The group of each token, -1 for BOS."""
        return np.concatenate([[-1], np.repeat(np.arange(self.groups), self.rank + 1), np.arange(self.groups)])

    def right(self, pattern: str) -> list[tuple[int, list[int]]]:
        """Each query that asks for something, and its right keys."""
        copies = range(1 + self.dormant, 1 + self.dormant + self.groups)
        dormant = [(query, [query if pattern == "diagonal" else 0]) for query in range(1, 1 + self.dormant)]
        return dormant + [(query, self._members(int(self.group[query]))) for query in copies]

    def _members(self, group: int) -> list[int]:
        return [int(key) for key in np.flatnonzero(self.group[: 1 + self.dormant] == group)]

    def requirements(self, pattern: str) -> Float[np.ndarray, "requirement span span"]:
        """Matrices A, one for each query, right key and wrong key: sqrt(d) <A, W_QK> >= kappa is asked of each."""
        x = self.tokens
        return np.stack([
            np.outer(x[query], x[good] - x[bad])
            for query, keys in self.right(pattern)
            for good in keys
            for bad in range(len(x))
            if bad not in keys
        ])  # fmt: skip

    def heard(self, pattern: str) -> Float[np.ndarray, "token span"]:
        """A x with the exact pattern: what the values of each query's right keys are read from, evenly."""
        heard = self.tokens.copy()
        for query, keys in self.right(pattern):
            heard[query] = self.tokens[keys].mean(0)
        return heard

    @cached_property
    def updates(self) -> Float[np.ndarray, "token span"]:
        """What the block is to add to each token: a dormant token itself, a copy token lambda dbar_c, BOS nothing."""
        updates = self.tokens.copy()
        updates[0] = 0
        updates[1 + self.dormant :] = self.scale * np.eye(self.span)[1 : 1 + self.groups]
        return updates

    @property
    def gap(self) -> float:
        """Delta_diag: the smallest |eta_i - eta_j|^2 of a group."""
        rows = self.nuisance
        return float(((rows[0] - rows[1]) ** 2).sum()) * self.width

    @property
    def effective_rank(self) -> float:
        """r_eff(Sigma_D): trace over largest eigenvalue of the covariance of a group's tokens."""
        values = np.linalg.eigvalsh(np.cov(self.nuisance.T, bias=True).reshape(self.rank, self.rank))
        return float(values.sum() / values[-1])

    def bounds(self) -> dict[str, float]:
        """The paper's four bounds, each split into its query-key part and the rest (values and MLP)."""
        unit, root = self.kappa / self.width**0.5, self.width**0.5
        c, r = self.groups, self.rank
        return {
            "L_sink": unit * c / 2,
            "U_sink_qk": 12 * unit * c,
            "U_sink_rest": 5.0 * (r + c),
            "L_diag": unit * self.effective_rank / self.delta**2 + unit * c / 2,
            "U_diag_qk": 13 * unit * c + 4 * self.kappa * root * r / self.gap,
            "U_diag_rest": 3.0 * (r + c),
        }


LARGEST = 12
"""The largest C and r_eta: requirements grow as the third power of C (r_eta + 1)."""


# Blocks that are written down: a sink's and a diagonal's matrices, in coordinates of the tokens' span.
#
# W_QK of the diagonal is the paper's, Pi^T M_diag Pi + alpha P_eta with its s, a, b and alpha; where they stand in
# M_diag is our reading. W_QK of the sink, the values and the MLP are ours.


@dataclass(frozen=True)
class Block:
    """W_QK, the product W_O W_V, and the MLP's two matrices. A product is split evenly, which is cheapest."""

    scores: Float[np.ndarray, "span span"]
    values: Float[np.ndarray, "span span"]
    up: Float[np.ndarray, "hidden span"]
    down: Float[np.ndarray, "span hidden"]

    @property
    def cost_scores(self) -> float:
        """|W_Q|^2 + |W_K|^2 of the cheapest W_Q, W_K with W_Q^T W_K = W_QK: twice its nuclear norm."""
        return 2 * float(np.linalg.norm(self.scores, "nuc"))

    @property
    def cost_rest(self) -> float:
        """|W_V|^2 + |W_O|^2 of the cheapest ones, plus |W_1|^2 + |W_2|^2."""
        values = 2 * float(np.linalg.norm(self.values, "nuc"))
        return values + float((self.up**2).sum() + (self.down**2).sum())


def construction(task: Relaxed, pattern: str) -> Block:
    """The block of a pattern. Its scores lead by kappa or more, its outputs are exact."""
    return Block(_scores(task, pattern), *(_diagonal_rest(task) if pattern == "diagonal" else _sink_rest(task)))


def margin(task: Relaxed, pattern: str, scores: Float[np.ndarray, "span span"]) -> float:
    """The smallest lead of a right score over a wrong one."""
    return float((task.requirements(pattern) * scores).sum((1, 2)).min()) * task.width**0.5


def missed(task: Relaxed, pattern: str, block: Block) -> float:
    """The largest absolute error of what the block adds to a token, in units of sqrt(d)."""
    heard = task.heard(pattern) @ block.values.T
    inner = np.maximum((task.tokens + heard) @ block.up.T, 0)
    return float(np.abs(heard + inner @ block.down.T - task.updates).max())


def _scores(task: Relaxed, pattern: str) -> Float[np.ndarray, "span span"]:
    c, root = task.groups, task.width**0.5
    weights = np.zeros((task.span, task.span))
    groups, copies = np.arange(1, 1 + c), np.arange(1 + c, 1 + 2 * c)
    weights[0, 0] = task.kappa / root
    if pattern == "sink":
        weights[groups, 0] = weights[copies, groups] = task.kappa / (task.scale * root)
        return weights
    nuisance = np.arange(1 + 2 * c, task.span)
    weights[groups, groups] = task.kappa / (task.scale**2 * root)
    weights[copies, groups] = 2 * task.kappa / (task.scale * root)
    weights[nuisance, nuisance] = 2 * task.kappa * root / task.gap
    return weights


def _diagonal_rest(task: Relaxed) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Values keep groups and nuisance; the nuisance of a whole group sums to 0. No MLP."""
    kept = np.r_[1 : 1 + task.groups, 1 + 2 * task.groups : task.span]
    values = np.zeros((task.span, task.span))
    values[kept, kept] = 1
    return values, np.zeros((0, task.span)), np.zeros((task.span, 0))


def _sink_rest(task: Relaxed) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Values bring a copy token half of its group, which the MLP doubles; it adds a dormant token to itself: one neuron
    for a group, whose coordinate is never negative, two for a dimension of nuisance."""
    axes, c = np.eye(task.span), task.groups
    groups, nuisance = axes[1 : 1 + c], axes[1 + 2 * c :]
    up = np.concatenate([groups, nuisance, -nuisance])
    return groups.T @ groups / 2, up, up.T
