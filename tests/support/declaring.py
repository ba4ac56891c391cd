"""Declares two quantities as a user would. As a script, it is the command line with them: declaring.py scan MODEL"""

from __future__ import annotations

from torch import Tensor

from sinkscope.capture import LayerView
from sinkscope.metrics.quantities import quantity


def received(view: LayerView) -> Tensor:
    """sum_i A[i,k], over all queries."""
    return view.attention.columns


def last_row(view: LayerView, length: int) -> Tensor:
    """A[i,0] of the last of the first `length` queries."""
    return view.attention.first[..., length - 1]


def declare() -> None:
    """Declares one quantity by position and one by length."""
    quantity("sequence", "head", "key", unit="queries", range="[0, T]")(received)
    quantity("sequence", "head", "length", unit="probability", range="[0, 1]")(last_row)


if __name__ == "__main__":
    from sinkscope.cli import main

    declare()
    main()
