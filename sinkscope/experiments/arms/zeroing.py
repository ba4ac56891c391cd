"""Sets heads to 0 where the output projection reads them, during one forward pass."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from sinkscope.capture import Site
from sinkscope.capture.attention_names import uncompiled
from sinkscope.capture.hooks import hooked
from sinkscope.capture.plan import INTERFACE
from sinkscope.errors import SinkscopeError
from sinkscope.runs.saved.ablation import Heads


@contextmanager
def zeroed(base: nn.Module, sites: list[Site], heads: Heads) -> Iterator[None]:
    """Sets the chosen heads' slices of the output projection's input to 0 until the block ends; the bias stays."""
    masks = {}
    for site in sites:
        if heads.get(site.name):
            masks[site.name] = torch.zeros(1, site.heads, dtype=torch.bool)
            masks[site.name][:, heads[site.name]] = True
    with zeroed_by_sequence(base, sites, masks):
        yield


@contextmanager
def zeroed_by_sequence(base: nn.Module, sites: list[Site], heads: dict[str, Tensor]) -> Iterator[None]:
    """As `zeroed`, for heads given as bool [sequence | 1, head] by the site's name."""
    with ExitStack() as stack:
        stack.enter_context(uncompiled())  # compiled code would not call the hooks
        for site in sites:
            chosen = heads.get(site.name)
            if chosen is not None and chosen.any():
                assert site.projection is not None  # `check_sites` saw to it
                projection = base.get_submodule(site.projection)
                stack.enter_context(hooked(projection, pre=_zero(site, chosen)))
        yield


def projections(sites: list[Site], chosen: Container[str]) -> list[str]:
    """Paths of the output projections of the sites whose names are chosen: where `zeroed` begins."""
    return [site.projection for site in sites if site.name in chosen and site.projection is not None]


def check_sites(sites: list[Site]) -> None:
    """Raises SinkscopeError where a head's slice of the output projection's input cannot be identified."""
    for site in sites:
        if site.path != INTERFACE:
            raise SinkscopeError(f"{site.module} computes attention in its own way: its heads cannot be zeroed safely")
        if site.projection is None or site.value_dim is None:
            raise SinkscopeError(f"no output projection of {site.module} was found: its heads cannot be zeroed")
        if site.call:
            raise SinkscopeError(f"{site.module} is called several times in a pass: its heads cannot be zeroed apart")


def _zero(site: Site, heads: Tensor) -> Callable[..., tuple[Any, ...]]:
    def hook(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        read = args[0] if args else None
        if not isinstance(read, Tensor) or read.shape[-1] != site.heads * (site.value_dim or 0):
            raise SinkscopeError(f"{site.projection} does not read its heads side by side: they cannot be zeroed")
        parts = read.unflatten(-1, (site.heads, site.value_dim))
        shape = (heads.shape[0], *(1 for _ in parts.shape[1:-2]), site.heads, 1)
        return (parts.masked_fill(heads.to(read.device).view(shape), 0.0).flatten(-2), *args[1:])

    return hook
