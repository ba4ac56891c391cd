"""What the engine hands to the tables: the numbers of one arm, or of one draw, for every sequence."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

UNABLATED = "unablated"
"""The name of the model as it is, which every measurement begins with."""

MEASURES = ("loss", "kl", "kl_last", "top1", "top5", "sink_rate_first", "sink_rate_any", "size")
"""The numbers of each sequence, in the order of the tables' columns."""


@dataclass(frozen=True)
class Measured:
    """The numbers of one arm, or of one draw of a random arm: by name of MEASURES, [sequence] float64.

    `name`, `family` and `kept` are the arm's.
    """

    name: str
    family: str | None
    kept: int | None
    draw: int | None
    values: dict[str, np.ndarray]
