"""How each keyword of transformers' attention interface changes the record of a call. Each keyword has one function.

A model may pass its attention function a keyword that transformers' own models do not use. Declare the keyword, in any
module, before the model is scanned:

    @attention_keyword("logit_multiplier")
    def multiplied(call, factor):
        return replace(call, scaling=call.scaling * factor)

or by an entry point of the group `sinkscope.attention_keywords`, whose name is the keyword's.

An undeclared keyword is left out. That is right for those of `WITHOUT_EFFECT`; any other one stands in the manifest's
warnings, by name. Where it changes attention, the self-check fails because our probabilities differ from the model's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from sinkscope.capture.calls import AttentionCall
from sinkscope.capture.private_doors import is_out_of_memory
from sinkscope.lookup import Lookup, a_function

Keyword = Callable[[AttentionCall, Any], AttentionCall]
"""Takes the call and the value that the model passed (never None); returns the call with the keyword applied."""

KEYWORDS: Lookup[Keyword] = Lookup("the attention keyword", group="sinkscope.attention_keywords", lacks=a_function)
"""Every declared keyword, by the name the model uses. They are applied in the order of their declaration, those of
packages last."""

WITHOUT_EFFECT = frozenset(
    {
        "dropout",  # 0 where a model does not train
        # For FlashAttention: where packed sequences end, which the mask says too.
        *("position_ids", "seq_idx", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"),
        "deterministic",  # which of FlashAttention's algorithms
        "block_indices",  # MiniMax: the blocks of keys that each query sees, which its mask says too
        *("use_cache", "output_attentions", "output_hidden_states", "output_router_logits", "return_dict"),
        *("num_items_in_batch", "labels", "logits_to_keep"),  # for the loss
        # Of continuous batches: where the cache keeps what is read, and what becomes of the logits.
        *("read_index", "write_index", "logits_indices", "logits_processor_args"),
    }
)
"""Keywords that transformers' own models pass, or hand down, and that change nothing of attention through the names
`sdpa` and `eager`."""


def attention_keyword(name: str) -> Callable[[Keyword], Keyword]:
    """Declares how the keyword `name` changes a call. Raises SinkscopeError for a name that is declared already."""
    return lambda keyword: KEYWORDS.add(name, keyword, keyword.__module__)


def with_keywords(call: AttentionCall, given: Mapping[str, Any]) -> AttentionCall:
    """Applies every declared keyword that the model passed; a value of None counts as not passed. Raises SinkscopeError
    where the package that declares one of them does not load, or its function fails or returns no call."""
    for name in KEYWORDS.among({name for name, value in given.items() if value is not None}):
        call = KEYWORDS[name](call, given[name]) if name in _OWN else _of_others(name, call, given[name])
    return call


def _of_others(name: str, call: AttentionCall, value: Any) -> AttentionCall:
    keyword = KEYWORDS[name]
    with KEYWORDS.blaming(name, is_out_of_memory):
        changed: Any = keyword(call, value)
        if not isinstance(changed, AttentionCall):
            raise TypeError(f"it returned {type(changed).__name__}; an AttentionCall is needed")
    return changed


def unknown_keywords(given: Mapping[str, Any]) -> list[str]:
    """The keywords that the model passed and that are neither declared nor known to change nothing."""
    return [name for name, value in given.items() if not (value is None or name in WITHOUT_EFFECT or name in KEYWORDS)]


def declared_elsewhere(given: Mapping[str, Any]) -> list[str]:
    """The keywords that the model passed and that code outside sinkscope has declared."""
    return [name for name, value in given.items() if value is not None and name not in _OWN and name in KEYWORDS]


@attention_keyword("scaling")
def scaling(call: AttentionCall, factor: float) -> AttentionCall:
    """Replaces d^-0.5; T5 passes 1."""
    return call if factor == call.scaling else replace(call, scaling=float(factor))


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


_OWN = frozenset(KEYWORDS.declared)
