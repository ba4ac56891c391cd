"""Pictures for vision models: a tensor of pixel values, given in Python, in the place of token ids."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sinkscope.errors import SinkscopeError
from sinkscope.inputs.corpus import Corpus
from sinkscope.inputs.rules import TokenRules

PIXELS = "pixel_values"
NAMES = ("position 0", "position")
"""A position's kind, in the place of a token: the first (the class token, in most models) and all others."""


@dataclass(frozen=True)
class Pictures:
    """Pixel values [picture, channel, height, width], float32, as the model's own image processor gives them."""

    pixels: np.ndarray

    def probe(self) -> torch.Tensor:
        """One picture, for the dry run."""
        return torch.from_numpy(self.pixels[:1])

    def corpus(self, positions: int) -> Corpus:
        """The pictures as sequences of `positions` attention positions."""
        kinds = np.ones((len(self.pixels), positions), dtype=np.int64)
        kinds[:, 0] = 0
        names = [f"picture {number}" for number in range(len(kinds))]
        return Corpus(PIXELS, kinds, names, vectors=self.pixels)


def picture_data(data: Any, count: int | None) -> Pictures | None:
    """The pictures of a mapping with `pixel_values`, the first `count` of them; None for any other data.

    Raises SinkscopeError where they are no finite numbers of shape [picture, channel, height, width].
    """
    if not hasattr(data, "keys") or PIXELS not in data:
        return None
    try:
        pixels = torch.as_tensor(data[PIXELS]).detach().float().cpu().numpy()
    except (TypeError, ValueError, RuntimeError):
        pixels = np.zeros(0)
    if pixels.ndim != 4 or not len(pixels):
        raise SinkscopeError(f"{PIXELS}: numbers of shape [picture, channel, height, width] are needed")
    if not np.isfinite(pixels).all():
        raise SinkscopeError(f"{PIXELS} hold NaN or infinity")
    return Pictures(np.ascontiguousarray(pixels[:count]))


def picture_rules() -> TokenRules:
    """No text, no special tokens."""
    return TokenRules([], [], None, frozenset(), len(NAMES), 0)
