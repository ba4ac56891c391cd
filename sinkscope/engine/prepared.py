"""What comes before a scan's first batch, save the self-check: loads the model, finds its attention, reads inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from sinkscope.capture import plan
from sinkscope.capture.plan import runnable
from sinkscope.checkpoints import Checkpoint, LoadOptions, open_checkpoint, wrap_model
from sinkscope.checkpoints.forward import DRY_RUN_TOKENS, keep_writer
from sinkscope.engine.batch_size import memory_needed
from sinkscope.engine.collector import check_lengths
from sinkscope.engine.input_kinds import blaming, check_asked, claim
from sinkscope.engine.input_kinds.kind import Reading
from sinkscope.engine.launch import Processes
from sinkscope.engine.loop import Loop, Progress
from sinkscope.engine.measurement import Subject, begun, left_out_words, measurements, refuse_spread
from sinkscope.engine.tensor_parallel import spread
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


def prepared(
    request: Request, checkpoint: Checkpoint, declared: QuantitySet, report: Progress, processes: Processes,
    strict: bool,
) -> tuple[Loop, Request]:  # fmt: skip
    """A loop that is ready for its first batch, and the request with what this model and these inputs add to it.

    Raises SinkscopeError where the model cannot read the inputs, or lacks what a measurement needs.
    """
    kind = claim(request, checkpoint)
    forward = kind.forward
    with blaming(type(kind)):
        short, extra = kind.probe()
        other, advice = kind.other_probe(short, extra), kind.signal_to_give(extra)
    with memory_needed(f"a dry run of {DRY_RUN_TOKENS} tokens"):
        call_plan = plan(
            checkpoint.model, partial(forward, short, **extra), None if other is None else partial(forward, other),
            advice,
        )  # fmt: skip
    with blaming(type(kind)):
        reading = kind.read(call_plan.positions)
    check_lengths(request.lengths, reading.tokens)
    heads = None
    if processes.tensor:
        call_plan, heads = spread(checkpoint.model, call_plan, processes.count)
    subject = Subject(
        checkpoint.model, call_plan, declared.metrics, partial(_short_pass, checkpoint, reading),
        lambda batch: forward(batch.inputs, batch.mask, **batch.extra), request, reading.rules.bos_id,
    )  # fmt: skip
    asked = reading.measures(request.measures)
    begun_measurements, left_out = begun(asked, subject, bool(processes.tensor))
    measures = tuple(name for name in asked if name not in left_out)
    request = request.model_copy(update={"measures": measures, "model": checkpoint.facts["id"]})
    loop = Loop(
        checkpoint, call_plan, forward, reading, request.epsilon, report, request.batch_size, spectra=request.spectra,
        measurements=begun_measurements, left_out=left_out_words(left_out),
        declared=declared.asked(measures) if left_out else declared, processes=processes, heads=heads, strict=strict,
    )  # fmt: skip
    return loop, request


def _short_pass(checkpoint: Checkpoint, reading: Reading) -> Any:
    """Runs the model on a few short sequences, every token at position 0. Raises SinkscopeError where it cannot."""
    probes = reading.kind.several_probes()
    with runnable(checkpoint.model, f"{len(probes)} sequences of {probes.shape[1]} tokens"):
        return reading.kind.forward.at_position_zero(probes)
