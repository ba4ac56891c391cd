"""Reads what a SPEC holds: text and token ids as they are, and conversations, with whose words their characters are."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from sinkscope.errors import SinkscopeError, first_line
from sinkscope.inputs.corpus import AS_GIVEN, Corpus, drawn, read_corpus, warn
from sinkscope.inputs.documents import ROLES, SYNTHETIC, DataSource, Document, read_source
from sinkscope.inputs.rules import NoTokenizer, TokenRules, check_characters, check_ids

Message = dict[str, str]
Render = Callable[[list[Message]], str]
"""Writes messages as the template does. Raises SinkscopeError where the template refuses them."""

MARK = "\U00100000"
"""A private-use character: no template changes it, or has it in its own markers."""


@dataclass(frozen=True)
class Span:
    """Characters `start` to `stop` - 1 are the text of message number `message`; None where nobody knows whose."""

    start: int
    stop: int
    message: int | None


def find_spans(messages: list[Message], render: Render) -> tuple[str, list[Span]]:
    """Returns what the template writes, and whose characters it holds, in order; all others are the template's own.

    The template also writes the conversation with a mark in the place of each message's text, without the space around
    it. What stands between the marks is the template's. Where the real texts between the same pieces do not give the
    real writing, as where a template leaves out a model's thoughts, every second message gets its real text back: what
    then stands between two marks, less the pieces that were there before, is what the template makes of that text. A
    message without a span was left out. Raises SinkscopeError where `render` does.
    """
    text = render(messages)
    marks = _Marks(messages)
    try:
        pieces, slots = marks.split(render(marks.put(range(len(messages)))))
        written = [marks.texts[number] for number in slots]
        if _joined(pieces, written) != text:
            pieces, written = _written(messages, marks, render, pieces, slots)
            if _joined(pieces, written) != text:
                raise SinkscopeError("the template makes other markers of other texts")
    except SinkscopeError:  # by a rule of its own it refuses marks, or writes something else beside them
        return text, [Span(0, len(text), None)]
    spans, reached = [], 0
    for piece, number, writing in zip(pieces, slots, written, strict=False):
        reached += len(piece)
        spans += _span(writing, marks.texts[number], number, reached)
        reached += len(writing)
    return text, spans


class _Marks:
    """Marks for the texts of a conversation.

    Attributes:
        texts: each message's text without the space around it.
    """

    def __init__(self, messages: list[Message]) -> None:
        self._messages = messages
        self.texts = [message["content"].strip() for message in messages]
        longest = max(len(run) for text in self.texts for run in re.findall(f"{MARK}*", text))
        self._edge = MARK * (longest + 1)

    def put(self, numbers: Collection[int]) -> list[Message]:
        """The messages, with a mark for the text of those with these numbers. The space around it stays."""
        return [
            {**message, "content": message["content"].replace(text, f"{self._edge}{number}{self._edge}", 1)}
            if number in numbers
            else message
            for number, (message, text) in enumerate(zip(self._messages, self.texts, strict=True))
        ]

    def split(self, text: str) -> tuple[list[str], list[int]]:
        """The pieces around the marks, one more than there are marks, and the number in each mark."""
        parts = re.split(f"{self._edge}([0-9]+){self._edge}", text)
        return parts[::2], [int(number) for number in parts[1::2]]


def _joined(pieces: list[str], written: list[str]) -> str:
    return "".join(part for pair in zip(pieces, [*written, ""], strict=True) for part in pair)


def _written(
    messages: list[Message], marks: _Marks, render: Render, pieces: list[str], slots: list[int]
) -> tuple[list[str], list[str]]:
    """What the template makes of each text, and the pieces between, of which a text may have changed an end.

    Raises SinkscopeError where this cannot be told.
    """
    between = [""] * len(slots)
    for odd in (0, 1):
        others = slots[1 - odd :: 2]
        new_pieces, kept = marks.split(render(marks.put({*others})))
        if kept != others:
            raise SinkscopeError("the template writes a text twice, or not always")
        between[odd::2] = new_pieces[odd : odd + len(between[odd::2])]
    starts, stops, written = [], [], []
    for gap, before, after in zip(between, pieces[:-1], pieces[1:], strict=True):
        start = _shared(gap, before)
        stop = _shared(gap[start:][::-1], after[::-1])
        starts.append(start)
        stops.append(stop)
        written.append(gap[start : len(gap) - stop])
    ends = zip(pieces, [len(pieces[0]), *stops], [*starts, len(pieces[-1])], strict=True)
    return [_middle(*end) for end in ends], written


def _shared(a: str, b: str) -> int:
    """How many characters two texts have in common at their start."""
    return next((place for place, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _middle(piece: str, at_end: int, at_start: int) -> str:
    """What both of a piece's neighbours left of it: one kept that many characters at its end, one at its start."""
    if at_end + at_start < len(piece):
        raise SinkscopeError("two texts change the markers between them")
    return piece[len(piece) - at_end : at_start]


