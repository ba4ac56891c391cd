"""Our function behind the names `sdpa` and `eager` of transformers' attention interface, for the time of a forward.

A name of our own would change the model: masks, windows and fallbacks are chosen by that name. Shadowing the names the
model already uses keeps all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface

from sinkscope.capture.private_doors import attention_functions

SHADOWED = ("sdpa", "eager")


@dataclass(frozen=True)
class RawCall:
    """An attention call with the keywords transformers uses, before any mask is read. Shapes as in AttentionCall.

    `score` is no keyword of transformers' own: a model whose attention is not softmax passes it, and is read by it.
    """

    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    causal: bool
    scaling: float
    softcap: float | None
    bias: Tensor | None
    sinks: Tensor | None
    window: int | None
    score: str = "softmax"


Handler = Callable[[RawCall], Tensor]
"""Takes a call, returns the attention output (B, Tq, H, dv)."""


@contextmanager
def shadowed(handler: Handler) -> Iterator[None]:
    """Sends every attention call of any model to `handler` until the block ends; then the registry is as before."""
    registry = attention_functions()
    before = {name: registry[name] for name in SHADOWED if name in registry}
    function = _attention_function(handler)
    for name in SHADOWED:
        AttentionInterface.register(name, function)
    try:
        yield
    finally:
        for name in SHADOWED:
            registry.pop(name, None)
        registry.update(before)


def _attention_function(handler: Handler) -> Callable[..., tuple[Tensor, None]]:
    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        scaling: float | None = None,
        dropout: float = 0.0,
        is_causal: bool | None = None,
        position_bias: Tensor | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        sinks: Tensor | None = None,
        sliding_window: int | None = None,
        score: str = "softmax",
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
        if attention_mask is None and causal and 1 < query.shape[2] < key.shape[2]:
            # Aligned top left, as torch's sdpa: the first query sees the first key, later keys are out of reach.
            key, value = key[:, :, : query.shape[2]], value[:, :, : query.shape[2]]
        call = RawCall(
            module=module,
            query=query,
            key=key,
            value=value,
            mask=attention_mask,
            causal=bool(causal) and query.shape[2] > 1,
            scaling=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
            softcap=softcap,
            bias=None if position_bias is None else position_bias[..., : key.shape[2]],
            sinks=_sink_logits(s_aux, sinks),
            window=sliding_window,
            score=score,
        )
        return handler(call), None

    return attention


def _sink_logits(per_head: Tensor | None, several: Tensor | None) -> Tensor | None:
    """One logit a head (H,), or several a query (B, H, T, n), as (B | 1, H, T | 1, n)."""
    if per_head is not None:
        return per_head.view(1, -1, 1, 1)
    return several
