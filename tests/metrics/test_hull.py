"""The distance of a point from a convex hull: closed forms, and the certificate of any nearest point."""

from __future__ import annotations

import math

import pytest
import torch

from sinkscope.metrics.geometry import hull_distance


def test_closed_forms() -> None:
    axes = torch.eye(5, dtype=torch.float64)
    assert hull_distance(axes) == pytest.approx(5**-0.5)  # the middle of a simplex
    assert hull_distance(axes[:1] * 3) == pytest.approx(3)
    segment = torch.tensor([[1.0, 2.0], [1.0, -1.0]])
    assert hull_distance(segment) == pytest.approx(1)
    assert hull_distance(segment + torch.tensor([0.0, 3.0])) == pytest.approx(math.hypot(1, 2))


def test_a_hull_that_holds_the_origin() -> None:
    axes = torch.eye(4)
    assert hull_distance(torch.cat([axes, -axes])) == 0
    assert hull_distance(torch.zeros(3, 4)) == 0
    assert math.isnan(hull_distance(torch.tensor([[1.0, math.nan]])))


@pytest.mark.parametrize(("count", "width"), [(30, 4), (30, 60), (200, 16)])
def test_no_point_lies_nearer(count: int, width: int) -> None:
    """Every point's component along the nearest one is at least its norm, which no larger distance could have; and a
    factor of the points is one of the distance."""
    points = torch.randn(count, width, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    points[:, 0] = points[:, 0].abs() + 0.5
    found = hull_distance(points)
    assert 0.5 <= found <= float(torch.linalg.vector_norm(points, dim=1).min())
    assert hull_distance(1e6 * points) == pytest.approx(1e6 * found)
    assert hull_distance(points[torch.randperm(count)]) == pytest.approx(found)
    weights = torch.rand(500, count, dtype=torch.float64).softmax(1)
    assert (torch.linalg.vector_norm(weights @ points, dim=1) >= found - 1e-12).all()
