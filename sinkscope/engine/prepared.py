"""Everything between a loaded model and the first batch but the self-check: finds the attention, reads the inputs."""

from __future__ import annotations

from functools import partial
from typing import Any

from sinkscope.capture import plan
from sinkscope.capture.plan import runnable
from sinkscope.checkpoints import Checkpoint
from sinkscope.checkpoints.forward import DRY_RUN_TOKENS
from sinkscope.engine.batch_size import memory_needed
from sinkscope.engine.collector import check_lengths
from sinkscope.engine.input_kinds import blaming, claim
from sinkscope.engine.input_kinds.kind import Reading
from sinkscope.engine.launch import Processes
from sinkscope.engine.loop import Loop, Progress
from sinkscope.engine.measurement import Subject, begun, left_out_words
from sinkscope.engine.tensor_parallel import spread
from sinkscope.metrics.quantities import QuantitySet
from sinkscope.runs.request import Request


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
