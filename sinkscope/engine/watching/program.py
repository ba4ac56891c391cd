"""Runs a Python program in this process and watches every model that it runs."""

from __future__ import annotations

import builtins
import gc
import io
import runpy
import sys
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import SourceFileLoader
from pathlib import Path
from threading import RLock, get_ident
from types import ModuleType
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from sinkscope.capture.alone import measuring
from sinkscope.capture.private_doors import without_numbers
from sinkscope.engine.watching.watch import Watch
from sinkscope.errors import SinkscopeError, first_line


class Everywhere:
    """Watches every model that this thread runs, or with `threads` any thread, from its first pass on.

    A model is a module that no other module calls, and that has modules inside it; with its head, where `with_head`
    finds one. `every`, `limit`, `until`, `tokenizer`: as in `watch`, for each model. `refused`: the models that could
    not be watched, each with the reason. `elsewhere`: whether a thread that is not watched ran some other model.
    """

    def __init__(
        self, every: int = 1, limit: int | None = None, until: int | None = None, tokenizer: Any = None,
        threads: bool = False,
    ) -> None:  # fmt: skip
        self._settings: dict[str, Any] = {
            "every": every, "limit": limit, "until": until, "tokenizer": tokenizer, "threads": threads,
        }  # fmt: skip
        self.watches: list[Watch] = []
        self.refused: dict[str, str] = {}
        self._known: set[nn.Module] = set()
        self._running: dict[int, list[nn.Module]] = {}
        self._thread, self.threads, self._lock = get_ident(), threads, RLock()
        self.elsewhere = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watches until the block ends."""
        plain, everywhere = nn.Module.__call__, self

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            thread = get_ident()
            if thread != everywhere._thread and not everywhere.threads:
                known = module in everywhere._known  # of a watched model, its watch tells
                everywhere.elsewhere |= not known and next(module.children(), None) is not None
                return plain(module, *args, **kwargs)
            if module not in everywhere._known and not measuring() and not without_numbers():
                with everywhere._lock:
                    everywhere._meet(module)  # a trace would hold hooks that come in between
            running = everywhere._running.setdefault(thread, [])
            running.append(module)
            try:
                return plain(module, *args, **kwargs)
            finally:
                running.pop()

        nn.Module.__call__ = call  # type: ignore[method-assign]
        try:
            yield
        finally:
            nn.Module.__call__ = plain  # type: ignore[method-assign]
            for watch in reversed(self.watches):
                watch.__exit__(None, None, None)

    @property
    def measured(self) -> list[Watch]:
        """The watches of models that attended, in the order of their first passes."""
        return [watch for watch in self.watches if watch.sequences]

    def _meet(self, module: nn.Module) -> None:
        """Watches a module that is called for the first time, unless it is a layer on its own, such as a loss."""
        models = [(watch.model, set(watch.model.modules())) for watch in self.watches]
        layers = {each for each in module.modules() if not any(True for _ in each.children())}
        running = self._running.get(get_ident(), [])
        if any(model in running and layers <= parts for model, parts in models):
            return  # a watched model runs its own layers within another frame, as TransformerLens does
        self._known.add(module)
        if layers == {module} and not isinstance(module, nn.MultiheadAttention):
            return
        if any(module in parts for _, parts in models):
            return  # it came into a model that is watched already
        module = with_head(module)
        try:
            watch = Watch(module, **self._settings)
            watch.__enter__()
        except SinkscopeError as error:
            self.refused[type(module).__name__] = first_line(error)
            self._known |= set(module.modules())  # a part of it would be measured with what it is refused for
            return
        inside = set(module.modules())
        for part in self.watches:
            if part.model in inside:  # a part was called by itself, before the whole
                part.rest()
        self._known |= inside
        self.watches.append(watch)


def with_head(module: nn.Module) -> nn.Module:
    """The model of transformers that has this one as its base model, where there is exactly one; else the module.

    A program may call both over one cache: kvpress fills it by `model.model` and answers by `model`. What attends is
    the same in both, so that a watch of the one with the head hears every pass, whichever is called.
    """
    if not isinstance(module, PreTrainedModel):
        return module
    models = [each for each in gc.get_objects() if issubclass(type(each), PreTrainedModel)]
    heads = [each for each in models if each is not module and each.base_model is module]
    return with_head(heads[0]) if len(heads) == 1 else module


def check_program(words: Sequence[str]) -> None:
    """Raises SinkscopeError where there is no such script, or where no module is named."""
    if words[0] == "-m":
        if len(words) < 2:
            raise SinkscopeError("-m names no module: give `-- -m MODULE ARGS`")
    elif not Path(words[0]).is_file():
        raise SinkscopeError(f"{words[0]} is no file: give `-- SCRIPT.py ARGS`, or `-- -m MODULE ARGS`")


def run_program(words: Sequence[str]) -> None:
    """Runs `SCRIPT.py ARGS` or `-m MODULE ARGS` as Python itself would, in this process. Raises what the program does.

    `check_program` says before whether there is such a program.
    """
    argv, path = sys.argv, sys.path[:]
    try:
        if words[0] == "-m":
            sys.argv = [*words[1:]]
            sys.path.insert(0, str(Path.cwd()))
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
            return
        sys.argv = [*words]
        sys.path.insert(0, str(Path(words[0]).resolve().parent))
        _run_script(str(Path(words[0]).absolute()))
    finally:
        sys.argv, sys.path[:] = argv, path


def _run_script(file: str) -> None:
    """Runs a script as Python's main module: runpy would put the whole path into sys.argv, or a relative one into
    `__file__`."""
    if zipfile.is_zipfile(file) or file.endswith(".pyc"):
        runpy.run_path(file, run_name="__main__")
        return
    main, before = ModuleType("__main__"), sys.modules["__main__"]
    main.__dict__.update(__file__=file, __builtins__=builtins, __loader__=SourceFileLoader("__main__", file))
    with io.open_code(file) as script:
        code = compile(script.read(), file, "exec", dont_inherit=True)
    sys.modules["__main__"] = main
    try:
        exec(code, main.__dict__)
    finally:
        sys.modules["__main__"] = before
