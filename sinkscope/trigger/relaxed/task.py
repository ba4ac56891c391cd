"""The dormant-plus-copy task: its tokens, what is asked of scores and of outputs, and the four bounds."""

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
        own = [(query, [query if pattern == "diagonal" else 0]) for query in range(1, 1 + self.dormant)]
        return own + [(query, self._members(int(self.group[query]))) for query in copies]

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
        found = self.tokens.copy()
        for query, keys in self.right(pattern):
            found[query] = self.tokens[keys].mean(0)
        return found

    @cached_property
    def updates(self) -> Float[np.ndarray, "token span"]:
        """What the block is to add to each token: a dormant token itself, a copy token lambda dbar_c, BOS nothing."""
        found = self.tokens.copy()
        found[0] = 0
        found[1 + self.dormant :] = self.scale * np.eye(self.span)[1 : 1 + self.groups]
        return found

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
