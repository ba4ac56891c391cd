"""Opens the model, the run and the held-out text of a measurement, and checks that they fit each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from sinkscope.capture import Plan, plan
from sinkscope.checkpoints import Checkpoint, LoadOptions, open_checkpoint, wrap_model
from sinkscope.checkpoints.forward import Forward, probe
from sinkscope.engine.launch import Processes
from sinkscope.engine.loop import Progress
from sinkscope.errors import SinkscopeError
from sinkscope.experiments.arms.arm import Setting
from sinkscope.experiments.arms.asked import Text
from sinkscope.experiments.arms.held_out import further, held_out
from sinkscope.inputs import Corpus
from sinkscope.runs.defaults import EPSILON
from sinkscope.runs.run import Run, load_run


def opened(
    model: Any, run: Run | str | Path | None, tokenizer: Any, options: LoadOptions, text: Text, report: Progress
) -> tuple[Setting, Corpus]:  # fmt: skip
    """Loads the model with its head, makes the dry run and reads the text.

    Raises SinkscopeError where the model does not predict the next token, the run is of another model, or the text
    cannot be had.
    """
    loaded = run if isinstance(run, Run) or run is None else load_run(run)
    named = isinstance(model, str)
    checkpoint = open_checkpoint(model, options, report) if named else wrap_model(model, tokenizer, head=True)
    if loaded is not None:
        _same_model(checkpoint, loaded)
    base, calls = planned(checkpoint)
    if loaded is not None:
        _same_heads(checkpoint, calls, loaded)
    manifest = None if loaded is None else loaded.manifest
    corpus = held_out(text, checkpoint, manifest)
    epsilon = EPSILON if manifest is None else manifest.request.epsilon
    setting = Setting(checkpoint, base, calls, torch.from_numpy(corpus.ids), loaded, text.seed, epsilon)
    setting.more_text = lambda count: torch.from_numpy(further(text, checkpoint, manifest, corpus, count).ids)
    return setting, corpus


def opened_by_all(
    model: Any, run: Run | str | Path | None, tokenizer: Any, options: LoadOptions, text: Text, report: Progress,
    processes: Processes,
) -> tuple[Setting, Corpus]:  # fmt: skip
    """As `opened`, in every process of a launch.

    Raises SinkscopeError also where the processes cannot share the work, or read other weights or text.
    """
    if processes.tensor:
        raise SinkscopeError("--tp spreads the heads of a scan; arms are shared by processes without it")
    processes.check(model, options.device_map)
    setting, corpus = processes.run(lambda: opened(model, run, tokenizer, options, text, report))
    processes.require_same([setting.checkpoint.facts["weights_sha256"], corpus.fingerprint])
    return setting, corpus


def _same_model(checkpoint: Checkpoint, run: Run) -> None:
    """Raises SinkscopeError for a run of other weights: scores of one model say nothing about another model's heads.

    Compares the hashes of the weights; where one is missing, the id and commit; where these are missing too (a model
    object), the model type. `_same_heads` compares the heads.
    """
    theirs, ours = run.manifest.model.model_dump(by_alias=True), checkpoint.facts
    for known in (("weights_sha256",), ("id", "revision"), ("model_type",)):
        pair = [[facts.get(name) for name in known] for facts in (theirs, ours)]
        if any(value is None for values in pair for value in values):
            continue
        if pair[0] != pair[1]:
            raise SinkscopeError(
                f"the run is of {run.manifest.model.shown}, whose weights are not those of {ours['id']}: scan this "
                "model first"
            )
        return


def planned(checkpoint: Checkpoint) -> tuple[nn.Module, Plan]:
    """The base model and its attention calls."""
    base: nn.Module = getattr(checkpoint.model, "base_model", checkpoint.model)
    forward, short = Forward(base), probe(checkpoint)
    return base, plan(base, lambda: forward(short))


def _same_heads(checkpoint: Checkpoint, calls: Plan, run: Run) -> None:
    """Raises SinkscopeError where the model's heads are not those of the run."""
    ours = {(site.name, head) for site in calls.sites for head in range(site.heads)}
    if ours != {(str(module), int(head)) for module, head in zip(run.heads["module"], run.heads["head"], strict=True)}:
        raise SinkscopeError(f"the run's heads are not those of {checkpoint.name}: scan this model first")


def facts_of(setting: Setting, corpus: Corpus) -> dict[str, Any]:
    """What was measured, for the JSON files: the model, the run and the text."""
    read: dict[str, Any] = {"spec": corpus.domain, "fingerprint": corpus.fingerprint, "documents": corpus.documents}
    read |= {"sequences": len(corpus.ids), "seq_len": int(corpus.ids.shape[1]), "bos": corpus.bos}
    run = setting.run
    return {
        "model": setting.checkpoint.facts,
        "run": None if run is None else {
            "path": None if run.path is None else str(run.path),
            "data": [data.fingerprint for data in run.manifest.data],
        },
        "data": read,
    }  # fmt: skip
