"""Text for the tests of real checkpoints."""

from __future__ import annotations

import torch

from sinkscope.checkpoints import Checkpoint
from sinkscope.inputs import read_corpus, token_rules


def prose(checkpoint: Checkpoint, length: int, count: int) -> torch.Tensor:
    rules = token_rules(checkpoint.tokenizer, checkpoint.vocabulary)
    return torch.from_numpy(read_corpus("prose", checkpoint.tokenizer, rules, length, count).ids)
