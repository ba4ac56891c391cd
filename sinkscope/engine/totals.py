"""Running totals over the sequences of a domain, for quantities that a run holds no single sequence of."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from sinkscope.metrics.quantities import STRETCHED, Quantity
from sinkscope.metrics.stretches import joined


class Total(Protocol):
    """A running total."""

    def add(self, values: Tensor, count: int) -> None:
        """Adds what a batch kept of its `count` sequences, [1, ...]."""

    def result(self) -> np.ndarray:
        """What a run holds of all sequences so far."""


def new_total(quantity: Quantity) -> Total | None:
    """An empty total; None for a quantity of which a run holds every sequence."""
    if quantity.dims == STRETCHED:
        return Stretches()
    return Places() if quantity.summed else None


class Places:
    """A quantity by position: the sum at each position (the last axis), and how many sequences reach it."""

    def __init__(self) -> None:
        self._sum = torch.zeros(0)
        self._number = torch.zeros(0, dtype=torch.float64)

    def add(self, values: Tensor, count: int) -> None:
        own, before, size = values[0], len(self._number), values.shape[-1]
        if size > before:
            longer = torch.zeros_like(own)
            longer[..., :before] = self._sum
            self._sum, self._number = longer, pad(self._number, (0, size - before))
        self._sum[..., :size] += own
        self._number[:size] += count

    def result(self) -> np.ndarray:
        """The mean at each position, over the sequences that reach it."""
        if bool((self._number == 1).all()):
            return self._sum.numpy()  # not copied: of one long sequence, this is most of what a scan holds
        return (self._sum / self._number.to(self._sum.dtype)).numpy()


class Stretches:
    """Stretches of positions."""

    def __init__(self) -> None:
        self._parts = torch.zeros(0)

    def add(self, values: Tensor, count: int) -> None:
        self._parts = joined(self._parts, values) if len(self._parts) else values

    def result(self) -> np.ndarray:
        """`stretches.PARTS` of each stretch, [head, stretch, 4]."""
        return self._parts[0].numpy()
