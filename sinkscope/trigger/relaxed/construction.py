"""Blocks that are written down: a sink's and a diagonal's matrices, in coordinates of the tokens' span.

W_QK of the diagonal is the paper's, Pi^T M_diag Pi + alpha P_eta with its s, a, b and alpha; where they stand in M_diag
is our reading. W_QK of the sink, the values and the MLP are ours.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from sinkscope.trigger.relaxed.task import Relaxed


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
    own = np.r_[1 : 1 + task.groups, 1 + 2 * task.groups : task.span]
    values = np.zeros((task.span, task.span))
    values[own, own] = 1
    return values, np.zeros((0, task.span)), np.zeros((task.span, 0))


def _sink_rest(task: Relaxed) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Values bring a copy token half of its group, which the MLP doubles; it adds a dormant token to itself: one neuron
    for a group, whose coordinate is never negative, two for a dimension of nuisance."""
    axes, c = np.eye(task.span), task.groups
    groups, nuisance = axes[1 : 1 + c], axes[1 + 2 * c :]
    up = np.concatenate([groups, nuisance, -nuisance])
    return groups.T @ groups / 2, up, up.T
