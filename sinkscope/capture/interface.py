"""Puts our function behind the names `sdpa` and `eager` of transformers' attention interface during a forward pass.

A new name would change the model, because transformers chooses masks, windows and fallbacks by the name. Replacing the
functions behind the names that the model already uses changes none of these. Other threads go on with the functions
that they had.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface

from sinkscope.capture.alone import alone
from sinkscope.capture.calls import AttentionCall
from sinkscope.capture.keywords import declared_elsewhere, unknown_keywords, with_keywords
from sinkscope.capture.registries import READ, check_registries, layered, readable, uncompiled

Handler = Callable[[nn.Module, AttentionCall], Tensor]
"""Takes the calling module and its call; returns the attention output (B, Tq, H, dv)."""


@dataclass(frozen=True)
class Passed:
    """Keywords that a model passes and that are not sinkscope's own, each with the module that passes it first.

    `unknown`: those that nobody has declared, which are left out. `declared`: those that code outside sinkscope has.
    """

    unknown: dict[str, str]
    declared: dict[str, str]


@contextmanager
def shadowed(model: nn.Module, handler: Handler, passed: Passed | None = None) -> Iterator[None]:
    """Sends every attention call of this thread to `handler` until the block ends, then puts all back.

    `model` is made to attend through the interface's readable names, and runs uncompiled. `passed` gets the keywords
    that the model passes and that are not sinkscope's own. Raises SinkscopeError where another thread measures, or
    where the user has replaced the interface's own functions.
    """
    check_registries()
    passed = passed or Passed({}, {})
    functions = {name: _attention_function(model, name, handler, passed) for name in READ}
    with (
        alone(f"a watched pass of {type(model).__name__}"),
        uncompiled(model),
        readable(model),
        layered(AttentionInterface, functions),
    ):
        yield


def _attention_function(
    model: nn.Module, name: str, handler: Handler, passed: Passed
) -> Callable[..., tuple[Tensor, None]]:
    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        *,
        is_causal: bool | None = None,
        **keywords: Any,
    ) -> tuple[Tensor, None]:
        for paths, names in ((passed.unknown, unknown_keywords), (passed.declared, declared_elsewhere)):
            for keyword in names(keywords):
                if keyword not in paths:
                    paths[keyword] = _path(model, module)
        causal = is_causal_without_mask(name, module, is_causal)
        return handler(module, call_of(query, key, value, attention_mask, causal, keywords)), None

    return attention


def is_causal_without_mask(name: str | None, module: nn.Module, given: bool | None) -> bool:
    """Whether a call through the function of this name is causal where it has no mask.

    `given`: the call's keyword is_causal, None where it has none: then the module says so. Where it does not either,
    transformers' `sdpa` is causal, and its eager functions, which know a mask alone, are not.
    """
    return bool(given if given is not None else getattr(module, "is_causal", name == "sdpa"))


def call_of(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, keywords: dict[str, Any]
) -> AttentionCall:
    """The record of one call of the interface's functions, with every known keyword applied. `causal` counts where
    there is no mask."""
    if mask is None and causal and 1 < query.shape[2] < key.shape[2]:
        # As in torch's sdpa, the mask is aligned top left: query 0 sees key 0 only, and no query sees keys >= Tq.
        key, value = key[:, :, : query.shape[2]], value[:, :, : query.shape[2]]
    causal = causal and query.shape[2] > 1
    return with_keywords(AttentionCall(query, key, value, mask, causal, scaling=query.shape[-1] ** -0.5), keywords)


def _path(model: nn.Module, module: nn.Module) -> str:
    """The module's path; its class's name where it is no part of the model."""
    return next((path for path, submodule in model.named_modules() if submodule is module), type(module).__name__)
