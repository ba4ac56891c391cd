"""Next-token cross-entropy of each sequence, in nats, and how many sequences' logits are held at once."""

from __future__ import annotations

from torch import Tensor, nn

LOGIT_BYTES = 512 * 2**20
"""Most memory for the logits of a batch, in the model's dtype."""

CHUNK_BYTES = 64 * 2**20
"""Most memory for the logits that are converted to float32 at once."""


def next_token_losses(log_probabilities: Tensor, targets: Tensor) -> Tensor:
    """Sums of losses, [batch] float64, from log-probabilities, [batch, position, vocabulary], and the tokens that
    follow, [batch, position]; without the last position where no token follows it."""
    picked = log_probabilities[:, : targets.shape[1]].gather(-1, targets.to(log_probabilities.device)[..., None])
    return picked[..., 0].neg().cpu().double().sum(-1)


def batch_size(model: nn.Module, length: int) -> int:
    """Number of sequences whose logits stay within LOGIT_BYTES; at least 1."""
    embedding = model.get_input_embeddings()  # type: ignore[operator]
    row = embedding.weight.shape[0] * embedding.weight.element_size()
    return max(1, LOGIT_BYTES // (row * length))
