"""Compares a checkpoint's weights, by name and shape, with those of the model that its config.json describes."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import nn

from sinkscope.errors import SinkscopeError

BUFFERS = frozenset(
    {
        *("inv_freq", "cos_cached", "sin_cached", "position_ids", "masked_bias", "relative_position_index"),
        *("k_scale", "v_scale"),  # of a quantised KV cache
    }
)
"""Names of buffers that old checkpoints hold beside a layer's weights; the model computes or ignores them."""

LAYER = re.compile(r"blk\.(\d+)\.")
"""How a GGUF names the weights of a layer."""


def check_keys(name: str, model: nn.Module, report: dict[str, Any]) -> list[str]:
    """Reads transformers' loading report. Returns a warning where weights of layers have no place in the model.

    Raises SinkscopeError for weights of a forward pass that the checkpoint lacks or holds in another shape: they would
    be random numbers. Heads (of a language model, a classifier, a pooler) may be missing or left over.
    """
    for key, found, needed in sorted(report.get("mismatched_keys", ())):
        raise SinkscopeError(f"{name}: {key} has shape {tuple(found)}, its config.json asks for {tuple(needed)}")
    harmful = [key for key in sorted(report.get("missing_keys", ())) if "pooler" not in key.lower()]
    if harmful:
        raise SinkscopeError(f"{name} lacks weights that {type(model).__name__} needs: {_first_of(harmful)}")
    return _left_over(name, model, "config.json", _of_layers(model, sorted(report.get("unexpected_keys", ()))))


def check_gguf_layers(name: str, model: nn.Module, file: Path) -> list[str]:
    """Returns a warning where a GGUF holds layers past the number that its header gives, which transformers skips."""
    from gguf import GGUFReader

    layers: Any = getattr(getattr(model, "config", None), "num_hidden_layers", None)
    keys = [str(tensor.name) for tensor in GGUFReader(file).tensors]
    places = {key: LAYER.match(key) for key in keys}
    past = [key for key, place in places.items() if place and isinstance(layers, int) and int(place[1]) >= layers]
    return _left_over(name, model, "header", past)


def _left_over(name: str, model: nn.Module, teller: str, left_over: list[str]) -> list[str]:
    if not left_over:
        return []
    kind = type(model).__name__
    return [
        f"{name} holds weights of layers that {kind} has no place for, as its {teller} describes it: "
        f"{_first_of(left_over)}; they are not measured"
    ]


def _of_layers(model: nn.Module, keys: Iterable[str]) -> list[str]:
    """Returns the keys of weights inside the model's lists of layers, including layers past a list's end."""
    prefix = f"{getattr(model, 'base_model_prefix', '')}."  # checkpoints are saved with and without their head
    lists = {path.removeprefix(prefix) for path, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    found = []
    for key in keys:
        parts = key.removeprefix(prefix).split(".")
        above = {".".join(parts[:depth]) for depth, part in enumerate(parts) if part.isdigit()}
        if above & lists and not _is_buffer(model, parts, prefix):
            found.append(key)
    return found


def _is_buffer(model: nn.Module, parts: list[str], prefix: str) -> bool:
    """Whether a key is one of BUFFERS, or the `bias` of a module that has submodules: GPT-2's causal mask."""
    if parts[-1] in BUFFERS:
        return True
    path = ".".join(parts[:-1])
    owners = [module for name, module in model.named_modules() if name.removeprefix(prefix) == path]
    return parts[-1] == "bias" and any(list(owner.children()) for owner in owners)


def _first_of(keys: list[str]) -> str:
    return keys[0] + (f" and {len(keys) - 1} more" if len(keys) > 1 else "")
