"""Scores that are not softmax: attention that is no distribution over keys. A model asks for one by the keyword
`score` of its attention call; see `AttentionCall.score`.

Each takes logits (..., query, key) and the queries' positions i as (query, 1), and returns A before the causal mask.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Score = Callable[[Tensor, Tensor], Tensor]


def relu(logits: Tensor, rows: Tensor) -> Tensor:
    """A[i,t] = relu(s_it) / max(i, 1), Ran-Milo 2603.11487: a row may be all zero, or sum to anything above."""
    return torch.relu(logits) / rows.clamp(min=1)


def sigmoid(logits: Tensor, rows: Tensor) -> Tensor:
    """A[i,t] = sigmoid(s_it): every key judged alone, no normalisation."""
    return torch.sigmoid(logits)


SCORES: dict[str, Score] = {"relu": relu, "sigmoid": sigmoid}
