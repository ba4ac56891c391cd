"""What the number of queries that see each key tells of a batch: padding that nobody told of, and several texts in one
row."""

from __future__ import annotations

import torch
from torch import Tensor


class Unseen:
    """The positions that no query may see in any call that reads its own sequence: padding, where nobody told of it."""

    def __init__(self) -> None:
        self._hidden: dict[tuple[str, int], Tensor] = {}

    def add(self, place: str, seen_by: Tensor, causal: bool, chosen: bool) -> None:
        """Adds a call, by the number of queries that see each key, (b | 1, h | 1, T). `causal`: a query need not see
        its own key, so that the last one tells nothing. `chosen`: so does none where the model chooses keys."""
        hidden = seen_by.amax(1) == 0
        if causal:
            hidden[:, -1] = False
        if chosen and bool(hidden.any()):
            return
        key = place, hidden.shape[1]
        self._hidden[key] = hidden & self._hidden[key] if key in self._hidden else hidden

    def sequences(self, rows: int) -> int:
        """How many of these sequences have such a position."""
        counts = (hidden.any(1).expand(rows).sum() for hidden in self._hidden.values())
        return max(map(int, counts), default=0)


PACKED = (
    "a row holds several texts, each with position_ids of its own, between which the model does not attend: give each "
    "text a row, or scan the model with these input_ids and position_ids"
)


def kept_apart(texts: Tensor, seen_by: Tensor, causal: bool) -> bool:
    """Whether some text of a packed row is not attended to from the next. `texts`: (B | 1, T), where one begins.
    `seen_by`: (b | 1, h | 1, T), how many queries see each key."""
    if texts.shape[1] != seen_by.shape[2]:
        return False
    seen = seen_by.amax(1)[:, :-1]  # of the last token of a text, if the next one begins behind it
    own = 1 if causal else torch.arange(1, texts.shape[1], device=seen.device)
    return bool((texts[:, 1:].to(seen.device) & (seen <= own)).any())  # layers may be on several devices
