"""What a scan of pictures or sound reads, alone or in text; and how much attention the text pays to pictures."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from sinkscope.checkpoints import Checkpoint
from sinkscope.checkpoints.checkpoint import check_length
from sinkscope.checkpoints.forward import Forward
from sinkscope.engine.reading import Reading
from sinkscope.errors import SinkscopeError
from sinkscope.inputs import token_rules
from sinkscope.inputs.batches import DECODER, batches
from sinkscope.inputs.images import processed
from sinkscope.inputs.signals import NAMES, PIXELS, SOUND, Signals, signal_data, signal_name, signal_rules
from sinkscope.inputs.signals_with_text import ImageNames, Sighted, image_token, joined, sighted_data
from sinkscope.inputs.sound import decoder_ids, sound_features
from sinkscope.inputs.vectors import KindNames
from sinkscope.runs.request import Request

Shown = Signals | Sighted
MODES = {"pixel_values": ("--images", "pictures"), "input_features": ("--audio", "sound")}
MODES["input_values"] = MODES["input_features"]
"""By the name of the forward's keyword: the command line's option, and what it is in words."""


def read_signals(request: Request, checkpoint: Checkpoint, forward: Forward) -> Shown | None:
    """The pictures or the sound asked for, with their text where the model reads both; None for text alone.

    Raises SinkscopeError for signals given to a model that reads text, and the other way round.
    """
    name = type(checkpoint.model).__name__
    asked = _asked(request, forward)
    if asked is not None and asked not in forward.takes:
        words = f"{name} reads {forward.signal or 'token ids'}, not {asked}"
        other = any(MODES[taken] == MODES[asked] for taken in forward.takes)
        raise SinkscopeError(words if other else f"{words}: it takes no {MODES[asked][1]}")
    shown = _from_folder(request, checkpoint, forward)
    if shown is None and forward.signal is None:
        image = image_token(checkpoint.model.config)
        shown = sighted_data(request.asked_data, request.num_sequences, checkpoint.vocabulary, image)
    if shown is None:
        shown = signal_data(request.asked_data, request.num_sequences, _decoder_vocabulary(checkpoint, forward))
    if forward.signal is not None and shown is None:
        raise SinkscopeError(
            f"{name} reads {forward.signal}, not token ids (--data is for text models): give "
            f"{MODES[forward.signal][0]} FOLDER, or in Python scan(model, "
            f'data={{"{forward.signal}": tensor}})'
        )
    if shown is not None and forward.signal is None and isinstance(shown, Signals):
        raise SinkscopeError(f"{name} reads token ids, not {shown.name} alone: give the input_ids with them")
    if shown is not None and request.seq_len is not None:
        raise SinkscopeError("--seq-len: pictures and recordings have as many positions as the model gives them")
    if isinstance(shown, Sighted):
        check_length(checkpoint, shown.tokens.longest)
    return shown if not isinstance(shown, Signals) else _with_warning(shown, forward)


def _asked(request: Request, forward: Forward) -> str | None:
    """The name of the signal that is asked for; None for text. A folder of sound: what the model calls it."""
    if request.images is not None:
        return PIXELS
    if request.audio is not None:
        return next((name for name in SOUND if name in forward.takes), SOUND[0])
    return signal_name(request.asked_data)


def _from_folder(request: Request, checkpoint: Checkpoint, forward: Forward) -> Shown | None:
    if request.audio is not None:
        return _from_sound(request, checkpoint, forward)
    if request.images is None:
        return None
    given = processed(
        request.images, request.prompt, request.num_sequences, checkpoint.origin, forward.signal == PIXELS
    )
    if isinstance(given, list):
        return joined(given, checkpoint.vocabulary)
    return signal_data(given, None)


def _from_sound(request: Request, checkpoint: Checkpoint, forward: Forward) -> Signals | None:
    assert request.audio is not None
    if forward.signal is None:
        raise SinkscopeError("--audio: of models that read text with sound, tensors are read in Python alone")
    if request.prompt is not None and not forward.decodes:
        raise SinkscopeError("--prompt: this model reads sound alone, no text")
    if request.prompt is not None and checkpoint.tokenizer is None:
        raise SinkscopeError(f"--prompt: no usable tokenizer ({checkpoint.tokenizer_error})")
    values = sound_features(request.audio, request.num_sequences, checkpoint.origin, forward.signal)
    given = {forward.signal: values}
    ids = decoder_ids(checkpoint.tokenizer, request.prompt, forward.start) if forward.decodes else []
    if len(ids) < 2:
        return signal_data(given, None)
    shown = signal_data(given | {DECODER: [ids] * len(values)}, None, _decoder_vocabulary(checkpoint, forward))
    read = "the tokenizer's special tokens" if request.prompt is None else "the text of --prompt"
    assert shown is not None
    return replace(shown, text_from=f"{read} after decoder_start_token_id {forward.start}, without the last token")


def _decoder_vocabulary(checkpoint: Checkpoint, forward: Forward) -> int | None:
    """Rows of the decoder's embedding; None for a model that has no decoder."""
    if forward.signal is None or not forward.decodes:
        return None
    size = getattr(checkpoint.model.config, "vocab_size", None)
    return size if isinstance(size, int) else checkpoint.vocabulary


def _with_warning(shown: Signals, forward: Forward) -> Signals:
    if not forward.decodes or shown.text is not None:
        return shown
    words = (
        "the decoder reads its start token alone, one query, and is not measured: give --prompt, or decoder_input_ids"
    )
    return replace(shown, warnings=(words,))


def probe_of(shown: Shown, checkpoint: Checkpoint) -> tuple[Tensor, dict[str, Tensor]]:
    """One signal, or one sequence with its picture, for the dry run; and what else the model takes with it."""
    tokens = shown.tokens(1) if isinstance(shown, Signals) else shown.tokens
    batch = next(batches(tokens, 0, 1, checkpoint.device))
    return batch.inputs, batch.extra


def show(shown: Shown, checkpoint: Checkpoint, positions: int) -> Reading:
    """Signals in the place of sequences, of as many positions as the model's attention has; or text with pictures."""
    if isinstance(shown, Signals):
        corpus, tokens = shown.corpus(positions), shown.tokens(positions)
        return Reading(signal_rules(), [corpus], [tokens], KindNames(NAMES), decoder_input=shown.text_from)
    image = image_token(checkpoint.model.config)
    rules = token_rules(checkpoint.tokenizer, checkpoint.vocabulary)
    return Reading(rules, [shown.corpus()], [shown.tokens], ImageNames(checkpoint.tokenizer, image), image)
