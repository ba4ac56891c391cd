"""The engine: a model, batches of text, the metrics -> a Run."""

from __future__ import annotations

import datetime
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from accelerate.utils import release_memory
from accelerate.utils.memory import should_reduce_batch_size

import sinkscope
from sinkscope.capture import Capture, LayerView, Plan, plan
from sinkscope.checkpoints import Checkpoint, LoadOptions, open_checkpoint, wrap_model
from sinkscope.errors import SinkscopeError
from sinkscope.forward import Forward
from sinkscope.inputs import BOS_MODES, Corpus, TokenRules, check_spec, read_corpus, token_rules
from sinkscope.inputs.batches import Batch, TokenData, as_corpus, batches, token_data
from sinkscope.inputs.pictures import NAMES as PICTURE_POSITIONS
from sinkscope.inputs.pictures import Pictures, picture_data, picture_rules
from sinkscope.inputs.vectors import TASKS, KindNames, read_task, task_rules
from sinkscope.measured import Collector, Domain
from sinkscope.metrics import columns
from sinkscope.metrics.registry import TABLES
from sinkscope.run import Run
from sinkscope.selfcheck import self_check as check_against_eager
from sinkscope.summary import stream_summaries
from sinkscope.tables import (
    Settings,
    curve_table,
    head_table,
    layer_table,
    parse_rule,
    position_table,
    sequence_table,
)

SCHEMA_VERSION = 1
DRY_RUN_TOKENS = 16
CPU_BATCH_TOKENS, DEVICE_BATCH_TOKENS = 1024, 16384
SEQ_LEN, NUM_SEQUENCES, DEFAULT_DATA = 256, 32, "prose"

Progress = Callable[[str, int, int], None]
"""Called with (stage, sequences done, sequences in all); stages are `loading`, `checking`, `scanning`."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C during a scan. `run` holds what was measured until then (manifest: complete = false), or None."""

    def __init__(self, run: Run | None) -> None:
        super().__init__("scan interrupted")
        self.run = run


@dataclass
class _Work:
    """One scan under way."""

    checkpoint: Checkpoint
    plan: Plan
    forward: Forward
    rules: TokenRules
    corpora: list[Corpus]
    settings: Settings
    progress: Progress
    data: list[TokenData]
    batch_size: int | None
    warnings: list[str] = field(default_factory=list)
    collectors: list[Collector] = field(default_factory=list)
    done: int = 0
    smallest_batch: int | None = None
    fits: int | None = None
    seconds: float = 0.0

    @property
    def total(self) -> int:
        return sum(len(data.ids) for data in self.data)


