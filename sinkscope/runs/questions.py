"""What a question is: something that a scan answers on request (`--measure NAME`), declared without torch.

Each question is one folder of `sinkscope/questions/`, or of another package. Its `__init__` declares a `Question`. What
else it has stands in modules of the folder, each found by its name and loaded when it is needed:

    columns   functions of a LayerView, each a column of a table               (engine)
    measure   MEASUREMENT, what is watched during the scan                     (engine)
    tables    values become tables; the columns of the whole run               (engine)
    words     what the summary and the screen say                              (engine)
    section   section(run, dense), its part of the report                      (present)
    figure    FIGURES, its figures over one or several runs                    (present)
    columns.json   the definitions of its columns, for what must not load torch; written by
                   `python -m sinkscope.tables.write_catalogue`

A question has `columns` or `measure`; what else is absent is not offered. A package brings a question by an entry point
of the group `sinkscope.questions`, whose name is the question's and whose object is the `Question`.
"""

from __future__ import annotations

import json
import pkgutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from importlib.resources import files
from importlib.util import find_spec
from keyword import iskeyword
from numbers import Integral, Real
from pathlib import Path
from types import ModuleType
from typing import Any

from sinkscope.errors import SinkscopeError, did_you_mean
from sinkscope.lookup import Lookup, of_that_name
from sinkscope.runs.schema.table import Column, TableSchema
from sinkscope.runs.schema.tables import TABLES

ALL = "all"
LAST = 1000
FIGURES = ("heatmap", "profile", "length", "scatter", "attention", "gallery", "trajectory")
"""The figures of `sinkscope plot` that are no question's: no question may have one of these names."""


@dataclass(frozen=True)
class Option:
    """A setting of a question. From its declaration alone it is a flag of `sinkscope scan`, a keyword of
    `sinkscope.scan` and a field of the request.

    Attributes:
        name: the field's name; the flag has hyphens for its underscores.
        default: the value where nothing is given; its type is the option's.
        help: what the flag says of itself.
        metavar: how the flag's value is shown.
        least, most: bounds of a number, both allowed; None = none.
    """

    name: str
    default: int | float | str | bool
    help: str
    metavar: str = "N"
    least: float | None = None
    most: float | None = None

    @property
    def flag(self) -> str:
        """The option as `sinkscope scan` takes it."""
        return "--" + self.name.replace("_", "-")

    def read(self, value: Any) -> Any:
        """The value in the option's type. Raises SinkscopeError for a value of another type or out of bounds."""
        kind: Any = type(self.default)
        allowed: type = {int: Integral, float: Real}.get(kind, kind)
        if not isinstance(value, allowed) or (isinstance(value, bool) and kind is not bool):
            raise SinkscopeError(f"{self.flag} {value!r}: {_KINDS[kind]} is needed")
        value = kind(value)
        if self.least is not None and value < self.least:
            raise SinkscopeError(f"{self.flag} {value}: at least {self.least:,g} is needed")
        if self.most is not None and value > self.most:
            raise SinkscopeError(f"{self.flag} {value}: at most {self.most:,.0f} is possible")
        return value

    def schema(self) -> dict[str, Any]:
        """What JSON schema says of the field."""
        bounds = {"minimum": self.least, "maximum": self.most}
        kind = {int: "integer", float: "number", str: "string", bool: "boolean"}[type(self.default)]
        return {"type": kind, "default": self.default} | {name: at for name, at in bounds.items() if at is not None}


_KINDS = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}


@dataclass(frozen=True)
class Question:
    """A question that a scan answers on request.

    Attributes:
        name: what `--measure` takes.
        asks: the question, in words.
        tables: the tables that it adds to a run folder.
        notation: what the formulas of its columns have in common.
        options: its settings.
        place: its place among the questions, in tables, sentences and lists; equal places are ordered by name.
        figures: names of its figures, which its module `figure` draws.
        asked_by: settings of a scan that ask the question too, where they are given.
        module: the folder that declares it, as Python imports it.
    """

    name: str
    asks: str
    module: str
    tables: tuple[TableSchema, ...]
    notation: str = ""
    options: tuple[Option, ...] = ()
    place: int = LAST
    figures: tuple[str, ...] = ()
    asked_by: tuple[str, ...] = ()

    def told(self, option: Option) -> str:
        """What one of its options is, with the question that it belongs to."""
        return f"{option.help} For --measure {self.name}."

    def part(self, name: str) -> ModuleType | None:
        """The module `name` of its folder; None where it has none. Raises SinkscopeError where it has no folder."""
        try:
            found = find_spec(f"{self.module}.{name}")
        except ModuleNotFoundError:
            raise SinkscopeError(
                f"--measure {self.name}: {self.module} is no folder of modules: declare the question in the "
                "__init__.py of one"
            ) from None
        with QUESTIONS.blaming(self.name):
            return import_module(f"{self.module}.{name}") if found else None

    def need(self, name: str) -> ModuleType:
        """The module `name` of its folder. Raises SinkscopeError where it has none."""
        module = self.part(name)
        if module is None:
            raise SinkscopeError(f"--measure {self.name}: {self.module} has no module {name}")
        return module

    @cached_property
    def columns(self) -> tuple[Column, ...]:
        """The definitions of its columns; none where its folder has no columns.json."""
        file = self.folder / "columns.json"
        if not file.is_file():
            return ()
        with QUESTIONS.blaming(self.name):
            return tuple(Column(**entry) for entry in json.loads(file.read_text("utf-8")))

    @property
    def folder(self) -> Path:
        """The folder that declares it."""
        return Path(str(files(self.module)))


