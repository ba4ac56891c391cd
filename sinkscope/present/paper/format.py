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
from pathlib import Path
from typing import TYPE_CHECKING

from sinkscope.errors import SinkscopeError
from sinkscope.lookup import Lookup, of_that_name

if TYPE_CHECKING:
    from sinkscope.runs.paper_table import PaperTable


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

    def written(self, table: PaperTable) -> str | bytes:
        """What `write` makes of the table. Raises SinkscopeError where another package's fails, or makes no text or
        bytes."""
        with FORMATS.blaming(self.name):
            content = self.write(table)
        if not isinstance(content, bytes if self.binary else str):
            kind, owner = "bytes" if self.binary else "str", " and ".join(FORMATS.owners(self.name))
            raise SinkscopeError(f"--format {self.name}: {owner} returns {type(content).__name__}, not {kind}")
        return content


def _lacks(name: str, thing: object) -> str | None:
    if isinstance(thing, Format) and not _are_extensions(thing.extensions):
        return "a Format whose extensions are a tuple of texts with their dot"
    return of_that_name(Format)(name, thing)


def _are_extensions(given: object) -> bool:
    return isinstance(given, tuple) and all(isinstance(each, str) and each.startswith(".") for each in given)


_BUILT_IN = [module.name for module in pkgutil.iter_modules([str(Path(__file__).parent / "formats")])]
FORMATS: Lookup[Format] = Lookup(
    "--format",
    {name: f"sinkscope.present.paper.formats.{name}:FORMAT" for name in _BUILT_IN},
    "sinkscope.export_formats",
    _lacks,
)
"""Every format, built-in ones first."""


def format_of_file(path: Path) -> Format | None:
    """The first format that has the file's extension, in any case; None where none has it.

    Raises SinkscopeError where none of those that load has it, and one does not load, whose extension it may be.
    """
    broken: SinkscopeError | None = None
    for name in FORMATS:
        try:
            form = FORMATS[name]
        except SinkscopeError as error:
            broken = broken or error
        else:
            if path.suffix.lower() in map(str.lower, form.extensions):
                return form
    if broken is not None:
        raise SinkscopeError(f"{broken}; mend that, or name the format of {path.name} with --format")
    return None
