"""Text that comes from models, tokenizers and files, made safe to show."""

from __future__ import annotations


def printable(text: str) -> str:
    """The text with every control or unprintable character written as its escape: no terminal codes get through."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
