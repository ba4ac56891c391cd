"""sentence-transformers compares sentences of several lengths, padded into one batch: sentences.py FOLDER."""

import sys
from typing import Any

import torch
from sentence_transformers import SentenceTransformer

TEXTS = [
    "A man is eating food.",
    "Somebody has lunch at the small table by the window.",
    "The girl carries a very heavy box over the bridge that leads to the harbour.",
]


def load(folder: str) -> Any:
    return SentenceTransformer(folder, device="cpu")


def work(model: Any) -> torch.Tensor:
    """The embeddings, (sentences, width)."""
    found: torch.Tensor = model.encode(TEXTS, convert_to_tensor=True)
    return found


if __name__ == "__main__":
    encoder = load(sys.argv[1])
    found = work(encoder)
    for text, row in zip(TEXTS, encoder.similarity(found, found), strict=True):
        print(*(f"{value:6.3f}" for value in row), text)
