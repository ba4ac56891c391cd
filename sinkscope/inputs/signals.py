"""Reads what a model is given instead of token ids or between them: pictures, sound, or the real vectors of a task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from sinkscope.errors import SinkscopeError
from sinkscope.inputs.batches import DECODER, TokenData, as_corpus, token_data
from sinkscope.inputs.corpus import Corpus
from sinkscope.inputs.rules import TokenRules, token_text

PIXELS, SOUND = "pixel_values", ("input_features", "input_values")
NAMES = ("position 0", "position")
"""Names of positions, shown instead of tokens: the first (the class token in most vision models) and all others."""


PATCH_COUNTS, PATCH_MASK = "spatial_shapes", "pixel_attention_mask"
"""Keys of the numbers of patches [picture, 2] down and across, and of the mask of patches [picture, patch], where a
processor cuts pictures itself: `pixel_values` are then [picture, patch, number], padded on the right (SigLIP 2)."""


@dataclass(frozen=True)
class SignalKind:
    """A kind of signal, which a mapping holds under one name.

    Attributes:
        unit: the word for one row; plural: the word for several.
        axes: the numbers of axes that it may have; shape: their names.
        option: the command line's option for a folder of them.
    """

    unit: str
    plural: str
    axes: tuple[int, ...]
    shape: str
    option: str


KINDS = {
    PIXELS: SignalKind("picture", "pictures", (4,), "[picture, channel, height, width]", "--images"),
    "input_features": SignalKind(
        "recording", "sound", (3,), "[recording, frame, feature] (Whisper: [recording, mel, frame])", "--audio"
    ),
    "input_values": SignalKind(
        "recording", "sound", (2, 3), "[recording, sample] (AST: [recording, frame, mel])", "--audio"
    ),
}
"""The kinds by keyword of the forward."""


@dataclass(frozen=True)
class Signals:
    """One signal a sequence, float32, all of one shape: nothing is padded but `patches`.

    Attributes:
        name: the forward's keyword. values: [sequence, ...] as KINDS says.
        text: what the decoder of an encoder-decoder reads, token ids [sequence, T]; None = its start token alone.
        text_from: describes that text in the manifest. warnings: for the run.
        patches: as PATCH_COUNTS, where `values` are pictures in patches padded on the right, which are read one by one.
    """

    name: str
    values: np.ndarray
    text: np.ndarray | None = None
    text_from: str | None = None
    warnings: tuple[str, ...] = ()
    patches: np.ndarray | None = None

    def tokens(self, positions: int) -> TokenData:
        """Returns what the model reads, as sequences of `positions` attention positions."""
        kinds = self._kinds(positions)
        if self.patches is None:
            return TokenData(kinds, vectors=self.values, decoder=self.text)
        whole = [torch.ones(1, int(sizes.prod()), dtype=torch.int32) for sizes in self.patches]
        extras = [
            {PATCH_COUNTS: torch.from_numpy(sizes[None]), PATCH_MASK: mask}
            for sizes, mask in zip(self.patches, whole, strict=True)
        ]
        there = (kinds >= 0).astype(np.int64)
        return TokenData(kinds.clip(min=0), None if there.all() else there, vectors=self.values, extras=extras)

    def corpus(self, positions: int) -> Corpus:
        """Returns the corpus that the run records. Its fingerprint covers the decoder's text, if there is one."""
        pieces = [(f"{KINDS[self.name].unit} {number}",) for number in range(len(self.values))]
        numbers = self.values
        if self.text is not None:
            numbers = np.concatenate([self.values.ravel(), self.text.ravel().astype(np.float32)])
        if self.patches is not None:
            numbers = np.concatenate([self.values.ravel(), self.patches.ravel().astype(np.float32)])
        return Corpus(self.name, self._kinds(positions), pieces, vectors=numbers, warnings=list(self.warnings))

    def _kinds(self, positions: int) -> np.ndarray:
        counts = np.full(len(self.values), positions) if self.patches is None else self.patches.prod(1)
        kinds = np.where(np.arange(counts.max()) < counts[:, None], 1, -1)
        kinds[:, 0] = 0
        return kinds.astype(np.int64)


