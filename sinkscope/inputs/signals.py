"""Reads what a model is given instead of token ids: pictures, sound, or the real vectors that a task draws."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from sinkscope.errors import SinkscopeError
from sinkscope.inputs.batches import DECODER, TokenData, token_data
from sinkscope.inputs.corpus import Corpus
from sinkscope.inputs.rules import TokenRules

PIXELS, SOUND = "pixel_values", ("input_features", "input_values")
NAMES = ("position 0", "position")
"""Names of positions, shown instead of tokens: the first (the class token in most vision models) and all others."""


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
    """One signal a sequence, float32, all of one shape: nothing is padded.

    Attributes:
        name: the forward's keyword. values: [sequence, ...] as KINDS says.
        text: what the decoder of an encoder-decoder reads, token ids [sequence, T]; None = its start token alone.
        text_from: describes that text in the manifest. warnings: for the run.
    """

    name: str
    values: np.ndarray
    text: np.ndarray | None = None
    text_from: str | None = None
    warnings: tuple[str, ...] = ()

    def tokens(self, positions: int) -> TokenData:
        """Returns what the model reads, as sequences of `positions` attention positions."""
        return TokenData(self._kinds(positions), vectors=self.values, decoder=self.text)

    def corpus(self, positions: int) -> Corpus:
        """Returns the corpus that the run records. Its fingerprint covers the decoder's text, if there is one."""
        pieces = [(f"{KINDS[self.name].unit} {number}",) for number in range(len(self.values))]
        numbers = self.values
        if self.text is not None:
            numbers = np.concatenate([self.values.ravel(), self.text.ravel().astype(np.float32)])
        return Corpus(self.name, self._kinds(positions), pieces, vectors=numbers, warnings=list(self.warnings))

    def _kinds(self, positions: int) -> np.ndarray:
        kinds = np.ones((len(self.values), positions), dtype=np.int64)
        kinds[:, 0] = 0
        return kinds


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
    if values.ndim not in kind.axes or not values.size:
        raise SinkscopeError(f"{name}: numbers of shape {kind.shape} are needed")
    if not np.isfinite(values).all():
        raise SinkscopeError(f"{name} hold NaN or infinity")
    padding = _padding_mask(data, name)
    if padding is not None:
        raise SinkscopeError(f"{name}: {padding} marks padding; give {kind.unit}s cut to one size, and no mask")
    text = None
    if DECODER in data:
        text = _decoder_text(data[DECODER], len(values), vocabulary)[:count]
    text_from = f"{DECODER} as given" if text is not None else None
    return Signals(name, np.ascontiguousarray(values[:count]), text, text_from)


def _padding_mask(data: Any, name: str) -> str | None:
    """Returns the name of a mask that hides part of the signals: they are read whole, so padding would be measured."""
    masks = [each for each in data if each.endswith("mask") and (name != PIXELS or each.startswith("pixel"))]
    return next((each for each in masks if not torch.as_tensor(data[each]).bool().all()), None)


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
        return self.names[kind]


def task_of(model: nn.Module) -> VectorTask | None:
    """Returns the task that a model brings; None for ordinary models, which bring none."""
    bring = getattr(model, "input_task", None)
    return bring() if callable(bring) else None


def task_rules(task: VectorTask) -> TokenRules:
    return TokenRules([], [], 0, frozenset({0}), len(task.tokens), 0)
