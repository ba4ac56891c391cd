"""User-defined metrics: read from a file or an installed package, checked, and added to sinkscope's own."""

from __future__ import annotations

import hashlib
import inspect
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from sinkscope.errors import SinkscopeError
from sinkscope.lookup import Lookup
from sinkscope.metrics.guests import as_guests, one_line, printed_to_stderr
from sinkscope.metrics.registry import ALWAYS, Metric, MetricSet, declared, registered

INSTALLED: Lookup[Any] = Lookup(
    "the metrics", group="sinkscope.metrics",
    lacks=lambda name, thing: None if _metrics_of(thing) else "a metric, and holds none",
)  # fmt: skip
"""What packages bring: entry points of the group, whose objects are decorated functions or modules that hold some."""

KEYS = ("domain", "stream", "layer", "head", "heads", "kv_group", "module", "kind", "sequence", "document")
"""Columns that identify the head, layer or sequence of a row."""


def with_own_metrics(given: Iterable[Any], reserved: Collection[str] = ()) -> MetricSet:
    """The metrics of a scan: sinkscope's own, then those of installed packages, then those given.

    Args:
        given: decorated functions, and paths of Python files that contain decorated functions.
        reserved: further column names that no metric may take.

    A warning names what a package brings and a scan cannot measure: nobody asked for it, and no other column is another
    one without it. Raises SinkscopeError for a file that cannot be run, a function that is no metric, and a name that
    another metric or column has already.
    """
    built_in, shipped = registered(), registered(shipped=True)
    foreign = _foreign(built_in, shipped)
    _check_names(foreign, shipped, reserved)
    metrics: list[Metric] = []

    def added(functions: Iterable[Any]) -> list[Metric]:
        found = [*metrics, *_new_metrics(functions, metrics, built_in)]
        _check_names([*foreign, *found], shipped, reserved)
        return found

    for name in filter(INSTALLED.loads, INSTALLED):
        try:
            metrics = added(_metrics_of(INSTALLED[name]))
        except SinkscopeError as error:
            owners = " and ".join(INSTALLED.owners(name))
            warnings.warn(f"{INSTALLED.what} {name} of {owners}: {error}; they are left out", stacklevel=2)
    return built_in.extended(as_guests(added(_functions(given))))


def refuse_left_out() -> None:
    """Raises SinkscopeError for the first package whose metrics do not load, as a strict scan needs it."""
    for name in INSTALLED:
        try:
            INSTALLED[name]
        except SinkscopeError as error:
            raise SinkscopeError(f"--strict: {error}") from None


def _new_metrics(functions: Iterable[Any], before: Sequence[Metric], built_in: MetricSet) -> list[Metric]:
    """The metrics that functions declare and that are neither sinkscope's own nor among those before. Raises
    SinkscopeError for a function that declares none, and for a column of a table that only a question writes."""
    found: list[Metric] = []
    for function in functions:
        declarations = declared(function)
        if not declarations:
            name = getattr(function, "__name__", None) or repr(function)
            raise SinkscopeError(f"{name} is no metric: put @sinkscope.head_metric or @sinkscope.layer_metric above it")
        found += [metric for metric in declarations if all(metric is not earlier for earlier in (*before, *found))]
    found = [metric for metric in found if built_in.tables.get(metric.table, {}).get(metric.name) is not metric]
    stray = next((metric for metric in found if metric.table not in ALWAYS), None)
    if stray is not None:
        raise SinkscopeError(f"metric {stray.name}: only a question adds columns to {stray.table}; use @head_metric")
    return found


