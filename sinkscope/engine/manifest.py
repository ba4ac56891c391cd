"""manifest.json: how a run was measured, so that another can be measured the same way."""

from __future__ import annotations

import datetime
import platform
from importlib.metadata import version
from typing import Any

import numpy as np

import sinkscope
from sinkscope.capture import Site
from sinkscope.capture.kernels.attend import TORCH, TRITON
from sinkscope.checkpoints import Checkpoint
from sinkscope.engine.launch import Processes
from sinkscope.engine.reading import Reading
from sinkscope.inputs import Corpus
from sinkscope.inputs.rules import first_token
from sinkscope.metrics import columns
from sinkscope.metrics.registry import TABLES
from sinkscope.runs.request import Request
from sinkscope.runs.settings import Settings
from sinkscope.runs.values import Domain

SCHEMA_VERSION = 1
PACKAGES = ("torch", "transformers", "tokenizers", "numpy", "pandas")


def describe(
    checkpoint: Checkpoint, sites: list[Site], reading: Reading, request: Request, settings: Settings,
    self_check: dict[str, Any], processes: Processes,
) -> dict[str, Any]:  # fmt: skip
    """All that is known before the first batch; the engine adds what it did (`progress`), the caller the command."""
    return {
        "schema_version": SCHEMA_VERSION,
        "sinkscope": sinkscope.__version__,
        "command": None,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}},
        "model": checkpoint.facts,
        "data": [
            _describe_corpus(corpus) | {"first_token": first_token([corpus.ids], reading.rules, reading.tokenizer)}
            for corpus in reading.corpora
        ],
        "first_token": reading.first_token(),
        "bos": request.bos if isinstance(request.bos, str) else list(request.bos),
        "seed": request.seed,
        "epsilon": settings.epsilon,
        "dormant_rule": settings.dormant_rule,
        "spectra": settings.spectra,
        "self_check": self_check,
        "processes": processes.count,
        "tensor_parallel": processes.count if processes.tensor else 1,
        "attention": [_describe_site(site) for site in sites],
        "conventions": {name: column.formula for table in TABLES for name, column in columns(table).items()},
    }


def spectra_measured(domains: list[Domain]) -> dict[str, int]:
    """Sequences of each domain that matrix_entropy was measured on: the most that any layer has."""
    return {
        domain.name: max(int((~np.isnan(values.layer("matrix_entropy"))).sum()) for values in domain.sites.values())
        for domain in domains
    }


def tell_of_failures(facts: dict[str, Any], reasons: list[str]) -> None:
    """Adds why Triton failed in the middle of a scan, and that torch has read the rest."""
    facts["warnings"] = [*facts["warnings"], *dict.fromkeys(reasons)]
    for site in facts["attention"]:
        if reasons and site["kernel"] == TRITON:
            site["kernel"] = f"{TRITON}, then {TORCH}"


def progress(done: int, scan_seconds: float, total_seconds: float) -> dict[str, Any]:
    """How far the scan came, and how fast."""
    return {
        "sequences_done": done,
        "timing": {
            "scan_seconds": round(scan_seconds, 3),
            "total_seconds": round(total_seconds, 3),
            "sequences_per_second": round(done / scan_seconds, 3) if scan_seconds else None,
        },
    }


def _describe_corpus(corpus: Corpus) -> dict[str, Any]:
    return {
        "spec": corpus.domain,
        "source": corpus.source,
        "fingerprint": corpus.fingerprint,
        "sequences": len(corpus.ids),
        "seq_len": int(corpus.ids.shape[1]),
        "bos": corpus.bos,
        "joined": corpus.joined,
        "dropped": corpus.dropped,
        "documents": corpus.documents,
    }


def _describe_site(site: Site) -> dict[str, Any]:
    shown = (
        "stream", "layer", "kind", "path", "kernel", "score", "causal", "heads", "kv_groups", "head_dim", "value_dim",
    )  # fmt: skip
    facts = {name: getattr(site, name) for name in shown}
    return facts | {"module": site.name, "block": site.block, "projection": site.projection}
