"""Calls of a dry run that are no map of a sequence's queries and keys, and how they are told from those that are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sinkscope.capture.sites import stream_of


@dataclass(frozen=True)
class Seen:
    """One call of the dry run. `heads` etc. as in Site."""

    module: str
    rows: int
    queries: int
    keys: int
    heads: int
    kv_groups: int
    head_dim: int | None
    value_dim: int | None
    causal: bool
    path: str
    window: int | None = None
    score: str = "softmax"
    kernel: str | None = None


def no_maps(model: nn.Module, seen: list[Seen], unmet: set[str], given: dict[str, torch.Size]) -> set[str]:
    """Modules whose calls are parts of an attention, or of something else. `unmet`: those with a softmax not read."""
    calls = Counter(one.module for one in seen)

    def part(one: Seen) -> bool:
        square = one.queries == one.keys
        pictures = _of_pictures(model, one)
        return (
            (one.module in unmet and not square)  # global tokens beside bands
            or one.rows != 1  # windows: several rows for the dry run's one sequence
            or (pictures and calls[one.module] > 1)  # windows: a call each, as many as the picture has
            or (pictures and not square)  # pooled keys
            or _filled_up(one, given.get(one.module))
            or _behind_a_window(model, one)
        )

    return {one.module for one in seen if part(one)}


@contextmanager
def hidden_states(model: nn.Module) -> Iterator[dict[str, torch.Size]]:
    """The shape of the hidden states each module is given, by its path."""
    shapes: dict[str, torch.Size] = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            hidden = kwargs.get("hidden_states", args[0] if args else None)
            if isinstance(hidden, Tensor) and hidden.dim() == 3:
                shapes[name] = hidden.shape

        return hook

    handles = [
        module.register_forward_pre_hook(keep(name), with_kwargs=True) for name, module in model.named_modules() if name
    ]
    try:
        yield shapes
    finally:
        for handle in handles:
            handle.remove()


def _behind_a_window(model: nn.Module, one: Seen) -> bool:
    """Whether a canvas reads its prompt from a cache that keeps a window: there the first key is no first position."""
    return (
        one.window is not None and one.queries != one.keys and hasattr(getattr(model, "config", None), "canvas_length")
    )


def _of_pictures(model: nn.Module, one: Seen) -> bool:
    return stream_of(model, one.module, False) == "vision"


def _filled_up(one: Seen, given: torch.Size | None) -> bool:
    """Whether an attention module fills its positions up to a whole window: (1, T, D) goes in, more than T queries ask.

    Where it reads channels (1, D, T) or positions (T, 1, D) first, that is not said.
    """
    if given is None or one.queries != one.keys or given[2] == one.queries:
        return False
    return 1 < given[1] < one.queries
