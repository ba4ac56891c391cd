"""Calling a base model on token ids or vectors, whatever family it is: which keywords its forward takes."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from sinkscope.errors import SinkscopeError


class Forward:
    """Runs a base model on token ids, or on the vectors of a model that reads those.

    Raises SinkscopeError for a model whose input is neither.
    """

    def __init__(self, model: nn.Module) -> None:
        needs = getattr(model, "main_input_name", "input_ids")
        if needs not in ("input_ids", "inputs_embeds"):
            raise SinkscopeError(f"{type(model).__name__} reads {needs}, not token ids: only text models yet")
        self.model = model
        self._accepted = set(inspect.signature(model.forward).parameters)

    def at_position_zero(self, inputs: torch.Tensor) -> Any:
        """A pass that puts every token at position 0, where rotations turn nothing; as usual where a model cannot."""
        if "position_ids" not in self._accepted or inputs.is_floating_point():
            return self(inputs)
        return self(inputs, position_ids=torch.zeros_like(inputs))

    def __call__(self, inputs: torch.Tensor, mask: torch.Tensor | None = None, **extra: Any) -> Any:
        """`inputs`: ids (B, T), or vectors (B, T, d) in any float dtype; `mask`: 1 = token, 0 = padding.

        No cache, so that layers that share keys see every query; positions count from each first valid token."""
        arguments: dict[str, Any] = {"use_cache": False, **extra}
        if mask is not None:
            arguments["attention_mask"] = mask
            if (mask[:, 0] == 0).any():
                arguments["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
        accepted = {name: value for name, value in arguments.items() if name in self._accepted or name in extra}
        if inputs.is_floating_point():
            return self.model(inputs_embeds=inputs.to(next(self.model.parameters()).dtype), **accepted)
        return self.model(input_ids=inputs, **accepted)
