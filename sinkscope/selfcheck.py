"""Before a scan, one short sequence measured both ways: our capture, and the model's own eager attention maps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from sinkscope.capture import Capture, LayerView, Plan
from sinkscope.checkpoints.quiet import quiet_transformers
from sinkscope.errors import SinkscopeError
from sinkscope.forward import Forward
from sinkscope.metrics.mass import alpha, query_rows

LENGTH = 128
BOUNDS = {torch.float64: 1e-3, torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Largest difference of a probability that is put down to rounding. Eager rounds probabilities to the model's dtype
before they are compared, and rounded logits (bf16 keeps 8 bits) move a single row's probability by percents."""


def self_check(model: nn.Module, plan: Plan, forward: Forward, ids: Tensor) -> dict[str, Any]:
    """Compares A[i,0] of every query and alpha_k of every key over the first 128 tokens of one sequence.

    Returns what the manifest records: tokens, attention layers compared, `max_difference` (absolute, in probability),
    `bound`, and `status` `passed`, `warning` (half precision beyond its bound) or `not possible` with the reason.
    Raises SinkscopeError where a float32 model differs by more than 1e-3: then no number of ours can be trusted.
    """
    ids = ids[:, :LENGTH]
    ours: dict[str, LayerView] = {}
    with Capture(model, plan, lambda view, row: ours.__setitem__(view.site.name, view)).watching():
        forward(ids)
    maps = _eager_maps(model, forward, ids)
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    bound = BOUNDS.get(dtype, BOUNDS[torch.float32])
    record: dict[str, Any] = {"tokens": ids.shape[1], "bound": bound, "reference": "eager attention maps"}
    if len(maps) != len(plan.sites):
        reason = f"the model returns {len(maps)} eager attention maps for {len(plan.sites)} attention calls"
        return record | {"status": "not possible", "reason": reason, "layers": 0, "max_difference": None}
    worst, where = 0.0, plan.sites[0].name
    for site, probabilities in zip(plan.sites, maps, strict=True):
        difference = _difference(ours[site.name], probabilities)
        if not difference <= worst:
            worst, where = difference, site.name
    if worst != worst:
        raise SinkscopeError(f"self-check: attention of {where} is NaN; the dtype overflows: try --dtype float32")
    record |= {"layers": len(maps), "max_difference": worst, "where": where}
    if worst <= bound:
        return record | {"status": "passed"}
    if dtype in (torch.bfloat16, torch.float16):
        return record | {"status": "warning"}
    raise SinkscopeError(
        f"self-check failed: at {where} our attention differs from the model's eager attention by {worst:.2g} "
        f"(allowed {bound:g}); the numbers could not be trusted (--no-self-check scans all the same)"
    )


def _difference(view: LayerView, probabilities: Tensor) -> float:
    full = probabilities.to(view.attention.first.dtype)
    if full.shape[:2] != view.attention.first.shape[:2] or full.shape[-2:] != (view.queries, view.keys):
        return float("inf")
    columns = full.sum(-2) / query_rows(view.attention.columns, view.queries, view.attention.causal)
    rows = (full[..., 0] - view.attention.first).abs().max()
    return float(torch.maximum(rows, (columns - alpha(view)).abs().max()))


def _eager_maps(model: nn.Module, forward: Forward, ids: Tensor) -> list[Tensor]:
    """The model's own maps, in the order of its layers; empty where it returns none."""
    try:
        with torch.no_grad(), eager(model), quiet_transformers():
            outputs = forward(ids, output_attentions=True)
    except (TypeError, ValueError, KeyError, RuntimeError):
        return []
    maps = getattr(outputs, "attentions", None) or ()
    return [probabilities for probabilities in maps if isinstance(probabilities, Tensor)]


@contextmanager
def eager(model: nn.Module) -> Iterator[None]:
    """Every configuration the model's modules read says `eager` until the block ends; then each says what it said."""
    configs = {id(config): config for config in _configs(model)}.values()
    before = [(config, config._attn_implementation) for config in configs]
    try:
        for config in configs:
            config._attn_implementation_internal = "eager"
        yield
    finally:
        for config, name in before:
            config._attn_implementation_internal = name


def _configs(model: nn.Module) -> Iterator[Any]:
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, "_attn_implementation_internal"):
            yield config
