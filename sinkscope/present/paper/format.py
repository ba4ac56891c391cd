"""Export formats: what a format declares, and how a format is found by name or by a file's extension.

The modules of `formats/` are built in. A package that is installed beside sinkscope adds a format by an entry point of
the group `sinkscope.export_formats`, whose name is the format's and whose object is a `Format`:

    [project.entry-points."sinkscope.export_formats"]
    typst = "my_package.typst:FORMAT"

An entry point is the only way in, because a command starts in a process of its own, where nobody has called anything.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import TYPE_CHECKING

from sinkscope.errors import SinkscopeError, did_you_mean
from sinkscope.present.paper import formats

if TYPE_CHECKING:
    from sinkscope.runs.paper_table import PaperTable


GROUP = "sinkscope.export_formats"


@dataclass(frozen=True)
class Format:
    """A way to write a table to a file.

    Attributes:
        name: what `--format` takes.
        extensions: the file endings that mean this format, with their dot: `(".tex",)`.
        write: turns a table into text, or into bytes where `binary`.
        binary: the result is bytes, which do not go to stdout.
        sources: it writes where metrics come from, not their values. Where none is named it gets all metrics of the
            runs, in a table without rows.
    """

    name: str
    extensions: tuple[str, ...]
    write: Callable[[PaperTable], str | bytes]
    binary: bool = False
    sources: bool = False


def format_names() -> list[str]:
    """The names of all formats, built-in ones first; loads none of them."""
    return list(dict.fromkeys([*_built_in(), *sorted(entry.name for entry in entry_points(group=GROUP))]))


def find_format(name: str) -> Format:
    """The format called `name`.

    Raises SinkscopeError where no format or more than one has that name, and where its package cannot be loaded.
    """
    installed = list(entry_points(group=GROUP, name=name))
    owners = [*(["sinkscope"] if name in _built_in() else []), *map(_package, installed)]
    if len(owners) > 1:
        raise SinkscopeError(f"--format {name}: declared by {' and by '.join(owners)}; keep one of them")
    if installed:
        return _loaded(installed[0])
    if not owners:
        raise SinkscopeError(
            f"--format {name!r}: choose one of {', '.join(format_names())}{did_you_mean(name, format_names())}"
        )
    found: Format = import_module(f"{formats.__name__}.{name}").FORMAT
    return found


def format_of_file(path: Path) -> Format | None:
    """The first format that has the file's extension; None where none has it."""
    every = (find_format(name) for name in format_names())
    return next((each for each in every if path.suffix.lower() in each.extensions), None)


def _built_in() -> list[str]:
    return [module.name for module in pkgutil.iter_modules(formats.__path__)]


def _package(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist is not None else entry.value


def _loaded(entry: EntryPoint) -> Format:
    try:
        found = entry.load()
    except Exception as error:  # the code of another package may raise anything
        raise SinkscopeError(f"--format {entry.name}: {_package(entry)} does not load: {error}") from error
    if not isinstance(found, Format) or found.name != entry.name:
        raise SinkscopeError(f"--format {entry.name}: {_package(entry)}'s {entry.value} is not a Format of that name")
    return found
