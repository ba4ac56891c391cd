"""How `--help` looks: options in panels, examples that can be copied, and near names for a slip of the keyboard."""

from __future__ import annotations

import inspect
import shlex
import sys
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn, get_args

from typer.core import TyperCommand, TyperGroup

from sinkscope.errors import did_you_mean, shorten
from sinkscope.present.text import printable, wrapped

FIRST = "Most used"
READ = "What is read"
LOADED = "How the model is loaded"
SPOT = "How a model is scanned on the spot"
MEASURED = "What is measured"
WRITTEN = "What is written"
OTHER = "Options"
PANELS = ("Arguments", FIRST, OTHER, READ, LOADED, SPOT, MEASURED, WRITTEN)
"""The panels in the order of the screen; an option that names none stands under OTHER."""

VALUES = {"str": "TEXT", "int": "N", "float": "X", "path": "PATH", "list[str]": "TEXT", "list[int]": "N"}
"""What stands for a value of each Python type where an option names no other word."""

WIDTH = 78
VERBATIM = "\b\n"
"""What stands before lines of help that are not to be wrapped anew."""
COLUMN = 55
"""The width of what an option's help says."""


class Command(TyperCommand):
    """A command whose options stand in panels."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        panels: dict[str, list[tuple[str, str]]] = {name: [] for name in PANELS}
        shown = [(parameter, parameter.get_help_record(ctx)) for parameter in self.get_params(ctx)]
        for parameter, record in shown:
            if record is not None and parameter.name != "help":
                panels[_panel(parameter)].append(_tidy(parameter, *record))
        last = [name for name, rows in panels.items() if rows and name != "Arguments"][-1:] or [OTHER]
        panels[last[0]] += [record for parameter, record in shown if parameter.name == "help" and record]
        for name, rows in panels.items():
            if rows:
                with formatter.section(name):
                    formatter.write_dl(rows, col_max=22)

    def format_help_text(self, ctx: Any, formatter: Any) -> None:
        write_help(self.help or "", formatter)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        words = list(args)
        try:
            rest = super().parse_args(ctx, args)
        except Exception as error:  # typer keeps the parser's exceptions to itself
            if hasattr(error, "possibilities") and hasattr(error, "option_name"):
                options = [name for parameter in self.get_params(ctx) for name in parameter.opts]
                error.possibilities = None
                error.message += did_you_mean(str(error.option_name), options)  # type: ignore[attr-defined]
            refuse(error, ctx, words)
            raise
        empty = _empty_path(self, ctx, words)
        if empty is not None:
            _end(empty, ctx)
        return rest


class Group(TyperGroup):
    """A group that lists its commands with their whole first sentences."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        rows = [
            (name, " ".join(first_paragraph(command.help or "").split())) for name, command in self.commands.items()
        ]
        with formatter.section("Commands"):
            formatter.write_dl(rows)

    def format_help_text(self, ctx: Any, formatter: Any) -> None:
        write_help(self.help or "", formatter)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        words = list(args)
        try:
            return super().parse_args(ctx, args)
        except Exception as error:  # typer keeps the parser's exceptions to itself
            refuse(error, ctx, words)
            raise

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        try:
            return super().resolve_command(ctx, args)
        except Exception as error:  # typer keeps the parser's exceptions to itself
            if hasattr(error, "message") and args[0] not in self.commands:
                said = error.message.partition(". Did you mean")[0].rstrip(".")
                error.message = said + did_you_mean(args[0], self.commands)
            refuse(error, ctx, args)
            raise


LONGEST = 800
"""Characters of what is said of wrong words at most."""

NUMBERS: dict[str, tuple[str, Callable[[str], float]]] = {
    "valid integer": ("a whole number", int),
    "valid number": ("a number", float),
    "valid float": ("a number", float),  # as typer 0.26 says it
}
"""What typer says of a value that is none, what is needed, and what reads it."""


def refuse(error: Any, ctx: Any, words: Sequence[str]) -> None:
    """Says in one line what is wrong with the words of a command, and ends it with exit code 2. Returns where the error
    is another one than of words."""
    asks_for_help = type(error).__name__ == "NoArgsIsHelpError"
    if asks_for_help or not hasattr(error, "format_message") or getattr(error, "exit_code", None) != 2:
        return
    message, parameter = error.format_message().rstrip("."), getattr(error, "param", None)
    number = next((what for sign, what in NUMBERS.items() if sign in message), None)
    if number is not None and parameter is not None:
        needed, read = number
        value = _value_of(parameter.opts, words, read)
        message = f"{parameter.opts[0]}{'' if value is None else f' {shorten(value)!r}'}: {needed} is needed"
    _end(message, ctx)


