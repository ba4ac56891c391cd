"""The first steps of a scan: checks what needs no model, then loads the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sinkscope.checkpoints import Checkpoint, LoadOptions, open_checkpoint, wrap_model
from sinkscope.checkpoints.forward import keep_writer
from sinkscope.engine.input_kinds import check_asked
from sinkscope.engine.launch import Processes
from sinkscope.engine.loop import Progress
from sinkscope.engine.measurement import measurements, refuse_spread
from sinkscope.errors import SinkscopeError
from sinkscope.metrics.quantities import QuantitySet, quantity_set
from sinkscope.runs.dormancy import check_rule
from sinkscope.runs.request import Request
from sinkscope.tables.columns import metric_set


def checked(
    request: Request, metrics: Sequence[Callable[..., Any] | str | Path], model: Any, processes: Processes,
    hash_later: bool = False,
) -> tuple[QuantitySet, LoadOptions]:  # fmt: skip
    """What the scan measures, and how its model is loaded. Raises SinkscopeError for what is wrong with the request
    for every model.

    `hash_later`: see `LoadOptions`; several processes compare the hash at once.
    """
    if request.given is not None and request.handed is None:
        if request.watched:
            raise SinkscopeError(
                "that run was watched, which no scan repeats: watch the program again, and give the new run folder"
            )
        raise SinkscopeError(
            f"the {request.given} of that scan were handed over in Python, or in a folder that sinkscope 0.1 did not "
            "record: they cannot be read again; scan the model yourself and give its run folder"
        )
    processes.check(model, request.device_map)
    options = LoadOptions(
        request.revision, processes.device(request.device), request.device_map, request.dtype,
        request.trust_remote_code, request.allow_pickle, head=request.generate is not None,
        tensor_parallel=processes.count if processes.tensor else 1, adapter=request.adapter,
        hash_later=hash_later and processes.count == 1,
    )  # fmt: skip
    if processes.tensor:
        refuse_spread(measurements([name for name in request.measures if name not in request.optional]))
    check_asked(request)
    measured = metric_set(metrics).asked(request.measures)
    columns, declared = measured.names("heads"), quantity_set(measured, request.lengths)
    check_rule(request.dormant_rule, columns)
    return declared, options


def loaded(model: Any, tokenizer: Any, options: LoadOptions, report: Progress) -> Checkpoint:
    """The checkpoint of a name, or around a model object. Raises SinkscopeError for anything wrong with it.

    `options.head`: the model also writes, so that its head is needed.
    """
    named = isinstance(model, str)
    checkpoint = open_checkpoint(model, options, report) if named else wrap_model(model, tokenizer, head=options.head)
    if options.head:
        keep_writer(checkpoint)
    return checkpoint
