"""The small files of a checkpoint that decide what a model reads and how: those of its processor and generation."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

SETTINGS = (
    "generation_config.json", "processor_config.json", "preprocessor_config.json", "image_processor_config.json",
    "video_preprocessor_config.json", "feature_extractor_config.json", "tokenizer_config.json",
    "special_tokens_map.json", "added_tokens.json", "chat_template.json", "chat_template.jinja",
)  # fmt: skip


def settings_sha256(origin: dict[str, Any]) -> dict[str, str]:
    """SHA-256 of each settings file of a checkpoint in a folder, by name; empty for others.

    A hub model's revision names all its files already, and a model object has none. `origin`: see `Checkpoint.origin`.
    """
    folder = Path(str(origin.get("pretrained_model_name_or_path", "")))
    if not origin or not folder.is_dir():
        return {}
    found = [folder / name for name in SETTINGS if (folder / name).is_file()]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in found}
