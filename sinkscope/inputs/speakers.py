"""Tells whose words the characters of a conversation are, by asking its chat template: marks stand in for the texts."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass

from sinkscope.errors import SinkscopeError

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
    for piece, number, own in zip(pieces, slots, written, strict=False):
        reached += len(piece)
        spans += _span(own, marks.texts[number], number, reached)
        reached += len(own)
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
        found, kept = marks.split(render(marks.put({*others})))
        if kept != others:
            raise SinkscopeError("the template writes a text twice, or not always")
        between[odd::2] = found[odd : odd + len(between[odd::2])]
    starts, stops, written = [], [], []
    for own, before, after in zip(between, pieces[:-1], pieces[1:], strict=True):
        start = _shared(own, before)
        stop = _shared(own[start:][::-1], after[::-1])
        starts.append(start)
        stops.append(stop)
        written.append(own[start : len(own) - stop])
    ends = zip(pieces, [len(pieces[0]), *stops], [*starts, len(pieces[-1])], strict=True)
    return [_middle(*each) for each in ends], written


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
    own = text if text in written or rest not in text else rest
    start, stop = written.find(own), written.find(own) + len(own)
    if start < 0 or start != written.rfind(own):
        parts: list[tuple[int, int, int | None]] = [(0, len(written), None)]
    else:
        parts = [(0, start, None), (start, stop, number), (stop, len(written), None)]
    return [Span(reached + first, reached + last, whose) for first, last, whose in parts if written[first:last].strip()]
