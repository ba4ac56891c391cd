"""Tells what a pass was given beside token ids, so that two runs know whether they read the same."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor


def given_digests(
    args: tuple[Any, ...], kwargs: dict[str, Any], rows: int | None, tokens: bool, seq2seq: bool = False
) -> list[bytes] | None:
    """SHA-256 of the tensors and numbers that a pass was given: for each of `rows` sequences, or one for all.

    A tensor whose first axis has `rows` entries belongs to the sequences one by one, any other to all. Masks never
    count. A tensor that holds no numbers gives a digest that no other pass has.

    `tokens`: whether token ids were given. Beside them only two kinds of tensors count: real numbers, such as pixels,
    and a decoder's ids. The result is None where there are none of these. `seq2seq`: whether the model is an
    encoder-decoder, whose decoder reads the labels where it gets no ids.
    """
    own = [hashlib.sha256() for _ in range(rows or 1)]
    counted = False
    for name, value in _leaves("", args, kwargs):
        real = isinstance(value, Tensor) and value.is_floating_point()
        of_decoder = name.endswith(".decoder_input_ids") or (seq2seq and name.endswith(".labels"))
        if "mask" in name or (tokens and not real and not of_decoder):
            continue
        counted = True
        pieces = _bytes(value, rows)
        for digest, piece in zip(own, pieces if len(pieces) == len(own) else pieces * len(own), strict=True):
            digest.update(name.encode())
            digest.update(piece)
    return [digest.digest() for digest in own] if counted or not tokens else None


def _leaves(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The tensors and numbers in arguments, each with its name; lists and mappings are entered."""
    named = [(f"{name}.{place}", value) for place, value in enumerate(args)]
    named += [(f"{name}.{key}", kwargs[key]) for key in sorted(kwargs, key=str)]
    for path, value in named:
        if isinstance(value, Tensor | int | float) and not isinstance(value, bool):
            yield path, value
        elif isinstance(value, Mapping):
            yield from _leaves(path, (), value)
        elif isinstance(value, list | tuple):
            yield from _leaves(path, tuple(value), {})


def _bytes(value: Any, rows: int | None) -> list[bytes]:
    """What a digest reads of a value: a piece for each sequence, or one for all."""
    if not isinstance(value, Tensor):
        return [repr(value).encode()]
    try:
        kind = f"{value.dtype}{tuple(value.shape[1:])}".encode()
        numbers = value.detach().contiguous().cpu().flatten().view(torch.uint8).numpy()
    except (RuntimeError, TypeError):  # a tensor without numbers, or of a kind of its own
        return [secrets.token_bytes(32)]
    if not rows or value.dim() < 1 or value.shape[0] != rows:
        return [kind + numbers.tobytes()]
    return [kind + row.tobytes() for row in numbers.reshape(rows, -1)]
