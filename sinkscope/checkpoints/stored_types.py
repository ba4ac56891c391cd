"""Refuses weights that a checkpoint holds as codes, without saying how they are turned into numbers."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import nn

from sinkscope.errors import SinkscopeError

NUMBERS = {"F64", "F32", "F16", "BF16"}
"""safetensors' names of the types that hold weights as they are."""


def check_stored_types(name: str, model: nn.Module, files: Iterable[Path]) -> None:
    """Raises SinkscopeError where safetensors files hold weights of the model as integers or 8-bit floats.

    With a quantization_config transformers knows how to read them. Without one it takes the codes for the numbers.
    """
    config: Any = model.config
    if getattr(config, "quantization_config", None) is not None:
        return
    ends = {_end(key) for key, weight in model.named_parameters() if weight.is_floating_point()}
    for file in files:
        if file.suffix != ".safetensors":
            continue
        coded = {key: kind for key, kind in _types(file).items() if kind not in NUMBERS}
        first = next((key for key in sorted(coded) if _end(key) in ends), None)
        if first is not None:
            raise SinkscopeError(
                f"{name}: the weights {first} are stored as {coded[first]}, and config.json has no quantization_config "
                "that says what the codes stand for: save the model again with it, or in a float type"
            )


def _end(key: str) -> str:
    """The last two parts of a weight's name, the same in the checkpoint and in the model whatever their prefixes."""
    return ".".join(key.split(".")[-2:])


def _types(file: Path) -> dict[str, str]:
    from safetensors import safe_open

    with safe_open(file, framework="pt") as opened:
        return {key: opened.get_slice(key).get_dtype() for key in opened.keys()}  # noqa: SIM118 - no mapping
