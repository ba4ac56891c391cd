"""Puts hooks on modules, or another forward in the place of their own, for a while. They concern the thread that put
them there: another may run the same model."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import wraps
from threading import get_ident
from typing import Any

from torch import nn

Hook = Callable[..., Any]
"""Takes (module, args) before the forward and (module, args, output) after it; with `with_kwargs`, the keyword
arguments stand behind `args`. What it returns is used as torch says of such hooks; None changes nothing."""


def first_returned(output: Any) -> Any:
    """What a module returns, or the first of several: a block may return its attention maps, or a cache, behind. Of a
    list, nothing shows which one the stream is where others have the same shape; then the list itself."""
    if isinstance(output, list):
        shapes = [getattr(each, "shape", None) for each in output]
        return output[0] if output and shapes[0] not in shapes[1:] else output
    return output[0] if isinstance(output, tuple) and output else output


@contextmanager
def hooked(
    modules: nn.Module | Iterable[nn.Module],
    pre: Hook | None = None,
    post: Hook | None = None,
    *,
    with_kwargs: bool = False,
    first: bool = False,
    always: bool = False,
    anywhere: bool = False,
    others: Callable[[], None] | None = None,
) -> Iterator[None]:
    """Calls `pre` before and `post` after the forward of each module until the block ends, in this thread alone. A
    copy of the module calls neither.

    Every hook is taken off at the end, also after an exception. `first`: `pre` comes before the hooks that a module has
    already. `always`: `post` is called, with the output None, after a forward that raised too. `anywhere`: other
    threads call them, too. `others` is called in other threads in the place of `pre`.
    """
    with ExitStack() as stack:
        for module in (modules,) if isinstance(modules, nn.Module) else modules:
            if pre is not None:
                here = _Here(module, pre, anywhere, others)
                before = module.register_forward_pre_hook(here, prepend=first, with_kwargs=with_kwargs)
                stack.callback(before.remove)
            if post is not None:
                stack.callback(
                    module.register_forward_hook(
                        _Here(module, post, anywhere), with_kwargs=with_kwargs, always_call=always
                    ).remove
                )
        yield


class _Here:
    """A hook of one module, in the thread that made it, or `anywhere`. It does nothing in a module that took the hooks
    of this one over, as torch's quantisation does. What is copied or saved of it does nothing either, and needs nothing
    of ours. `others` is called in other threads."""

    def __init__(self, module: nn.Module, hook: Hook, anywhere: bool, others: Callable[[], None] | None = None) -> None:
        self._module, self._hook, self._others = weakref.ref(module), hook, others
        self._thread = None if anywhere else get_ident()

    def __call__(self, module: nn.Module, *args: Any) -> Any:
        thread = get_ident()
        if module is not self._module() or thread in _unheard:
            return None
        if self._thread not in (None, thread):
            return None if self._others is None else self._others()
        return self._hook(module, *args)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")


_unheard: set[int] = set()
"""Threads whose hooks are not called at the moment."""


@contextmanager
def unheard() -> Iterator[None]:
    """Calls no hook of `hooked` in this thread until the block ends: what a layer is given there is no text."""
    thread = get_ident()
    outer = thread not in _unheard
    _unheard.add(thread)
    try:
        yield
    finally:
        if outer:
            _unheard.discard(thread)


@contextmanager
def instead(module: nn.Module, compute: Callable[..., Any]) -> Iterator[None]:
    """Calls `compute(forward, *args, **kwargs)` in the place of the module's forward until the block ends, in this
    thread alone. `forward` is the module's own; its hooks are called as ever."""
    thread, forward, before = get_ident(), module.forward, module.__dict__.get("forward")

    @wraps(forward)
    def here(*args: Any, **kwargs: Any) -> Any:
        return compute(forward, *args, **kwargs) if get_ident() == thread else forward(*args, **kwargs)

    module.__dict__["forward"] = here
    try:
        yield
    finally:
        if before is None:
            del module.__dict__["forward"]
        else:
            module.__dict__["forward"] = before


# Hooks on every module of a model, which can be lifted from those that have nothing to tell.


Making = Callable[[str, nn.Module], Callable[..., Any]]
"""Makes the hook of a module, from its path and the module."""


class Ears:
    """Hooks before and after the forward of every module of `model`, while `on()`. `anywhere`: in all threads.
    `others`: called where another thread calls one of them."""

    def __init__(
        self, model: nn.Module, entering: Making, leaving: Making, anywhere: bool = False,
        others: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        self._model, self._entering, self._leaving = model, entering, leaving
        self._anywhere, self._others = anywhere, others
        self._modules: dict[str, nn.Module] = {}
        self._hooks: dict[str, ExitStack] = {}
        self._without: frozenset[str] = frozenset()

    @contextmanager
    def on(self) -> Iterator[None]:
        """Puts the hooks on, and takes all of them off when the block ends."""
        try:
            self._put_all()
            yield
        finally:
            self.off()

    def renewed(self) -> bool:
        """Puts the hooks on anew where modules of the model came, went or changed places since. Returns whether any
        did."""
        if not self._modules or self._modules == dict(self._model.named_modules()):
            return False
        self.off()
        self._put_all()
        return True

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

    def _put_all(self) -> None:
        self._modules, self._without = dict(self._model.named_modules()), frozenset()
        for name in self._modules:
            self._put(name)

    def _put(self, name: str) -> None:
        module = self._modules[name]
        stack = self._hooks[name] = ExitStack()
        before, after = self._entering(name, module), self._leaving(name, module)
        # The hook behind the forward comes first and goes last: another thread may be in this module, and each entry
        # that is heard needs its end.
        stack.enter_context(hooked(module, post=after, with_kwargs=True, always=True, anywhere=self._anywhere))
        where: dict[str, Any] = {"anywhere": self._anywhere, "others": self._others}
        stack.enter_context(hooked(module, before, with_kwargs=True, first=True, **where))


@contextmanager
def forwards_only() -> Iterator[None]:
    """Calls no hook at all in this thread until the block ends, of whomever: every module runs its `forward` alone.

    In somebody else's program a hook may keep what a layer is given, such as a calibration's or TransformerLens'.
    """
    plain, thread = nn.Module.__call__, get_ident()

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return module.forward(*args, **kwargs) if get_ident() == thread else plain(module, *args, **kwargs)

    nn.Module.__call__ = call  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.__call__ = plain  # type: ignore[method-assign]
