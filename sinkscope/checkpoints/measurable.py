"""Checks that a model in memory can be measured: eval mode, numbers at hand, finite weights."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from sinkscope.capture.private_doors import execution_devices, inner_tensors
from sinkscope.checkpoints.placement import held
from sinkscope.errors import SinkscopeError


def check_object(model: nn.Module) -> None:
    """Raises SinkscopeError for a model object whose numbers would be random, absent or out of sight.

    These are a module in training mode, whose dropout draws at random; weights on torch's meta device; a module that
    torch.jit has compiled, which calls neither hooks nor the attention interface.
    """
    for path, module in model.named_modules():
        if module.training:
            where = f"the module {path} is" if path and not model.training else "the model is"
            raise SinkscopeError(f"{where} in training mode (dropout on): call model.eval() first")
        if isinstance(module, torch.jit.ScriptModule):
            raise SinkscopeError(f"torch.jit has compiled the module {path}: attention in it cannot be seen; undo that")
    absent = next((name for name, weight in model.named_parameters() if weight.is_meta), None)
    if absent is not None and not list(execution_devices(model)):
        raise SinkscopeError(f"the weights {absent} are on torch's meta device, without numbers: load the model first")


def check_finite(name: str, model: nn.Module) -> None:
    """Raises SinkscopeError for weights that hold NaN or infinity: some would not show in any attention column."""
    for key, weight in held(model):
        for part in _plain_parts(weight):
            if part.is_floating_point() and not part.is_meta and part.numel():
                low, high = torch.aminmax(part)
                if not (torch.isfinite(low) and torch.isfinite(high)):
                    raise SinkscopeError(f"{name}: the weights {key} hold NaN or infinity; the checkpoint is damaged")


def _plain_parts(weight: Tensor) -> Iterator[Tensor]:
    """The plain tensors that a weight is made of: itself, or those inside a quantised tensor (codes, scales).

    A subclass that does not say what it is made of gives none: few functions are defined for it.
    """
    if type(weight) in (Tensor, nn.Parameter):
        yield weight.detach()
        return
    for part in inner_tensors(weight):
        yield from _plain_parts(part)
