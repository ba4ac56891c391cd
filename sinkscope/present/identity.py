"""A short id that tells one run from another."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sinkscope.runs.run import Run

MODEL = ("id", "revision", "weights_sha256", "dtype", "device")


def run_id(run: Run) -> str:
    """12 hex digits of the SHA-256 of weights, text and settings: the same scan again has the same id."""
    manifest = run.manifest
    facts = [
        manifest.sinkscope,
        [getattr(manifest.model, name) for name in MODEL],
        [[data.domain, data.fingerprint] for data in manifest.data],
        manifest.request.part("columns"),
    ]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:12]
