"""Text with pictures or sound in it, as the processor of a vision- or audio-language model returns it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sinkscope.errors import SinkscopeError
from sinkscope.inputs.batches import TokenData, as_corpus, token_data
from sinkscope.inputs.corpus import Corpus
from sinkscope.inputs.rules import token_text
from sinkscope.inputs.signals import PIXELS, signal_name

GRIDS = ("image_grid_thw", "image_grid_hws")
"""Keys of picture sizes [picture, axis]. `pixel_values` joins the patches of all pictures, a picture's number of
patches being the product of its sizes."""

IMAGE_IDS = ("image_token_id", "image_token_index")
IMAGE = "image"
"""Name of an image token in the tables."""


@dataclass(frozen=True)
class Sighted:
    """Sequences with pictures or sound: token ids, and the model's other inputs for each sequence."""

    tokens: TokenData
    signal: str = PIXELS

    def corpus(self) -> Corpus:
        """Returns the valid ids of each sequence; the fingerprint covers the pictures or sound too."""
        given = self.tokens.extras or []
        numbers = [extra[name].cpu().double().numpy().ravel() for extra in given for name in sorted(extra)]
        plain = as_corpus(self.tokens)
        what = "pictures" if self.signal == PIXELS else "sound"
        return Corpus(f"token ids and {what}", plain.ids, plain.pieces, vectors=np.concatenate(numbers))


@dataclass(frozen=True)
class ImageNames:
    """Names tokens as the tokenizer does (by id without one), but image tokens `image`."""

    tokenizer: Any
    image_id: int | None

    def convert_ids_to_tokens(self, token: int) -> str:
        return IMAGE if token == self.image_id else token_text(self.tokenizer, token)


def image_token(config: Any) -> int | None:
    """The id that stands for a part of a picture in the text; None where the configuration names none."""
    found = (getattr(config, name, None) for name in IMAGE_IDS)
    return next((token for token in found if isinstance(token, int)), None)


def sighted_data(data: Any, count: int | None, vocabulary: int, image_id: int | None = None) -> Sighted | None:
    """Reads the sequences of a mapping with `input_ids` and pictures or sound for each; None for any other data.

    Every other entry of the mapping is a tensor, which is split by sequence and goes to the model with it. A sequence
    may have several pictures where all sequences have equally many pictures and tokens `image_id`. Raises
    SinkscopeError where a tensor cannot be split by sequence.
    """
    signal = signal_name(data)
    if signal is None or "input_ids" not in data:
        return None
    ids = token_data({name: data[name] for name in ("input_ids", "attention_mask") if name in data}, vocabulary)
    try:
        rest = {name: torch.as_tensor(data[name]).detach().cpu() for name in data if name not in ("input_ids",)}
    except (TypeError, ValueError, RuntimeError):
        raise SinkscopeError(f"{signal} and the entries beside it: tensors are needed (return_tensors='pt')") from None
    if not rest[signal].is_floating_point() or not torch.isfinite(rest[signal]).all():
        raise SinkscopeError(f"{signal}: finite numbers are needed")
    rest.pop("attention_mask", None)
    shown = np.unique((ids.ids == image_id).sum(1)) if image_id is not None else np.zeros(2)
    parts = [_parts(name, value, rest, len(ids.ids), len(shown) == 1) for name, value in rest.items()]
    extras = [dict(zip(rest, own, strict=True)) for own in zip(*parts, strict=True)]
    for number, extra in enumerate(extras):
        length = ids.ids.shape[1]
        start, stop = ids.span(number)
        for name, value in extra.items():
            if value.shape == (1, length):  # one number per token: cut the padding off as from the ids
                extra[name] = value[:, start:stop]
    mask = None if ids.mask is None else ids.mask[:count]
    return Sighted(TokenData(ids.ids[:count], mask, extras=extras[:count]), signal)


def joined(sequences: Sequence[dict[str, Any]], vocabulary: int) -> Sighted:
    """Joins sequences that a processor returned one by one, each a batch of one; lengths may differ."""
    read = [sighted_data(sequence, None, vocabulary) for sequence in sequences]
    rows = [one.tokens.ids[0] for one in read if one is not None]
    extras = [extra for one in read if one is not None for extra in one.tokens.extras or []]
    ids = token_data(rows, vocabulary)
    return Sighted(TokenData(ids.ids, ids.mask, extras=extras))


def _parts(name: str, value: Tensor, rest: dict[str, Tensor], sequences: int, several: bool) -> list[Tensor]:
    """Splits a tensor into a part per sequence, first axis kept. `several`: a part may hold more than one picture."""
    grid = next((rest[grid] for grid in GRIDS if grid in rest), None)
    if name == PIXELS and grid is not None and _fits(len(grid), sequences, several):
        sizes = grid.prod(-1).view(sequences, -1).sum(1).tolist()
        if sum(sizes) == len(value):
            return list(value.split(sizes))
    if value.dim() and _fits(len(value), sequences, several):
        return list(value.split(len(value) // sequences))
    raise SinkscopeError(
        f"{name} of shape {tuple(value.shape)} for {sequences} sequences: give one picture for each sequence, or "
        "all of them equally many pictures and image tokens"
    )


def _fits(rows: int, sequences: int, several: bool) -> bool:
    return rows == sequences or (several and rows > 0 and rows % sequences == 0)
