"""What stands at the positions of a stream: the token, and the region it belongs to."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from sinkscope.inputs.rules import shared_tokens, token_text


@dataclass(frozen=True)
class Places:
    """The positions of one stream's keys, in one domain.

    Attributes:
        regions: [sequence, position], the name of each position's region; "" past a sequence's end.
        ids: [sequence, position], token ids; None where the positions hold no tokens (patches, frames).
        tokenizer: gives the ids their texts.
    """

    regions: np.ndarray
    ids: np.ndarray | None = None
    tokenizer: Any = None

    @property
    def lengths(self) -> np.ndarray:
        """[sequence]: the number of positions of each sequence."""
        return np.asarray((self.regions != "").sum(1))

    def cut(self, sequences: int) -> Places:
        """The places of the first `sequences`, those that an interrupted scan has measured."""
        return Places(self.regions[:sequences], None if self.ids is None else self.ids[:sequences], self.tokenizer)

    @cached_property
    def shared(self) -> list[str | None]:
        """The token at each position where all sequences have the same one; None elsewhere."""
        if self.ids is None:
            return [None] * self.regions.shape[1]
        return shared_tokens(self.ids, self.tokenizer)

    def texts(self, ids: np.ndarray) -> dict[int, str]:
        """The text of each id, as the vocabulary spells it."""
        return {int(each): token_text(self.tokenizer, int(each)) for each in np.unique(ids)}


PlacesOf = dict[tuple[str, str], Places]
"""The places of the keys of every attention call, by (domain, name of the site); calls of a stream share them."""


def text_regions(ids: np.ndarray, special: frozenset[int]) -> np.ndarray:
    """[sequence, position]: `special` for special tokens, `text` for all others, "" past a sequence's end (id < 0)."""
    regions = np.where(np.isin(ids, list(special)), "special", "text")
    return np.asarray(np.where(ids < 0, "", regions))