def _span(written: str, text: str, number: int, reached: int) -> list[Span]:
    """The spans of what the template made of a text, which begins at character `reached`.

    Where it left out a part, the rest is the message's. Where it changed the text, or wrote more, that is nobody's.
    """
    rest = written.strip()
    kept_text = text if text in written or rest not in text else rest
    start, stop = written.find(kept_text), written.find(kept_text) + len(kept_text)
    if start < 0 or start != written.rfind(kept_text):
        parts: list[tuple[int, int, int | None]] = [(0, len(written), None)]
    else:
        parts = [(0, start, None), (start, stop, number), (stop, len(written), None)]
    return [Span(reached + first, reached + last, whose) for first, last, whose in parts if written[first:last].strip()]


# Reads what a SPEC holds: text and token ids as they are, conversations through the chat template, with whose words
# each token is.


REGIONS = ("markers", *ROLES, "text", "generated")
"""Whose words a token is: a role's, what the model wrote itself, the template's own markers; `text` is a prompt that is
no conversation."""
PADDING = NOBODY = -1
"""Past a sequence's end; and a token of which nobody knows whose it is."""
GENERATION = re.compile(r"{%-?\s*generation\b")
"""How a template says that what follows is what the model writes."""
MOST_TOKENS = 1024
"""Tokens at which a conversation is cut where --seq-len does not say."""
GENERATED, MARKERS, TEXT = (REGIONS.index(name) for name in ("generated", "markers", "text"))


@dataclass(frozen=True)
class _Chat:
    """A conversation's token ids, the place in REGIONS of each or NOBODY, and the numbers of messages without a token
    of their own."""

    document: Document
    ids: np.ndarray
    regions: np.ndarray
    absent: list[int]

    @property
    def problem(self) -> str:
        """What keeps its tokens from being told apart; empty where nothing does."""
        if self.absent:
            role = (self.document.messages or [])[self.absent[0]]["role"]
            return f"the chat template does not write message {self.absent[0]} ({role}) as it stands"
        return "the chat template changes its own markers with the texts" if NOBODY in self.regions else ""


def read_chats(
    source: DataSource, tokenizer: Any, rules: TokenRules, most: int, wanted: int, seed: int, open_end: bool = False
) -> Corpus:
    """Makes a sequence of each conversation, cut after `most` tokens; shorter ones end in PADDING.

    `open_end`: the template's beginning of an answer follows, for a model that goes on writing. No special token is
    added to what the template writes, as transformers does in chats too. Where nobody can tell whose words tokens are,
    they have no region, and the corpus a warning.

    Raises SinkscopeError: no chat template, one that fails or changes every text, data without conversations.
    """
    _check(source, tokenizer)
    order = sorted(drawn(len(source.documents), wanted, seed)[:wanted])
    documents = [source.documents[number] for number in order]
    chats = [_tokens(document, tokenizer, open_end) for document in documents]
    untold = _untold(chats)
    if min(len(chat.ids) for chat in chats) < 2:
        raise SinkscopeError(f"{source.spec}: the chat template makes fewer than two tokens of a conversation")
    length = min(most, max(len(chat.ids) for chat in chats))
    ids = np.stack([_padded(chat.ids, length) for chat in chats])
    regions = np.stack([_padded(chat.regions, length) for chat in chats])
    for row in ids:
        check_ids(row[row != PADDING].tolist(), rules.vocabulary, f"{source.spec} under this tokenizer")
    if len(np.unique(regions[regions != PADDING])) == 1:
        raise SinkscopeError(
            f"{source.spec}: every token is of one region ({REGIONS[regions.max()]}), so regions cannot be compared; "
            "give conversations with several roles, or a longer --seq-len"
        )
    corpus = Corpus(
        domain=source.spec,
        ids=ids,
        pieces=[(document.name,) for document in documents],
        passages=[(document.passage,) for document in documents],
        bos="the chat template's",
        regions=regions,
        warnings=untold,
    )
    warn(corpus, rules, wanted)
    return corpus


