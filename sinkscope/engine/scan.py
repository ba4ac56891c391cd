"""The engine: a model, batches of text, the metrics -> a Run."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sinkscope.capture import not_softmax, plan
from sinkscope.capture.kernels.attend import failures
from sinkscope.checkpoints import Checkpoint, LoadOptions, open_checkpoint, wrap_model
from sinkscope.checkpoints.forward import Forward
from sinkscope.checkpoints.probes import DRY_RUN_TOKENS, probe, several_probes
from sinkscope.comparison.domains import contrast_summary, contrast_table
from sinkscope.engine import manifest
from sinkscope.engine.batch_size import memory_needed
from sinkscope.engine.launch import ALONE, Processes
from sinkscope.engine.loop import Loop, Progress
from sinkscope.engine.reading import read_inputs
from sinkscope.engine.self_check import self_check as check_against_eager
from sinkscope.engine.self_check import warnings_of
from sinkscope.engine.shards import Shards
from sinkscope.engine.signals import probe_of, read_signals, show
from sinkscope.engine.smoother import Smoother, smoother
from sinkscope.engine.tensor_parallel import spread
from sinkscope.errors import SinkscopeError
from sinkscope.inputs.rules import shared_tokens
from sinkscope.metrics.spectra import FEWEST_SPECTRA, SPECTRA_CUBES
from sinkscope.runs.image_tokens import image_tokens
from sinkscope.runs.published import published_for
from sinkscope.runs.request import Request
from sinkscope.runs.run import Run
from sinkscope.runs.settings import DEFAULT_RULE, Settings
from sinkscope.runs.smoothing import add_to_summary, smoothing_table
from sinkscope.runs.summary import domain_summaries
from sinkscope.runs.tables import curve_table, head_table, layer_table, position_table, sequence_table


class Interrupted(KeyboardInterrupt):
    """Ctrl-C during a scan. `run` holds what was measured until then (manifest: complete = false), or None."""

    def __init__(self, run: Run | None) -> None:
        super().__init__("scan interrupted")
        self.run = run


def scan(
    model: Any,
    *,
    data: Any = None,
    images: str | Path | None = None,
    audio: str | Path | None = None,
    prompt: str | None = None,
    seq_len: int | None = None,
    num_sequences: int | None = None,
    batch_size: int | None = None,
    bos: str | Sequence[str] = "auto",
    tokenizer: Any = None,
    device: str = "auto",
    device_map: str | dict[str, Any] | None = None,
    dtype: str = "auto",
    revision: str | None = None,
    trust_remote_code: bool = False,
    allow_pickle: bool = False,
    seed: int = 0,
    epsilon: float = 0.3,
    dormant_rule: str = DEFAULT_RULE,
    smoothing: bool = False,
    spectra: int | None = None,
    self_check: bool = True,
    shards: str | Path | None = None,
    resume: bool = False,
    progress: Progress | None = None,
    processes: Processes = ALONE,
) -> Run:
    """Measures every attention head of a model while it reads text once.

    Args:
        model: a name (hub id, folder, .gguf file, example:NAME) or a transformers model already loaded, in eval mode.
        data: a SPEC or a list of them (each becomes a domain), "prose" by default; or token ids: a tensor
            [sequence, T], a list of lists of int, or a mapping with `input_ids` and `attention_mask`, or with
            `position_ids` of packed rows, whose pieces are read apart. No tokenizer is needed for token ids. Vision
            models read a mapping with `pixel_values` [picture, channel, height, width]; vision-language models what
            their processor returns, as many pictures in each sequence: `input_ids`, `pixel_values`, ... Speech models
            read `input_features` or `input_values` [recording, ...], all of one length, and beside them
            `decoder_input_ids` [recording, token] where they have a decoder (its start token alone without). A model
            that reads real vectors (the trigger task's) brings its data itself.
        images, audio: a folder of png and jpg, or of wav files, for the checkpoint's own processor, one for each
            sequence. prompt: the text beside each, which a speech model's decoder reads.
        seq_len, num_sequences: tokens a sequence and sequences a SPEC; 256 and 32 for text, all there is for token ids,
            the task's own length and number for a model that brings a task.
        bos: the first token: auto (the tokenizer's habit), always, never; a list of them makes a domain of each.
        batch_size: None = chosen by the device and halved when memory runs out.
        tokenizer: for a model object; a name brings its own.
        device_map: `auto`, or accelerate's map of module paths to devices: the model is spread over them.
        epsilon: the sink threshold. dormant_rule: "NAME<x" on a head column.
        smoothing: measure the smoothing table too (`Run.smoothing`).
        spectra: sequences of each domain whose matrix_entropy is measured, the first ones; None = as many as are cheap.
        self_check: compare one short sequence with the model's own eager attention first.
        shards: a folder that keeps every finished batch until the run is saved there. resume: go on with what an
            earlier scan of the same model, data and settings left in it; the result is the same to the last bit.
        processes: what `processes.start` gave, in a script that a launcher runs in several processes: they share the
            work, and all get the same Run.

    Returns:
        A Run: tables as pandas frames, summary and manifest as dicts. Nothing is written; use `run.save(folder)`.

    Raises:
        SinkscopeError: anything the user can mend, in one line. Interrupted: Ctrl-C, with what was done.
    """
    started = time.perf_counter()
    settings = Settings(epsilon, dormant_rule, spectra)
    request = processes.agree(lambda: Request(data, seq_len, num_sequences, bos, seed, images, prompt, audio))
    if batch_size is not None and batch_size < 1:
        raise SinkscopeError(f"--batch-size {batch_size}: at least 1 is needed")
    processes.check(model, device_map, smoothing)
    options = LoadOptions(
        revision, processes.device(device), device_map, dtype, trust_remote_code, allow_pickle,
        tensor_parallel=processes.count if processes.tensor else 1,
    )  # fmt: skip
    report = progress or _silent
    checkpoint = processes.agree(lambda: _load(model, tokenizer, options, report))
    loop = processes.agree(lambda: _prepare(checkpoint, request, settings, batch_size, report, processes))
    processes.same([checkpoint.facts["weights_sha256"], *(corpus.fingerprint for corpus in loop.reading.corpora)])
    if smoothing:
        loop.smoother = processes.agree(lambda: _smoother(loop))
    checked = _check(loop) if self_check else {"status": "skipped"}
    facts = manifest.describe(checkpoint, loop.sites, loop.reading, request, settings, checked, processes)
    facts["decoder_input"] = loop.reading.decoder_input or loop.forward.decoder_input
    warnings = [*loop.checkpoint.warnings, *loop.reading.warnings, *_unread(loop), *warnings_of(checked)]
    facts["warnings"] = warnings
    if shards is not None:
        rule = [SPECTRA_CUBES, FEWEST_SPECTRA] if spectra is None else spectra
        key = facts | {"batch_size": batch_size, "smoothing": smoothing, "spectra": rule}
        loop.shards = processes.on_main(lambda: Shards.open(shards, key, resume))
    try:
        loop.run()
    except KeyboardInterrupt:
        raise Interrupted(_build(loop, facts, settings, started, False) if loop.done else None) from None
    finally:
        if loop.shards is not None and processes.index == 0:
            loop.shards.discard_if_empty()
    return processes.agree(lambda: _build(loop, facts, settings, started, True))


def _silent(stage: str, done: int, total: int) -> None:
    """No progress shown."""


def _load(model: Any, tokenizer: Any, options: LoadOptions, report: Progress) -> Checkpoint:
    report("loading", 0, 0)
    return open_checkpoint(model, options) if isinstance(model, str) else wrap_model(model, tokenizer)


def _prepare(
    checkpoint: Checkpoint, request: Request, settings: Settings, batch_size: int | None, report: Progress,
    processes: Processes,
) -> Loop:  # fmt: skip
    """The model's attention calls found, its inputs read: with loading all that can fail before the first batch."""
    forward = Forward(checkpoint.model)
    shown = read_signals(request, checkpoint, forward)
    short, extra = (probe(checkpoint), {}) if shown is None else probe_of(shown, checkpoint)
    with memory_needed(f"a dry run of {DRY_RUN_TOKENS} tokens"):
        found = plan(checkpoint.model, lambda: forward(short, **extra))
    reading = read_inputs(request, checkpoint) if shown is None else show(shown, checkpoint, found.positions)
    heads = None
    if processes.tensor:
        found, heads = spread(checkpoint.model, found, processes.count)
    return Loop(
        checkpoint, found, forward, reading, settings.epsilon, report, batch_size, spectra=settings.spectra,
        processes=processes, heads=heads,
    )  # fmt: skip


def _smoother(loop: Loop) -> Smoother:
    if loop.forward.signal is not None:
        name = type(loop.checkpoint.model).__name__
        raise SinkscopeError(
            f"--smoothing: W_V is looked for in a pass over token ids, and {name} reads {loop.forward.signal}"
        )
    several = several_probes(loop.checkpoint)
    with memory_needed("a short pass that looks for W_V (--smoothing)"):
        return smoother(loop.checkpoint.model, loop.plan, lambda: loop.forward.at_position_zero(several))


def _check(loop: Loop) -> dict[str, Any]:
    """What the self-check found; in a launch, in the process where the difference is largest."""
    loop.report("checking", 0, loop.reading.total)

    def check() -> dict[str, Any]:
        with memory_needed("the self-check (--no-self-check skips it)"):
            sequence, extra = loop.reading.first_sequence(loop.checkpoint.device)
            return check_against_eager(loop.checkpoint.model, loop.plan, loop.forward, sequence, extra)

    return max(loop.processes.together(check), key=lambda found: found["max_difference"] or 0.0)


def _unread(loop: Loop) -> list[str]:
    names = loop.plan.unread
    return [f"attention that is no map of queries and keys was not read: {', '.join(names)}"] if names else []


def _build(loop: Loop, facts: dict[str, Any], settings: Settings, started: float, complete: bool) -> Run:
    """Tables, summary and manifest from what the loop has measured."""
    manifest.tell_of_failures(facts, [*failures(), *loop.failures])
    sites, domains, checkpoint = loop.sites, loop.domains(), loop.checkpoint
    facts["spectra_measured"] = manifest.spectra_measured(domains)
    tokens = {domain.name: shared_tokens(domain.ids, loop.reading.tokenizer) for domain in domains}
    heads = head_table(domains, sites, settings)
    layers = layer_table(domains, sites, heads, settings)
    positions = position_table(domains, sites, tokens)
    contrast = contrast_table(domains, sites) if len(domains) > 1 else None
    summary = {
        "schema_version": manifest.SCHEMA_VERSION,
        "model": checkpoint.facts["id"],
        "complete": complete,
        "data": [domain.name for domain in domains],
        "sequences": loop.done,
        "epsilon": settings.epsilon,
        "first_token": loop.reading.first_token(len(domains)),
        **domain_summaries(domains, sites, heads, layers, tokens, settings),
        "domains_compared": [] if contrast is None else contrast_summary(contrast),
        "published": published_for(checkpoint.facts["id"]),
        "not_softmax": not_softmax(checkpoint.model, sites),
        "joined_sequences": sum(corpus.joined for corpus in loop.reading.corpora),
        "warnings": facts["warnings"],
    }
    if checkpoint.task is not None:
        summary["task"] = checkpoint.task.report(positions)
    if loop.reading.image_id is not None:
        summary["image_tokens"] = image_tokens(domains[0], sites, loop.reading.image_id)
    smoothing = None
    if isinstance(loop.smoother, Smoother):
        smoothing = smoothing_table(domains, sites, loop.smoother.wirings)
        add_to_summary(summary, smoothing)
    timing = manifest.progress(loop.done, loop.seconds, time.perf_counter() - started)
    return Run(
        heads=heads,
        layers=layers,
        positions=positions,
        length_curve=curve_table(domains, sites, settings),
        sequences=sequence_table(domains, sites),
        domains=contrast,
        summary=summary,
        shards=loop.shards.folder if loop.shards is not None else None,
        smoothing=smoothing,
        manifest=facts | {"complete": complete, "batch_size": loop.smallest_batch} | timing,
    )
