"""Turns token ids into batches for the model. Token ids from a caller may hold padding, which is masked."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from sinkscope.errors import SinkscopeError
from sinkscope.inputs.corpus import Corpus
from sinkscope.inputs.rules import check_ids
from sinkscope.runs.passages import Passage, ids_fingerprint

DECODER = "decoder_input_ids"


@dataclass(frozen=True)
class Batch:
    """Consecutive sequences of a corpus, from number `start` on.

    `spans`: (first, past the last) valid position of each sequence; None without padding.
    `inputs`: token ids [sequence, T], or vectors [sequence, T, d] for a model that reads vectors. `extra`: the model's
    other inputs, by keyword of its forward. `regions`: see Corpus, [sequence, T].
    """

    start: int
    inputs: torch.Tensor
    mask: torch.Tensor | None
    spans: list[tuple[int, int]] | None
    extra: dict[str, torch.Tensor] = field(default_factory=dict)
    regions: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.inputs)


@dataclass(frozen=True)
class TokenData:
    """Token ids [sequence, T], with or without an attention mask (1 = token, 0 = padding).

    A model that takes real vectors reads `vectors` [sequence, T, d] instead of the ids. `extras`: the model's other
    inputs for each sequence (pictures, or their sizes); such sequences are read one by one. `decoder`: token ids
    [sequence, T] that a decoder reads while the encoder reads the vectors. `regions`: see Corpus; such rows are padded
    on the right.
    """

    ids: np.ndarray
    mask: np.ndarray | None = None
    vectors: np.ndarray | None = None
    extras: list[dict[str, torch.Tensor]] | None = None
    decoder: np.ndarray | None = None
    regions: np.ndarray | None = None

    def span(self, number: int) -> tuple[int, int]:
        """First and past-the-last valid position of a sequence."""
        return (0, self.ids.shape[1]) if self.mask is None else _span(self.mask[number])

    @property
    def longest(self) -> int:
        """Valid tokens of the longest sequence."""
        return int(self.ids.shape[1] if self.mask is None else self.mask.sum(1).max())


def batches(data: TokenData, start: int, size: int, device: torch.device) -> Iterator[Batch]:
    """Yields consecutive batches from sequence `start` on. With extras, a batch is one sequence without padding."""
    if data.extras is not None:
        yield from (_one_sequence(data, number, device) for number in range(start, len(data.ids)))
        return
    for first in range(start, len(data.ids), size):
        regions = None if data.regions is None else data.regions[first : first + size]
        read = data.ids if data.vectors is None else data.vectors
        if data.mask is None:
            inputs = torch.from_numpy(np.ascontiguousarray(read[first : first + size])).to(device)
            extra = {} if data.decoder is None else _decoder_input(data.decoder, first, size, device)
            yield Batch(first, inputs, None, None, extra, regions)
        else:
            padded = _padded(first, read[first : first + size], data.mask[first : first + size], device)
            yield replace(padded, regions=regions)


def _padded(first: int, read: np.ndarray, mask: np.ndarray, device: torch.device) -> Batch:
    """A batch whose padding stands on the right, wherever the caller had it.

    Many models count positions from the row's start, whatever the mask says: for them text after padding is other text
    (BART's position embeddings, Llama-4's temperature, the state of a recurrent layer).
    """
    starts = [_span(row)[0] for row in mask]
    rows, marks = (
        np.stack([np.roll(row, -start, axis=0) for row, start in zip(whole, starts, strict=True)])
        for whole in (read, mask)
    )
    spans = [_span(row) for row in marks]
    return Batch(first, torch.from_numpy(rows).to(device), torch.from_numpy(marks).to(device), spans)


def _decoder_input(ids: np.ndarray, first: int, size: int, device: torch.device) -> dict[str, torch.Tensor]:
    return {DECODER: torch.from_numpy(np.ascontiguousarray(ids[first : first + size])).to(device)}


def _one_sequence(data: TokenData, number: int, device: torch.device) -> Batch:
    assert data.extras is not None
    read = data.ids if data.vectors is None else data.vectors
    row = read[number : number + 1, slice(*data.span(number))]
    inputs = torch.from_numpy(np.ascontiguousarray(row)).to(device)
    extra = {name: value.to(device) for name, value in data.extras[number].items()}
    if data.vectors is None:
        extra = {"attention_mask": torch.ones_like(inputs), **extra}
    return Batch(number, inputs, None, None, extra)


READ = ("input_ids", "attention_mask", "position_ids")
OF_TOKENIZERS = ("labels", "special_tokens_mask", "offset_mapping", "overflow_to_sample_mapping", "length", "word_ids")
"""What tokenizers and collators put beside the ids, which no attention reads."""


def _check_keys(data: Any) -> None:
    """Raises SinkscopeError for what a mapping holds beside token ids, which a scan would leave out in silence.

    Token types that are all 0 are what a model takes where it is given none.
    """
    for name in sorted({*data.keys()} - {*READ, *OF_TOKENIZERS}):
        zeros = name.endswith("token_type_ids") and not any(np.any(row) for row in _rows(data[name], name, "integers"))
        if data[name] is not None and not zeros:
            raise SinkscopeError(
                f"{name}: a scan of token ids gives the model no such input: leave it out, or measure your own passes "
                "with sinkscope.watch"
            )


def token_data(data: Any, vocabulary: int | None) -> TokenData:
    """Reads ids from a tensor, an array, a list of lists, or a mapping with `input_ids` and `attention_mask`.

    Lists of unequal length are padded on the right and masked. With `position_ids` instead of a mask, rows are packed:
    each piece whose positions count from 0 is read as a sequence of its own. `vocabulary`: how many ids exist; None
    where this is not known yet. Raises SinkscopeError for anything else, for a decoder's own ids, for ids outside the
    vocabulary, and for masks with holes.
    """
    mask = positions = None
    if hasattr(data, "keys") and "input_ids" in data:
        if "decoder_input_ids" in data:
            raise SinkscopeError(
                "a scan gives the decoder the text of the encoder, and reads no decoder_input_ids: leave them out, or "
                "measure your own passes over two texts with sinkscope.watch"
            )
        _check_keys(data)
        mask, positions, data = data.get("attention_mask"), data.get("position_ids"), data["input_ids"]
    rows = _rows(data, "data", "a SPEC, a list of them, or token ids (integers, [sequence, token])")
    if positions is not None:
        if mask is not None:
            raise SinkscopeError("token ids are packed or padded: give position_ids or attention_mask, not both")
        rows = _unpacked(rows, _rows(positions, "position_ids", "integers, [sequence, token],"))
    if not rows or any(len(row) < 2 for row in rows):
        raise SinkscopeError("token ids: at least one sequence, each of at least 2 tokens, is needed")
    length = max(map(len, rows))
    ids = np.stack([np.pad(row, (0, length - len(row))) for row in rows])
    if mask is None:
        kept = np.stack([np.arange(length) < len(row) for row in rows]).astype(np.int64)
    else:
        marks = _marks(mask)
        if [len(mark) for mark in marks] != [len(row) for row in rows]:
            raise SinkscopeError("attention_mask and input_ids differ in shape")
        kept = np.stack([np.pad(mark, (0, length - len(mark))) for mark in marks])
    for number, (row, valid) in enumerate(zip(ids, kept, strict=True)):
        tokens = row[slice(*_span(valid))].tolist()
        if vocabulary is not None:
            check_ids(tokens, vocabulary, f"sequence {number}")
    return TokenData(ids, None if kept.all() else kept)


def token_data_of(corpus: Corpus) -> TokenData:
    """What a model reads of a corpus of token ids; sequences that end early (id -1) are padded and masked."""
    ended = corpus.ids < 0
    if not ended.any():
        return TokenData(corpus.ids, regions=corpus.regions)
    return TokenData(np.where(ended, 0, corpus.ids), (~ended).astype(np.int64), regions=corpus.regions)


def as_corpus(data: TokenData) -> Corpus:
    """Returns the valid ids of each sequence, with -1 past its end, so that the fingerprint depends on its length."""
    valid = [row[slice(*data.span(number))] for number, row in enumerate(data.ids)]
    aligned = np.stack([np.pad(row, (0, data.longest - len(row)), constant_values=-1) for row in valid])
    pieces = [(f"sequence {number}",) for number in range(len(valid))]
    passages = [(Passage(ids_fingerprint(row.tolist())),) for row in valid]
    return Corpus("token ids", aligned, pieces, passages)


def _rows(data: Any, name: str, needed: str) -> list[np.ndarray]:
    """Returns one array of integers per sequence. Raises SinkscopeError where the data are anything else."""
    rows = _arrays(data)
    if not rows or any(row.dtype.kind not in "biu" for row in rows):
        raise SinkscopeError(f"{name}: {needed} are needed, not {type(data).__name__}")
    return [row.astype(np.int64) for row in rows]


def _arrays(data: Any) -> list[np.ndarray]:
    """One array [token] per sequence; none where the data are no rows."""
    try:
        rows = [np.asarray(row.tolist() if hasattr(row, "tolist") else list(row)) for row in data]
    except (TypeError, ValueError):
        return []
    return rows if all(row.ndim == 1 for row in rows) else []


def _marks(mask: Any) -> list[np.ndarray]:
    """Returns one array per sequence, 1 = token. Raises SinkscopeError where a mask of whatever type holds anything but
    0 and 1."""
    marks = _arrays(mask)
    if not marks or any(row.dtype.kind not in "biuf" or not np.isin(row, (0, 1)).all() for row in marks):
        raise SinkscopeError("attention_mask: 1 for each token and 0 for padding are needed, [sequence, token]")
    return [row.astype(np.int64) for row in marks]


def _unpacked(rows: list[np.ndarray], positions: list[np.ndarray]) -> list[np.ndarray]:
    """Splits packed rows into pieces. Raises SinkscopeError where a piece's positions do not count up from 0."""
    if [len(row) for row in rows] != [len(row) for row in positions]:
        raise SinkscopeError("position_ids and input_ids differ in shape")
    pieces = []
    for row, places in zip(rows, positions, strict=True):
        starts = np.flatnonzero(places == 0)
        for piece, counted in zip(np.split(row, starts), np.split(places, starts), strict=True):
            if not np.array_equal(counted, np.arange(len(counted))):
                raise SinkscopeError("position_ids must count up from 0 in each packed piece")
            pieces += [piece] if len(piece) else []  # np.split gives an empty piece before the first 0
    return pieces


def _span(row: np.ndarray) -> tuple[int, int]:
    valid = np.flatnonzero(row)
    if len(valid) < 2 or valid[-1] - valid[0] + 1 != len(valid):
        raise SinkscopeError("attention_mask: each sequence needs at least 2 valid tokens, and no holes between them")
    return int(valid[0]), int(valid[-1]) + 1