def region_names(regions: np.ndarray) -> np.ndarray:
    """The name of each token's region, [sequence, T]; "" for NOBODY's and past a sequence's end."""
    return np.array([*REGIONS, ""])[regions]


def _check(source: DataSource, tokenizer: Any) -> None:
    if any(document.messages is None for document in source.documents):
        raise SinkscopeError(f"data {source.spec!r} mixes conversations with texts: use a source for each")
    if tokenizer is None:
        raise NoTokenizer(f"data {source.spec!r} holds conversations and the model has no tokenizer")
    if not getattr(tokenizer, "chat_template", None):
        raise SinkscopeError(
            f"data {source.spec!r} holds conversations and the tokenizer has no chat template: give a model that was "
            "trained on chats (often called -Instruct or -it), or text"
        )
    if not tokenizer.is_fast:
        raise SinkscopeError(
            f"{type(tokenizer).__name__} does not say which characters a token stands for, so the message of a "
            "token is not known: give a checkpoint with a tokenizer.json"
        )


def _untold(chats: list[_Chat]) -> list[str]:
    """A warning where whose words some tokens are cannot be told. Raises SinkscopeError where it nowhere can."""
    unclear = [chat for chat in chats if chat.problem]
    if not unclear:
        return []
    first = f"{unclear[0].document.name}: {unclear[0].problem}"
    if all((chat.regions <= 0).all() for chat in chats):
        raise SinkscopeError(f"{first}, so the tokens of its messages cannot be told from those of the template")
    others = f" (and so in {len(unclear) - 1} more of {len(chats)} conversations)" if len(unclear) > 1 else ""
    return [f"{first}{others}: tokens whose message is not known have no region"]


def _tokens(document: Document, tokenizer: Any, open_end: bool) -> _Chat:
    messages = document.messages or []
    text, spans = find_spans(messages, lambda turns: _rendered(document.name, turns, tokenizer, open_end))
    check_characters(text, document.name)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, truncation=False, verbose=False)
    ids = np.array(encoded["input_ids"], dtype=np.int64)
    regions = _regions(messages, spans, np.array(encoded["offset_mapping"]).reshape(-1, 2))
    told = {span.message for span in spans}
    if NOBODY in regions and GENERATION.search(str(tokenizer.chat_template)):
        regions[(regions == NOBODY) & _generated(document, tokenizer, open_end, ids)] = REGIONS.index("assistant")
        told |= {number for number, message in enumerate(messages) if message["role"] == "assistant"}
    return _Chat(document, ids, regions, [number for number in range(len(messages)) if number not in told])


def _regions(messages: list[dict[str, str]], spans: list[Span], offsets: np.ndarray) -> np.ndarray:
    """The region of each token: that of the first span that it shares a character with, else the markers."""
    if not spans:
        return np.zeros(len(offsets), dtype=np.int64)
    whose = [NOBODY if span.message is None else REGIONS.index(messages[span.message]["role"]) for span in spans]
    bounds = np.array([(span.start, span.stop) for span in spans])
    first = np.searchsorted(bounds[:, 1], offsets[:, 0], side="right")
    within = np.minimum(first, len(spans) - 1)
    shared = (first < len(spans)) & (bounds[within, 0] < offsets[:, 1])
    return np.where(shared, np.array(whose)[within], 0)