class Questions(Lookup[Question]):
    """Every question that loads, in the order of their places. A warning names each of a package that does not."""

    def __iter__(self) -> Iterator[str]:
        names = filter(self.loads, super().__iter__())
        return iter(sorted(names, key=lambda name: (self[name].place, name)))


def _built_in() -> dict[str, str]:
    home = files("sinkscope") / "questions"
    return {
        module.name: f"sinkscope.questions.{module.name}:QUESTION"
        for module in pkgutil.iter_modules([str(home)])
        if module.ispkg
    }


def _lacks(name: str, thing: Any) -> str | None:
    """What a package's question would have to be."""
    return of_that_name(Question)(name, thing) or _wrong_type(thing) or _wrong_name(thing)


def _wrong_type(question: Question) -> str | None:
    single: dict[str, type] = {"asks": str, "module": str, "notation": str, "place": int}
    for field, kind in single.items():
        if not isinstance(getattr(question, field), kind):
            return f"a Question whose {field} is {_KINDS[kind]}"
    several: dict[str, type] = {"tables": TableSchema, "options": Option, "figures": str, "asked_by": str}
    for field, kind in several.items():
        values = getattr(question, field)
        if not isinstance(values, tuple) or not all(isinstance(value, kind) for value in values):
            return f"a Question whose {field} are a tuple of {kind.__name__}"
    if any(type(option.default) not in _KINDS for option in question.options):
        return f"a Question whose options have defaults that are {', '.join(_KINDS.values())}"
    return None


def _wrong_name(question: Question) -> str | None:
    """Says which name is none for a column, a file or a keyword, or is taken by sinkscope itself."""
    tables, options = [table.name for table in question.tables], [option.name for option in question.options]
    names = [question.name.replace("-", "_"), *tables, *options]
    bad = next((name for name in names if not name.isidentifier() or iskeyword(name)), None)
    if bad is not None or question.name == ALL:
        return f"a Question of plain names: {ALL if bad is None else bad!r} is none"
    own = [QUESTIONS[name] for name in QUESTIONS.built_in]
    taken = {*TABLES, *(table.name for each in own for table in each.tables)} & {*tables}
    taken |= {option.name for each in own for option in each.options} & {*options}
    taken |= {*FIGURES, *(name for each in own for name in each.figures)} & {*question.figures}
    return f"a Question with names of its own: sinkscope has {', '.join(sorted(taken))}" if taken else None


QUESTIONS = Questions("--measure", _built_in(), "sinkscope.questions", _lacks)


def tables_of_questions() -> dict[str, TableSchema]:
    """The tables of all questions, by name."""
    return {table.name: table for question in QUESTIONS.values() for table in question.tables}


def questions_asked(names: str | Sequence[str]) -> tuple[str, ...]:
    """The questions asked, in their order, each once; `all` stands for every one (see `asked_by_all`).

    Raises SinkscopeError for a name that is no question.
    """
    given = {names} if isinstance(names, str) else {*names}
    known = list(QUESTIONS)
    unknown = sorted(map(str, given - {*known, ALL}))
    if unknown and unknown[0] in QUESTIONS:
        QUESTIONS[unknown[0]]  # says why it does not load
    if unknown:
        listed = [*known, ALL]
        remedy = did_you_mean(unknown[0], listed) or ", or install the package that brings it"
        raise SinkscopeError(f"--measure {unknown[0]!r}: choose one of {', '.join(listed)}{remedy}")
    return tuple(name for name in known if name in given or ALL in given)


def asked_by_all(names: str | Sequence[str]) -> frozenset[str]:
    """The questions that `all` alone asks: none where it is not among `names`, and none that is named there, too."""
    given = {names} if isinstance(names, str) else {*names}
    return frozenset(QUESTIONS) - given if ALL in given else frozenset()


def declared_options() -> dict[str, tuple[Question, Option]]:
    """The options of all questions with the question that each belongs to, by the option's name.

    Raises SinkscopeError where two questions declare an option of one name.
    """
    declared: dict[str, tuple[Question, Option]] = {}
    for question in QUESTIONS.values():
        for option in question.options:
            if option.name in declared:
                raise SinkscopeError(
                    f"{option.flag} is declared by the questions {declared[option.name][0].name} and {question.name}: "
                    "rename one"
                )
            declared[option.name] = (question, option)
    return declared
