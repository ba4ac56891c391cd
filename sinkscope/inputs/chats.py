"""Reads conversations through the tokenizer's chat template, and tells whose words each token is."""

from __future__ import annotations

from typing import Any

import numpy as np

from sinkscope.errors import SinkscopeError
from sinkscope.inputs.corpus import Corpus, warn
from sinkscope.inputs.cutting import drawn
from sinkscope.inputs.documents import Document, Source
from sinkscope.inputs.messages import ROLES
from sinkscope.inputs.rules import TokenRules, check_characters, check_ids

REGIONS = ("markers", *ROLES, "text", "generated")
"""Whose words a token is: a role's, what the model wrote itself, the template's own markers; `text` is a prompt that is
no conversation."""
PADDING = -1
MOST_TOKENS = 1024
"""Tokens at which a conversation is cut where --seq-len does not say."""


def read_chats(
    source: Source, tokenizer: Any, rules: TokenRules, most: int, wanted: int, seed: int, open_end: bool = False
) -> Corpus:
    """Makes a sequence of each conversation, cut after `most` tokens; shorter ones end in PADDING.

    `open_end`: the template's beginning of an answer follows, for a model that goes on writing. No special token is
    added to what the template writes, as transformers does in chats too.

    Raises SinkscopeError: no chat template, one that fails, text that it changes, data without conversations.
    """
    _check(source, tokenizer)
    order = sorted(drawn(len(source.documents), wanted, seed)[:wanted])
    documents = [source.documents[number] for number in order]
    chats = [_tokens(document, tokenizer, open_end) for document in documents]
    shortest = min(len(ids) for ids, _ in chats)
    if shortest < 2:
        raise SinkscopeError(f"{source.spec}: the chat template makes fewer than two tokens of a conversation")
    length = min(most, max(len(ids) for ids, _ in chats))
    ids, regions = (np.stack([_padded(chat[part], length) for chat in chats]) for part in (0, 1))
    for row in ids:
        check_ids(row[row != PADDING].tolist(), rules.vocabulary, f"{source.spec} under this tokenizer")
    if len(np.unique(regions[regions != PADDING])) == 1:
        raise SinkscopeError(
            f"{source.spec}: every token is of one region ({REGIONS[regions[0, 0]]}), so regions cannot be compared; "
            "give conversations with several roles, or a longer --seq-len"
        )
    corpus = Corpus(
        domain=source.spec,
        ids=ids,
        pieces=[(document.name,) for document in documents],
        passages=[(document.passage,) for document in documents],
        bos="the chat template's",
        regions=regions,
    )
    warn(corpus, rules, wanted)
    return corpus


def region_names(regions: np.ndarray) -> np.ndarray:
    """The name of each token's region, [sequence, T]; "" past a sequence's end."""
    return np.array([*REGIONS, ""])[regions]


def _check(source: Source, tokenizer: Any) -> None:
    if any(document.messages is None for document in source.documents):
        raise SinkscopeError(f"data {source.spec!r} mix conversations with texts: use a source for each")
    if tokenizer is None:
        raise SinkscopeError(f"data {source.spec!r} are conversations and the model has no tokenizer")
    if not getattr(tokenizer, "chat_template", None):
        raise SinkscopeError(
            f"data {source.spec!r} are conversations and the tokenizer has no chat template: give a model that was "
            "trained on chats (often called -Instruct or -it), or text"
        )
    if not tokenizer.is_fast:
        raise SinkscopeError(
            f"{type(tokenizer).__name__} does not say which characters a token stands for, so whose words it is "
            "cannot be told: give a checkpoint with a tokenizer.json"
        )


def _tokens(document: Document, tokenizer: Any, open_end: bool) -> tuple[list[int], list[int]]:
    """The token ids of a conversation, and the place in REGIONS of each."""
    messages = document.messages or []
    text = _rendered(document, tokenizer, open_end)
    check_characters(text, document.name)
    spans = _spans(document.name, messages, text)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, truncation=False, verbose=False)
    ids = [int(token) for token in encoded["input_ids"]]
    return ids, [_region(start, stop, spans) for start, stop in encoded["offset_mapping"]]


def _rendered(document: Document, tokenizer: Any, open_end: bool) -> str:
    try:
        return str(tokenizer.apply_chat_template(document.messages, tokenize=False, add_generation_prompt=open_end))
    except Exception as error:  # a template is a program of the checkpoint's: it may fail in any way
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise SinkscopeError(f"{document.name}: the tokenizer's chat template refuses it ({reason})") from None


def _spans(name: str, messages: list[dict[str, str]], text: str) -> list[tuple[int, int, int]]:
    """(start, stop, place in REGIONS) of each message's own characters in the text that the template wrote."""
    spans, reached = [], 0
    for number, message in enumerate(messages):
        content = message["content"].strip()
        start = text.find(content, reached)
        if start < 0:
            raise SinkscopeError(
                f"{name}: the chat template does not write message {number} ({message['role']}) as it stands, so its "
                "tokens cannot be told from the template's"
            )
        reached = start + len(content)
        spans.append((start, reached, REGIONS.index(message["role"])))
    return spans


def _region(start: int, stop: int, spans: list[tuple[int, int, int]]) -> int:
    """The region of a token: that of the message that it shares a character with, else the markers."""
    return next((region for first, last, region in spans if start < last and stop > first), 0)


def _padded(values: list[int], length: int) -> np.ndarray:
    return np.array([*values[:length], *[PADDING] * (length - len(values))], dtype=np.int64)
