"""A plain second implementation of arms: attention over the whole matrix, changed in the way that an arm claims."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from models import tiny
from torch import Tensor
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.masking_utils import AttentionMaskInterface, eager_mask
from watched import find

from sinkscope.checkpoints import wrap_model
from sinkscope.experiments.arms.arm import Setting

NAME = "by_hand"


def causal(family: str, **overrides: Any) -> Any:
    """A tiny random causal language model in float64 whose biases are not 0."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny(family, **overrides).config, dtype=torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn(parameter.shape, dtype=torch.float64))
    return model.eval()


def setting_of(model: Any, ids: Tensor, run: Any = None) -> Setting:
    """What arms need to be measured on these ids."""
    return Setting(wrap_model(model, None, head=True), model.base_model, find(model.base_model)[1], ids, run, 0, 0.3)


def losses(model: Any, ids: Tensor) -> Tensor:
    """The mean loss of each sequence, by torch alone."""
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits[:, :-1].double()
    picked = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    return -picked.mean(-1)


@contextmanager
def attention_by_hand(
    model: Any, change: Callable[..., tuple[Tensor, Tensor, Tensor]], output: Callable[..., Tensor] | None = None
) -> Iterator[None]:
    """Makes the model attend by the plain function until the block ends.

    `change` gets (layer, k, v, seen) and returns k and v (B, G, T, d) and which keys each query sees (B, 1, T, T);
    `output` gets (layer, the heads' outputs (B, T, H, d)) and returns these.
    """

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **keywords: Any
    ) -> tuple[Tensor, None]:
        length = query.shape[2]
        seen = torch.ones(length, length, dtype=torch.bool).tril()[None, None]
        if mask is not None:
            seen = mask[..., :length] if mask.dtype == torch.bool else mask[..., :length] == 0
        layer = module.layer_idx
        key, value, seen = change(layer, key, value, seen)
        repeat = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
        scaling = keywords.get("scaling")
        logits = query @ key.mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
        attended = logits.masked_fill(~seen, -torch.inf).softmax(-1) @ value
        out = attended.transpose(1, 2)
        return (out if output is None else output(layer, out)).contiguous(), None

    before = model.config._attn_implementation
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(AttentionInterface._global_mapping, NAME, attend)
        patch.setitem(AttentionMaskInterface._global_mapping, NAME, eager_mask)
        model.set_attn_implementation(NAME)
        try:
            yield
        finally:
            model.set_attn_implementation(before)


def levels(x: Tensor, bits: int, axis: int, kept: Tensor) -> Tensor:
    """x rounded to 2^bits levels between its ends along `axis`, row by row with numpy-like loops; `kept` (B, T) of a
    tensor (B, H, T, d) stays and has no part in the ends."""
    out = x.clone()
    for b in range(x.shape[0]):
        part = x[b][:, ~kept[b]]
        low, high = part.amin(axis - 1, True), part.amax(axis - 1, True)
        grid = torch.stack([low + (high - low) * n / (2**bits - 1) for n in range(2**bits)])
        nearest = (part[None] - grid).abs().argmin(0, keepdim=True)
        out[b][:, ~kept[b]] = grid.expand(-1, *part.shape).gather(0, nearest)[0]
    return out


def hidden(*columns: int) -> Any:
    """Hides these keys from every later query."""

    def change(layer: int, key: Tensor, value: Tensor, seen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        allowed = torch.ones_like(seen)
        for column in columns:
            allowed[..., column + 1 :, column] = False
        return key, value, seen & allowed

    return change


def no_value(layer: int, key: Tensor, value: Tensor, seen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sets the values of the first two positions to 0."""
    value = value.clone()
    value[:, :, :2] = 0
    return key, value, seen
