"""TransformerLens' bridge to a model reads a text: lens.py FOLDER."""

import sys
from typing import Any

import torch
from transformer_lens.model_bridge import TransformerBridge

TEXT = (
    "When Mary and John went to the store by the river, they met an old friend who had come home from the sea, and "
    "John gave a drink to"
)


def load(folder: str) -> Any:
    return TransformerBridge.boot_transformers(folder).eval()


@torch.no_grad()
def work(model: Any) -> torch.Tensor:
    """The logits, (1, tokens, vocabulary)."""
    logits: torch.Tensor = model(model.to_tokens(TEXT))
    return logits


if __name__ == "__main__":
    bridge = load(sys.argv[1])
    best = work(bridge)[0, -1].topk(3)
    for logit, token in zip(*best, strict=True):
        print(f"{logit:6.2f}  {bridge.to_string(token[None])!r}")
