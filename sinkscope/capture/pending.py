"""An attention call that waits for the end of its block, where the last it needs for its view is known."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from sinkscope.capture.calls import Cut
from sinkscope.capture.sums import AttentionSums
from sinkscope.capture.view import Site

Part = tuple[slice, Cut | None, AttentionSums]
"""Sums over some rows of a batch: all of it, or one sequence cut out of a padded one."""


@dataclass
class Pending:
    """One attention call of the pass under way, until its block has ended; `rows`: sequences, queries.

    Shapes as in AttentionMap.
    """

    site: Site
    parts: list[Part]
    rows: tuple[int, int]
    query: Tensor | None
    key: Tensor | None
    value: Tensor | None
    output: Tensor | None
    projected: Tensor | None = None
