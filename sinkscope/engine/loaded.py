"""Loads the model of a request, as the processes of a launch share it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sinkscope.checkpoints import Checkpoint, LoadOptions, open_checkpoint, wrap_model
from sinkscope.checkpoints.forward import keep_writer
from sinkscope.engine.launch import Processes
from sinkscope.engine.loop import Progress
from sinkscope.runs.request import Request


def loaded(
    request: Request, model: Any, tokenizer: Any, report: Progress, processes: Processes, hash_later: bool = False
) -> Checkpoint:
    """The checkpoint of a name, or around a model object. Raises SinkscopeError for anything wrong with it.

    `hash_later`: see `LoadOptions`; several processes compare the hash at once.
    """
    report("loading", 0, 0)
    later = hash_later and processes.count == 1
    options, writes = replace(_load_options(request, processes), hash_later=later), request.generate is not None
    named = isinstance(model, str)
    checkpoint = open_checkpoint(model, options, report) if named else wrap_model(model, tokenizer, head=writes)
    if writes:
        keep_writer(checkpoint)
    return checkpoint


def _load_options(request: Request, processes: Processes) -> LoadOptions:
    return LoadOptions(
        request.revision, processes.device(request.device), request.device_map, request.dtype,
        request.trust_remote_code, request.allow_pickle, head=request.generate is not None,
        tensor_parallel=processes.count if processes.tensor else 1, adapter=request.adapter,
    )  # fmt: skip
