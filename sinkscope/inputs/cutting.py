"""Cuts documents into stretches of tokens of one length; joins short documents, reads a .txt in windows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from sinkscope.errors import SinkscopeError
from sinkscope.inputs.documents import DataSource, Document
from sinkscope.inputs.rules import encode
from sinkscope.runs.passages import Passage

JOINT = "\n\n"
CHARACTERS_PER_TOKEN = 12
"""Characters first handed to the tokenizer for each token wanted; more where these give too few."""


@dataclass(frozen=True)
class Stretch:
    """The tokens of one sequence, without special ones.

    Attributes:
        order: its place in the source.
        ids: token ids.
        names, passages: of the documents that the ids come from.
    """

    order: int
    ids: list[int]
    names: tuple[str, ...]
    passages: tuple[Passage, ...]


def stretches(source: DataSource, tokenizer: Any, length: int, wanted: int, seed: int) -> list[Stretch]:
    """Returns at most `wanted` stretches of `length` tokens, in the order of the source.

    The passage of a document that is cut or joined is the whole document, so that no part of it counts as unread.
    Raises SinkscopeError where there is no tokenizer.
    """
    if tokenizer is None:
        raise SinkscopeError(
            f"data {source.spec!r} is text and the model has no tokenizer: give token ids (.jsonl, `input_ids`)"
        )
    if source.running:
        return list(_windows(source, tokenizer, length, wanted))
    return sorted(_cut_or_joined(source, tokenizer, length, wanted, seed), key=lambda stretch: stretch.order)


def drawn(count: int, wanted: int, seed: int) -> list[int]:
    """The order in which documents are tried: the source's own, or a seeded draw where there are more than needed."""
    return list(range(count)) if count <= wanted else np.random.default_rng(seed).permutation(count).tolist()


def _cut_or_joined(source: DataSource, tokenizer: Any, length: int, wanted: int, seed: int) -> Iterator[Stretch]:
    order = iter(drawn(len(source.documents), wanted, seed))
    for made, index in enumerate(order):
        if made == wanted:
            return
        documents = [source.documents[index]]
        text = _text_of(documents[0])
        ids = _encode_start(tokenizer, text, length)
        while len(ids) < length:
            following = next(order, None)
            if following is None:
                return
            documents.append(source.documents[following])
            text += JOINT + _text_of(documents[-1])
            ids = _encode_start(tokenizer, text, length)
        names, passages = (document.name for document in documents), (document.passage for document in documents)
        yield Stretch(index, ids, tuple(names), tuple(passages))


def _windows(source: DataSource, tokenizer: Any, length: int, wanted: int) -> Iterator[Stretch]:
    document, left_out = source.documents[0], source.left_out
    whole = document.passage.document
    reach = left_out.reach(whole)
    if reach is None:
        return
    windows = wanted + len(left_out.names) + -(-reach // length)
    ids = _encode_start(tokenizer, _text_of(document), length * windows)
    for index in range(len(ids) // length):
        start, stop = index * length, (index + 1) * length
        name, passage = f"{document.name}[{index}]", Passage(whole, start, stop)
        if wanted and not left_out.holds(name, passage):
            wanted -= 1
            yield Stretch(index, ids[start:stop], (name,), (passage,))


def _text_of(document: Document) -> str:
    assert document.text is not None  # a source that holds ids is not cut
    return document.text


def _encode_start(tokenizer: Any, text: str, length: int) -> list[int]:
    """The first `length` tokens of a text, without tokenizing all of a long one."""
    size = CHARACTERS_PER_TOKEN * length
    while size < len(text):
        ids = encode(tokenizer, text[:size], False)
        if len(ids) > length + 16:  # the cut changes the last few tokens only
            return ids[:length]
        size *= 4
    return encode(tokenizer, text, False)[:length]
