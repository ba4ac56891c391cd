"""Writes the manifest of a scan: what is known before the first batch, and what the scan adds."""

from __future__ import annotations

import datetime
import hashlib
import platform
from dataclasses import asdict
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from sinkscope.capture import Plan, Site, keywords
from sinkscope.capture.kernels.attend import TORCH, TRITON
from sinkscope.checkpoints import Checkpoint
from sinkscope.checkpoints.hashing import settings_sha256
from sinkscope.engine.input_kinds.kind import Reading
from sinkscope.engine.launch import Processes
from sinkscope.engine.self_check import EAGER, warnings_of
from sinkscope.engine.shards import first_difference
from sinkscope.errors import SinkscopeError
from sinkscope.inputs import Corpus
from sinkscope.inputs.rules import first_token
from sinkscope.metrics.extension import code_sha256, definitions
from sinkscope.metrics.guests import Guests, slow
from sinkscope.metrics.quantities import QuantitySet
from sinkscope.metrics.spectra import FEWEST_SPECTRA, SPECTRA_CUBES
from sinkscope.runs.defaults import VERSION
from sinkscope.runs.folder import UNFINISHED, sha256_of
from sinkscope.runs.questions import QUESTIONS
from sinkscope.runs.request import Request
from sinkscope.runs.run import Run, finished, load_run
from sinkscope.runs.schema.base import plain
from sinkscope.runs.schema.manifest import KeywordFacts, Manifest, Timing
from sinkscope.runs.schema.site import SiteFacts
from sinkscope.tables.columns import columns
from sinkscope.tables.values import Domain

MEASURING = ("capture", "checkpoints", "engine", "inputs", "metrics", "questions", "trigger", "wiring")
"""The rooms whose code decides what a batch measures."""

PACKAGES = ("torch", "transformers", "tokenizers", "numpy", "numba", "pandas")


class Described(Protocol):
    """What a manifest tells of before the first batch; its attributes are those of `Loop`."""

    checkpoint: Checkpoint
    plan: Plan
    reading: Reading
    processes: Processes
    declared: QuantitySet

    @property
    def sites(self) -> list[Site]: ...

    @property
    def decoder_input(self) -> str | None: ...


def describe(loop: Described, request: Request, checked: dict[str, Any]) -> Manifest:
    """Returns the manifest as known before the first batch. `checked`: the self-check's record."""
    reading, processes = loop.reading, loop.processes
    facts = {
        "sinkscope": VERSION,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": {"python": platform.python_version()}
        | {name: version(name) for name in PACKAGES if find_spec(name)},
        "request": request.as_dict(),
        "model": loop.checkpoint.facts | {"name": request.name},
        "data": [_corpus_facts(corpus, reading) for corpus in reading.corpora],
        "first_token": reading.first_token(),
        "decoder_input": loop.decoder_input,
        "self_check": checked,
        "processes": processes.count,
        "tensor_parallel": processes.count if processes.tensor else 1,
        "attention": [_site_facts(site) for site in loop.sites],
        "conventions": {
            name: column.formula
            for table in dict.fromkeys([*loop.declared.metrics.tables, *_measured_tables(request)])
            for name, column in columns(table, loop.declared.metrics).items()
        },
        "metrics": definitions(loop.declared.metrics),
        "keywords": declared_keywords(loop.plan),
        "warnings": [*loop.checkpoint.warnings, *reading.warnings, *unread(loop.plan, checked), *warnings_of(checked)],
    }
    return Manifest.model_validate(plain(facts))


def with_weights(manifest: Manifest, checkpoint: Checkpoint) -> Manifest:
    """Returns the manifest with the weights' hash, for which it waits."""
    checkpoint.settle()
    model = manifest.model.model_copy(update={"weights_sha256": checkpoint.facts["weights_sha256"]})
    return manifest.model_copy(update={"model": model})


def _measured_tables(request: Request) -> list[str]:
    """The tables that the request's measurements write."""
    return [table.name for name in request.measures for table in QUESTIONS[name].tables]