def signal_name(data: Any) -> str | None:
    """The name under which a mapping holds pictures or sound; None for any other data."""
    return next((name for name in KINDS if name in data), None) if hasattr(data, "keys") else None


def signal_data(data: Any, count: int | None, vocabulary: int | None = None) -> Signals | None:
    """Reads the first `count` pictures or recordings of a mapping; returns None where it holds none.

    The mapping's `decoder_input_ids` are the decoder's text; `vocabulary`: how many ids exist for it. Raises
    SinkscopeError where the signals are not finite numbers of the shape in KINDS, or a mask marks some as padding.
    """
    name = signal_name(data)
    if name is None:
        return None
    kind = KINDS[name]
    try:
        values = torch.as_tensor(data[name]).detach().float().cpu().numpy()
    except (TypeError, ValueError, RuntimeError):
        values = np.zeros(0)
    patches = _patch_counts(data, values) if name == PIXELS and PATCH_COUNTS in data else None
    if (values.ndim not in kind.axes and patches is None) or not values.size:
        raise SinkscopeError(f"{name}: numbers of shape {kind.shape} are needed")
    if not np.isfinite(values).all():
        raise SinkscopeError(f"{name} hold NaN or infinity")
    padding = None if patches is not None else _padding_mask(data, name)
    if padding is not None:
        raise SinkscopeError(f"{name}: {padding} marks padding; give {kind.unit}s cut to one size, and no mask")
    text = None
    if DECODER in data:
        text = _decoder_text(data[DECODER], len(values), vocabulary)[:count]
    text_from = f"{DECODER} as given" if text is not None else None
    if patches is not None:
        values, patches = values[:, : patches[:count].prod(1).max()], patches[:count]
    return Signals(name, np.ascontiguousarray(values[:count]), text, text_from, patches=patches)


def _patch_counts(data: Any, values: np.ndarray) -> np.ndarray:
    """The numbers of patches of each picture, [picture, 2]. Raises SinkscopeError where the patches or their mask are
    not as these say."""
    sizes = torch.as_tensor(data[PATCH_COUNTS]).cpu().numpy()
    if values.ndim != 3 or sizes.shape != (len(values), 2) or sizes.dtype.kind not in "iu":
        raise SinkscopeError(
            f"{PIXELS} beside {PATCH_COUNTS} [picture, 2]: numbers of shape [picture, patch, number] are needed"
        )
    counts = sizes.prod(1)
    if sizes.min() < 1 or counts.min() < 2 or counts.max() > values.shape[1]:
        raise SinkscopeError(f"{PATCH_COUNTS}: pictures of 2 to {values.shape[1]} patches are needed")
    if PATCH_MASK in data:
        mask = torch.as_tensor(data[PATCH_MASK]).bool().cpu().numpy()
        if mask.shape != values.shape[:2] or (mask != (np.arange(values.shape[1]) < counts[:, None])).any():
            raise SinkscopeError(f"{PATCH_MASK} shows other patches than {PATCH_COUNTS} counts")
    return sizes.astype(np.int64)


def _padding_mask(data: Any, name: str) -> str | None:
    """Returns the name of a mask that hides part of the signals: they are read whole, so padding would be measured."""
    masks = [key for key in data if key.endswith("mask") and (name != PIXELS or key.startswith("pixel"))]
    return next((mask for mask in masks if not torch.as_tensor(data[mask]).bool().all()), None)


def _decoder_text(given: Any, sequences: int, vocabulary: int | None) -> np.ndarray:
    if vocabulary is None:
        raise SinkscopeError(f"{DECODER}: this model has no decoder that reads text")
    read = token_data(given, vocabulary)
    if read.mask is not None or len(read.ids) != sequences:
        raise SinkscopeError(f"{DECODER}: {sequences} rows of equal length are needed, one for each signal")
    return read.ids


def signal_rules() -> TokenRules:
    """Returns the rules of signals: no text, no special tokens."""
    return TokenRules([], [], None, frozenset(), len(NAMES), 0)


