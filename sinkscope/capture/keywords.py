"""How each keyword of transformers' attention interface enters the record of a call: one function a keyword.

A model whose attention call passes a keyword that transformers' own models do not know is measured once that keyword
is declared, from anywhere:

    @attention_keyword("logit_multiplier")
    def multiplied(call, factor):
        return replace(call, scaling=call.scaling * factor)

A keyword that nobody declares changes nothing (`output_attentions`, `use_cache`, `position_ids`): where it should have,
the self-check finds our probabilities apart from the model's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from sinkscope.capture.calls import AttentionCall
from sinkscope.errors import SinkscopeError

Keyword = Callable[[AttentionCall, Any], AttentionCall]
"""Takes the call and the value the model passed (never None), returns the call as this keyword makes it."""

KEYWORDS: dict[str, Keyword] = {}
"""By the name the model uses; applied in the order in which they were declared."""


def attention_keyword(name: str) -> Callable[[Keyword], Keyword]:
    """Declares how the keyword `name` enters a call. Raises SinkscopeError for a name that is declared already."""

    def declare(keyword: Keyword) -> Keyword:
        if name in KEYWORDS:
            raise SinkscopeError(f"the attention keyword {name!r} is declared already, by {KEYWORDS[name].__module__}")
        KEYWORDS[name] = keyword
        return keyword

    return declare


def with_keywords(call: AttentionCall, given: Mapping[str, Any]) -> AttentionCall:
    """The call with every declared keyword that the model passed; None counts as not passed."""
    for name, keyword in KEYWORDS.items():
        value = given.get(name)
        if value is not None:
            call = keyword(call, value)
    return call


@attention_keyword("scaling")
def scaling(call: AttentionCall, factor: float) -> AttentionCall:
    """In place of d^-0.5; T5 passes 1."""
    return replace(call, scaling=float(factor))


@attention_keyword("softcap")
def softcap(call: AttentionCall, cap: float) -> AttentionCall:
    """Gemma 2 and its kin."""
    return replace(call, softcap=cap)


@attention_keyword("position_bias")
def position_bias(call: AttentionCall, bias: Tensor) -> AttentionCall:
    """T5 and its kin, conformers: (b, h, Tq | 1, >= Tk)."""
    return replace(call, bias=bias[..., : call.key.shape[2]])


@attention_keyword("sinks")
def sinks(call: AttentionCall, logits: Tensor) -> AttentionCall:
    """Several logits a query, (B, H, T, n)."""
    return replace(call, sinks=logits)


@attention_keyword("s_aux")
def s_aux(call: AttentionCall, logits: Tensor) -> AttentionCall:
    """One logit a head, (H,): gpt-oss and its kin."""
    return replace(call, sinks=logits.view(1, -1, 1, 1))


@attention_keyword("sliding_window")
def sliding_window(call: AttentionCall, window: int) -> AttentionCall:
    """Names the window that the mask already holds."""
    return replace(call, window=window)


@attention_keyword("score")
def score(call: AttentionCall, name: str) -> AttentionCall:
    """No keyword of transformers' own: a model whose attention is not softmax passes it, the trigger task's does."""
    return replace(call, score=name)
