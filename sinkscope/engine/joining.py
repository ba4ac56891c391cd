"""Joins the processes of a launch, and does not wait long for processes that never start."""

from __future__ import annotations

import sys
import warnings
from datetime import timedelta
from typing import Any

from sinkscope.engine.launcher import UNSET, is_main, told_by
from sinkscope.errors import SinkscopeError, first_line

_in_vain = False


def waited_in_vain() -> bool:
    """Whether this process has waited for others that did not appear."""
    return _in_vain


def join(cpu: bool, wait: timedelta, patience: timedelta) -> Any:
    """Returns accelerate's state of this process once all processes of the launch have started.

    Args:
        cpu: whether the process computes on the CPU although there is a GPU.
        wait: how long the processes may take to start; a launcher starts them together.
        patience: how long a step of the joined processes may take.

    Raises SinkscopeError where the others do not start in time: variables of another launch were left behind. A
    process that is not the main one also prints it, since all else that it prints is discarded.
    """
    global _in_vain  # noqa: PLW0603 - a process has one launch
    from accelerate import PartialState

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            state = PartialState(cpu=cpu, timeout=wait)
            _ = state.process_index
            _be_patient(patience)
        except (ValueError, KeyError, AttributeError, RuntimeError, OSError) as error:
            detail = first_line(error)
            line = (
                f"the environment tells of a launch ({told_by()}) whose other processes did not appear within "
                f"{wait.total_seconds():.0f} s ({detail}): {UNSET}"
            )
            _in_vain = True
            if not is_main() and sys.__stderr__ is not None:
                print(f"sinkscope: error: {line}", file=sys.__stderr__)
            raise SinkscopeError(line) from None
    return state


def _be_patient(patience: timedelta) -> None:
    """Lets the processes wait longer for each other than for their start."""
    from sinkscope.capture.private_doors import set_process_timeout

    set_process_timeout(patience)
