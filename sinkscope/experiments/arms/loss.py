"""Next-token cross-entropy of each sequence, in nats per token, from the model's own logits."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

LOGIT_BYTES = 512 * 2**20
"""Most memory for the logits of a batch, in the model's dtype."""

CHUNK_BYTES = 64 * 2**20
"""Most memory for the logits that are converted to float32 at once."""


def next_token_losses(logits: Tensor, ids: Tensor) -> Tensor:
    """Mean losses, [batch] float64, from logits [batch, T, vocabulary]; converts few positions at a time to float32."""
    batch, length, vocabulary = logits.shape
    step = max(1, CHUNK_BYTES // (4 * batch * vocabulary))
    total = torch.zeros(batch, dtype=torch.float64)
    for start in range(0, length - 1, step):
        stop = min(start + step, length - 1)
        rows, targets = logits[:, start:stop].float(), ids[:, start + 1 : stop + 1].to(logits.device)
        parts = cross_entropy(rows.flatten(0, 1), targets.flatten(), reduction="none")
        total += parts.view(batch, -1).cpu().double().sum(-1)
    return total / (length - 1)


def batch_size(model: nn.Module, length: int) -> int:
    """Number of sequences whose logits stay within LOGIT_BYTES; at least 1."""
    embedding = model.get_input_embeddings()  # type: ignore[operator]
    row = embedding.weight.shape[0] * embedding.weight.element_size()
    return max(1, LOGIT_BYTES // (row * length))
