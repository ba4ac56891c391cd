"""What a pass shows of the slots of its cache: which it sees, and which get attention from it."""

from __future__ import annotations

import torch
from torch import Tensor

from sinkscope.capture.calls import AttentionCall
from sinkscope.capture.kernels.attend import read
from sinkscope.capture.masks.visibility import Visibility
from sinkscope.errors import SinkscopeError

NO_WEIGHT = 1e-30
"""Less attention than this changes no number in float32. The compiled exponential gives no less than 1e-38."""


def weighs(call: AttentionCall, past: int) -> Tensor:
    """(B, G, past): whether the queries of a pass give a slot of the cache any attention.

    NaN counts as some, and so does every weight of a score that is not softmax's.
    """
    if call.score != "softmax":
        return torch.ones((*call.key.shape[:2], past), dtype=torch.bool, device=call.key.device)
    columns = read(call)[1].columns[..., :past]
    return ~(columns < NO_WEIGHT).unflatten(1, (call.key.shape[1], -1)).all(2)


def windowed(call: AttentionCall, before: int) -> bool:
    """Whether a cache holds as many keys as the model's sliding window needs, so that it dropped none that are seen."""
    new, keys = call.lengths
    return call.window is not None and keys == min(before, call.window - 1) + new


def first_seen(visible: Visibility, past: int, name: str) -> Tensor:
    """(B | 1): the first slot that the queries of a pass see, of the `past` ones before their own.

    Raises SinkscopeError where it is not the same for all of them, or where they do not see each other in causal order.
    """
    if visible.spans is not None and visible.spans[0].shape[1] == 1:
        first, end = visible.spans
        order = torch.arange(past + 1, past + 1 + end.shape[2], device=end.device)
        if bool((end == order).all()) and bool((first == first[..., :1]).all()) and bool((first < order).all()):
            return first[:, 0, 0].clamp(max=past)
    raise SinkscopeError(f"{name} hides keys from some queries over a cache that changed others: it is not read")
