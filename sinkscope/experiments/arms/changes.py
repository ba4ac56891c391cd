"""How arms change a pass: its attention calls, the heads before the output projection, the digits of numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from sinkscope.capture import Plan, Site
from sinkscope.capture.calls import AttentionCall, MaskReadings
from sinkscope.capture.hooks import hooked
from sinkscope.capture.interface import Passed, shadowed
from sinkscope.capture.kernels.attend import read
from sinkscope.capture.learned_keys import not_read
from sinkscope.capture.masks.lazy import lazy_masks
from sinkscope.capture.plan import INTERFACE
from sinkscope.capture.registries import uncompiled
from sinkscope.errors import SinkscopeError
from sinkscope.experiments.arms.arm import Pass, Setting
from sinkscope.experiments.arms.readings import SinkCount
from sinkscope.runs.saved.ablation import Heads


def check_next_token(name: str, plan: Plan) -> None:
    """Raises SinkscopeError where some query sees later tokens: the one that it shall predict is among them."""
    for site in plan.sites:
        if not site.causal and not site.cross:
            raise SinkscopeError(
                f"{name} is not a causal language model: queries of {site.module} see later tokens, so that the loss "
                "of the next token says nothing; give a model that was loaded as a decoder (is_decoder=True)"
            )


def check_calls(setting: Setting) -> None:
    """Raises SinkscopeError where some attention of the model is computed in its own code: it cannot be changed."""
    for site in setting.sites:
        if site.path != INTERFACE:
            raise SinkscopeError(
                f"{site.module} computes attention in its own way: its keys and values are out of reach"
            )
        if site.cross or not site.causal:
            raise SinkscopeError(f"{site.module} is no causal self-attention: there is no cache of keys to change")


@contextmanager
def watched(forward: Pass, sinks: SinkCount) -> Iterator[None]:
    """Reads every attention call of a pass as the arm has changed it, and counts its sinks, until the block ends."""
    setting = forward.setting
    names = {module: name for name, module in setting.base.named_modules()}
    by_call = {(site.module, site.call): site for site in setting.sites}
    counts: Counter[str] = Counter()
    masks = MaskReadings()

    def attention(module: nn.Module, call: AttentionCall) -> Tensor:
        name = names.get(module)
        if name is None or not setting.plan.of_positions(name, call):  # no site of the base model
            return read(masks.read(call), setting.plan.failures)[0]
        site = by_call.get((name, counts[name]))
        if site is None:
            raise SinkscopeError(f"attention module {name!r} was called more often than in the dry run")
        counts[name] += 1
        if name in setting.plan.learned:
            raise SinkscopeError(not_read(name, "an arm would take them for keys of tokens"))
        for change in forward.changes:
            call = change(site, call)
        output, sums = read(masks.read(call), setting.plan.failures)
        sinks.receive(sums)
        return output

    with shadowed(setting.model, attention, Passed(setting.plan.keywords, setting.plan.declared)), lazy_masks():
        yield


# Sets heads to 0 where the output projection reads them, during one forward pass.


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


def no_head(setting: Setting, layer: int, head: int) -> str:
    """What is said of a head that the model lacks."""
    if all(site.layer != layer for site in setting.sites):
        return f"the model has no layer {layer}"
    return f"the model has no head {head} in layer {layer}"


def check_sites(setting: Setting) -> None:
    """Raises SinkscopeError where a head's slice of the output projection's input cannot be identified."""
    for site in setting.sites:
        if site.path != INTERFACE:
            raise SinkscopeError(f"{site.module} computes attention in its own way: its heads cannot be zeroed safely")
        if site.projection is None or site.value_dim is None:
            raise SinkscopeError(f"no output projection of {site.module} was found: its heads cannot be zeroed")
        if site.call:
            raise SinkscopeError(f"{site.module} is called several times in a pass: its heads cannot be zeroed apart")
        if setting.called_again(setting.base.get_submodule(site.projection)):
            raise SinkscopeError(f"{site.projection} is called several times in a pass: heads cannot be zeroed apart")


def _zero(site: Site, heads: Tensor) -> Callable[..., tuple[Any, ...]]:
    def hook(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        read = args[0] if args else None
        if not isinstance(read, Tensor) or read.shape[-1] != site.heads * (site.value_dim or 0):
            raise SinkscopeError(f"{site.projection} does not read its heads side by side: they cannot be zeroed")
        parts = read.unflatten(-1, (site.heads, site.value_dim))
        shape = (heads.shape[0], *(1 for _ in parts.shape[1:-2]), site.heads, 1)
        return (parts.masked_fill(heads.to(read.device).view(shape), 0.0).flatten(-2), *args[1:])

    return hook


# Fake quantisation: numbers are rounded to the nearest of 2^bits levels and kept in their own type.


WHOLE = 16
"""From this many bits on, nothing is rounded: these are the 16 bits that a cache has without quantisation."""


def between_ends(x: Tensor, bits: int, axis: int, kept: Tensor | None = None) -> Tensor:
    """Rounds to 2^bits levels, evenly spaced from the smallest to the largest number along `axis` (asymmetric).

    `kept`: True where a number stays as it is and has no part in the ends; it broadcasts with x.
    """
    if bits >= WHOLE:
        return x
    wide = x.double() if x.dtype == torch.float64 else x.float()
    low, high = _without(wide, kept, torch.inf).amin(axis, True), _without(wide, kept, -torch.inf).amax(axis, True)
    step = (high - low) / (2**bits - 1)
    rounded = torch.where(step > 0, ((wide - low) / step).round() * step + low, wide)
    return _restored(rounded.to(x.dtype), x, kept)


def around_zero(x: Tensor, bits: int, axes: tuple[int, ...], kept: Tensor | None = None) -> Tensor:
    """Rounds to the levels -(2^(bits-1) - 1) .. 2^(bits-1) - 1 times a step, so that the largest |x| over `axes` is a
    level (symmetric). `kept` is as in `between_ends`."""
    if bits >= WHOLE:
        return x
    wide = x.double() if x.dtype == torch.float64 else x.float()
    step = _without(wide.abs(), kept, 0.0).amax(axes, True) / (2 ** (bits - 1) - 1)
    rounded = torch.where(step > 0, (wide / step).round() * step, wide)
    return _restored(rounded.to(x.dtype), x, kept)


def _without(wide: Tensor, kept: Tensor | None, value: float) -> Tensor:
    return wide if kept is None else wide.masked_fill(kept, value)


def _restored(rounded: Tensor, x: Tensor, kept: Tensor | None) -> Tensor:
    return rounded if kept is None else torch.where(kept, x, rounded)