def scan(
    model: Any,
    *,
    data: Any = None,
    seq_len: int | None = None,
    num_sequences: int | None = None,
    batch_size: int | None = None,
    bos: str = "auto",
    tokenizer: Any = None,
    device: str = "auto",
    device_map: str | None = None,
    dtype: str = "auto",
    revision: str | None = None,
    trust_remote_code: bool = False,
    allow_pickle: bool = False,
    seed: int = 0,
    epsilon: float = 0.3,
    dormant_rule: str = "honor<0.4",
    self_check: bool = True,
    progress: Progress | None = None,
) -> Run:
    """Measures every attention head of a model while it reads text once.

    Args:
        model: a name (hub id, folder, .gguf file, example:NAME) or a transformers model already loaded, in eval mode.
        data: a SPEC or a list of them (each becomes a domain), "prose" by default; or token ids: a tensor
            [sequence, T], a list of lists of int, or a mapping with `input_ids` and `attention_mask`. No tokenizer is
            needed for token ids. Vision models read a mapping with `pixel_values` [picture, channel, height, width].
            A model that reads real vectors (the trigger task's) brings its data itself.
        seq_len, num_sequences: tokens a sequence and sequences a SPEC; 256 and 32 for text, all there is for token ids,
            the task's own length and number for a model that brings a task.
        batch_size: None = chosen by the device and halved when memory runs out.
        tokenizer: for a model object; a name brings its own.
        epsilon: the sink threshold. dormant_rule: "NAME<x" on a head column.
        self_check: compare one short sequence with the model's own eager attention first.

    Returns:
        A Run: tables as pandas frames, summary and manifest as dicts. Nothing is written; use `run.save(folder)`.

    Raises:
        SinkscopeError: anything the user can mend, in one line. Interrupted: Ctrl-C, with what was done.
    """
    started = time.perf_counter()
    report = progress or (lambda stage, done, total: None)
    settings = Settings(epsilon, dormant_rule)
    _check_arguments(seq_len, num_sequences, batch_size, bos, seed, settings)
    specs = _specs(data)
    for spec in specs:
        if spec not in TASKS:
            check_spec(spec)
    report("loading", 0, 0)
    options = LoadOptions(revision, device, device_map, dtype, trust_remote_code, allow_pickle)
    checkpoint = open_checkpoint(model, options) if isinstance(model, str) else wrap_model(model, tokenizer)
    forward = Forward(checkpoint.model)
    pictures = picture_data(data, num_sequences)
    _check_inputs(checkpoint, forward, pictures, seq_len)
    rules = _rules(checkpoint) if pictures is None else picture_rules()
    probe = _probe(checkpoint) if pictures is None else pictures.probe().to(checkpoint.device)
    with _memory_needed(f"a dry run of {DRY_RUN_TOKENS} tokens"):
        found = plan(checkpoint.model, lambda: forward(probe))
    if pictures is None:
        corpora, tokens = _read(data, specs, checkpoint, rules, seq_len, num_sequences, bos, seed)
    else:
        corpora, tokens = _shown(pictures, checkpoint, found.positions)
    work = _Work(checkpoint, found, forward, rules, corpora, settings, report, tokens, batch_size)
    work.warnings += [*checkpoint.warnings, *(warning for corpus in corpora for warning in corpus.warnings)]
    if found.unread:
        work.warnings.append(
            f"attention in a form that is no map of queries and keys was not read: {', '.join(found.unread)}"
        )
    checked: dict[str, Any] = {"status": "skipped"}
    if self_check:
        report("checking", 0, work.total)
        with _memory_needed("the self-check (--no-self-check skips it)"):
            checked = check_against_eager(checkpoint.model, found, forward, _first_sequence(tokens[0], checkpoint))
        if checked["status"] != "passed":
            work.warnings.append(_check_warning(checked))
    manifest = _manifest(work, seed, bos, checked)
    try:
        _measure(work)
    except KeyboardInterrupt:
        raise Interrupted(_build(work, manifest, started, complete=False) if work.done else None) from None
    return _build(work, manifest, started, complete=True)


def _check_arguments(
    seq_len: int | None, num_sequences: int | None, batch: int | None, bos: str, seed: int, settings: Settings
) -> None:
    """What is wrong whatever the model: said before it is loaded."""
    parse_rule(settings.dormant_rule)
    if seq_len is not None and seq_len < 2:
        raise SinkscopeError(f"--seq-len {seq_len}: at least 2 tokens are needed (bos_mass starts at the second)")
    if num_sequences is not None and num_sequences < 1:
        raise SinkscopeError(f"--num-sequences {num_sequences}: at least 1 is needed")
    if batch is not None and batch < 1:
        raise SinkscopeError(f"--batch-size {batch}: at least 1 is needed")
    if bos not in BOS_MODES:
        raise SinkscopeError(f"--bos {bos!r}: one of {', '.join(BOS_MODES)}")
    if seed < 0:
        raise SinkscopeError(f"--seed {seed}: 0 or more is needed")
    if not 0 < settings.epsilon < 1:
        raise SinkscopeError(f"--epsilon {settings.epsilon}: a probability between 0 and 1 is needed")


def _check_inputs(checkpoint: Checkpoint, forward: Forward, pictures: Pictures | None, seq_len: int | None) -> None:
    """Pictures for the models that see, text for those that read."""
    name = type(checkpoint.model).__name__
    if forward.sees and pictures is None:
        raise SinkscopeError(
            f"{name} reads pixel_values, not token ids: text models only, but in Python "
            'scan(model, data={"pixel_values": tensor}) reads pictures'
        )
    if pictures is not None and not forward.sees:
        raise SinkscopeError(f"{name} reads token ids, not pixel_values")
    if pictures is not None and seq_len is not None:
        raise SinkscopeError("--seq-len: a picture has as many positions as the model gives it")


def _shown(pictures: Pictures, checkpoint: Checkpoint, positions: int) -> tuple[list[Corpus], list[TokenData]]:
    """Pictures in the place of sequences."""
    checkpoint.tokenizer = KindNames(PICTURE_POSITIONS)
    corpus = pictures.corpus(positions)
    return [corpus], [TokenData(corpus.ids, vectors=corpus.vectors)]


def _rules(checkpoint: Checkpoint) -> TokenRules:
    if checkpoint.task is not None:
        return task_rules(checkpoint.task)
    return token_rules(checkpoint.tokenizer, checkpoint.vocabulary)