TASKS = ("trigger",)
"""SPECs that name a task; only a model that brings the task can read it."""


class VectorTask(Protocol):
    """What a task offers the engine.

    Attributes:
        name: the SPEC that names it (`--data NAME`), and the default data of its model.
        tokens: names of the kinds of position, by the ids in `Corpus.ids`; kind 0 is BOS.
    """

    name: str
    tokens: tuple[str, ...]

    def read(self, seq_len: int | None, num_sequences: int | None, seed: int) -> Corpus:
        """Draws sequences with `vectors`; None = the task's own length or number."""

    def report(self, positions: Any) -> dict[str, Any]:
        """Returns the task's entry of summary.json, from the run's positions table: `columns`, `heads`, `in_words`."""


@dataclass(frozen=True)
class KindNames:
    """Stands in for a tokenizer where positions have kinds, not tokens."""

    names: tuple[str, ...]

    def convert_ids_to_tokens(self, kind: int) -> str:
        """The name of one kind of position, as a tokenizer gives that of a token."""
        return self.names[kind]


def task_of(model: nn.Module) -> VectorTask | None:
    """Returns the task that a model brings; None for ordinary models, which bring none."""
    bring = getattr(model, "input_task", None)
    return bring() if callable(bring) else None


def task_rules(task: VectorTask) -> TokenRules:
    """The rules for a task's sequences, whose positions have kinds, not tokens: kind 0 is special, none is drawn."""
    return TokenRules([], [], 0, frozenset({0}), len(task.tokens), 0)


# Text with pictures or sound in it, as the processor of a vision- or audio-language model returns it.


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
        extras = self.tokens.extras or []
        numbers = [extra[name].cpu().double().numpy().ravel() for extra in extras for name in sorted(extra)]
        plain = as_corpus(self.tokens)
        what = "pictures" if self.signal == PIXELS else "sound"
        return Corpus(f"token ids and {what}", plain.ids, plain.pieces, vectors=np.concatenate(numbers))


@dataclass(frozen=True)
class ImageNames:
    """Names tokens as the tokenizer does (by id without one), but image tokens `image`."""

    tokenizer: Any
    image_id: int | None

    def convert_ids_to_tokens(self, token: int) -> str:
        """The name of one token."""
        return IMAGE if token == self.image_id else token_text(self.tokenizer, token)


def image_token(config: Any) -> int | None:
    """The id that stands for a part of a picture in the text; None where the configuration names none."""
    candidates = (getattr(config, name, None) for name in IMAGE_IDS)
    return next((token for token in candidates if isinstance(token, int)), None)


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
    extras = [dict(zip(rest, row, strict=True)) for row in zip(*parts, strict=True)]
    for number, extra in enumerate(extras):
        length = ids.ids.shape[1]
        start, stop = ids.span(number)
        for name, value in extra.items():
            if value.shape == (1, length):  # one number per token: cut the padding off as from the ids
                extra[name] = value[:, start:stop]
        _cut_patches(extra)
    mask = None if ids.mask is None else ids.mask[:count]
    return Sighted(TokenData(ids.ids[:count], mask, extras=extras[:count]), signal)


def _cut_patches(extra: dict[str, Tensor]) -> None:
    """Leaves out what stands behind the patches of a picture, where it is the only one of its sequence."""
    if PATCH_COUNTS not in extra or len(extra[PATCH_COUNTS]) != 1:
        return
    patches = int(_patch_counts(extra, extra[PIXELS].numpy()).prod())
    for name in {PIXELS, PATCH_MASK} & extra.keys():
        extra[name] = extra[name][:, :patches]


def joined(sequences: Sequence[dict[str, Any]], vocabulary: int) -> Sighted:
    """Joins sequences that a processor returned one by one, each a batch of one; lengths may differ."""
    read = [sighted_data(sequence, None, vocabulary) for sequence in sequences]
    rows = [sighted.tokens.ids[0] for sighted in read if sighted is not None]
    extras = [extra for sighted in read if sighted is not None for extra in sighted.tokens.extras or []]
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
