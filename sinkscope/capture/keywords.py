"""How each keyword of transformers' attention interface changes the record of a call. Each keyword has one function.

A model may pass its attention function a keyword that transformers' own models do not use. Declare the keyword, in any
module, before the model is scanned:

    @attention_keyword("logit_multiplier")
    def multiplied(call, factor):
        return replace(call, scaling=call.scaling * factor)

An undeclared keyword is ignored. That is right for `output_attentions`, `use_cache` or `position_ids`; where the
keyword changes attention, the self-check fails because our probabilities differ from the model's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from sinkscope.capture.calls import AttentionCall
from sinkscope.errors import SinkscopeError

Keyword = Callable[[AttentionCall, Any], AttentionCall]
"""Takes the call and the value that the model passed (never None); returns the call with the keyword applied."""

KEYWORDS: dict[str, Keyword] = {}
"""Every declared keyword, by the name the model uses. They are applied in the order of their declaration."""


def attention_keyword(name: str) -> Callable[[Keyword], Keyword]:
    """Declares how the keyword `name` changes a call. Raises SinkscopeError for a name that is declared already."""

    def declare(keyword: Keyword) -> Keyword:
        if name in KEYWORDS:
            raise SinkscopeError(f"the attention keyword {name!r} is declared already, by {KEYWORDS[name].__module__}")
        KEYWORDS[name] = keyword
        return keyword

    return declare


def with_keywords(call: AttentionCall, given: Mapping[str, Any]) -> AttentionCall:
    """Applies every declared keyword that the model passed; a value of None counts as not passed."""
    for name, keyword in KEYWORDS.items():
        value = given.get(name)
        if value is not None:
            call = keyword(call, value)
    return call


@attention_keyword("scaling")
def scaling(call: AttentionCall, factor: float) -> AttentionCall:
    """Replaces d^-0.5; T5 passes 1."""
    return replace(call, scaling=float(factor))


@attention_keyword("softcap")
def softcap(call: AttentionCall, cap: float) -> AttentionCall:
    """Passed by Gemma 2 and related models."""
    return replace(call, softcap=cap)


@attention_keyword("position_bias")
def position_bias(call: AttentionCall, bias: Tensor) -> AttentionCall:
    """A bias (b, h, Tq | 1, >= Tk), passed by T5, related models and conformers."""
    return replace(call, bias=bias[..., : call.key.shape[2]])


@attention_keyword("sinks")
def sinks(call: AttentionCall, logits: Tensor) -> AttentionCall:
    """Learned sink logits, n for each query: (B, H, T, n)."""
    return replace(call, sinks=logits)


@attention_keyword("s_aux")
def s_aux(call: AttentionCall, logits: Tensor) -> AttentionCall:
    """Learned sink logits, one for each head: (H,). Passed by gpt-oss and related models."""
    return replace(call, sinks=logits.view(1, -1, 1, 1))


@attention_keyword("sliding_window")
def sliding_window(call: AttentionCall, window: int) -> AttentionCall:
    """Records the window's size; the mask already applies it."""
    return replace(call, window=window)


@attention_keyword("score")
def score(call: AttentionCall, name: str) -> AttentionCall:
    """Passed by models whose attention is not softmax, such as the trigger task's; transformers itself has no such
    keyword."""
    return replace(call, score=name)