def _probe(checkpoint: Checkpoint) -> torch.Tensor:
    """One short input for the dry run."""
    if checkpoint.task is not None:
        return torch.from_numpy(checkpoint.task.read(None, 1, 0).vectors).to(checkpoint.device)
    return torch.arange(DRY_RUN_TOKENS, device=checkpoint.device).remainder(checkpoint.vocabulary)[None]


def _read(
    data: Any, specs: list[str], checkpoint: Checkpoint, rules: TokenRules, seq_len: int | None, count: int | None,
    bos: str, seed: int,
) -> tuple[list[Corpus], list[TokenData]]:  # fmt: skip
    """The sequences of every domain: the model's own task, text, or token ids as given."""
    if checkpoint.task is not None:
        drawn = read_task(checkpoint.task, data, checkpoint.name, seq_len, count, seed)
        return [drawn], [TokenData(drawn.ids, vectors=drawn.vectors)]
    for spec in specs:
        check_spec(spec)  # the name of a task is none of the data that other models read
    if specs:
        corpora = _read_text(specs, checkpoint, rules, seq_len, count, bos, seed)
        return corpora, [TokenData(corpus.ids) for corpus in corpora]
    tokens = _read_ids(data, checkpoint, seq_len, count)
    return [as_corpus(tokens)], [tokens]


def _specs(data: Any) -> list[str]:
    """The SPECs that `data` names, "prose" by default; none where it is token ids."""
    if data is None:
        return [DEFAULT_DATA]
    specs = [data] if isinstance(data, str) else data
    if not isinstance(specs, Sequence) or not specs or not all(isinstance(spec, str) for spec in specs):
        return []
    if len(set(specs)) < len(specs):
        raise SinkscopeError("--data names the same source twice")
    return list(specs)


def _read_text(
    specs: list[str], checkpoint: Checkpoint, rules: TokenRules, seq_len: int | None, count: int | None, bos: str,
    seed: int,
) -> list[Corpus]:  # fmt: skip
    """One corpus a SPEC, checked against the model's positions."""
    length = seq_len or SEQ_LEN
    _check_length(checkpoint, length)
    if checkpoint.tokenizer_error and not all(_needs_no_tokenizer(spec) for spec in specs):
        raise SinkscopeError(
            f"{checkpoint.name} has no usable tokenizer ({checkpoint.tokenizer_error}): text cannot be read; "
            "give token ids (.jsonl with `input_ids`) or --data random"
        )
    return [read_corpus(spec, checkpoint.tokenizer, rules, length, count or NUM_SEQUENCES, bos, seed) for spec in specs]


def _read_ids(data: Any, checkpoint: Checkpoint, seq_len: int | None, count: int | None) -> TokenData:
    """Token ids as given; cut where `seq_len` or `num_sequences` say so."""
    tokens = token_data(data, checkpoint.vocabulary)
    mask = None if tokens.mask is None else tokens.mask[:count, :seq_len]
    tokens = TokenData(tokens.ids[:count, :seq_len], mask)
    _check_length(checkpoint, tokens.longest)
    return tokens


