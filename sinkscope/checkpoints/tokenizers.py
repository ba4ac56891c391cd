"""Loads a checkpoint's tokenizer, or says why there is none."""

from __future__ import annotations

from typing import Any

from sinkscope.checkpoints.gguf_tokenizers import gguf_problem
from sinkscope.checkpoints.sources import Source, first_line


def load_tokenizer(source: Source, trust_remote_code: bool) -> tuple[Any, str | None]:
    """Returns (tokenizer, None) or (None, reason): token files can be scanned without a tokenizer."""
    from transformers import AutoTokenizer

    if source.gguf and (problem := gguf_problem()):
        return None, problem
    extra: dict[str, Any] = {"revision": source.revision} if source.revision else {}
    if source.gguf:
        extra["gguf_file"] = source.gguf
    try:
        tokenizer = AutoTokenizer.from_pretrained(source.location, trust_remote_code=trust_remote_code, **extra)
    except Exception as error:  # absent, damaged, of an unknown class, missing package: the caller says which
        if "trust_remote_code" in str(error):
            return None, "it carries its own Python code: pass --trust-remote-code if you trust it"
        return None, first_line(error)
    if len(tokenizer) <= len(tokenizer.all_special_ids):
        # Some families load an empty tokenizer where its files are missing, and all text would become [UNK].
        return None, "no vocabulary files"
    return tokenizer, None
