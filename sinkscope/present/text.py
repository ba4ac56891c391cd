"""Text that comes from models, tokenizers and files, made safe to show."""

from __future__ import annotations

import shlex


def printable(text: str) -> str:
    """The text with every control or unprintable character written as its escape: no terminal codes get through.

    Nor does a line that begins with it become a command to a CI runner: `::` and `##[` lose their first sign so, too.
    """
    shown = (
        text
        if text.isprintable()
        else "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
    )
    start = len(shown) - len(shown.lstrip())
    if shown.startswith(("::", "##["), start):
        shown = f"{shown[:start]}\\x{ord(shown[start]):02x}{shown[start + 1 :]}"
    return shown


def next_command(*words: object) -> str:
    """A `sinkscope` command that a shell takes as it stands."""
    return printable(shlex.join(["sinkscope", *map(str, words)]))


def shortened(text: str, limit: int) -> str:
    """The text where it has at most `limit` characters, else its start and its end, which says what to do."""
    if len(text) <= limit:
        return text
    end = limit // 3
    return f"{text[: limit - end - 5]} ... {text[-end:]}"


def markdown_cell(text: str) -> str:
    """Text for a Markdown line or table cell: control characters visible, Markdown's and HTML's own signs escaped."""
    shown = printable(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return "".join(f"\\{char}" if char in "\\`*_[]|" else char for char in shown)
