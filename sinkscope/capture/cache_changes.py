"""Tells an ear what is done to a cache of keys and values between two passes.

Its sequences are put in another order, as beam search does, or its newest tokens are taken back, as in assisted
generation.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from sinkscope.capture.listeners import Listeners
from sinkscope.capture.private_doors import cache_methods, set_cache_method

ORDER, CROP = "reorder_cache", "crop"

Ear = Callable[[Any, Tensor | int], None]
"""Takes a cache, and the number that each sequence which it holds now had before, or how many tokens it took back."""


def cache_changes(ear: Ear) -> AbstractContextManager[None]:
    """Tells `ear` of every such change of transformers' caches in this thread, after it was made, until the end."""
    return _listeners.joined_by(ear)


def _put() -> Callable[[], None]:
    plain = {(kind, name): own for name in (ORDER, CROP) for kind, own in cache_methods(name).items()}
    for (kind, name), method in plain.items():
        set_cache_method(kind, name, _telling(method, name))

    def back() -> None:
        for (kind, name), method in plain.items():
            set_cache_method(kind, name, method)

    return back


_listeners: Listeners[Ear] = Listeners(_put)


def _telling(method: Callable[..., Any], name: str) -> Callable[..., Any]:
    def order(self: Any, beam_idx: Tensor) -> Any:
        result = method(self, beam_idx)
        _tell(self, beam_idx)
        return result

    def crop(self: Any, tokens_to_remove: int) -> Any:
        result = method(self, tokens_to_remove)
        _tell(self, abs(int(tokens_to_remove)))
        return result

    return order if name == ORDER else crop


def _tell(cache: Any, what: Tensor | int) -> None:
    for ear in _listeners.here():
        ear(cache, what)