@contextmanager
def _memory_needed(what: str) -> Iterator[None]:
    """Out of memory inside the block becomes one line that says what did not fit."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, RuntimeError) and not should_reduce_batch_size(error):
            raise
        raise SinkscopeError(
            f"out of memory in {what}: try --dtype bfloat16, --device-map auto or another --device"
        ) from None


def _needs_no_tokenizer(spec: str) -> bool:
    return spec in ("random", "repeated") or spec.partition("#")[0].endswith((".jsonl", ".parquet"))


def _check_length(checkpoint: Checkpoint, length: int) -> None:
    limit = checkpoint.max_positions
    if limit is not None and length > limit:
        raise SinkscopeError(
            f"--seq-len {length} exceeds the {limit} positions of {checkpoint.name}: give {limit} or less"
        )


def _first_sequence(data: TokenData, checkpoint: Checkpoint) -> torch.Tensor:
    """The valid tokens of the first sequence, [1, length]."""
    batch = next(batches(data, 0, 1, checkpoint.device))
    return batch.inputs if batch.spans is None else batch.inputs[:, slice(*batch.spans[0])]


def _check_warning(checked: dict[str, Any]) -> str:
    if checked["status"] == "warning":
        return (
            f"self-check: {checked['max_difference']:.2g} from eager attention at {checked['where']}, more than the "
            f"{checked['bound']:g} that half precision explains; try --dtype float32"
        )
    return f"self-check not possible: {checked['reason']}"


def _measure(work: _Work) -> None:
    for data in work.data:
        collector = Collector(data.longest)
        work.collectors.append(collector)
        _measure_domain(work, data, collector)


def _measure_domain(work: _Work, data: TokenData, collector: Collector) -> None:
    """All batches of one domain. Out of memory halves the batch and goes on where it stopped."""

    def receive(view: LayerView, row: int) -> None:
        collector.add(view)

    capture = Capture(work.checkpoint.model, work.plan, receive, work.settings.epsilon)
    limit = CPU_BATCH_TOKENS if work.checkpoint.device.type == "cpu" else DEVICE_BATCH_TOKENS
    size = work.fits or work.batch_size or max(1, min(len(data.ids), limit // data.ids.shape[1]))
    start, finished = work.done, 0
    work.progress("scanning", work.done, work.total)
    while finished < len(data.ids):
        work.smallest_batch = size if work.smallest_batch is None else min(size, work.smallest_batch)
        began = time.perf_counter()
        try:
            finished += _one_batch(
                work, capture, collector, next(batches(data, finished, size, work.checkpoint.device))
            )
        except (RuntimeError, MemoryError) as error:
            if isinstance(error, RuntimeError) and not should_reduce_batch_size(error):
                raise
            if size == 1:
                raise SinkscopeError(_what_would_fit(data.ids.shape[1])) from None
            work.fits = size = size // 2
            release_memory()
        work.done = start + finished
        work.seconds += time.perf_counter() - began
        work.progress("scanning", work.done, work.total)


def _what_would_fit(length: int) -> str:
    return (
        f"out of memory with one sequence of {length} tokens: try --seq-len {max(2, length // 2)}, --dtype bfloat16, "
        "or --device-map auto"
    )


def _one_batch(work: _Work, capture: Capture, collector: Collector, batch: Batch) -> int:
    """Runs and keeps one batch; returns its number of sequences."""
    collector.begin()
    with capture.watching(batch.spans, batch.inputs.shape[1]):
        work.forward(batch.inputs, batch.mask)
    bad = collector.bad_site(work.plan.sites)
    if bad is not None:
        raise SinkscopeError(_why_not_finite(work.checkpoint, bad.layer, bad.module))
    collector.commit()
    return len(batch)


def _why_not_finite(checkpoint: Checkpoint, layer: int, module: str) -> str:
    """The weights are finite (checked on loading): the dtype overflowed."""
    return (
        f"layer {layer} ({module}) gives NaN or infinity although all weights are finite: "
        f"{checkpoint.facts['dtype']} overflows; try --dtype float32"
    )


def _build(work: _Work, manifest: dict[str, Any], started: float, complete: bool) -> Run:
    """Tables, summary and manifest from what the collectors hold."""
    sites, settings = work.plan.sites, work.settings
    domains = []
    for corpus, collector in zip(work.corpora, work.collectors, strict=False):
        values = collector.values()
        if values:
            domains.append(Domain(corpus.domain, corpus.ids, corpus.documents, values))
    tokens = {domain.name: _shared_tokens(domain, work.checkpoint.tokenizer) for domain in domains}
    heads = head_table(domains, sites, settings)
    layers = layer_table(domains, sites, heads, settings)
    positions = position_table(domains, sites, tokens)
    summary = _summary(work, domains, heads, layers, tokens, complete)
    if work.checkpoint.task is not None:
        summary["task"] = work.checkpoint.task.report(positions)
    manifest |= {
        "complete": complete,
        "sequences_done": work.done,
        "batch_size": work.smallest_batch,
        "warnings": work.warnings,
        "timing": {
            "scan_seconds": round(work.seconds, 3),
            "total_seconds": round(time.perf_counter() - started, 3),
            "sequences_per_second": round(work.done / work.seconds, 3) if work.seconds else None,
        },
    }
    return Run(
        heads=heads,
        layers=layers,
        positions=positions,
        length_curve=curve_table(domains, sites, settings),
        sequences=sequence_table(domains, sites),
        summary=summary,
        manifest=manifest,
    )


def _summary(
    work: _Work, domains: list[Domain], heads: Any, layers: Any, tokens: dict[str, list[str | None]], complete: bool
) -> dict[str, Any]:
    sites, settings = work.plan.sites, work.settings
    summary: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "model": work.checkpoint.facts["id"],
        "complete": complete,
        "data": [domain.name for domain in domains],
        "sequences": work.done,
        "epsilon": settings.epsilon,
        "first_token": _first_token(domains, work),
        "streams": stream_summaries(domains, sites, heads, layers, tokens, settings),
    }
    if len(domains) > 1:
        summary["domains"] = {
            domain.name: {
                "streams": stream_summaries(
                    [domain], sites, heads[heads["domain"] == domain.name],
                    layers[layers["domain"] == domain.name], tokens, settings,
                )
            }
            for domain in domains
        }  # fmt: skip
        summary["dormant_in_some_domains"] = _dormant_in_some(heads)
    summary["not_softmax"] = not_softmax(work.checkpoint.model, work.plan)
    summary["joined_sequences"] = sum(corpus.joined for corpus in work.corpora)
    summary["warnings"] = work.warnings
    return summary


def _dormant_in_some(heads: Any) -> list[dict[str, Any]]:
    """Heads dormant in one domain and not in another."""
    found = []
    for (stream, layer, head), rows in heads.groupby(["stream", "layer", "head"], sort=False):
        dormant = rows.loc[rows["dormant"].fillna(False).astype(bool), "domain"].tolist()
        if 0 < len(dormant) < len(rows):
            active = [name for name in rows["domain"] if name not in dormant]
            place = {"stream": stream, "layer": int(layer), "head": int(head)}
            found.append(place | {"dormant_in": dormant, "active_in": active})
    return found


def not_softmax(model: torch.nn.Module, found: Plan) -> list[str]:
    """Blocks beside the attention blocks that made no attention call: Mamba, linear attention, convolutions."""
    blocks = {site.block for site in found.sites if site.block is not None}
    parents = {block.rpartition(".")[0] for block in blocks}
    return [
        f"{parent}.{name}"
        for parent in sorted(parents)
        for name, _ in model.get_submodule(parent).named_children()
        if f"{parent}.{name}" not in blocks
    ]


def _shared_tokens(domain: Domain, tokenizer: Any) -> list[str | None]:
    """The token at each position where every sequence of the domain has the same one; None elsewhere."""
    same = (domain.ids == domain.ids[0]).all(0) & (domain.ids[0] >= 0)
    return [_token_text(tokenizer, int(t)) if s else None for t, s in zip(domain.ids[0], same, strict=True)]


def _token_text(tokenizer: Any, token: int) -> str:
    if tokenizer is None:
        return str(token)
    return str(tokenizer.convert_ids_to_tokens(token))


def _first_token(domains: list[Domain], work: _Work) -> dict[str, Any]:
    """Id and text of the first token where all sequences share it, and whether it is the tokenizer's BOS (or CLS)."""
    firsts = np.unique(np.concatenate([domain.ids[:, 0] for domain in domains]))
    if len(firsts) > 1:
        return {"id": None, "text": None, "distinct": len(firsts), "is_bos": False}
    token = int(firsts[0])
    is_bos = work.rules.bos_id == token if work.rules.bos_id is not None else None
    return {"id": token, "text": _token_text(work.checkpoint.tokenizer, token), "distinct": 1, "is_bos": is_bos}


