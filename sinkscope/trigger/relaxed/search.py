"""Searches the cheapest block of a pattern: scores with a certificate, values and MLP from several starts.

Scores are a convex problem: least 2 |W|_* (nuclear norm), which is |W_Q|^2 + |W_K|^2, with sqrt(d) <A_k, W> >= kappa.
It is solved in W_Q and W_K by the method of multipliers. Its multipliers mu give a lower bound on every solution:
kappa sum(mu) 2 / (sqrt(d) |sum mu_k A_k|) with the spectral norm. Between both lies the least cost.

Values and MLP are not convex: what is found is an upper bound, the best of the starts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from sinkscope.trigger.relaxed.task import Relaxed, construction

ROUNDS, INNER = 40, 400
"""Updates of the multipliers, and steps of L-BFGS in each."""

TIGHT = 1e-6
"""A requirement counts as met within this share of kappa; an output, within this of its size."""

Objective = Callable[[Tensor], tuple[Tensor, Tensor]]
"""From all weights as one vector: the cost, and what is to be 0 (equalities) or at most 0 (inequalities)."""


@dataclass(frozen=True)
class Least:
    """The least cost that was found, and a bound that no solution is below; its largest violation of what is asked."""

    cost: float
    bound: float
    violation: float


def least_scores(task: Relaxed, pattern: str, seed: int = 0) -> Least:
    """The least |W_Q|^2 + |W_K|^2 whose right scores lead by kappa. Weights are scaled up to meet every requirement.

    The search has the cost of the written block as its unit. A small nuisance makes a diagonal dear: from weights of
    size 1 it would be out of reach.
    """
    unit = construction(task, pattern).cost_scores
    requirements = torch.from_numpy(task.requirements(pattern)) * (unit * task.width**0.5 / task.kappa)
    size = task.span

    def objective(weights: Tensor) -> tuple[Tensor, Tensor]:
        query, key = weights.view(2, size, size)
        return weights.square().sum(), 1 - (requirements * (query.T @ key)).sum((1, 2))

    start = torch.from_numpy(np.random.default_rng(seed).normal(size=2 * size * size) / size**0.5)
    weights, multipliers = _multipliers(objective, start, equal=False)
    query, key = weights.view(2, size, size)
    product = query.T @ key
    lead = float((requirements * product).sum((1, 2)).min())
    mixed = torch.linalg.matrix_norm((multipliers[:, None, None] * requirements).sum(0), 2)
    bound = 2 * float(multipliers.sum() / mixed)
    return Least(unit * 2 * float(torch.linalg.matrix_norm(product, "nuc")) / lead, unit * bound, max(0.0, 1 - lead))


def least_rest(task: Relaxed, pattern: str, seed: int = 0) -> Least:
    """The least |W_V|^2 + |W_O|^2 + |W_1|^2 + |W_2|^2 found from one random start; `bound` is 0, none is known."""
    tokens, heard, updates = (torch.from_numpy(array) for array in (task.tokens, task.heard(pattern), task.updates))
    size, hidden = task.span, 2 * task.span

    def objective(weights: Tensor) -> tuple[Tensor, Tensor]:
        value, output, up, down = weights.split([size * size, size * size, hidden * size, size * hidden])
        mixed = heard @ value.view(size, size).T @ output.view(size, size).T
        inner = torch.relu((tokens + mixed) @ up.view(hidden, size).T)
        return weights.square().sum(), (mixed + inner @ down.view(size, hidden).T - updates).flatten()

    count = 2 * size * size + 2 * size * hidden
    start = torch.from_numpy(np.random.default_rng(seed).normal(size=count) / size**0.5)
    weights, _ = _multipliers(objective, start, equal=True)
    cost, errors = objective(weights)
    return Least(float(cost), 0.0, float(errors.abs().max()))


def _multipliers(objective: Objective, weights: Tensor, equal: bool) -> tuple[Tensor, Tensor]:
    """The method of multipliers (augmented Lagrangian), each round by L-BFGS. Returns weights and multipliers."""
    from scipy.optimize import minimize

    multipliers, penalty, before = torch.zeros_like(objective(weights)[1]), 1.0, float("inf")

    def smooth(flat: Float[np.ndarray, " weight"]) -> tuple[float, Float[np.ndarray, " weight"]]:
        point = torch.from_numpy(flat.copy()).requires_grad_()
        cost, errors = objective(point)
        shifted = multipliers + penalty * errors
        total = cost + (shifted if equal else shifted.clamp(min=0)).square().sum() / (2 * penalty)
        total.backward()
        assert point.grad is not None
        return float(total.detach()), point.grad.numpy()

    for _ in range(ROUNDS):
        result = minimize(smooth, weights.numpy(), jac=True, method="L-BFGS-B", options={"maxiter": INNER})
        weights = torch.from_numpy(result.x)
        errors = objective(weights)[1]
        multipliers = multipliers + penalty * errors
        if not equal:
            multipliers = multipliers.clamp(min=0)
        worst = float((errors.abs() if equal else errors).max())
        if worst < TIGHT:
            break
        if worst > before / 4:
            penalty *= 4
        before = worst
    return weights, multipliers
