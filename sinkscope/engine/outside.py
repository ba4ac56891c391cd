"""Names a question of another package, and the package, where it fails in a scan."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

import pandas as pd

from sinkscope.capture.private_doors import is_out_of_memory
from sinkscope.capture.view import LayerView, Missing, sealed
from sinkscope.engine.collector import Part, Parts
from sinkscope.errors import SinkscopeError
from sinkscope.runs.questions import QUESTIONS, Question

if TYPE_CHECKING:
    import numpy as np

    from sinkscope.engine.measurement import Findings, Measurement
    from sinkscope.inputs.batches import Batch
    from sinkscope.metrics.quantities import Quantity
    from sinkscope.runs.schema.stream import StreamSummary

STEPS = ("__init__", "of_call", "again", "left_out")
"""What a scan calls of a measurement and takes as it is."""


def guarded(kind: type[Measurement], question: Question) -> type[Measurement]:
    """The measurement of another package's question: where a step of it fails, SinkscopeError names the question and
    the package. Its quantities see views that they cannot change."""
    blaming = partial(QUESTIONS.blaming, question.name, _passes)

    class Guarded(kind):  # type: ignore[misc, valid-type]
        def quantities(self) -> tuple[Quantity, ...]:
            with blaming():
                found = tuple(super().quantities())
                return tuple(replace(each, compute=_of_sealed(each.compute, blaming)) for each in found)

        @contextmanager
        def watching(self, batch: Batch, ids: np.ndarray) -> Iterator[None]:
            with ExitStack() as stack:
                with blaming():
                    stack.enter_context(super().watching(batch, ids))
                yield
                with blaming():
                    stack.close()

        def parts(self) -> Parts:
            with blaming():
                return _as_parts(super().parts())

        def tables(self, findings: Findings) -> dict[str, pd.DataFrame]:
            with blaming():
                return _as_declared(super().tables(findings), question)

        def summarise(self, streams: dict[str, StreamSummary], tables: dict[str, pd.DataFrame]) -> None:
            with blaming():
                super().summarise(streams, tables)
                for stream in streams.values():
                    stream.as_dict()  # what is no JSON ends here, where it is known whose it is

    for name in STEPS:
        setattr(Guarded, name, _blamed(getattr(kind, name), blaming))
    return Guarded


def _passes(error: Exception) -> bool:
    """Whether an error is none of the question's: a column that a layer lacks, or memory that ran out."""
    return isinstance(error, Missing) or is_out_of_memory(error)


Blaming = Callable[[], AbstractContextManager[None]]


def _blamed(step: Callable[..., Any], blaming: Blaming) -> Callable[..., Any]:
    @wraps(step)
    def called(*given: Any) -> Any:
        with blaming():
            return step(*given)

    return called


def _of_sealed(compute: Callable[..., Any], blaming: Blaming) -> Callable[..., Any]:
    """The function of a quantity, which gets a sealed view."""

    def computed(view: LayerView, *more: Any) -> Any:
        with blaming(), sealed(view) as shown:
            try:
                return compute(shown, *more)
            except SinkscopeError as error:  # of the seal, which does not know whom it stopped
                raise TypeError(str(error)) from error

    return computed


def _as_parts(parts: Any) -> Parts:
    """The parts. Raises TypeError where they are something else."""
    lists = list(parts.values()) if isinstance(parts, dict) else [None]
    if not all(isinstance(each, list) and all(isinstance(part, Part) for part in each) for each in lists):
        raise TypeError("parts() returns no lists of Part by name")
    return parts


def _as_declared(tables: Any, question: Question) -> dict[str, pd.DataFrame]:
    """The tables. Raises TypeError where they are none, or others than the question declares."""
    if not isinstance(tables, dict) or not all(isinstance(table, pd.DataFrame) for table in tables.values()):
        raise TypeError("tables() returns no DataFrames by name")
    declared = [table.name for table in question.tables]
    stray = next((name for name in tables if name not in declared), None)
    if stray is not None:
        raise TypeError(f"tables() returns {stray}, and the question declares {', '.join(declared) or 'no table'}")
    return tables
