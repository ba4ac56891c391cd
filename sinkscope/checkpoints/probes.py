"""Short sequences of token ids for passes whose numbers are not kept: the dry run, and the search for W_V."""

from __future__ import annotations

import torch

from sinkscope.checkpoints import Checkpoint

DRY_RUN_TOKENS = 16


def probe(checkpoint: Checkpoint) -> torch.Tensor:
    """One sequence of DRY_RUN_TOKENS token ids, [1, token]."""
    return torch.arange(DRY_RUN_TOKENS, device=checkpoint.device).remainder(checkpoint.vocabulary)[None]


def several_probes(checkpoint: Checkpoint) -> torch.Tensor:
    """DRY_RUN_TOKENS sequences of 4 token ids, [sequence, token], all different where the vocabulary has that many."""
    count, length = DRY_RUN_TOKENS, 4
    ids = torch.randperm(max(checkpoint.vocabulary, count * length), generator=torch.Generator().manual_seed(0))
    ids = ids[: count * length].remainder(checkpoint.vocabulary)
    return ids.view(count, length).to(checkpoint.device)
