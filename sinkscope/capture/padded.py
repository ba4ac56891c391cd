"""The padding of a pass: the masks that a model is given, and the attention calls whose positions they tell."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from sinkscope.capture.sites import shown_name
from sinkscope.capture.views import Cut, Span
from sinkscope.errors import SinkscopeError

OWN, TARGET, MEMORY = "own", "target", "memory"
HUGGING_FACE, KEYS = "attention_mask", "key_padding_mask"
NAMES = {
    OWN: (HUGGING_FACE, "src_key_padding_mask", KEYS),
    TARGET: ("decoder_attention_mask", "tgt_key_padding_mask"),
    MEMORY: ("encoder_attention_mask", "memory_key_padding_mask"),
}
"""What models call the padding mask of their input (an encoder's, where there is a decoder), of a decoder's input, and
of what a decoder reads by cross-attention. There, transformers' models take the input's, torch's none."""
BEHIND = "a sequence goes on behind padding, which is not read: pad prompts on the left"
"""Said where a token attends to this padding, and where attention is computed in a model's own code."""


MASKS = tuple(name for names in NAMES.values() for name in names)


def given_by_place(module: nn.Module, args: tuple[Any, ...], names: Collection[str]) -> dict[str, Any]:
    """Those of the arguments with these names that a module is given without their names."""
    if len(args) < 2:
        return {}
    try:
        parameters = signature(module.forward).parameters
    except (ValueError, TypeError):  # a function that Python code does not describe
        return {}
    return {name: given for name, given in zip(parameters, args, strict=False) if name in names}


def masks_given(
    kwargs: Mapping[str, Any], batch: int | None, second: int | None, of_keys: bool = False
) -> dict[str, Tensor]:
    """The padding masks [B, T] that a pass is given, 1 = token, by OWN, TARGET and MEMORY, and by HUGGING_FACE the
    input's again where cross-attention takes it.

    `batch`, `second`: the first two axes of the input. B is the first; in torch's own modules, whose input may put time
    first, also the second. A mask of another shape, such as [T, T], tells no padding. `of_keys`: the pass reads keys of
    another sequence, which `key_padding_mask` tells of.
    """
    masks = {}
    for side, names in NAMES.items():
        for name in names:
            mask, of_torch = kwargs.get(name), name.endswith("key_padding_mask")
            rows = {batch, second} if of_torch else {batch}
            if side not in masks and isinstance(mask, Tensor) and mask.dim() == 2 and mask.shape[0] in rows:
                shown = MEMORY if name == KEYS and of_keys else side
                masks[shown] = _valid(mask.detach(), of_torch)
                if name == HUGGING_FACE:
                    masks[name] = masks[shown]
    return masks


def _valid(mask: Tensor, hides: bool) -> Tensor:
    """1 where a mask leaves a token. `hides`: torch's own convention, True = padding. One of real numbers may be added
    to the logits: 0 = token."""
    if mask.is_floating_point():
        return mask == 0 if hides or bool((mask < 0).any()) else mask
    return mask == 0 if hides else mask


def valid_spans(mask: Tensor) -> list[Span] | None:
    """The valid positions of each row of a padding mask [B, T]; None without padding.

    Raises ValueError for a mask with holes, or with an empty row.
    """
    valid = mask != 0
    if bool(valid.all()):
        return None
    starts, ends = _edges(valid)
    if has_holes(valid):
        raise ValueError("an attention_mask with holes, or of a sequence without any token")
    return list(zip(starts.tolist(), ends.tolist(), strict=True))


def has_holes(valid: Tensor) -> bool:
    """Whether some row of a padding mask [B, T] has padding between its tokens, or no token."""
    starts, ends = _edges(valid)
    return bool((ends - starts != valid.sum(1)).any())


def _edges(valid: Tensor) -> tuple[Tensor, Tensor]:
    """The first token of each row, and the place after the last."""
    return valid.int().argmax(1), valid.shape[1] - valid.flip(1).int().argmax(1)


@dataclass(frozen=True)
class Side:
    """The valid positions of each sequence, of `length` positions in all; `spans` None: all of them."""

    spans: list[Span] | None
    length: int


def padding_tokens(model: nn.Module) -> set[int]:
    """The tokens with which programs pad: 0, and the one that the model's configuration names."""
    told = getattr(getattr(model, "config", None), "pad_token_id", None)
    return {0, told} if isinstance(told, int) else {0}


def like_padding(ids: Tensor, tokens: set[int]) -> int:
    """How many rows of ids [B, T] begin or end with one of these tokens, where others of the batch do not."""
    found = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
    for token in tokens:
        for edge in (ids[:, 0] == token, ids[:, -1] == token):
            if not bool(edge.all()):
                found |= edge
    return int(found.sum())


@dataclass(frozen=True)
class Padding:
    """The padding of one batch: what each mask that was given says, by OWN, TARGET and MEMORY.

    `of_text`: token ids were given, so that the masks tell of no pictures or sound beside them.
    """

    sides: dict[str, Side] = field(default_factory=dict)
    of_text: bool = False

    @classmethod
    def of(cls, masks: Mapping[str, Tensor], of_text: bool) -> Padding:
        """What these masks say. Raises as `valid_spans`."""
        return cls({name: Side(valid_spans(mask), mask.shape[1]) for name, mask in masks.items()}, of_text)

    @property
    def any(self) -> bool:
        """Whether some position is padding."""
        return any(side.spans is not None for side in self.sides.values())

    def cuts(self, name: str, place: str, among: Collection[str]) -> list[Cut] | None:
        """How an attention call is cut into its sequences; None where it holds no padding.

        `name`: the call's, for errors. `place`: `side_of` its module. `among`: those of all calls of the pass. Raises
        SinkscopeError where none can tell whose padding a mask shows.
        """
        if not self.any:
            return None
        queries, keys = (self._first(masks) for masks in _masks_of(name, place, among, self.of_text))
        spans = [side.spans for side in (queries, keys) if side is not None and side.spans is not None]
        if not spans:
            return None
        return [Cut(row, _at(queries, row), _at(keys, row)) for row in range(len(spans[0]))]

    def heeded(self, calls: Iterable[tuple[str, str, tuple[int, int], bool]], among: Collection[str]) -> Padding:
        """Without masks of other lengths than all positions that they could tell of, where the model hides none of
        these: Whisper's encoder reads its whole picture of the sound, with half as many positions as the mask that
        transformers' pipelines give it. Of each call: its name, its place, numbers of queries and keys, and whether
        some query does not see some key."""
        sizes: dict[str, set[int]] = {}
        hidden = set[str]()
        for name, place, lengths, hides in calls:
            for size, masks in zip(lengths, _masks_of(name, place, among, self.of_text), strict=True):
                side = next((mask for mask in masks if mask in self.sides), None)
                if side is not None:
                    sizes.setdefault(side, set()).add(size)
                    hidden |= {side} if hides else set()
        without = {side for side, found in sizes.items() if self.sides[side].length not in found} - hidden
        return replace(self, sides={name: side for name, side in self.sides.items() if name not in without})

    def alike(self, name: str, place: str, before: Collection[str], after: Collection[str]) -> bool:
        """Whether a call is cut alike among these calls and among those. Arguments as in `cuts`, which raises alike."""
        first, second = (
            tuple(map(self._first, _masks_of(name, place, among, self.of_text))) for among in (before, after)
        )
        return first == second

    def _first(self, names: tuple[str, ...]) -> Side | None:
        return next((self.sides[name] for name in names if name in self.sides), None)


def _at(side: Side | None, row: int) -> tuple[Span, int] | None:
    return None if side is None or side.spans is None else (side.spans[row], side.length)


def _masks_of(name: str, place: str, among: Collection[str], of_text: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The masks of a call's queries and of its keys, each the first that was given."""
    if place == "signal":  # a tower of pictures or sound beside the text, whose mask is not its own
        return ((OWN,), (OWN,)) if set(among) == {"signal"} and not of_text else ((), ())
    if "cross" not in among:
        own = (OWN,) if place != "decoder" else (TARGET,) if "encoder" in among else (TARGET, OWN)
        return own, own
    if not {"encoder", "decoder"} & set(among):  # text that reads pictures, or a decoder alone
        return (TARGET, OWN), (MEMORY,) if place == "cross" else (TARGET, OWN)
    sides = {
        "encoder": ((OWN,), (OWN,)),
        "decoder": ((TARGET,), (TARGET,)),
        "cross": ((TARGET,), (MEMORY, HUGGING_FACE)),
    }
    if place not in sides:
        raise SinkscopeError(
            f"{shown_name(name)} attends beside an encoder and a decoder: whether their padding masks are its own "
            "cannot be told; give sequences of equal length"
        )
    return sides[place]
