"""Finds the attention calls of a dry run that are not one map of a sequence's queries and keys."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sinkscope.capture.hooks import hooked
from sinkscope.capture.sites import stream_of


@dataclass(frozen=True)
class Seen:
    """One attention call of the dry run. `heads` and the fields after it are as in Site."""

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


def no_maps(
    model: nn.Module, seen: list[Seen], unmatched: set[str], given: dict[str, torch.Size], rows: int = 1
) -> set[str]:
    """Paths of modules whose calls are only parts of an attention map, or no attention; `rows`: sequences of the pass.

    `unmatched`: modules with a softmax whose product with values was not seen.
    """
    calls = Counter(one.module for one in seen)

    def part(one: Seen) -> bool:
        square = one.queries == one.keys
        of_image = _of_image(model, one)
        return (
            (one.module in unmatched and not square)  # banded attention with global tokens
            or one.rows != rows  # windows folded into the batch: several rows for one sequence
            or (of_image and calls[one.module] > 1)  # windows: one call for each, their number depends on the image
            or (of_image and not square)  # pooled keys
            or _padded_to_window(one, given.get(one.module))
            or _reads_windowed_cache(model, one)
        )

    return {one.module for one in seen if part(one)}


@contextmanager
def hidden_states(model: nn.Module) -> Iterator[dict[str, torch.Size]]:
    """Collects the shape of the hidden states that each module receives, by the module's path."""
    shapes: dict[str, torch.Size] = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            hidden = kwargs.get("hidden_states", args[0] if args else None)
            if isinstance(hidden, Tensor) and hidden.dim() == 3:
                shapes[name] = hidden.shape

        return hook

    with ExitStack() as stack:
        for name, module in model.named_modules():
            if name:
                stack.enter_context(hooked(module, pre=keep(name), with_kwargs=True))
        yield shapes


def _reads_windowed_cache(model: nn.Module, one: Seen) -> bool:
    """Whether a diffusion model's canvas reads its prompt from a sliding-window cache, whose first key may not be the
    sequence's first position."""
    return (
        one.window is not None and one.queries != one.keys and hasattr(getattr(model, "config", None), "canvas_length")
    )


def _of_image(model: nn.Module, one: Seen) -> bool:
    return stream_of(model, one.module, False) == "vision"


def _padded_to_window(one: Seen, given: torch.Size | None) -> bool:
    """Whether an attention module pads its positions to a whole window: it gets (1, T, D) and has more than T queries.

    False where it gets channels first (1, D, T) or positions first (T, 1, D): these sizes do not show padding.
    """
    if given is None or one.queries != one.keys or given[2] == one.queries:
        return False
    return 1 < given[1] < one.queries
