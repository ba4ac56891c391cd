"""Small GGUF files."""

from __future__ import annotations

from pathlib import Path

import numpy as np


def write_gguf(path: Path, layers: int = 1, rows: int = 100) -> Path:
    """A GGUF with sound headers and one tensor."""
    from gguf import GGUFWriter

    writer = GGUFWriter(path, "llama")
    writer.add_block_count(layers)
    writer.add_embedding_length(64)
    writer.add_tensor("token_embd.weight", np.zeros((rows, 64), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