def _rendered(name: str, messages: list[dict[str, str]], tokenizer: Any, open_end: bool) -> str:
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=open_end))
    except MemoryError:
        raise SinkscopeError(f"{name}: the tokenizer's chat template takes more memory than there is") from None
    except Exception as error:  # a template is a program of the checkpoint's: it may fail in any way
        raise SinkscopeError(f"{name}: the tokenizer's chat template refuses it ({first_line(error)})") from None


def _generated(document: Document, tokenizer: Any, open_end: bool, ids: np.ndarray) -> np.ndarray:
    """Which tokens the template itself says that the model writes."""
    made = tokenizer.apply_chat_template(
        document.messages, return_dict=True, return_assistant_tokens_mask=True, add_generation_prompt=open_end
    )
    same = np.array_equal(made["input_ids"], ids)
    return np.array(made["assistant_masks"], dtype=bool) if same else np.zeros(len(ids), dtype=bool)


def _padded(values: np.ndarray, length: int) -> np.ndarray:
    return np.pad(values[:length], (0, max(0, length - len(values))), constant_values=PADDING)


def holds_chats(spec: str) -> DataSource | None:
    """The source of a SPEC that holds conversations; None for any other."""
    if spec in SYNTHETIC or spec.partition("#")[0].endswith(".txt"):
        return None
    source = read_source(spec)
    return source if any(document.messages is not None for document in source.documents) else None


def read_chats_or_text(
    spec: str, tokenizer: Any, rules: TokenRules, seq_len: int | None, default: int, limit: int | None, wanted: int,
    bos: str, seed: int, goes_on: bool,
) -> Corpus:  # fmt: skip
    """Reads conversations or text. `seq_len`: tokens as asked; None = `default` for text, at most MOST_TOKENS and the
    model's `limit` for conversations. `goes_on`: the model will write after it."""
    chats = holds_chats(spec)
    if chats is None:
        corpus = read_corpus(spec, tokenizer, rules, seq_len or default, wanted, bos, seed)
        if bos != "auto" and corpus.bos == AS_GIVEN:
            raise SinkscopeError(
                f"--bos {bos}: rows of token ids ({spec}) are read unchanged, with BOS where they have it"
            )
        return corpus
    if bos != "auto":
        raise SinkscopeError(f"--bos {bos}: in conversations ({spec}) the chat template decides what stands first")
    most = seq_len or min(MOST_TOKENS, limit or MOST_TOKENS)
    return read_chats(chats, tokenizer, rules, most, wanted, seed, goes_on)


def continued(corpus: Corpus, rules: TokenRules, write: Callable[[list[int]], list[int]]) -> Corpus:
    """The corpus with what `write` makes of each sequence after it, in the region `generated`.

    Sequences of text get regions too: special tokens are markers. Raises SinkscopeError where nothing is written.
    """
    rows, regions = [], []
    for number, row in enumerate(corpus.ids):
        prompt = row[row != PADDING].tolist()
        answer = write(prompt)
        prompt_regions = (
            _of_text(prompt, rules) if corpus.regions is None else corpus.regions[number, : len(prompt)].tolist()
        )
        rows.append([*prompt, *answer])
        regions.append([*prompt_regions, *[GENERATED] * len(answer)])
    if all(GENERATED not in row for row in regions):
        raise SinkscopeError(f"--generate: the model ends at once after every sequence of {corpus.domain}")
    length = max(map(len, rows))
    return replace(corpus, ids=_block(rows, length), regions=_block(regions, length))


def _of_text(ids: list[int], rules: TokenRules) -> list[int]:
    return [MARKERS if token in rules.special else TEXT for token in ids]


def _block(rows: list[list[int]], length: int) -> np.ndarray:
    return np.array([[*row, *[PADDING] * (length - len(row))] for row in rows], dtype=np.int64)
