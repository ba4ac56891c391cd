"""Temporary changes to a model: zeroed heads, a hidden first token. Each is undone when its `with` block ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from sinkscope.capture import Site
from sinkscope.capture.alone import here
from sinkscope.capture.attention_names import uncompiled
from sinkscope.capture.calls import AttentionCall
from sinkscope.capture.interface import shadowed
from sinkscope.capture.kernels.attend import read
from sinkscope.capture.kernels.sums import AttentionSums
from sinkscope.capture.plan import INTERFACE
from sinkscope.errors import SinkscopeError
from sinkscope.experiments.ablation.choice import Heads


@contextmanager
def zeroed(base: nn.Module, sites: list[Site], heads: Heads) -> Iterator[None]:
    """Sets the chosen heads' slices of the output projection's input to 0 until the block ends; the bias stays."""
    with ExitStack() as stack:
        stack.enter_context(uncompiled())  # compiled code would not call the hooks
        for site in sites:
            chosen = heads.get(site.name)
            if chosen:
                assert site.projection is not None  # `check_sites` saw to it
                projection = base.get_submodule(site.projection)
                stack.callback(projection.register_forward_pre_hook(here(_zero(site, chosen))).remove)
        yield


def check_sites(sites: list[Site]) -> None:
    """Raises SinkscopeError where a head's slice of the output projection's input cannot be identified."""
    for site in sites:
        if site.path != INTERFACE:
            raise SinkscopeError(f"{site.module} computes attention in its own way: its heads cannot be zeroed safely")
        if site.projection is None or site.value_dim is None:
            raise SinkscopeError(f"no output projection of {site.module} was found: its heads cannot be zeroed")
        if site.call:
            raise SinkscopeError(f"{site.module} is called several times in a pass: its heads cannot be zeroed apart")


def _zero(site: Site, heads: list[int]) -> Callable[..., tuple[Any, ...]]:
    def hook(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        read = args[0] if args else None
        if not isinstance(read, Tensor) or read.shape[-1] != site.heads * (site.value_dim or 0):
            raise SinkscopeError(f"{site.projection} does not read its heads side by side: they cannot be zeroed")
        kept = read.clone()
        kept.unflatten(-1, (site.heads, site.value_dim))[..., heads, :] = 0.0
        return (kept, *args[1:])

    return hook


@contextmanager
def first_token_hidden(
    model: nn.Module, receive: Callable[[AttentionSums], None], failures: list[str] | None = None
) -> Iterator[None]:
    """Hides key 0 from every query but query 0 until the block ends; `receive` and `failures` are as in `watched`."""
    with _attention_changed(model, _without_first, receive, failures):
        yield


@contextmanager
def watched(
    model: nn.Module, receive: Callable[[AttentionSums], None], failures: list[str] | None = None
) -> Iterator[None]:
    """Reports every attention call's sums to `receive` without changing the attention.

    `failures` gets a line where Triton fails.
    """
    with _attention_changed(model, lambda call: call, receive, failures):
        yield


@contextmanager
def _attention_changed(
    model: nn.Module,
    change: Callable[[AttentionCall], AttentionCall],
    receive: Callable[[AttentionSums], None],
    failures: list[str] | None,
) -> Iterator[None]:
    def attention(module: nn.Module, call: AttentionCall) -> Tensor:
        output, sums = read(change(call), failures)
        receive(sums)
        return output

    with shadowed(model, attention):
        yield


def _without_first(call: AttentionCall) -> AttentionCall:
    """The call with key 0 masked for queries 1..; a boolean mask stays boolean, an additive one additive."""
    queries, keys = call.lengths
    if call.mask is None:
        mask = torch.ones(1, 1, queries, keys, dtype=torch.bool, device=call.query.device)
        mask = mask.tril() if call.causal else mask
    else:
        mask = call.mask.expand(-1, -1, queries, -1).clone()
    mask[..., 1:, 0] = False if mask.dtype == torch.bool else torch.finfo(mask.dtype).min
    return replace(call, mask=mask)
