"""Short inputs for passes whose numbers are not kept: the dry run, and the search for W_V."""

from __future__ import annotations

import torch

from sinkscope.checkpoints import Checkpoint

DRY_RUN_TOKENS = 16


def probe(checkpoint: Checkpoint) -> torch.Tensor:
    """One short input for the dry run."""
    if checkpoint.task is not None:
        return torch.from_numpy(checkpoint.task.read(None, 1, 0).vectors).to(checkpoint.device)
    return torch.arange(DRY_RUN_TOKENS, device=checkpoint.device).remainder(checkpoint.vocabulary)[None]


def several_probes(checkpoint: Checkpoint) -> torch.Tensor:
    """DRY_RUN_TOKENS short inputs, all their tokens different (a task's begin with its BOS)."""
    if checkpoint.task is not None:
        return torch.from_numpy(checkpoint.task.read(None, DRY_RUN_TOKENS, 0).vectors).to(checkpoint.device)
    count, length = DRY_RUN_TOKENS, 4
    ids = torch.randperm(max(checkpoint.vocabulary, count * length), generator=torch.Generator().manual_seed(0))
    ids = ids[: count * length].remainder(checkpoint.vocabulary)
    return ids.view(count, length).to(checkpoint.device)
