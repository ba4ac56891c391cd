"""What a watch could leave behind in a process: hooks, and other functions in the place of functions."""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

State = dict[str, Any]


def state(model: nn.Module, *libraries: str) -> State:
    """All hooks of the model and of every module, and every function of torch's nn package, of transformers and of the
    libraries: in modules, classes, and transformers' registries of attention."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's old names warn where they are looked at
        return _state(model, *libraries)


def _state(model: nn.Module, *libraries: str) -> State:
    found: State = dict(_hooks(model))
    for name, module in list(sys.modules.items()):
        if isinstance(module, ModuleType) and name.startswith(("torch.nn", "transformers", *libraries)):
            found |= {f"{name}.{each}": value for each, value in vars(module).items() if inspect.isroutine(value)}
            found |= _methods(module)
    found |= {f"torch.{each}": value for each, value in vars(torch).items() if inspect.isroutine(value)}
    found |= {f"Tensor.{each}": value for each, value in vars(torch.Tensor).items() if inspect.isroutine(value)}
    for kind in ("_global_mapping", "_local_mapping"):
        registry = getattr(ALL_ATTENTION_FUNCTIONS, kind)
        found |= {f"attention functions, {kind}, {name}": function for name, function in registry.items()}
    found["torch function modes"] = torch.overrides._len_torch_function_stack()
    found["dispatch mode"] = _get_current_dispatch_mode()
    return found


def _hooks(model: nn.Module) -> Iterator[tuple[str, Any]]:
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks")
    for name, module in model.named_modules():
        for kind in kinds:
            yield f"{name}.{kind}", len(getattr(module, kind, ()))
        yield f"{name}, own functions", sorted(each for each, value in vars(module).items() if inspect.isroutine(value))
    for name, value in vars(torch.nn.modules.module).items():
        if name.startswith("_global_") and isinstance(value, dict):
            yield f"torch.nn.modules.module.{name}", len(value)


def _methods(module: ModuleType) -> State:
    classes = [value for value in vars(module).values() if isinstance(value, type)]
    return {
        f"{kind.__module__}.{kind.__qualname__}.{each}": value
        for kind in classes
        if kind.__module__ == module.__name__
        for each, value in vars(kind).items()
        if inspect.isroutine(value) or isinstance(value, classmethod | staticmethod | property)
    }


def left(before: State, after: State) -> list[str]:
    """What differs from before; modules that were imported since are no difference."""
    new = [name for name in after.keys() - before.keys() if name.rpartition(".")[0] in _owners(before)]
    return sorted(new + [name for name, value in before.items() if name not in after or not _same(value, after[name])])


def _owners(state: State) -> set[str]:
    return {name.rpartition(".")[0] for name in state}


def _same(one: Any, other: Any) -> bool:
    return one is other or (isinstance(one, int | list) and one == other)
