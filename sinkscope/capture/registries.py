"""Replaces functions of transformers' registries for one thread, and tells whether they are transformers' own."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from threading import RLock, get_ident
from typing import Any

from sinkscope.capture.private_doors import registry_of, set_registry, shared_registries
from sinkscope.errors import SinkscopeError

READ = ("sdpa", "eager")
"""The names of attention and mask functions that sinkscope reads a model through."""


@dataclass(eq=False)
class _Layer:
    thread: int
    functions: Mapping[str, Any]


class _Layered(MutableMapping[str, Any]):
    """A registry over which each thread sees its own layers. What is written goes to the registry below."""

    def __init__(self, below: MutableMapping[str, Any]) -> None:
        self.below = below
        self.layers: list[_Layer] = []

    def __getitem__(self, name: str) -> Any:
        thread = get_ident()
        for layer in reversed(self.layers):
            if layer.thread == thread and name in layer.functions:
                return layer.functions[name]
        return self.below[name]

    def __setitem__(self, name: str, function: Any) -> None:
        self.below[name] = function

    def __delitem__(self, name: str) -> None:
        del self.below[name]

    def __iter__(self) -> Iterator[str]:
        thread = get_ident()
        mine = (name for layer in self.layers if layer.thread == thread for name in layer.functions)
        return iter(dict.fromkeys([*self.below, *mine]))

    def __len__(self) -> int:
        return len(list(iter(self)))


_lock = RLock()


@contextmanager
def layered(interface: type[Any], functions: Mapping[str, Any]) -> Iterator[None]:
    """Puts `functions` over the registry of `interface` until the block ends, for this thread alone.

    Other threads find what they found before, also where a name was absent. Blocks may end in any order: the last one
    puts the registry itself back.
    """
    layer = _Layer(get_ident(), functions)
    with _lock:
        registry = registry_of(interface)
        if not isinstance(registry, _Layered):
            registry = _Layered(registry)
            set_registry(interface, registry)
        registry.layers.append(layer)
    try:
        yield
    finally:
        with _lock:
            registry.layers.remove(layer)
            if not registry.layers and registry_of(interface) is registry:
                set_registry(interface, registry.below)


def check_registries() -> None:
    """Raises SinkscopeError where a function behind a name of `READ` is not transformers' own.

    Our function takes its place, so what the other one computes would not be measured.
    """
    for what, registry in shared_registries().items():
        for name in READ:
            function = registry.get(name)
            if function is not None and not is_own(function):
                raise SinkscopeError(
                    f"transformers' {what} function {name!r} was replaced by {_name(function)}, and sinkscope cannot "
                    f"know what that computes: put transformers' own back, register yours under another name, "
                    "and scan a model that was loaded with attn_implementation='sdpa' or 'eager'"
                )


def is_own(function: Any) -> bool:
    """Whether a registered function is one that transformers (or sinkscope) defines, not one wrapped around it."""
    module = str(getattr(function, "__module__", ""))
    if module.startswith("sinkscope."):
        return True
    defined = getattr(sys.modules.get(module), getattr(function, "__name__", ""), None)
    return module.startswith("transformers.") and defined is function


def _name(function: Any) -> str:
    return f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', type(function).__name__)}"
