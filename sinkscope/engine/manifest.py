"""Writes the manifest of a scan: what is known before the first batch, and what the scan adds."""

from __future__ import annotations

import datetime
import functools
import platform
from collections.abc import Iterable
from dataclasses import asdict
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from sinkscope.capture import Plan, Site, keywords
from sinkscope.capture.kernels.attend import TORCH, TRITON
from sinkscope.capture.scores import normalises
from sinkscope.capture.sites import shown_name
from sinkscope.checkpoints import Checkpoint
from sinkscope.engine.input_kinds.kind import Reading
from sinkscope.engine.launch import Processes
from sinkscope.engine.self_check import EAGER, warnings_of
from sinkscope.errors import SinkscopeError
from sinkscope.inputs import Corpus
from sinkscope.inputs.rules import first_token
from sinkscope.metrics.extension import code_sha256, definitions
from sinkscope.metrics.guests import Guests, slow
from sinkscope.metrics.quantities import QuantitySet
from sinkscope.runs.defaults import VERSION
from sinkscope.runs.questions import QUESTIONS
from sinkscope.runs.request import Request
from sinkscope.runs.schema.base import plain
from sinkscope.runs.schema.manifest import KeywordFacts, Manifest, MetricFacts, SiteFacts, Timing
from sinkscope.tables.columns import columns, metric_set
from sinkscope.tables.values import Domain

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


@functools.cache
def _versions() -> dict[str, str]:
    """Python's version, and those of the packages that are installed."""
    return {"python": platform.python_version()} | {name: version(name) for name in PACKAGES if find_spec(name)}


def describe(loop: Described, request: Request, checked: dict[str, Any]) -> Manifest:
    """Returns the manifest as known before the first batch. `checked`: the self-check's record."""
    reading, processes = loop.reading, loop.processes
    facts = {
        "sinkscope": VERSION,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": _versions(),
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
        }
        | {each.column: each.formula for each in loop.declared.quantities if each.column and not each.ships},
        "metrics": definitions(loop.declared.metrics),
        "keywords": declared_keywords(loop.plan),
        "warnings": [
            *loop.checkpoint.warnings,
            *reading.warnings,
            *unread(loop.plan, checked),
            *_without_projection(loop.sites),
            *_steered_projection(loop.sites),
            *_without_block(loop.sites),
            *warnings_of(checked),
        ],
    }
    return Manifest.model_validate(plain(facts))


def own_metrics(files: Iterable[str | Path]) -> dict[str, MetricFacts]:
    """What the manifest of a scan with these files would record of metrics that are not sinkscope's. Raises
    SinkscopeError where a file or an installed package cannot be read."""
    return {name: MetricFacts(**facts) for name, facts in definitions(metric_set(files)).items()}


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
    hides = {module: any(flags) if flags else None for module, flags in seen.items()}
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


def with_warnings(manifest: Manifest, warnings: list[str]) -> Manifest:
    """Returns the manifest with these warnings behind its own."""
    return manifest.model_copy(update={"warnings": [*manifest.warnings, *warnings]}) if warnings else manifest


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
    metrics = {name: facts.model_copy(update={"failed": failed.get(name)}) for name, facts in manifest.metrics.items()}
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
    warnings = []
    if plan.unread:
        warnings.append(f"attention that is no map of queries and keys was not read: {', '.join(plan.unread)}")
    agrees = checked["status"] == "passed" and checked["reference"] == EAGER
    shown = (
        "the self-check agreed with the model's own attention maps without it"
        if agrees
        else "no self-check against the model's own attention maps shows that it changes nothing"
    )
    return warnings + [
        f"the model passes the attention keyword {name!r} (in {module}), which sinkscope does not know and leaves out: "
        f"{shown}"
        for name, module in plan.keywords.items()
    ]


def _without_projection(sites: list[Site]) -> list[str]:
    """A warning that names the first attention call whose output projection was not found, if there is one."""
    calls = _told([site for site in sites if site.projection is None and not site.steered])
    return calls and [
        f"no linear layer that reads the heads of {calls[0]} side by side was found (the first is {calls[1]}): columns "
        "that need W_O are empty there"
    ]


def _steered_projection(sites: list[Site]) -> list[str]:
    """A warning that names the first attention call whose output projection was given more than the heads, if there is
    one."""
    steered = [site for site in sites if site.steered]
    calls = _told(steered)
    return calls and [
        f"the output projection of {calls[0]} (the first is {calls[1]}) was given {steered[0].steered!r} beside the "
        "heads, with which it may treat each token in another way: columns that need W_O are empty there"
    ]


def _without_block(sites: list[Site]) -> list[str]:
    """A warning that names the first attention call whose block was not found, if there is one."""
    calls = _told([site for site in sites if site.block is None and not site.cross])
    return calls and [
        f"no block that the residual stream enters and leaves was found around {calls[0]} (the first is {calls[1]}): "
        "columns that need the stream are empty there"
    ]


def _told(sites: list[Site]) -> list[str]:
    """How many attention calls these are, and the name of the first; empty without any."""
    count = "1 attention call" if len(sites) == 1 else f"{len(sites)} attention calls"
    return [count, shown_name(sites[0].name)] if sites else []


def refuse_unread(plan: Plan, checked: dict[str, Any]) -> None:
    """Raises SinkscopeError for the first of what a strict scan must not leave out."""
    left_out = unread(plan, checked)
    if left_out:
        more = f" (and {len(left_out) - 1} more)" if len(left_out) > 1 else ""
        raise SinkscopeError(f"--strict: {left_out[0]}{more}")


def shared_facts(loop: Described) -> list[Any]:
    """What must be equal in all processes of a launch: weights, metrics, keywords that others declare, and inputs."""
    measured = [definitions(loop.declared.metrics), declared_keywords(loop.plan)]
    return [
        loop.checkpoint.facts["weights_sha256"],
        *measured,
        *(corpus.fingerprint for corpus in loop.reading.corpora),
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
    return with_warnings(manifest, late)


def _corpus_facts(corpus: Corpus, reading: Reading) -> dict[str, Any]:
    return {
        "domain": corpus.domain,
        "spec": corpus.source,
        "fingerprint": corpus.fingerprint,
        "sequences": len(corpus.ids),
        "seq_len": int(corpus.ids.shape[1]),
        "shortest": _shortest(corpus),
        "bos": corpus.bos,
        "joined": corpus.joined,
        "dropped": corpus.dropped,
        "documents": corpus.documents,
        "passages": corpus.passages,
        "first_token": first_token([corpus.ids], reading.rules, reading.tokenizer),
    }


def _shortest(corpus: Corpus) -> int | None:
    """Tokens of the shortest sequence, where one is shorter than the others: ids are -1 past a sequence's end."""
    shortest = int((corpus.ids >= 0).sum(1).min())
    return shortest if shortest < corpus.ids.shape[1] else None


def _site_facts(site: Site) -> dict[str, Any]:
    same = set(SiteFacts.model_fields) - {"module", "kind", "hides", "normalised"}
    own = {"module": site.name, "kind": asdict(site.kind), "normalised": normalises(site.score)}
    return {name: getattr(site, name) for name in same} | own
