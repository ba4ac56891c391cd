"""Finds things of one kind by name: those that ship with sinkscope, those of installed packages, those declared here.

Every kind of addition has one `Lookup`: questions, metrics, arms, export formats, figures, kinds of input, attention
keywords. Nothing is imported before it is asked for, so that a room may name what stands above it. A package adds to a
kind by an entry point of the kind's group, whose name is the thing's:

    [project.entry-points."sinkscope.export_formats"]
    typst = "my_package.typst:FORMAT"
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, TypeVar

from sinkscope.errors import SinkscopeError, did_you_mean, first_line

T = TypeVar("T")
OWN = "sinkscope"


class Lookup(Generic[T]):
    """Things of one kind, by name: built-in ones in their order, then declared ones, then those of packages by name.

    Args:
        what: how an error names the kind, such as `--format`.
        built_in: `MODULE:ATTRIBUTE` by name.
        group: the group of entry points by which packages add to the kind; None = they cannot.
        lacks: what a package's thing would have to be, called with its name and the thing; None where it is that.
    """

    def __init__(
        self, what: str, built_in: Mapping[str, str] | None = None, group: str | None = None,
        lacks: Callable[[str, Any], str | None] = lambda name, thing: None,
    ) -> None:  # fmt: skip
        self.what, self.group, self._lacks = what, group, lacks
        self._built_in = dict(built_in or {})
        self._loaded: dict[str, T] = {}
        self._declared: dict[str, str] = {}

    def add(self, name: str, thing: T, owner: str = OWN) -> T:
        """Declares a thing. Raises SinkscopeError where the name is taken."""
        if name in self:
            raise SinkscopeError(f"{self.what} {name!r} is declared already, by {' and by '.join(self.owners(name))}")
        self._declared[name] = owner
        self._loaded[name] = thing
        return thing

    def remove(self, name: str) -> None:
        """Takes back what `add` declared."""
        del self._declared[name], self._loaded[name]

    def __getitem__(self, name: str) -> T:
        """Loads the thing on its first use.

        Raises SinkscopeError where nothing or more than one thing has that name, and where a package does not load.
        """
        ours = name in self._built_in or name in self._declared
        if ours and name in self._loaded and name not in self._installed:
            return self._loaded[name]
        owners = self.owners(name)
        if not owners:
            names = list(self)
            raise SinkscopeError(f"{self.what} {name!r}: choose one of {', '.join(names)}{did_you_mean(name, names)}")
        if len(owners) > 1:
            raise SinkscopeError(f"{self.what} {name}: declared by {' and by '.join(owners)}; keep one of them")
        if name in self._built_in and name not in self._loaded:
            self._loaded[name] = _object(self._built_in[name])
        return self._loaded[name] if name in self._loaded else self._of_package(self._installed[name][0])

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys([*self._built_in, *self._declared, *sorted(self._installed)]))

    def __contains__(self, name: object) -> bool:
        return name in self._built_in or name in self._declared or name in self._installed

    def among(self, names: Collection[str]) -> list[str]:
        """Those of these names that it has, in its own order."""
        ours, installed = [*self._built_in, *self._declared], self._installed
        return [
            *(name for name in ours if name in names),
            *sorted(name for name in names if name in installed and name not in ours),
        ]

    @property
    def declared(self) -> tuple[str, ...]:
        """The names that `add` has declared, in their order."""
        return tuple(self._declared)

    def loads(self, name: str) -> bool:
        """Whether the thing of that name loads, where it does not come with sinkscope. A warning, given once, names one
        that does not."""
        return self.ships(name) or self._warned(name, tuple(sys.path))

    @cache  # noqa: B019 there are few lookups, and they stay
    def _warned(self, name: str, paths: tuple[str, ...]) -> bool:
        """`paths`: where packages are looked for, so that a change is seen."""
        try:
            self[name]
        except SinkscopeError as error:
            warnings.warn(f"{error}; it is left out", stacklevel=3)
            return False
        return True

    def values(self) -> list[T]:
        """All of them, loaded, in the order of their names."""
        return [self[name] for name in self]

    def items(self) -> list[tuple[str, T]]:
        """(name, thing) of all of them, loaded, in the order of their names."""
        return [(name, self[name]) for name in self]

    def ships(self, name: str) -> bool:
        """Whether the thing of that name comes with sinkscope itself."""
        return name in self._built_in

    @property
    def built_in(self) -> tuple[str, ...]:
        """The names of what comes with sinkscope itself."""
        return tuple(self._built_in)

    @property
    def _installed(self) -> dict[str, list[EntryPoint]]:
        return _entries(self.group, tuple(sys.path)) if self.group else {}

    def owners(self, name: str) -> list[str]:
        """Who declares the thing of that name: sinkscope, modules, packages."""
        built_in = [OWN] if name in self._built_in else []
        declared = [self._declared[name]] if name in self._declared else []
        return [*built_in, *declared, *map(package_of, self._installed.get(name, []))]

    @contextmanager
    def blaming(self, name: str, passes: Callable[[Exception], bool] = lambda error: False) -> Iterator[None]:
        """Raises SinkscopeError with its name and its package, where the thing of that name fails in the block and does
        not come with sinkscope. Errors in sinkscope's own words pass, and so do memory that ran out and those of which
        `passes` says so."""
        try:
            yield
        except Exception as error:
            if self.ships(name) or isinstance(error, SinkscopeError | MemoryError) or passes(error):
                raise
            owner = " and ".join(self.owners(name))
            raise SinkscopeError(f"{self.what} {name}: {owner} fails: {first_line(error)}") from error

    def _of_package(self, entry: EntryPoint) -> T:
        try:
            with redirect_stdout(sys.stderr):  # stdout is for results
                thing: T = entry.load()
        except (Exception, SystemExit) as error:  # the code of another package may raise anything
            why = first_line(error)
            raise SinkscopeError(f"{self.what} {entry.name}: {package_of(entry)} does not load: {why}") from error
        needed = self._lacks(entry.name, thing)
        if needed is not None:
            raise SinkscopeError(f"{self.what} {entry.name}: {package_of(entry)}'s {entry.value} is not {needed}")
        return thing


def of_that_name(kind: type) -> Callable[[str, Any], str | None]:
    """For `Lookup.lacks`: an object of the class, whose `name` is the entry point's."""

    def lacks(name: str, thing: Any) -> str | None:
        sound = isinstance(thing, kind) and getattr(thing, "name", None) == name
        return None if sound else f"a {kind.__name__} of that name"

    return lacks


def a_function(name: str, thing: Any) -> str | None:
    """For `Lookup.lacks`: something that can be called."""
    return None if callable(thing) else "a function"


@cache
def _entries(group: str, paths: tuple[str, ...]) -> dict[str, list[EntryPoint]]:
    """The entry points of a group by name. `paths`: where packages are looked for, so that a change is seen."""
    entries: dict[str, list[EntryPoint]] = {}
    for entry in entry_points(group=group):
        entries.setdefault(entry.name, []).append(entry)
    return entries


def package_of(entry: EntryPoint) -> str:
    """The name of the distribution that an entry point comes from."""
    return entry.dist.name if entry.dist is not None else entry.value


def _object(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)
