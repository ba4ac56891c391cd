"""Puts hooks on modules, or another forward in the place of their own, for a while. They concern the thread that put
them there: another may run the same model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from threading import get_ident
from typing import Any

from torch import nn

Hook = Callable[..., Any]
"""Takes (module, args) before the forward and (module, args, output) after it; with `with_kwargs`, the keyword
arguments stand behind `args`. What it returns is used as torch says of such hooks; None changes nothing."""


@contextmanager
def hooked(
    modules: nn.Module | Iterable[nn.Module],
    pre: Hook | None = None,
    post: Hook | None = None,
    *,
    with_kwargs: bool = False,
    first: bool = False,
    always: bool = False,
) -> Iterator[None]:
    """Calls `pre` before and `post` after the forward of each module until the block ends, in this thread alone.

    Every hook is taken off at the end, also after an exception. `first`: `pre` comes before the hooks that a module has
    already. `always`: `post` is called, with the output None, after a forward that raised too.
    """
    thread = get_ident()

    def here(hook: Hook) -> Hook:
        return lambda *args: hook(*args) if get_ident() == thread else None

    with ExitStack() as stack:
        for module in (modules,) if isinstance(modules, nn.Module) else modules:
            if pre is not None:
                before = module.register_forward_pre_hook(here(pre), prepend=first, with_kwargs=with_kwargs)
                stack.callback(before.remove)
            if post is not None:
                stack.callback(
                    module.register_forward_hook(here(post), with_kwargs=with_kwargs, always_call=always).remove
                )
        yield


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
