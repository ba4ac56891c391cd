"""Hands every attention function that a model looks up in transformers' interface through an ear."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from sinkscope.capture.listeners import Listeners
from sinkscope.capture.private_doors import interface_lookup, set_interface_lookup

Ear = Callable[[str | None, Callable[..., Any]], Callable[..., Any]]
"""Takes the name and the function that transformers' interface gives a model; returns what the model is to call."""


def overheard(ear: Ear) -> AbstractContextManager[None]:
    """Hands every function that transformers' interface looks up in this thread through `ear`, until the end."""
    return _listeners.joined_by(ear)


def _put() -> Callable[[], None]:
    plain = interface_lookup()

    def lookup(interface: Any, name: str | None, default: Callable[..., Any]) -> Callable[..., Any]:
        found: Callable[..., Any] = plain(interface, name, default)
        for ear in _listeners.here():
            found = ear(name, found)
        return found

    set_interface_lookup(lookup)
    return partial(set_interface_lookup, plain)


_listeners: Listeners[Ear] = Listeners(_put)
