"""What an earlier scan left in a run folder: the same scan's finished run, or batches from which it goes on."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from sinkscope.capture.alone import alone
from sinkscope.checkpoints import Checkpoint
from sinkscope.engine.launch import ALONE
from sinkscope.engine.manifest import describe
from sinkscope.engine.prepared import prepared
from sinkscope.engine.shards import Shards, first_difference, resume_key, with_weights
from sinkscope.errors import SinkscopeError
from sinkscope.metrics.quantities import quantity_set
from sinkscope.runs.folder import unfinished_in
from sinkscope.runs.request import Request
from sinkscope.runs.run import Run, finished, load_run
from sinkscope.runs.schema.base import plain
from sinkscope.runs.schema.manifest import HASHES, Manifest
from sinkscope.tables.columns import metric_set


def finished_or_shards(folder: str | Path, wanted: Manifest, checkpoint: Checkpoint, resume: bool) -> Run | Shards:
    """With `resume`, the finished run in a folder; where there is none, the shards that this scan goes on with.

    `wanted`: the manifest of the scan that is asked for now. Only a scan that resumes waits for the weights' hash here.
    Where the hash is still being made, the shards' key is written with the first batch. Raises SinkscopeError where
    another scan left what is there, or the folder cannot be written.
    """
    before = finished_before(folder, with_weights(wanted, checkpoint)) if resume else None
    if before is not None:
        return before
    if resume or checkpoint.hashing is None:
        return Shards.open(folder, resume_key(wanted, checkpoint), resume)
    return Shards.begin(folder, partial(resume_key, wanted, checkpoint))


READ = {"spec", "bos", "fingerprint", "sequences", "seq_len"}
"""What tells the sequences of one domain from others."""


def finished_before(folder: str | Path, wanted: Manifest) -> Run | None:
    """The finished run in a folder; None where there is none, or where an unfinished scan is to replace it.

    `wanted`: the manifest of the scan that is asked for now. Raises SinkscopeError where another scan made the run: of
    another model, over other sequences, or with other settings. It names the first difference. It raises it too where
    no hash tells whether the weights are the same.
    """
    target = Path(folder)
    if not finished(target) or unfinished_in(target):
        return None
    run = load_run(target)
    new, old = _facts(wanted), _facts(run.manifest)
    told = wanted.model.told and run.manifest.model.told
    recorded = {name for name, value in old["model"].items() if value is not None}  # sinkscope 0.1 recorded fewer
    recorded |= {*HASHES} if told else set()
    for facts in (new, old):
        facts["model"] = {name: value for name, value in facts["model"].items() if name in recorded}
    if new["data"] == old["data"]:  # however they were asked for, the sequences are the same
        del new["text"], old["text"]
    different = [name for name in new if new[name] != old[name]]
    if different:
        raise SinkscopeError(
            f"{target} holds a finished run with another {first_difference(new, old, different)}; give another "
            "--out, or --force to replace it"
        )
    if not told:
        raise SinkscopeError(
            f"{target} holds a finished run, and nothing tells whether it is of this model: one of the two has no hash "
            "of its weights, as a model object that was scanned without shards; give another --out, or --force to "
            "replace it"
        )
    return run


def wanted_manifest(request: Request, checkpoint: Checkpoint) -> Manifest:
    """The manifest that a scan of this request would write now, for `finished_before`: the model is open, its inputs
    are read, and nothing is measured. Raises SinkscopeError where the scan would."""
    with alone(f"a look at {request.model}"):
        declared = quantity_set(metric_set(()).asked(request.measures), request.lengths)
        loop, request = prepared(request, checkpoint, declared, lambda *_: None, ALONE, strict=False)
        return with_weights(describe(loop, request, {"status": "skipped"}), checkpoint)


def _facts(manifest: Manifest) -> dict[str, Any]:
    """What makes two scans the same, as plain data."""
    return {
        "text": plain(manifest.request.part("text")),
        "request": plain(manifest.request.part("columns", "rounding")),
        "model": manifest.model.model_dump(mode="json", by_alias=True, exclude={"name"}),
        "data": {domain.domain: domain.model_dump(mode="json", include=READ) for domain in manifest.data},
        "metrics": {
            name: metric.model_dump(mode="json", exclude={"failed"}) for name, metric in manifest.metrics.items()
        },
        "keywords": {name: keyword.model_dump(mode="json") for name, keyword in manifest.keywords.items()},
        "tensor_parallel": manifest.tensor_parallel,
    }