def spectra_measured(domains: list[Domain]) -> dict[str, int]:
    """Sequences of each domain that matrix_entropy was measured on: the most that any layer has."""
    return {
        domain.name: max(int((~np.isnan(values.layer("matrix_entropy"))).sum()) for values in domain.sites.values())
        for domain in domains
    }


def with_hidden(attention: list[SiteFacts], domains: list[Domain]) -> list[SiteFacts]:
    """Returns the facts of the attention calls with what the scan saw of their masks."""
    seen = {site.module: [d.sites[site.module].hides for d in domains if site.module in d.sites] for site in attention}
    hides = {module: any(found) if found else None for module, found in seen.items()}
    return [site.model_copy(update={"hides": hides[site.module]}) for site in attention]


def with_failures(manifest: Manifest, reasons: list[str]) -> Manifest:
    """Returns the manifest with the reasons why Triton failed during the scan, after which torch measured the rest."""
    if not reasons:
        return manifest
    sites = [
        site.model_copy(update={"kernel": f"{TRITON}, then {TORCH}"}) if site.kernel == TRITON else site
        for site in manifest.attention
    ]
    warnings = [*manifest.warnings, *dict.fromkeys(reasons)]
    return manifest.model_copy(update={"warnings": warnings, "attention": sites})


class Attended(Protocol):
    """What was measured by metrics of others; its attributes are those of `Loop`."""

    processes: Processes
    seconds: float

    @property
    def guests(self) -> Guests: ...

    @property
    def guest_seconds(self) -> dict[str, float]: ...


def with_guests(manifest: Manifest, loop: Attended) -> Manifest:
    """Returns the manifest with what the metrics of others did: those that failed, whose columns no table has, and
    those that took long."""
    failed = loop.guests.failed
    metrics = {name: each.model_copy(update={"failed": failed.get(name)}) for name, each in manifest.metrics.items()}
    told = [*loop.guests.left_out, *slow(loop.guest_seconds, loop.seconds * loop.processes.count)]
    return manifest.model_copy(update={
        "metrics": metrics,
        "conventions": {name: text for name, text in manifest.conventions.items() if name not in failed},
        "warnings": [*manifest.warnings, *told],
    })  # fmt: skip


def timing(done: int, scan_seconds: float, total_seconds: float) -> Timing:
    """How long the scan took; `done`: sequences measured."""
    return Timing(
        scan_seconds=round(scan_seconds, 3),
        total_seconds=round(total_seconds, 3),
        sequences_per_second=round(done / scan_seconds, 3) if scan_seconds else None,
    )


def unread(plan: Plan, checked: dict[str, Any]) -> list[str]:
    """Warnings that name what a scan leaves out: attention that is not read, and keywords that sinkscope does not know.

    `checked`: the self-check's record.
    """
    found = []
    if plan.unread:
        found.append(f"attention that is no map of queries and keys was not read: {', '.join(plan.unread)}")
    agrees = checked["status"] == "passed" and checked["reference"] == EAGER
    shown = (
        "the self-check agreed with the model's own attention maps without it"
        if agrees
        else "no self-check against the model's own attention maps shows that it changes nothing"
    )
    return found + [
        f"the model passes the attention keyword {name!r} (in {module}), which sinkscope does not know and leaves out: "
        f"{shown}"
        for name, module in plan.keywords.items()
    ]


def declared_keywords(plan: Plan) -> dict[str, dict[str, str]]:
    """What a manifest records of each keyword that the model passes and that code outside sinkscope declares."""
    return {
        name: {
            "package": " and ".join(keywords.KEYWORDS.owners(name)),
            "code_sha256": code_sha256(keywords.KEYWORDS[name]),
        }
        for name in sorted(plan.declared)
    }


