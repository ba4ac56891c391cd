"""Reads a folder of recordings through a checkpoint's own feature extractor, and the text for its decoder."""

from __future__ import annotations

import struct
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sinkscope.errors import SinkscopeError, all_lines
from sinkscope.inputs.documents import check_regular, from_checkpoint, listed
from sinkscope.inputs.rules import encode


def sound_features(folder: str | Path, count: int | None, origin: dict[str, Any], name: str) -> Any:
    """Returns the model's main input `name` for the first `count` wav files of a folder, sorted by name, as an array.

    Channels are averaged. Where the model has a fixed length (Whisper's 30 s, AST's 1024 frames), the extractor pads to
    it, and the padding is measured because the model attends to it; else all recordings are cut to the shortest.
    `origin`: arguments of from_pretrained. Raises SinkscopeError: no recordings, one that cannot be read or has another
    sampling rate than the model's, no extractor.
    """
    paths = sound_paths(Path(folder))[:count]
    if not origin:
        raise SinkscopeError("--audio needs a model by name: a model object has no feature extractor; give " + name)
    extractor = _extractor(origin)
    sounds = [read_wav(path, extractor.sampling_rate) for path in paths]
    try:
        parts = _extracted(extractor, sounds, name)
        if len({part.shape for part in parts}) > 1:
            shortest = min(map(len, sounds))
            parts = _extracted(extractor, [sound[:shortest] for sound in sounds], name)
        return np.stack(parts)
    except (ValueError, TypeError, KeyError, RuntimeError, ImportError) as error:
        raise SinkscopeError(
            f"the model's own feature extractor cannot read these recordings: {all_lines(error)}"
        ) from error


def sound_paths(folder: Path) -> list[Path]:
    """The wav files of a folder, by name. Raises SinkscopeError where there are none."""
    return listed(folder, "--audio", (".wav",))


def read_wav(path: Path, rate: int) -> np.ndarray:
    """Reads a wav file's samples, float32 in -1..1, channels averaged.

    Raises SinkscopeError: no regular file, a damaged one, one that holds less than it declares, another rate.
    """
    from scipy.io import wavfile

    check_regular(path, "--audio")
    try:
        cut = _cut_short(path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about chunks that hold no sound
            hertz, samples = (0, None) if cut else wavfile.read(path)
    except Exception:  # scipy's reader meets damage with a dozen kinds of exception
        raise SinkscopeError(f"--audio: {path} is damaged or not a wav file") from None
    if samples is None:
        raise SinkscopeError(
            f"--audio: {path} is cut short: it declares more than it holds; copy it again, or write it again with its "
            "length, which a program that writes to a pipe does not know"
        )
    if hertz != rate:
        raise SinkscopeError(f"--audio: {path} has {hertz} samples a second, the model reads {rate}: resample it first")
    if samples.dtype == np.uint8:
        sound = (samples.astype(np.float32) - 128) / 128
    elif samples.dtype.kind == "i":
        sound = samples.astype(np.float32) / -float(np.iinfo(samples.dtype).min)
    else:
        sound = samples.astype(np.float32)
    if not sound.size or not np.isfinite(sound).all():
        raise SinkscopeError(f"--audio: {path} holds no sound")
    return np.asarray(sound if sound.ndim == 1 else sound.mean(1))


def _cut_short(path: Path) -> bool:
    """Whether a RIFF file ends before the length that its head, or that of its sound, declares.

    A file of another form (RF64) is left to scipy. Raises struct.error where there is no head.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        form, declared, _ = struct.unpack("<4sI4s", file.read(12))
        if form != b"RIFF":
            return False
        start, length, name = 12, 0, b""
        while name != b"data":
            file.seek(start)
            name, length = struct.unpack("<4sI", file.read(8))
            start += 8 + length + length % 2
    # Writers leave out the byte that pads a sound of odd length at the end of a file.
    return max(declared + 8, start) - length % 2 > size


def decoder_ids(tokenizer: Any, text: str | None, start: int | None) -> list[int]:
    """Returns the decoder's input: the start token, then the tokenizer's ids of a text (None: its special tokens).

    As in training, the start token comes once, and a special token at the end is left out, so that each position has a
    next token.
    """
    if tokenizer is None:
        return [] if start is None else [start]
    ids = encode(tokenizer, text or "", True)
    if start is None:
        return ids
    ends = ids[-1:] and ids[-1] in tokenizer.all_special_ids
    return [start, *(ids[1:] if ids[:1] == [start] else ids)[: -1 if ends else None]]


def _extractor(origin: dict[str, Any]) -> Any:
    from transformers import AutoFeatureExtractor

    extractor = from_checkpoint(AutoFeatureExtractor, origin, "--audio", "feature extractor")
    if not isinstance(getattr(extractor, "sampling_rate", None), int):
        raise SinkscopeError("--audio: the checkpoint's feature extractor reads no sound")
    return extractor


def _extracted(extractor: Any, sounds: Sequence[np.ndarray], name: str) -> list[np.ndarray]:
    """Extracts each recording by itself, without the frames that its extractor marks as padding."""
    parts = []
    for sound in sounds:
        features = extractor(sound, sampling_rate=extractor.sampling_rate, return_tensors="np")
        values, mask = np.asarray(features[name])[0], features.get("attention_mask")
        if mask is not None and mask.shape[1] == len(values):
            values = values[: int(mask.sum())]
        parts.append(values)
    return parts
