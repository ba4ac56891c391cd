"""One scan: loads a model, reads its inputs, measures the batches and returns a Run."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from sinkscope.capture import plan
from sinkscope.capture.alone import alone
from sinkscope.capture.loops.compilation import COMPILATION
from sinkscope.checkpoints import Checkpoint
from sinkscope.checkpoints.forward import DRY_RUN_TOKENS, Forward
from sinkscope.engine.assemble import build_run
from sinkscope.engine.batch_size import memory_needed
from sinkscope.engine.collector import check_lengths
from sinkscope.engine.input_kinds import check_asked, claim
from sinkscope.engine.launch import ALONE, Processes
from sinkscope.engine.loaded import loaded
from sinkscope.engine.loop import Loop, Progress
from sinkscope.engine.manifest import (
    declared_keywords,
    describe,
    finished_before,
    resume_key,
    unread,
    with_weights,
)
from sinkscope.engine.measurement import Subject, measurements, refuse_spread
from sinkscope.engine.requested import requested
from sinkscope.engine.self_check import check_loop
from sinkscope.engine.shards import Shards
from sinkscope.engine.stages import Stages
from sinkscope.engine.tensor_parallel import spread
from sinkscope.errors import SinkscopeError
from sinkscope.metrics.extension import definitions
from sinkscope.metrics.quantities import quantity_set
from sinkscope.metrics.registry import MetricSet
from sinkscope.runs.defaults import DORMANT_RULE, EPSILON
from sinkscope.runs.dormancy import check_rule
from sinkscope.runs.questions import declared_options, questions_asked
from sinkscope.runs.request import Request
from sinkscope.runs.run import Run
from sinkscope.runs.schema.manifest import Manifest
from sinkscope.tables.columns import metric_set


class Interrupted(KeyboardInterrupt):
    """Ctrl-C during a scan. `run` holds what was measured until then (manifest: complete = false), or None."""

    def __init__(self, run: Run | None) -> None:
        super().__init__("scan interrupted")
        self.run = run


def scan(
    model: Any,
    *,
    data: Any = None,
    name: str | None = None,
    images: str | Path | None = None,
    audio: str | Path | None = None,
    prompt: str | None = None,
    seq_len: int | None = None,
    num_sequences: int | None = None,
    batch_size: int | None = None,
    bos: str | Sequence[str] = "auto",
    first: str | Sequence[str] = (),
    prepend: int | Sequence[int] = (),
    generate: int | None = None,
    tokenizer: Any = None,
    device: str = "auto",
    device_map: str | dict[str, Any] | None = None,
    dtype: str = "auto",
    revision: str | None = None,
    adapter: str | Path | None = None,
    trust_remote_code: bool = False,
    allow_pickle: bool = False,
    seed: int = 0,
    epsilon: float = EPSILON,
    dormant_rule: str = DORMANT_RULE,
    measure: str | Sequence[str] = (),
    smoothing: bool = False,
    spectra: int | None = None,
    lengths: Sequence[int] | None = None,
    metrics: Sequence[Callable[..., Any] | str | Path] = (),
    self_check: bool = True,
    shards: str | Path | None = None,
    resume: bool = False,
    progress: Progress | None = None,
    processes: Processes = ALONE,
    strict: bool = False,
    **options: Any,
) -> Run:
    """Measures every attention head of a model while it reads text once.

    Args:
        model: a name (hub id, folder, .gguf file, example:NAME) or a model already loaded, in eval mode:
            any torch.nn.Module, though only a transformers model tells padding, names and a tokenizer's vocabulary.
        data: a SPEC or a list of them (each becomes a domain), "prose" by default.
            Texts: a list of strings with spaces, none of them a SPEC; together they are one domain, `texts`.
            Token ids: a tensor [sequence, T], a list of lists of int, or a mapping with `input_ids` and
            `attention_mask`, or `position_ids` of packed rows, whose pieces become sequences. They need no tokenizer.
            Vision models: a mapping with `pixel_values` [picture, channel, height, width]. Vision-language models: what
            their processor returns (`input_ids`, `pixel_values`, ...), with equally many pictures in each sequence.
            Speech models: `input_features` or `input_values` [recording, ...], all of one length; for a decoder also
            `decoder_input_ids` [recording, token] (without them it reads its start token alone).
            A model that reads real vectors (the trigger task's) brings its data itself.
        name: what tables, figures and pages call the model; its id by default.
        images, audio: a folder of png and jpg, or of wav files; the checkpoint's own processor makes a sequence of each
            file. prompt: the text beside each file; a speech model's decoder reads it.
        seq_len, num_sequences: tokens per sequence, and sequences per SPEC; by default 256 and 32 for text, all there
            are for token ids, the task's own length and number for a model that brings a task.
        bos: the first token: auto (the tokenizer's default), always, never; a list of modes makes a domain of each.
        first: what stands first instead: auto, bos, bosxN (N times), none, random, or a text of one token. prepend: how
            many random tokens stand before that. Every combination makes a domain over the same text.
        generate: how many tokens the model writes after each sequence, greedily; they are measured with it.
        batch_size: None = chosen by the device and halved when memory runs out.
        tokenizer: for a model object; a name brings its own. adapter: a PEFT adapter's folder, for a named model.
        device_map: `auto`, or accelerate's map of module paths to devices: the model is spread over them.
        epsilon: the sink threshold. dormant_rule: "NAME<x" on a head column. smoothing: True adds measure="smoothing".
        measure: what to measure on request (`Run.measured`): names of `sinkscope scan --help`, or "all".
        spectra: how many first sequences of each domain matrix_entropy, and what needs spectra in smoothing.csv, is
            measured on; None = as many as are cheap.
        lengths: the prefixes of length_curve.csv and cosine_curve.csv; None = 64, 128, 256, ... T comes last always.
        metrics: your own functions, decorated with `head_metric` or `layer_metric`, or Python files that define some,
            which are run; they are measured in addition to sinkscope's.
        self_check: compare one short sequence with the model's own eager attention first.
        shards: a folder that keeps every finished batch until the run is saved there. resume: continue from what an
            earlier scan of the same model, data and settings left there; the result is the same to the last bit. If
            that scan is finished, its run is returned.
        processes: the result of `start_processes`, in a script that a launcher runs in several processes: they share
            the work, and all get the same Run.
        strict: raise SinkscopeError, and measure nothing, where some attention of the model cannot be read or a keyword
            of it is not known; raise it too where one of `metrics` fails, whose columns are left out otherwise.
        options: those of the questions, such as `window` and `sinks` of measure="streaming"; `sinkscope scan --help`
            lists them.

    Returns:
        A Run: tables as pandas frames, summary and manifest as records. Nothing is written; use `run.save(folder)`.

    Raises:
        SinkscopeError: anything the user can fix, in one line; also where another thread of this process measures.
            Interrupted: Ctrl-C; it holds what was measured.

    Other threads may use other models meanwhile. A forward pass of this model in another thread is not measured either,
    but while the self-check runs it may attend with the wrong function: pass self_check=False there.
    """
    unknown = sorted(options.keys() - declared_options().keys())
    if unknown:
        raise TypeError(f"scan() got an unexpected keyword argument {unknown[0]!r}")
    asked: dict[str, Any] = options | {
        "name": name, "images": images, "audio": audio, "prompt": prompt, "seq_len": seq_len,
        "num_sequences": num_sequences, "batch_size": batch_size, "bos": bos, "first": first, "prepend": prepend,
        "generate": generate,
        "device": device, "device_map": device_map, "dtype": dtype, "revision": revision, "adapter": adapter,
        "trust_remote_code": trust_remote_code, "allow_pickle": allow_pickle, "seed": seed, "epsilon": epsilon,
        "dormant_rule": dormant_rule, "measures": measure, "spectra": spectra,
        "lengths": lengths, "self_check": self_check,
    }  # fmt: skip
    if smoothing:
        asked["measures"] = (*([measure] if isinstance(measure, str) else measure), "smoothing")
    request = processes.run(lambda: requested(model, data, asked))
    return scan_request(
        request, model=model, tokenizer=tokenizer, metrics=metrics, shards=shards, resume=resume, progress=progress,
        processes=processes, strict=strict,
    )  # fmt: skip


def scan_request(
    request: Request,
    *,
    model: Any = None,
    tokenizer: Any = None,
    metrics: Sequence[Callable[..., Any] | str | Path] = (),
    shards: str | Path | None = None,
    resume: bool = False,
    progress: Progress | None = None,
    processes: Processes = ALONE,
    strict: bool = False,
) -> Run:
    """Runs the scan of a request. The request may come from a manifest or a baseline, to measure the same way again.

    `model`: a model object in place of `request.model`. The other arguments are those of `scan`. Raises as `scan` does,
    and SinkscopeError where the request's data were handed over in Python and are no longer there.
    """
    with alone(f"a scan of {request.model}"):
        report = Stages(progress or (lambda *_: None))
        with COMPILATION.told(report.compiling):
            return _scan(request, model, tokenizer, metrics, shards, resume, report, processes, strict)


def _scan(
    request: Request, model: Any, tokenizer: Any, metrics: Sequence[Callable[..., Any] | str | Path],
    shards: str | Path | None, resume: bool, report: Progress, processes: Processes, strict: bool,
) -> Run:  # fmt: skip
    started = time.perf_counter()
    if request.given is not None and request.handed is None:
        raise SinkscopeError(
            f"the {request.given} of that scan were handed over in Python, or in a folder that sinkscope 0.1 did not "
            "record: they cannot be read again; scan the model yourself and give its run folder"
        )
    with ExitStack() as ended:
        loop, manifest = _set_up(request, model, tokenizer, metrics, report, processes, strict, resume, ended)

        def whole() -> Manifest:
            return with_weights(manifest, loop.checkpoint)

        if shards is not None:
            before = processes.on_main(lambda: finished_before(shards, whole()) if resume else None)
            if before is not None:
                return before
            loop.shards = processes.on_main(lambda: _kept(shards, lambda: resume_key(whole(), loop.checkpoint), resume))
        try:
            loop.run()
        except KeyboardInterrupt:
            raise Interrupted(build_run(loop, whole(), started, False) if loop.done else None) from None
        finally:
            if loop.shards is not None and processes.index == 0:
                loop.shards.discard_if_empty()
        return processes.run(lambda: build_run(loop, whole(), started, True))


def _kept(folder: str | Path, key: Callable[[], dict[str, Any]], resume: bool) -> Shards:
    """Where batches are kept. The key holds the weights' hash: only a scan that resumes waits for it now."""
    return Shards.open(folder, key(), True) if resume else Shards.begin(folder, key)


def _set_up(
    request: Request, model: Any, tokenizer: Any, metrics: Sequence[Callable[..., Any] | str | Path],
    report: Progress, processes: Processes, strict: bool, resume: bool, ended: ExitStack,
) -> tuple[Loop, Manifest]:  # fmt: skip
    """Everything before the first batch: checks, loading, the dry run, reading, the self-check.

    `ended`: closes the checkpoint.
    """
    measured = processes.run(lambda: _checked(request, metrics))
    model = request.model if model is None else model
    processes.check(model, request.device_map)
    if processes.tensor:
        refuse_spread(measurements(request.measures))
    checkpoint = processes.run(lambda: loaded(request, model, tokenizer, report, processes, not resume))
    ended.callback(checkpoint.close)
    loop = processes.run(lambda: _prepare(checkpoint, request, report, processes, strict))
    request = request.model_copy(update={"measures": questions_asked((*request.measures, *loop.reading.measures))})
    loop.declared = quantity_set(measured, request.lengths)
    read = [corpus.fingerprint for corpus in loop.reading.corpora]
    code = [definitions(measured), declared_keywords(loop.plan)]
    processes.require_same([checkpoint.facts["weights_sha256"], *code, *read])
    subject = Subject(
        checkpoint.model, loop.plan, measured, lambda: _short_pass(loop),
        lambda batch: loop.forward(batch.inputs, batch.mask, **batch.extra), request, loop.reading.rules.bos_id,
    )  # fmt: skip
    loop.measurements = processes.run(lambda: [kind(subject) for kind in measurements(request.measures)])
    checked = check_loop(loop) if request.self_check else {"status": "skipped"}
    left_out = unread(loop.plan, checked)
    if strict and left_out:
        more = f" (and {len(left_out) - 1} more)" if len(left_out) > 1 else ""
        raise SinkscopeError(f"--strict: {left_out[0]}{more}")
    return loop, describe(loop, request.model_copy(update={"model": checkpoint.facts["id"]}), checked)


def _checked(request: Request, metrics: Sequence[Callable[..., Any] | str | Path]) -> MetricSet:
    """The metrics of the scan. Raises SinkscopeError for what is wrong with the request for every model."""
    check_asked(request)
    measured = metric_set(metrics).asked(request.measures)
    check_rule(request.dormant_rule, measured.names("heads"))
    return measured


def _prepare(checkpoint: Checkpoint, request: Request, report: Progress, processes: Processes, strict: bool) -> Loop:
    """Finds the model's attention calls and reads its inputs."""
    forward = Forward(checkpoint.model)
    kind = claim(request, checkpoint, forward)
    short, extra = kind.probe()
    with memory_needed(f"a dry run of {DRY_RUN_TOKENS} tokens"):
        found = plan(checkpoint.model, lambda: forward(short, **extra))
    reading = kind.read(found.positions)
    check_lengths(request.lengths, max(data.longest for data in reading.tokens))
    heads = None
    if processes.tensor:
        found, heads = spread(checkpoint.model, found, processes.count)
    return Loop(
        checkpoint, found, forward, reading, request.epsilon, report, request.batch_size, spectra=request.spectra,
        processes=processes, heads=heads, strict=strict,
    )  # fmt: skip


def _short_pass(loop: Loop) -> None:
    loop.forward.at_position_zero(loop.reading.kind.several_probes())
