"""Hands every attention function that a model looks up in transformers' interface through an ear."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any

from sinkscope.capture.private_doors import interface_lookup, set_interface_lookup

Ear = Callable[[str | None, Callable[..., Any]], Callable[..., Any]]
"""Takes the name and the function that transformers' interface gives a model; returns what the model is to call."""

_ears: list[tuple[int, Ear]] = []
_plain: list[Callable[..., Any]] = []


@contextmanager
def overheard(ear: Ear) -> Iterator[None]:
    """Hands every function that transformers' interface looks up in this thread through `ear`, until the end.

    Such blocks may end in any order: the last one puts the interface back.
    """
    mine = (get_ident(), ear)
    if not _ears:
        _plain[:] = [interface_lookup()]
        set_interface_lookup(_lookup)
    _ears.append(mine)
    try:
        yield
    finally:
        _ears.remove(mine)
        if not _ears:
            set_interface_lookup(_plain.pop())


def _lookup(interface: Any, name: str | None, default: Callable[..., Any]) -> Callable[..., Any]:
    found: Callable[..., Any] = _plain[0](interface, name, default)
    for thread, ear in _ears:
        found = ear(name, found) if thread == get_ident() else found
    return found
