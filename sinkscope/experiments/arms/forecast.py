"""The dry run of a measurement of arms: how many there are with their controls and draws, and what they would cost."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from sinkscope.capture.alone import alone
from sinkscope.checkpoints import LoadOptions
from sinkscope.checkpoints.checkpoint import check_length
from sinkscope.checkpoints.classes import unwrapped
from sinkscope.checkpoints.forward import DRY_RUN_TOKENS, SEVERAL
from sinkscope.checkpoints.loading import check_device_map, pick_device
from sinkscope.checkpoints.outline import Outline, outline_of, outlined
from sinkscope.engine.batch_size import chosen_batch
from sinkscope.engine.forecast.build import Workload, built, looked, pieces_of, short_passes, token_ids
from sinkscope.engine.forecast.costs import check_machine
from sinkscope.errors import SinkscopeError
from sinkscope.experiments.arms.arm import Arm, Pass, Setting
from sinkscope.experiments.arms.engine import trials_of
from sinkscope.experiments.arms.experiment import expanded, size_of
from sinkscope.experiments.arms.grammar import read_arms
from sinkscope.experiments.arms.kinds.per_token import SEQUENCES, groups_of
from sinkscope.experiments.arms.readings import batch_size
from sinkscope.experiments.arms.replay import Layers
from sinkscope.experiments.arms.text import Text, check_numbers
from sinkscope.inputs.handed import loss_data
from sinkscope.runs.defaults import EPSILON
from sinkscope.runs.forecast import Forecast, Passes
from sinkscope.runs.run import Run, load_run


@alone("a dry run of arms")
def dry_run_arms(
    model: Any,
    arms: Sequence[str | Arm],
    *,
    command: str = "arms",
    run: Run | str | Path | None = None,
    machine: str | None = None,
    data: Any = "prose",
    seq_len: int | None = None,
    num_sequences: int | None = None,
    draws: int = 5,
    seed: int = 0,
    cosines: bool = False,
    device: str = "auto",
    device_map: str | None = None,
    dtype: str = "auto",
    revision: str | None = None,
    trust_remote_code: bool = False,
    allow_pickle: bool = False,
) -> Forecast:
    """Says what `arms` would read of a model, what memory it would take and how long: no weights are loaded.

    Args:
        model: a name, or a causal language model, of which a copy without numbers is made.
        arms, run, data, seq_len, num_sequences, draws, seed, cosines, device, device_map, dtype, revision,
            trust_remote_code, allow_pickle: as `sinkscope.arms` takes them.
        command: the name that the forecast bears. machine: as `dry_run` takes it.

    Raises:
        SinkscopeError: one line, for anything that `arms` would refuse before it loads the model, and for an arm that
            cannot apply to it.
    """
    check_machine(machine)
    parsed = read_arms(arms)
    text = Text(loss_data(data), seq_len, num_sequences, seed)
    check_numbers(text, draws)
    place = pick_device(device)
    check_device_map(device_map)
    loaded = run if isinstance(run, Run) or run is None else load_run(run)
    outline = _outline(model, LoadOptions(revision, dtype=dtype, trust_remote_code=trust_remote_code, head=True))
    count, length = size_of(text, outline, None if loaded is None else loaded.manifest)
    check_length(outline, length)
    base = unwrapped(outline.model)
    look = looked(base, token_ids, [(count, length)])
    if look.plan is None:
        raise SinkscopeError(f"the arms cannot be counted without loading the model: {look.why}")
    ids = torch.zeros(count, length, dtype=torch.long)
    setting = Setting(outline, base, look.plan, ids, loaded, seed, EPSILON)
    chosen = expanded(parsed, setting, only_counted=True).arms
    size = batch_size(outline.model, length)
    others = short_passes(look, [_first_passes(arm, count, length, place, size) for arm in chosen if arm.reads_first])
    if any(arm.tries for arm in chosen):
        others.append(Passes("try out what linear modules read", 1, *SEVERAL))
    groups = len(groups_of(setting, setting.to_map))
    if groups:
        batches = -(-SEQUENCES // chosen_batch(length, place))
        others.append(Passes("fit maps of tokens, at most", groups * batches, groups * SEQUENCES, length))
    pieces = pieces_of(count, length, torch.device("cpu"), size)
    layers, all_trials = Layers(setting), trials_of(chosen, draws)
    starts = [layers.start(arm, Pass(setting, ids, draw=draw or 0)) for arm, draw in all_trials[1:]]
    tried = len(set(starts) - {0})
    if tried:
        others.append(Passes("try out which layers may be left out", 2 + tried, 2 + tried, DRY_RUN_TOKENS))
    trials = len(all_trials)
    logits = pieces[0][0] * length * outline.vocabulary * _bytes(outline)
    workload = Workload(
        command, place, machine, "arms", pieces, others, trials, trials, logits, layers=layers.blocks, starts=starts
    )
    return built(outline, look, workload)


def _outline(model: Any, options: LoadOptions) -> Outline:
    return outlined(model, options) if isinstance(model, str) else outline_of(model, head=True)


def _first_passes(arm: Arm, sequences: int, length: int, device: torch.device, size: int) -> Passes:
    """What an arm reads before all arms: a scan, whose batches are a scan's."""
    passes = len(pieces_of(sequences, length, device, min(size, chosen_batch(length, device))))
    return Passes(f"before {arm.name}", passes, sequences, length)


def _bytes(outline: Outline) -> int:
    dtype: torch.dtype = getattr(torch, outline.facts["dtype"])
    return dtype.itemsize
