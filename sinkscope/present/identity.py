"""What tells one run from another in a few characters."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sinkscope.runs.run import Run


SETTINGS = ("sinkscope", "seed", "bos", "epsilon", "dormant_rule")
MODEL = ("id", "revision", "weights_sha256", "dtype", "device")


def run_id(run: Run) -> str:
    """12 hex digits of the SHA-256 of weights, text, settings: the same scan again has the same id."""
    manifest = run.manifest
    facts = [manifest["model"].get(key) for key in MODEL] + [manifest.get(key) for key in SETTINGS]
    facts += [] if manifest.get("spectra") is None else [manifest["spectra"]]
    facts += [[data.get("spec"), data.get("fingerprint")] for data in manifest["data"]]
    return hashlib.sha256(json.dumps(facts, default=str).encode()).hexdigest()[:12]
