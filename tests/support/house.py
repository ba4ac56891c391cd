"""Prints how the package is laid out: which entries import which, on how many levels, and what has grown large.

    python tests/support/house.py [FOLDER]

FOLDER holds the package `sinkscope` (default: this file's own checkout). An arrow is a pair of entries of sinkscope/ of
which one imports the other; imports under `if TYPE_CHECKING` do not count. An entry stands one
level above the highest entry it imports.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

PACKAGE = "sinkscope"
ROOMS = (
    *("cli", "claims", "questions", "trigger", "present", "experiments", "engine", "tables"),
    *("metrics", "checkpoints"),
    *("wiring", "capture", "inputs"),
    *("comparison", "runs", "lookup", "errors"),
)
"""The rooms from the top down; each may import those below it, but for neighbours."""
NEIGHBOURS = ({"metrics", "checkpoints"}, {"capture", "inputs"})
"""Rooms that stand beside each other: neither imports the other."""
OUTSIDE = ("__init__", "__main__", "py.typed", "data")
"""Entries outside the order: the public names, the command, and files that nobody imports."""
FUNCTION_LINES = 45

Arrow = tuple[str, str]


def entries(package: Path) -> set[str]:
    """Names of the package's modules and folders, and of any file beside them."""
    return {path.stem if path.suffix == ".py" else path.name for path in package.iterdir()} - {"__pycache__"}


def modules(package: Path) -> list[Path]:
    return sorted(package.rglob("*.py"))


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"))


def _is_type_checking(node: ast.AST) -> bool:
    tested = node.test if isinstance(node, ast.If) else None
    return isinstance(tested, ast.Name | ast.Attribute) and "TYPE_CHECKING" in vars(tested).values()


def run_time_statements(tree: ast.AST) -> Iterator[ast.AST]:
    """All statements but those under `if TYPE_CHECKING`; expressions, which hold none, are passed over."""
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, ast.expr) and not _is_type_checking(node):
            yield node
            yield from run_time_statements(node)


