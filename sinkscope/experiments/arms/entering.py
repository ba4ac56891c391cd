"""Changes what enters a block of the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from sinkscope.errors import SinkscopeError


def block_hook(change: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    """A forward pre-hook of a block that replaces its residual stream, (batch, T, channel)."""

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if isinstance(kwargs.get("hidden_states"), Tensor):
            return args, kwargs | {"hidden_states": change(kwargs["hidden_states"])}
        if not args or not isinstance(args[0], Tensor):
            raise SinkscopeError(f"{type(module).__name__} does not read the residual stream as its first argument")
        return (change(args[0]), *args[1:]), kwargs

    return hook