def functions_in(path: str | Path) -> list[Callable[..., Any]]:
    """Runs a Python file and returns the decorated functions that it defines or imports.

    Raises SinkscopeError where the file cannot be read, fails, or has no metric.
    """
    path = Path(path)
    name = f"sinkscope_metrics_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:12]}"
    spec = spec_from_file_location(name, path)
    if path.suffix != ".py" or spec is None or spec.loader is None:
        raise SinkscopeError(f"--metrics {path}: a Python file (.py) is needed")
    module = sys.modules[name] = module_from_spec(spec)
    try:
        # Compiled from its text: the cache beside it goes by time and size, and may hold what stood there before.
        code = compile(path.read_bytes(), str(path), "exec")
        with printed_to_stderr():
            exec(code, vars(module))  # the user named the file
    except OSError as error:
        raise SinkscopeError(f"--metrics {path}: {error.strerror or error}") from None
    except (Exception, SystemExit) as error:
        raise SinkscopeError(f"--metrics {path}: {one_line(error, path.name)}") from error
    functions = _functions_of(module)
    if not functions:
        raise SinkscopeError(
            f"--metrics {path}: the file declares no metric; put @sinkscope.head_metric above a function"
        )
    return functions


def definitions(metrics: MetricSet) -> dict[str, dict[str, Any]]:
    """What a manifest records of each metric that is not sinkscope's own: its declaration and its `code_sha256`.

    Two scans measure the same metrics where names and code are the same.
    """
    hidden = ("name", "per", "compute", "begin", "measure", "map_place")
    return {
        metric.name: {key: value for key, value in asdict(metric).items() if key not in hidden}
        | {"code_sha256": code_sha256(metric.compute)}
        for metric in _foreign(metrics, registered(shipped=True))
    }


def _foreign(metrics: MetricSet, shipped: MetricSet) -> list[Metric]:
    """The metrics that are not sinkscope's own."""
    return [
        metric
        for table, columns in metrics.tables.items()
        for name, metric in columns.items()
        if name not in shipped.names(table)
    ]


def code_sha256(function: Callable[..., Any]) -> str:
    """SHA-256 of the file that defines a function, so that its helper functions count too; of the function alone where
    it was typed into an interactive session."""
    function = inspect.unwrap(function)
    file = inspect.getsourcefile(function)
    if file is not None and Path(file).is_file():
        return hashlib.sha256(Path(file).read_bytes()).hexdigest()
    try:
        text = inspect.getsource(function)
    except OSError:
        code = function.__code__
        text = repr((code.co_code, code.co_names, code.co_consts))
    return hashlib.sha256(text.encode()).hexdigest()


def _functions(given: Iterable[Any]) -> list[Any]:
    """Replaces each file by its functions and reads each file once; functions stay as they are.

    One file or one function may stand for a list of it: the letters of a file's name are none.
    """
    functions: list[Any] = []
    read: set[Path] = set()
    for source in [given] if isinstance(given, str | Path) or callable(given) else given:
        if not isinstance(source, str | Path):
            functions.append(source)
        elif Path(source).resolve() not in read:
            read.add(Path(source).resolve())
            functions += functions_in(source)
    return functions


def _metrics_of(thing: Any) -> list[Callable[..., Any]]:
    """The functions that what a package brings declares as metrics: itself, or those that it holds."""
    return [thing] if declared(thing) else _functions_of(thing)


def _functions_of(module: object) -> list[Callable[..., Any]]:
    """The metrics among what a module, or whatever a package gives for one, holds."""
    return [value for value in getattr(module, "__dict__", {}).values() if declared(value)]


def _check_names(metrics: list[Metric], built_in: MetricSet, reserved: Collection[str]) -> None:
    """Refuses a column name that any table has: sequences.parquet holds the metrics of all tables together."""
    taken = {*KEYS, *reserved}
    for table in built_in.tables.values():
        for metric in table.values():
            taken |= _columns_of(metric)
    for metric in metrics:
        whose = f" of --measure {metric.measure}" if metric.measure else ""
        if not metric.name.isidentifier():
            raise SinkscopeError(f"metric {metric.name!r}{whose}: no name for a column; give the function a plain name")
        again = sorted(_columns_of(metric) & taken)
        if again:
            name = metric.name if metric.name in again else again[0]
            raise SinkscopeError(
                f"metric {metric.name}{whose}: the column name {name} is taken; give the function another name"
            )
        taken |= _columns_of(metric)


def _columns_of(metric: Metric) -> set[str]:
    """The names of all columns that a metric adds to any table."""
    names = {metric.name, f"mean_{metric.name}"} if metric.table == "heads" else {metric.name}
    return names | {f"{name}_sem" for name in names}
