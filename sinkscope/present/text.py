"""Text as every screen and page shows it: safe to print, names of runs, answers, labels."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import shutil
import sys
import textwrap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sinkscope.runs.run import Run
    from sinkscope.runs.schema.manifest import FirstToken
    from sinkscope.runs.schema.stream import StreamSummary


def printable(text: str) -> str:
    """The text with every control or unprintable character written as its escape: no terminal codes get through.

    Nor does a line that begins with it become a command to a CI runner: `::` and `##[` lose their first sign so, too.
    """
    shown = (
        text
        if text.isprintable()
        else "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
    )
    return no_command(shown)


CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def readable(text: str) -> str:
    """A file's text on a terminal: its lines and tabs, and as escapes all other control characters and the marks that
    turn the direction of writing."""
    return CONTROL.sub(lambda code: code[0].encode("unicode_escape").decode(), text)


def no_command(line: str) -> str:
    """A line that no CI runner takes for a command, also where a break put its sign at the start."""
    start = len(line) - len(line.lstrip())
    if line.startswith(("::", "##["), start):
        return f"{line[:start]}\\x{ord(line[start]):02x}{line[start + 1 :]}"
    return line


WIDTH, NARROWEST = 80, 40
"""Columns of a terminal that nobody made wider or narrower, and the fewest that a screen is laid out for."""


def terminal_width() -> int:
    """Columns of the terminal, at least NARROWEST; WIDTH where stdout is none and COLUMNS does not name them."""
    told = "COLUMNS" in os.environ or sys.stdout.isatty()
    return max(NARROWEST, shutil.get_terminal_size((WIDTH, 24)).columns if told else WIDTH)


def screen_width() -> int:
    """Characters a line of a screen may have: a wider terminal makes sentences no easier to read."""
    return min(WIDTH, terminal_width())


NO_BREAK = "\N{NO-BREAK SPACE}"
"""A blank at which `wrapped` breaks no line; it writes an ordinary one there."""


def wrapped(text: str, width: int | None = None, first: str = "", rest: str | None = None) -> list[str]:
    """Lines of at most `width` characters (None: `screen_width`), the first behind `first` and the others behind `rest`
    (None: as the first).

    A word, such as a path or an option, is never cut, at a hyphen neither; it may make its line longer. Nor does a line
    begin with the unit of a number.
    """
    joined = _BEFORE_UNIT.sub(NO_BREAK, text)
    lines = textwrap.wrap(
        joined,
        screen_width() if width is None else width,
        initial_indent=first,
        subsequent_indent=first if rest is None else rest,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [no_command(line.replace(NO_BREAK, " ")) for line in lines]


_BEFORE_UNIT = re.compile(r"(?<=\d) (?=(%|[num]?s|min|h|[KMGT]i?B|x)(?!\w))")


def next_command(*words: object) -> str:
    """A `sinkscope` command that a shell takes as it stands."""
    return printable(shlex.join(["sinkscope", *map(str, words)]))


def shortened(text: str, limit: int) -> str:
    """The text where it has at most `limit` characters, else its start and its end, which says what to do."""
    if len(text) <= limit:
        return text
    end = limit // 3
    return f"{text[: limit - end - 5]} ... {text[-end:]}"


def cut_in_the_middle(text: str, limit: int) -> str:
    """A name of at most `limit` characters: its start and its end, for names of one family begin alike."""
    if len(text) <= limit:
        return text
    end = max(1, (limit - 1) // 2)
    return f"{text[: max(0, limit - 1 - end)]}\u2026{text[-end:]}"


def sentence(text: str) -> str:
    """The text with a capital at its start."""
    return text[:1].upper() + text[1:]


def span(first: object, last: object, joint: str) -> str:
    """`first`, joined to `last` where this is another one: `5`, `0 to 17`."""
    return str(first) if first == last else f"{first}{joint}{last}"


def first_token(run: Run) -> str:
    """What stands first in every sequence of a run, or of each dataset, as it is: text and id of a token; without a
    tokenizer, the id alone, or the name of what stands there instead of a token."""
    first = run.summary.first_token
    if first.id is not None:
        return _named(run, first)
    by_domain = {data.domain: data.first_token for data in run.manifest.data if data.first_token is not None}
    told = [f"{_named(run, token)} in {domain}" for domain, token in by_domain.items() if token.id is not None]
    if not told or len(by_domain) > DOMAINS:
        return "differs between sequences"
    differing = [domain for domain, token in by_domain.items() if token.id is None]
    return "; ".join([*told, *([f"differs between sequences in {', '.join(differing)}"] if differing else [])])


DOMAINS = 4
"""Most datasets whose first tokens are named one by one."""


def _named(run: Run, first: FirstToken) -> str:
    if run.manifest.model.tokenizer is not None or first.is_bos is not None:
        return f"'{token_text(str(first.text))}' (id {first.id})"
    return f"id {first.id}" if first.text == str(first.id) else str(first.text)


def token_text(token: str) -> str:
    """A token as text, safe to print: without the signs by which vocabularies write a space and a line break."""
    return printable(token.replace("\u2581", " ").replace("\u0120", " ").replace("\u010a", "\n"))


def token_cell(token: str) -> str:
    """A token in a cell of a table: as text, in quotes where it begins or ends with a blank."""
    text = token_text(token)
    return text if text == text.strip() else f"\u2018{text}\u2019"


def sentences(summary: StreamSummary) -> list[str]:
    """The answers of one stream, with their tokens as text."""
    return [token_text(line) for line in summary.in_words]


def markdown_cell(text: str) -> str:
    """Text for a Markdown line or table cell: control characters visible, Markdown's and HTML's own signs escaped, and
    the dollars between which GitHub sets mathematics."""
    shown = printable(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace("$", "&#36;")
    return "".join(f"\\{char}" if char in "\\`*_[]|~" else char for char in shown)


def answers(run: Run) -> list[tuple[str, list[str]]]:
    """The answers, each below its name: of each stream; of each domain where there are several, since a mean over
    different kinds of text answers nothing."""
    summary = run.summary
    if not summary.domains:
        return [(stream, sentences(of_stream)) for stream, of_stream in summary.streams.items()]
    return [
        (domain if len(entry.streams) == 1 else f"{domain}, {stream}", sentences(of_stream))
        for domain, entry in summary.domains.items()
        for stream, of_stream in entry.streams.items()
    ]


MODEL = ("id", "revision", "weights_sha256", "dtype", "device")


def run_id(run: Run) -> str:
    """12 hex digits of the SHA-256 of weights, text and settings: the same scan again has the same id."""
    manifest = run.manifest
    facts = [
        manifest.sinkscope,
        [getattr(manifest.model, name) for name in MODEL],
        [[data.domain, data.fingerprint] for data in manifest.data],
        manifest.request.part("columns"),
    ]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:12]


def within_noise(count: int, beside_others: bool) -> str:
    """What follows a list of changes: how many heads crossed the threshold without a difference that holds."""
    if not count:
        return ""
    heads = "more" if beside_others else "head" if count == 1 else "heads"
    return f"; {count} {heads} crossed the threshold without a difference that holds"