def _manifest(work: _Work, seed: int, bos: str, checked: dict[str, Any]) -> dict[str, Any]:
    return {
        "schema_version": SCHEMA_VERSION,
        "sinkscope": sinkscope.__version__,
        "command": None,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": _versions(),
        "model": work.checkpoint.facts,
        "data": [
            {
                "spec": corpus.domain,
                "fingerprint": corpus.fingerprint,
                "sequences": len(corpus.ids),
                "seq_len": int(corpus.ids.shape[1]),
                "bos": corpus.bos,
                "joined": corpus.joined,
                "dropped": corpus.dropped,
                "documents": corpus.documents,
            }
            for corpus in work.corpora
        ],
        "first_token": _first_token([Domain(c.domain, c.ids, c.documents) for c in work.corpora], work),
        "bos": bos,
        "decoder_input": work.forward.decoder_input,
        "seed": seed,
        "epsilon": work.settings.epsilon,
        "dormant_rule": work.settings.dormant_rule,
        "self_check": checked,
        "attention": [
            {
                "stream": site.stream, "layer": site.layer, "module": site.name, "kind": site.kind, "path": site.path,
                "score": site.score, "causal": site.causal, "heads": site.heads, "kv_groups": site.kv_groups,
                "head_dim": site.head_dim, "value_dim": site.value_dim, "block": site.block,
                "projection": site.projection,
            }
            for site in work.plan.sites
        ],
        "conventions": {
            name: column.formula
            for table in TABLES
            for name, column in columns(table).items()
        },
    }  # fmt: skip


def _versions() -> dict[str, str]:
    from importlib.metadata import version

    packages = ("torch", "transformers", "tokenizers", "numpy", "pandas")
    return {"python": platform.python_version(), **{name: version(name) for name in packages}}
