"""Names for token ids: what stands at each position, and what the first token is."""

from __future__ import annotations

from typing import Any

import numpy as np

from sinkscope.inputs.rules import TokenRules


def token_text(tokenizer: Any, token: int) -> str:
    """The token as the vocabulary spells it; its id where there is no tokenizer."""
    return str(token) if tokenizer is None else str(tokenizer.convert_ids_to_tokens(token))


def shared_tokens(ids: np.ndarray, tokenizer: Any) -> list[str | None]:
    """The token at each position where every sequence of `ids` [sequence, T] has the same one; None elsewhere."""
    same = (ids == ids[0]).all(0) & (ids[0] >= 0)
    return [token_text(tokenizer, int(token)) if s else None for token, s in zip(ids[0], same, strict=True)]


def first_token(ids: list[np.ndarray], rules: TokenRules, tokenizer: Any) -> dict[str, Any]:
    """Id and text of the first token where all sequences share it, and whether it is the tokenizer's BOS (or CLS)."""
    firsts = np.unique(np.concatenate([sequences[:, 0] for sequences in ids]))
    if len(firsts) > 1:
        return {"id": None, "text": None, "distinct": len(firsts), "is_bos": False}
    token = int(firsts[0])
    is_bos = rules.bos_id == token if rules.bos_id is not None else None
    return {"id": token, "text": token_text(tokenizer, token), "distinct": 1, "is_bos": is_bos}
