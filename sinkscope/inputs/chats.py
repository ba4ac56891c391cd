"""Reads what a SPEC holds: text and token ids as they are, conversations through the chat template, with whose words
each token is."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from sinkscope.errors import SinkscopeError, first_line
from sinkscope.inputs.corpus import Corpus, read_corpus, warn
from sinkscope.inputs.cutting import drawn
from sinkscope.inputs.documents import ROLES, SYNTHETIC, DataSource, Document, read_source
from sinkscope.inputs.rules import TokenRules, check_characters, check_ids
from sinkscope.inputs.speakers import Span, find_spans

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
    text, spans = find_spans(messages, lambda each: _rendered(document.name, each, tokenizer, open_end))
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
    whose = [NOBODY if each.message is None else REGIONS.index(messages[each.message]["role"]) for each in spans]
    bounds = np.array([(each.start, each.stop) for each in spans])
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
        return read_corpus(spec, tokenizer, rules, seq_len or default, wanted, bos, seed)
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
        known = _of_text(prompt, rules) if corpus.regions is None else corpus.regions[number, : len(prompt)].tolist()
        rows.append([*prompt, *answer])
        regions.append([*known, *[GENERATED] * len(answer)])
    if all(GENERATED not in row for row in regions):
        raise SinkscopeError(f"--generate: the model ends at once after every sequence of {corpus.domain}")
    length = max(map(len, rows))
    return replace(corpus, ids=_block(rows, length), regions=_block(regions, length))


def _of_text(ids: list[int], rules: TokenRules) -> list[int]:
    return [MARKERS if token in rules.special else TEXT for token in ids]


def _block(rows: list[list[int]], length: int) -> np.ndarray:
    return np.array([[*row, *[PADDING] * (length - len(row))] for row in rows], dtype=np.int64)
