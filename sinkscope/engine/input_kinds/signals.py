"""Pictures or sound instead of token ids: vision and speech models."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import numpy as np
from torch import Tensor

from sinkscope.checkpoints import Checkpoint
from sinkscope.checkpoints.forward import Forward
from sinkscope.checkpoints.tokenizers import language_and_task
from sinkscope.engine.input_kinds.kind import InputKind, Reading
from sinkscope.errors import SinkscopeError
from sinkscope.inputs import TokenRules
from sinkscope.inputs.batches import DECODER, batches
from sinkscope.inputs.corpus import Corpus, warn_of_count
from sinkscope.inputs.images import picture_paths, processed
from sinkscope.inputs.signals import (
    KINDS,
    NAMES,
    PIXELS,
    SOUND,
    KindNames,
    Signals,
    signal_data,
    signal_name,
    signal_rules,
)
from sinkscope.inputs.sound import decoder_ids, sound_features, sound_paths
from sinkscope.runs.request import Request


class SignalInput(InputKind):
    """Reads one signal per sequence, of as many positions as the model's attention has.

    It claims every request for signals, and every model that reads only signals, to say why a request does not fit.
    """

    name: ClassVar[str] = "signals"

    def __init__(self, request: Request, checkpoint: Checkpoint, forward: Forward) -> None:
        super().__init__(request, checkpoint, forward)
        _refuse_other_models(request, checkpoint, forward)
        signals = self._from_folder() if request.handed is None else self._given()
        if signals is None:
            raise SinkscopeError(
                f"{type(checkpoint.model).__name__} reads {forward.signal}, not token ids (--data is for text models): "
                f'give {KINDS[forward.signal or PIXELS].option} FOLDER, or in Python scan(model, data={{"'
                f'{forward.signal}": tensor}})'
            )
        refuse_text_settings(request)
        self._signals = _with_warning(signals, forward)

    @classmethod
    def asked_for(cls, request: Request) -> bool:
        return request.images is not None or request.audio is not None or signal_name(request.handed) is not None

    @classmethod
    def claims(cls, request: Request, checkpoint: Checkpoint, forward: Forward) -> bool:
        return cls.asked_for(request) or forward.signal is not None

    @classmethod
    def check(cls, request: Request) -> None:
        if request.images is not None:
            picture_paths(Path(request.images))
        elif request.audio is not None:
            sound_paths(Path(request.audio))
        else:
            signal_data({name: request.handed[name] for name in request.handed if name != DECODER}, None)
        refuse_text_settings(request)

    def probe(self) -> tuple[Tensor, dict[str, Tensor]]:
        batch = next(batches(self._signals.tokens(1), 0, 1, self.checkpoint.device))
        return batch.inputs, batch.extra

    def several_probes(self) -> Tensor:
        what = f"{type(self.checkpoint.model).__name__} reads {self.forward.signal}"
        raise SinkscopeError(f"the parts of a layer are found in a pass over token ids, but {what}")

    def read(self, positions: int) -> Reading:
        corpus = named_by_files(self._signals.corpus(positions), self.request)
        tokens = self._signals.tokens(positions)
        warn_of_count(corpus, self.request.num_sequences or 0)
        names, text_from = KindNames(NAMES), self._signals.text_from
        return Reading(signal_rules(), [corpus], [tokens], names, self, decoder_input=text_from)

    def regions(self, ids: np.ndarray, rules: TokenRules) -> np.ndarray | None:
        return None

    def _given(self) -> Signals | None:
        return signal_data(self.request.handed, self.request.num_sequences, self._decoder_vocabulary())

    def _from_folder(self) -> Signals | None:
        request = self.request
        if request.audio is not None:
            return self._from_sound(request.audio)
        if request.images is None:
            return None
        origin = self.checkpoint.origin
        return signal_data(processed(request.images, request.prompt, request.num_sequences, origin, alone=True), None)

    def _from_sound(self, folder: str | Path) -> Signals | None:
        request, forward, tokenizer = self.request, self.forward, self.checkpoint.tokenizer
        if request.prompt is not None and not forward.decodes:
            raise SinkscopeError("--prompt: this model reads sound alone, no text")
        if request.prompt is not None and tokenizer is None:
            raise SinkscopeError(f"--prompt: no usable tokenizer ({self.checkpoint.tokenizer_error})")
        name = forward.signal or SOUND[0]
        values = sound_features(folder, request.num_sequences, self.checkpoint.origin, name)
        ids = decoder_ids(tokenizer, request.prompt, forward.start) if forward.decodes else []
        told = language_and_task(self.checkpoint.origin) if forward.decodes and forward.start is not None else {}
        if not set(told.values()) & set(ids):  # a tokenizer may write them itself
            ids = [*ids[:1], *told.values(), *ids[1:]]
        if len(ids) < 2:
            return signal_data({name: values}, None)
        signals = signal_data({name: values, DECODER: [ids] * len(values)}, None, self._decoder_vocabulary())
        text = "the tokenizer's special tokens" if request.prompt is None else "the text of --prompt"
        start = ", ".join([f"decoder_start_token_id {forward.start}", *told])
        text_from = f"{text} after {start}, without a special token at its end"
        return None if signals is None else replace(signals, text_from=text_from)

    def _decoder_vocabulary(self) -> int | None:
        """Rows of the decoder's embedding; None for a model that has no decoder."""
        if not self.forward.decodes:
            return None
        size = getattr(self.checkpoint.model.config, "vocab_size", None)
        return size if isinstance(size, int) else self.checkpoint.vocabulary


def named_by_files(corpus: Corpus, request: Request) -> Corpus:
    """The corpus of a request, whose sequences have the names of their files where they come from a folder."""
    if request.images is not None:
        paths = picture_paths(Path(request.images))
    elif request.audio is not None:
        paths = sound_paths(Path(request.audio))
    else:
        return corpus
    return replace(corpus, pieces=[(path.name,) for path in paths[: len(corpus.ids)]])


def signal_asked_for(request: Request, forward: Forward) -> str | None:
    """The keyword of the signal that is asked for, or None. For a folder of sound it is the one the model takes."""
    if request.images is not None:
        return PIXELS
    if request.audio is not None:
        return next((name for name in SOUND if name in forward.takes), SOUND[0])
    return signal_name(request.handed)


def refuse_text_settings(request: Request) -> None:
    """Raises SinkscopeError where a request for signals sets a length, or how text begins."""
    if request.bos != ("auto",):
        raise SinkscopeError("--bos chooses how text begins, and pictures or recordings are read: leave it out")
    if request.seq_len is not None:
        raise SinkscopeError("--seq-len: pictures and recordings have as many positions as the model gives them")


def _refuse_other_models(request: Request, checkpoint: Checkpoint, forward: Forward) -> None:
    """Raises SinkscopeError where the model does not take the signal asked for."""
    signal = signal_asked_for(request, forward)
    if signal is None or signal in forward.takes:
        return
    words = f"{type(checkpoint.model).__name__} reads {forward.signal or 'token ids'}, not {signal}"
    what = KINDS[signal].plural
    taken = any(KINDS[name].plural == what for name in forward.takes)
    raise SinkscopeError(words if taken else f"{words}: it takes no {what}")


def _with_warning(signals: Signals, forward: Forward) -> Signals:
    if not forward.decodes or signals.text is not None:
        return signals
    words = (
        "the decoder reads its start token alone, one query, and is not measured: give --prompt, or decoder_input_ids"
    )
    return replace(signals, warnings=(words,))
