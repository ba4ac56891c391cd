"""The lower bound on the cost of a diagonal pattern: it holds, it is reached, and what may not be added to it."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sinkscope.questions.smoothing.columns import cost_diagonal_lower, cost_sink_lower
from sinkscope.questions.smoothing.tables import cheaper, cheaper_block, cheaper_groups, cheaper_qk
from sinkscope.wiring.folded import FoldedHeads
from sinkscope.wiring.linear_maps import Projection
from sinkscope.wiring.trace import one_factor

SCALE, KAPPA = 0.25, 3.0


def folded(tokens: np.ndarray) -> FoldedHeads:
    """One head of this margin over tokens i >= 1."""
    margin = torch.full((1, len(tokens)), KAPPA, dtype=torch.float64)
    return FoldedHeads(1, x=torch.from_numpy(tokens), z=torch.from_numpy(tokens), margin=margin, scale=SCALE)


def margins(weights: np.ndarray, tokens: np.ndarray, first: np.ndarray) -> list[float]:
    """s z_i^T W (z_i - z_j) of every token i and every other token j, the first among them."""
    others = [(i, key) for i in range(len(tokens)) for j, key in enumerate([*tokens, first]) if j != i]
    return [SCALE * float(tokens[i] @ weights @ (tokens[i] - key)) for i, key in others]


def test_orthogonal_tokens_reach_the_bound() -> None:
    """W = c P, P the projection on the differences of tokens: every difference has the margin, at the bound's cost."""
    count = 5
    tokens = np.eye(8)[:count] * 8**0.5
    mean = np.full(count, 1 / count)
    projection = np.zeros((8, 8))
    projection[:count, :count] = np.eye(count) - np.outer(mean, np.ones(count))
    weights = KAPPA / (SCALE * 8) * projection
    found = [SCALE * (a - b) @ weights @ (a - b) for a, b in itertools.combinations(tokens, 2)]
    assert np.allclose(found, 2 * KAPPA)
    assert np.linalg.norm(weights, "nuc") == pytest.approx(float(cost_diagonal_lower(folded(tokens))))


def test_weights_exist_below_the_bound_with_a_term_for_the_first_token() -> None:
    """Two tokens a + e, a - e and a first token against them: the diagonal wins by kappa everywhere, at less than
    kappa / (s |B'|_2) + kappa C / (2 s D)."""
    width, small = 16, 0.5
    a, e = np.eye(width)[0] * (width - small**2) ** 0.5, np.eye(width)[1] * small
    tokens, first = np.stack([a + e, a - e]), -np.eye(width)[0] * width**0.5
    outer = np.outer(e, e) / small**2 * KAPPA / (2 * SCALE * small**2)
    share = KAPPA / (2 * SCALE) / (a[0] ** 2 + a[0] * width**0.5)
    weights = outer + share * np.diag(np.eye(width)[0])
    assert min(margins(weights, tokens, first)) >= KAPPA - 1e-9
    cost = np.linalg.norm(weights, "nuc")
    bound, added = float(cost_diagonal_lower(folded(tokens))), float(cost_sink_lower(folded(tokens)))
    assert added == pytest.approx(KAPPA / (2 * SCALE * width))
    assert bound <= cost < bound + added


def test_the_bound_holds_for_random_weights() -> None:
    generator = np.random.default_rng(0)
    tokens = generator.normal(size=(4, 6))
    tokens *= 6**0.5 / np.linalg.norm(tokens, axis=1, keepdims=True)
    for _ in range(50):
        half = generator.normal(size=(6, 6))
        weights = half @ half.T
        least = min(SCALE * (p - q) @ weights @ (p - q) / 2 for p, q in itertools.combinations(tokens, 2))
        bound = float(cost_diagonal_lower(folded(tokens))) * least / KAPPA
        assert np.linalg.norm(weights, "nuc") >= bound


def test_which_is_cheaper() -> None:
    nan = np.nan
    means = {
        "cost_sink_lower": [1, 9, 1, nan], "cost_sink_upper": [2, 20, 9, 9],
        "cost_diagonal_lower": [3, 1, 2, 2], "cost_diagonal_upper": [9, 8, 9, 9],
    }  # fmt: skip
    run = SimpleNamespace(means={name: np.array(values, float) for name, values in means.items()})
    assert list(cheaper(run)) == ["sink", "diagonal", "undecided", None]  # type: ignore[arg-type]


def test_which_is_cheaper_by_queries_and_keys_and_by_the_block() -> None:
    """Values may turn the verdict; an upper bound that does not exist decides nothing."""
    nan = np.nan
    means = {
        "cost_sink_lower_qk": [1, 9, 1, 1, nan], "cost_sink_upper_qk": [2, 20, 2, 9, 9],
        "cost_diagonal_lower_qk": [30, 1, 3, 4, 2], "cost_diagonal_upper_qk": [40, 8, nan, nan, 9],
        "cost_sink_upper_value": [10, 10, 10, 10, nan], "cost_diagonal_upper_value": [6, 6, 6, 6, nan],
    }  # fmt: skip
    run = SimpleNamespace(means={name: np.array(values, float) for name, values in means.items()})
    assert list(cheaper_qk(run)) == ["sink", "diagonal", "sink", "undecided", None]  # type: ignore[arg-type]
    assert list(cheaper_block(run)) == ["sink", "undecided", "undecided", "undecided", None]  # type: ignore[arg-type]


def test_which_is_cheaper_with_clusters() -> None:
    """As cheaper_qk, a lower bound that does not exist, as with a single token behind the first, decides nothing."""
    nan = np.nan
    means = {"cost_sink_upper_groups": [2, 20, nan, 5, 5], "cost_diagonal_lower_groups": [3, 1, 2, 5, nan]}
    run = SimpleNamespace(means={name: np.array(values, float) for name, values in means.items()})
    assert list(cheaper_groups(run)) == ["sink", "undecided", None, "undecided", "undecided"]  # type: ignore[arg-type]


def test_a_factor_of_the_model_is_found_and_a_norm_is_not_one() -> None:
    generator = torch.Generator().manual_seed(0)
    z, weight = torch.randn(1, 12, 6, generator=generator).double(), torch.randn(2, 4, 6, generator=generator).double()
    made = torch.einsum("btc,hdc->bhtd", z, weight)
    projection = Projection(weight, weight.new_zeros(2, 4))
    assert one_factor(projection, 0.125 * made.flip(-1), z) == pytest.approx(0.125)
    assert one_factor(projection, torch.nn.functional.normalize(made, dim=-1), z) is None