@cache
def imported(path: Path) -> set[str]:
    """Dotted names that a module imports while the program runs, absolute ones; `from a import b` gives a.b."""
    found = set()
    for node in run_time_statements(parsed(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def arrows(package: Path) -> set[Arrow]:
    """(importing entry, imported entry), for every such pair."""
    names = entries(package)
    found = set()
    for path in modules(package):
        importing = path.relative_to(package).parts[0].removesuffix(".py")
        for name in imported(path):
            first, _, rest = name.partition(".")
            other = rest.partition(".")[0]
            if first == PACKAGE and other in names and other != importing:
                found.add((importing, other))
    return found


def against_the_order(pairs: set[Arrow]) -> list[Arrow]:
    """The arrows between rooms that do not lead down, including any between neighbours."""
    places = {name: place for place, name in enumerate(ROOMS)}
    rooms = {(one, other) for one, other in pairs if one in places and other in places}
    return sorted(pair for pair in rooms if set(pair) in NEIGHBOURS or places[pair[0]] > places[pair[1]])


def file_imports(package: Path) -> dict[str, set[str]]:
    """The modules of the package that each module imports, those within functions too."""
    names = {".".join((PACKAGE, *path.relative_to(package).with_suffix("").parts)): path for path in modules(package)}
    names = {name.removesuffix(".__init__"): path for name, path in names.items()}
    return {
        name: {each if each in names else each.rpartition(".")[0] for each in imported(path)} & names.keys() - {name}
        for name, path in names.items()
    }


def private_imports(package: Path) -> list[str]:
    """`module:name` of every name with an underscore that a module imports from another module of the package."""
    return sorted(
        f"{path.relative_to(package)}:{name}"
        for path in modules(package)
        for name in imported(path)
        if name.startswith(f"{PACKAGE}.") and re.search(r"\._(?!_)", name)
    )


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Groups of modules each of which imports every other, if only through others of the group."""

    @cache
    def reached(name: str) -> frozenset[str]:
        found: set[str] = set()
        open_names = [name]
        while open_names:
            for other in graph[open_names.pop()] - found:
                found.add(other)
                open_names.append(other)
        return frozenset(found)

    groups = {tuple(sorted(each for each in reached(name) if name in reached(each))) for name in graph}
    return sorted([list(group) for group in groups if group])


def misplaced(package: Path) -> list[str]:
    """Entries that are neither a room nor one of the few that stand outside the order."""
    return sorted(entries(package) - {*ROOMS, *OUTSIDE})


def levels(pairs: set[Arrow]) -> dict[str, int]:
    """Each entry's level: 1 for those that import no other. Along a cycle each entry counts once."""
    below: dict[str, set[str]] = {}
    for one, other in pairs:
        below.setdefault(one, set()).add(other)
        below.setdefault(other, set())

    def height(name: str, above: tuple[str, ...]) -> int:
        deeper = below[name] - {name, *above}
        return 1 + max((height(other, (*above, name)) for other in deeper), default=0)

    return {name: height(name, ()) for name in below}


def lines_of(path: Path) -> int:
    return len(path.read_text("utf-8").splitlines())


def long_functions(package: Path) -> list[tuple[int, str]]:
    """(lines, module:function) of every function past the limit, longest first."""
    found = []
    for path in modules(package):
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > FUNCTION_LINES:
                    found.append((length, f"{path.relative_to(package)}:{node.name}"))
    return sorted(found, reverse=True)


Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def undocumented(package: Path) -> tuple[list[str], int]:
    """`module:name` of every public name without a docstring, and how many public names there are.

    Public are functions, classes, and the methods of public classes, where no underscore begins their name.
    """
    names = [(path, owner, node) for path in modules(package) for owner, node in _public(parsed(path))]
    without = [
        f"{path.relative_to(package)}:{f'{owner.name}.' if owner else ''}{node.name}"
        for path, owner, node in names
        if not ast.get_docstring(node)
    ]
    return without, len(names)


def _public(tree: ast.Module | ast.ClassDef) -> Iterator[tuple[ast.ClassDef | None, Definition]]:
    """Each public name of a module or class, with the class that it belongs to."""
    for node in tree.body:
        if isinstance(node, Definition) and not node.name.startswith("_"):
            yield (tree if isinstance(tree, ast.ClassDef) else None), node
            if isinstance(node, ast.ClassDef):
                yield from _public(node)


def describe(package: Path) -> str:
    """The report as text, one fact a line."""
    pairs, files = arrows(package), modules(package)
    wrong, longest = against_the_order(pairs), long_functions(package)
    strangers = misplaced(package)
    largest = max(files, key=lines_of)
    rings = circles(file_imports(package))
    height = levels(pairs)
    without, public = undocumented(package)
    return "\n".join([
        f"entries           {len(entries(package))}",
        f"without a place   {len(strangers)}{_listed(strangers)}",
        f"import arrows     {len(pairs)} between them",
        f"against the order {len(wrong)}{_listed(f'{one} > {other}' for one, other in wrong)}",
        f"levels            {max(height.values(), default=0)}",
        f"modules           {len(files)}",
        f"lines             {sum(map(lines_of, files))}",
        f"circles           {len(rings)} of files{_listed(' and '.join(ring) for ring in rings)}",
        f"documented        {public - len(without)} of {public} public names, {1 - len(without) / public:.1%}",
        f"largest module    {largest.relative_to(package)}, {lines_of(largest)} lines",
        f"long functions    {len(longest)} past {FUNCTION_LINES} lines"
        f"{_listed(f'{name} {length}' for length, name in longest)}",
    ])  # fmt: skip


def _listed(words: Iterable[str]) -> str:
    text = ", ".join(words)
    return f": {text}" if text else ""


if __name__ == "__main__":
    home = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[2]
    print(describe(home / PACKAGE))
