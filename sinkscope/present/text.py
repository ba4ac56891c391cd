"""Text that comes from models, tokenizers and files, made safe to show."""

from __future__ import annotations


def printable(text: str) -> str:
    """The text with every control or unprintable character written as its escape: no terminal codes get through."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def markdown_cell(text: str) -> str:
    """Text for a Markdown line or table cell: control characters visible, Markdown's and HTML's own signs escaped."""
    shown = printable(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return "".join(f"\\{char}" if char in "\\`*_[]|" else char for char in shown)