def _end(message: str, ctx: Any) -> NoReturn:
    """Says in one line what is wrong with the words of a command, and ends it with exit code 2."""
    shown = printable(shorten(message, LONGEST))
    sys.stderr.write(f"sinkscope: error: {shown} ({ctx.command_path} --help lists what there is)\n")
    raise SystemExit(2)


def _empty_path(command: Any, ctx: Any, words: Sequence[str]) -> str | None:
    """Says which path, or which argument, is an empty text, as an unset variable of a shell leaves it: Python would
    take it for the working folder. None where none is. What stands behind -- is a program's own."""
    words = words[: words.index("--") if "--" in words else None]
    if not any(word == "" or word.endswith("=") for word in words):
        return None
    kinds = inspect.signature(command.callback, eval_str=True).parameters
    options = {
        name: parameter
        for parameter in command.get_params(ctx)
        if parameter.param_type_name == "option" and not parameter.is_flag
        for name in parameter.opts
    }
    for before, word in zip(["", *words], words, strict=False):
        name = before if word == "" else word.removesuffix("=")
        if word == "" and name not in options:
            return "an argument is empty: a name or a path is needed"
        given = options.get(name) if word == "" or name != word else None
        if given is not None and given.name in kinds and _is_path(kinds[given.name].annotation):
            return f"{name} '': a path is needed"
    return None


def _is_path(kind: Any) -> bool:
    """Whether a type is that of paths, as in Annotated[list[Path] | None, ...]."""
    return kind is Path or any(map(_is_path, get_args(kind)))


def _value_of(names: Sequence[str], words: Sequence[str], read: Callable[[str], float]) -> str | None:
    """What was given to the option of these names; of several values, the first that is no number."""
    values: list[str] = []
    for place, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name in names:
            values += [value] if equals else words[place + 1 : place + 2]
    for value in values:
        try:
            read(value)
        except ValueError:
            return value
    return values[-1] if values else None


def _panel(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return "Arguments"
    return getattr(parameter, "rich_help_panel", None) or OTHER


def _tidy(parameter: Any, names: str, words: str) -> tuple[str, str]:
    """A line of help: words for Python types, none behind an argument's own name, single blanks but in a list."""
    shown = parameter.metavar if parameter.param_type_name == "argument" and parameter.metavar else names
    for kind, word in VALUES.items():
        shown = shown.replace(f"<{kind}>", word)
    return shown, words if VERBATIM in words else " ".join(words.split())


def listed(rows: Sequence[tuple[str, str]]) -> str:
    """Names and what they are, a row each, for the help of an option."""
    indent = max(len(name) for name, _ in rows) + 2
    lines = (wrapped(f"{name:{indent}}{words}", COLUMN, rest=" " * indent) for name, words in rows)
    return VERBATIM + "\n".join(chain.from_iterable(lines))


def write_help(text: str, formatter: Any) -> None:
    """Writes a command's description. Its example is not wrapped as prose: a shell must be able to take it."""
    paragraphs = [
        f"\b\n{example(paragraph)}" if paragraph.startswith("Example: ") else paragraph
        for paragraph in text.strip().split("\n\n")
    ]
    formatter.write_paragraph()
    with formatter.indentation():
        formatter.write_text("\n\n".join(paragraphs))


def example(paragraph: str) -> str:
    """An `Example: COMMAND` in lines of at most WIDTH characters that a shell joins: each but the last ends in `\\`."""
    parts: list[str] = []
    for word in paragraph.removeprefix("Example: ").split():
        if word.startswith("-") or len(parts) < 1:
            parts.append(word)
        else:
            parts[-1] += f" {word}"
    lines, line = [], "Example:"
    for part in parts:
        if len(line) + 1 + len(part) > WIDTH - 4:
            lines.append(f"{line} \\")
            line = "   "
        line += f" {part}"
    return "\n".join([*lines, line])


def examples(text: str) -> list[list[str]]:
    """The words of every example in a command's help text."""
    paragraphs = [part for part in text.strip().split("\n\n") if part.startswith("Example: ")]
    return [shlex.split(" ".join(part.removeprefix("Example: ").split())) for part in paragraphs]


def first_paragraph(text: str) -> str:
    """The first paragraph on one line."""
    return " ".join(text.strip().partition("\n\n")[0].split())
