"""One scan: loads a model, reads its inputs, measures the batches and returns a Run.

Each step of `scan_request` is a function of a file of its own. All processes of a launch take it, and learn how it
ended in the others, before the next one begins.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from sinkscope.capture.alone import alone
from sinkscope.capture.loops.compilation import COMPILATION
from sinkscope.capture.quiet_logs import quiet_logs
from sinkscope.engine.assemble import build_run
from sinkscope.engine.finished import finished_or_shards
from sinkscope.engine.launch import ALONE, Processes
from sinkscope.engine.loaded import checked, loaded
from sinkscope.engine.loop import Progress
from sinkscope.engine.manifest import describe, refuse_unread, shared_facts, with_warnings
from sinkscope.engine.prepared import prepared
from sinkscope.engine.requested import requested
from sinkscope.engine.self_check import check_loop
from sinkscope.engine.stages import Stages
from sinkscope.metrics.extension import refuse_left_out
from sinkscope.runs.defaults import DORMANT_RULE, EPSILON
from sinkscope.runs.questions import declared_options
from sinkscope.runs.request import Request
from sinkscope.runs.run import Run


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
            are for token ids, the task's own length and number for a model that brings a task. A model with fewer than
            256 positions reads as many tokens of text as it has positions.
        bos: the first token: auto (the tokenizer's default), always, never; a list of modes makes a domain of each.
        first: what stands first instead: auto, bos, bosxN (N times), none, random, or a text of one token. prepend: how
            many random tokens stand before that. Every combination makes a domain over the same text.
        generate: how many tokens the model writes after each sequence, greedily; they are measured with it.
        batch_size: None = chosen by the device and halved when memory runs out.
        tokenizer: for a model object; a name brings its own. adapter: a PEFT adapter's folder, for a named model.
        device_map: `auto`, or accelerate's map of module paths to devices: the model is spread over them.
        epsilon: the sink threshold. dormant_rule: "NAME<x" on a head column. smoothing: True adds measure="smoothing".
        measure: what to measure on request (`Run.measured`): names of `sinkscope scan --help`, or "all": all that the
            model and its inputs allow; a warning names the others.
        spectra: how many first sequences of each domain matrix_entropy, and what needs spectra in smoothing.csv, is
            measured on; None = as many as are cheap.
        lengths: the prefixes of length_curve.csv and cosine_curve.csv; None = 64, 128, 256, ... T comes last always.
        metrics: your own functions, decorated with `head_metric` or `layer_metric`, or Python files that define some,
            which are run; they are measured in addition to sinkscope's.
        self_check: compare one short sequence with the model's own eager attention first.
        shards: a folder that keeps every finished batch until the run is saved there. resume: continue from what an
            earlier scan of the same model, data and settings left there; the result is the same to the last bit. If
            that scan is finished, its run is returned. A model object is told by the numbers in it.
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
    settings: dict[str, Any] = options | {
        "name": name, "images": images, "audio": audio, "prompt": prompt, "seq_len": seq_len,
        "num_sequences": num_sequences, "batch_size": batch_size, "bos": bos, "first": first, "prepend": prepend,
        "generate": generate,
        "device": device, "device_map": device_map, "dtype": dtype, "revision": revision, "adapter": adapter,
        "trust_remote_code": trust_remote_code, "allow_pickle": allow_pickle, "seed": seed, "epsilon": epsilon,
        "dormant_rule": dormant_rule, "measures": measure, "spectra": spectra,
        "lengths": lengths, "self_check": self_check,
    }  # fmt: skip
    if smoothing:
        settings["measures"] = (*([measure] if isinstance(measure, str) else measure), "smoothing")
    request = processes.run(partial(requested, model, data, settings))
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
    started, report = time.perf_counter(), Stages(progress or (lambda *_: None))
    if strict:
        processes.run(refuse_left_out)
    model = request.model if model is None else model
    with alone(f"a scan of {request.model}"), COMPILATION.told(report.compiling), ExitStack() as ended:
        declared, options = processes.run(partial(checked, request, metrics, model, processes, not resume))
        checkpoint = processes.run(partial(loaded, model, tokenizer, options, report))
        ended.callback(checkpoint.close)
        ended.enter_context(quiet_logs())  # once: each level that a pass would change empties every logger's cache
        loop, request = processes.run(partial(prepared, request, checkpoint, declared, report, processes, strict))
        processes.require_same(shared_facts(loop))
        check = check_loop(loop) if request.self_check else {"status": "skipped"}
        if strict:
            refuse_unread(loop.plan, check)
        if shards is not None and not isinstance(model, str):
            processes.run(checkpoint.identify)
            processes.require_same(checkpoint.facts.get("tensors_sha256"))
        manifest = with_warnings(describe(loop, request, check), loop.left_out)
        if shards is not None:
            run_or_shards = processes.on_main(partial(finished_or_shards, shards, manifest, checkpoint, resume))
            if isinstance(run_or_shards, Run):
                return run_or_shards
            loop.shards = run_or_shards
        try:
            loop.run()
        except KeyboardInterrupt:
            raise Interrupted(build_run(loop, manifest, started, False) if loop.done else None) from None
        return processes.run(partial(build_run, loop, manifest, started, True))
