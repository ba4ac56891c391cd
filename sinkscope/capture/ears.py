"""Hooks on every module of a model, which can be lifted from those that have nothing to tell."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from sinkscope.capture.hooks import hooked

Making = Callable[[str, nn.Module], Callable[..., Any]]
"""Makes the hook of a module, from its path and the module."""


class Ears:
    """Hooks before and after the forward of every module of `model`, while `on()`."""

    def __init__(self, model: nn.Module, entering: Making, leaving: Making) -> None:
        self._model, self._entering, self._leaving = model, entering, leaving
        self._modules: dict[str, nn.Module] = {}
        self._hooks: dict[str, ExitStack] = {}
        self._without: frozenset[str] = frozenset()

    @contextmanager
    def on(self) -> Iterator[None]:
        """Puts the hooks on, and takes all of them off when the block ends."""
        self._modules, self._without = dict(self._model.named_modules()), frozenset()
        try:
            for name in self._modules:
                self._put(name)
            yield
        finally:
            self.off()

    def off(self) -> None:
        """Takes every hook off."""
        self._modules = {}
        for name in [*self._hooks]:
            self._hooks.pop(name).close()

    def without(self, paths: frozenset[str]) -> None:
        """Has hooks on every module but those at `paths`. A hook slows a call by some microseconds."""
        if paths == self._without or not self._modules:
            return
        for name in paths - self._without:
            self._hooks.pop(name).close()
        for name in self._without - paths:
            self._put(name)
        self._without = paths

    def _put(self, name: str) -> None:
        module = self._modules[name]
        stack = self._hooks[name] = ExitStack()
        stack.enter_context(hooked(module, self._entering(name, module), with_kwargs=True, first=True))
        stack.enter_context(hooked(module, post=self._leaving(name, module), always=True))
