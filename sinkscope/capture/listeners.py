"""The ears of several threads on things of another library, which are changed while anyone listens: the lookup of
attention functions, caches of keys and values, and the test for texts that have ended."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial, wraps
from threading import Lock, get_ident
from typing import Any, Generic, TypeVar

from torch import Tensor

from sinkscope.capture.generation_doors import (
    cache_methods,
    end_tokens,
    set_cache_method,
    set_stopping_test,
    stopping_test,
)
from sinkscope.capture.private_doors import interface_lookup, set_interface_lookup

Ear = TypeVar("Ear", bound=Callable[..., object])


class Listeners(Generic[Ear]):
    """Who listens, each in a thread of its own.

    `put` changes the thing when the first one comes, and returns what puts it back when the last one leaves.
    """

    def __init__(self, put: Callable[[], Callable[[], None]]) -> None:
        self._put, self._lock = put, Lock()
        self._back: list[Callable[[], None]] = []
        self._ears: list[tuple[int, Ear]] = []

    @contextmanager
    def joined_by(self, ear: Ear) -> Iterator[None]:
        """Lets `ear` listen in this thread until the block ends. Such blocks may end in any order."""
        entry = (get_ident(), ear)
        with self._lock:
            if not self._ears:
                self._back.append(self._put())
            self._ears.append(entry)
        try:
            yield
        finally:
            with self._lock:
                self._ears.remove(entry)
                if not self._ears:
                    self._back.pop()()

    def here(self) -> list[Ear]:
        """The ears of this thread, the first one first."""
        thread = get_ident()
        return [ear for of, ear in [*self._ears] if of == thread]

    def everywhere(self) -> list[Ear]:
        """The ears of all threads, the first one first."""
        return [ear for _, ear in [*self._ears]]


# Hands every attention function that a model looks up in transformers' interface through an ear.


LookupEar = Callable[[str | None, Callable[..., Any]], Callable[..., Any]]
"""Takes the name and the function that transformers' interface gives a model; returns what the model is to call."""


def overheard(ear: LookupEar) -> AbstractContextManager[None]:
    """Hands every function that transformers' interface looks up in this thread through `ear`, until the end."""
    return _of_lookups.joined_by(ear)


def _put_on_lookups() -> Callable[[], None]:
    plain = interface_lookup()

    def lookup(interface: Any, name: str | None, default: Callable[..., Any]) -> Callable[..., Any]:
        function: Callable[..., Any] = plain(interface, name, default)
        for ear in _of_lookups.here():
            function = ear(name, function)
        return function

    set_interface_lookup(lookup)
    return partial(set_interface_lookup, plain)


_of_lookups: Listeners[LookupEar] = Listeners(_put_on_lookups)


# Tells an ear what is done to a cache of keys and values between two passes.
#
# Its sequences are put in another order, as beam search does, or its newest tokens are taken back, as in assisted
# generation.


ORDER, CROP = "reorder_cache", "crop"

CacheEar = Callable[[Any, Tensor | int | None], None]
"""Takes a cache, and the number that each sequence which it holds now had before, or how many tokens it took back; None
before it does either."""


def cache_changes(ear: CacheEar) -> AbstractContextManager[None]:
    """Tells `ear` of every such change of transformers' caches in this thread, before it is made and after, until the
    end."""
    return _of_caches.joined_by(ear)


def _put_on_caches() -> Callable[[], None]:
    plain = {(kind, name): method for name in (ORDER, CROP) for kind, method in cache_methods(name).items()}
    for (kind, name), method in plain.items():
        set_cache_method(kind, name, _telling(method, name))

    def back() -> None:
        for (kind, name), method in plain.items():
            set_cache_method(kind, name, method)

    return back


_of_caches: Listeners[CacheEar] = Listeners(_put_on_caches)


def _telling(method: Callable[..., Any], name: str) -> Callable[..., Any]:
    def order(self: Any, beam_idx: Tensor) -> Any:
        _tell(self, None)
        result = method(self, beam_idx)
        _tell(self, beam_idx)
        return result

    def crop(self: Any, tokens_to_remove: int) -> Any:
        _tell(self, None)
        result = method(self, tokens_to_remove)
        _tell(self, abs(int(tokens_to_remove)))
        return result

    return order if name == ORDER else crop


def _tell(cache: Any, what: Tensor | int | None) -> None:
    for ear in _of_caches.here():
        ear(cache, what)


# Tells an ear by which tokens the texts end that `generate` writes.


EndEar = Callable[[Tensor, list[int], Tensor], None]
"""Takes the token ids of prompts and answers so far, [B, T], the tokens that end one of them (there may be none), and
which of them are over, bool [B]."""


def text_ends(ear: EndEar) -> AbstractContextManager[None]:
    """Tells `ear` after each token that transformers' `generate` writes in this thread, until the end."""
    return _of_ends.joined_by(ear)


def _put_on_stopping() -> Callable[[], None]:
    plain = stopping_test()

    @wraps(plain)
    def telling(self: Any, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        over = plain(self, input_ids, *args, **kwargs)
        for ear in _of_ends.here():
            ear(input_ids, end_tokens(self), over)
        return over

    set_stopping_test(telling)
    return partial(set_stopping_test, plain)


_of_ends: Listeners[EndEar] = Listeners(_put_on_stopping)