def with_late_keywords(manifest: Manifest, plan: Plan) -> Manifest:
    """Returns the manifest with the keywords that the model passed only after it was written."""
    declared = {name: KeywordFacts(**facts) for name, facts in declared_keywords(plan).items()}
    manifest = manifest.model_copy(update={"keywords": declared})
    named = unread(plan, manifest.self_check.as_dict())
    late = [warning for warning in named if warning not in manifest.warnings]
    return manifest.model_copy(update={"warnings": [*manifest.warnings, *late]}) if late else manifest


def _corpus_facts(corpus: Corpus, reading: Reading) -> dict[str, Any]:
    return {
        "domain": corpus.domain,
        "spec": corpus.source,
        "fingerprint": corpus.fingerprint,
        "sequences": len(corpus.ids),
        "seq_len": int(corpus.ids.shape[1]),
        "bos": corpus.bos,
        "joined": corpus.joined,
        "dropped": corpus.dropped,
        "documents": corpus.documents,
        "passages": corpus.passages,
        "first_token": first_token([corpus.ids], reading.rules, reading.tokenizer),
    }


def _site_facts(site: Site) -> dict[str, Any]:
    same = set(SiteFacts.model_fields) - {"module", "kind", "hides"}
    return {name: getattr(site, name) for name in same} | {"module": site.name, "kind": asdict(site.kind)}


def resume_key(manifest: Manifest, checkpoint: Checkpoint) -> dict[str, Any]:
    """Everything that must be equal for a scan to go on from another's shards."""
    rule = manifest.request.spectra
    return manifest.decides() | {
        "spectra": [SPECTRA_CUBES, FEWEST_SPECTRA] if rule is None else rule,
        "settings": settings_sha256(checkpoint.origin),
        "measuring_code": measuring_code(),
    }


def measuring_code() -> str:
    """The first 16 digits of the SHA-256 over the source of every module that decides what a batch measures."""
    return _code_of(MEASURING)


@cache
def _code_of(rooms: tuple[str, ...]) -> str:
    root, digest = Path(__file__).parents[1], hashlib.sha256()
    for path in sorted(path for room in rooms for path in (root / room).rglob("*.py")):
        digest.update(f"{path.relative_to(root).as_posix()}:{sha256_of(path)}\n".encode())
    return digest.hexdigest()[:16]


READ = {"spec", "bos", "fingerprint", "sequences", "seq_len"}
"""What tells the sequences of one domain from others."""


def finished_before(folder: str | Path, asked: Manifest) -> Run | None:
    """The finished run in a folder; None where there is none, or where an unfinished scan is to replace it.

    `asked`: the manifest of the scan that is asked for now. Raises SinkscopeError where another scan made the run: of
    another model, over other sequences, or with other settings. It names the first difference.
    """
    target = Path(folder)
    if not finished(target) or (target / UNFINISHED).exists():
        return None
    run = load_run(target)
    own, theirs = _facts(asked), _facts(run.manifest)
    known = {name for name, value in theirs["model"].items() if value is not None}  # sinkscope 0.1 recorded fewer
    for facts in (own, theirs):
        facts["model"] = {name: value for name, value in facts["model"].items() if name in known}
    if own["data"] == theirs["data"]:  # however they were asked for, the sequences are the same
        del own["text"], theirs["text"]
    different = [name for name in own if own[name] != theirs[name]]
    if different:
        raise SinkscopeError(
            f"{target} holds a finished run with another {first_difference(own, theirs, different)}; give another "
            "--out, or --force to replace it"
        )
    return run


def _facts(manifest: Manifest) -> dict[str, Any]:
    """What makes two scans the same, as plain data."""
    return {
        "text": plain(manifest.request.part("text")),
        "request": plain(manifest.request.part("columns", "rounding")),
        "model": manifest.model.model_dump(mode="json", by_alias=True, exclude={"name"}),
        "data": {each.domain: each.model_dump(mode="json", include=READ) for each in manifest.data},
        "metrics": {name: each.model_dump(mode="json", exclude={"failed"}) for name, each in manifest.metrics.items()},
        "keywords": {name: each.model_dump(mode="json") for name, each in manifest.keywords.items()},
        "tensor_parallel": manifest.tensor_parallel,
    }
