"""Replaces functions of transformers' registries for one thread, tells whether they are transformers' own, and changes
the attention that a model's configurations choose."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from threading import RLock, get_ident
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedConfig

from sinkscope.capture.private_doors import (
    attention_name,
    has_sdpa,
    registry_of,
    set_attention_name,
    set_registry,
    shared_registries,
)
from sinkscope.errors import SinkscopeError

READ = ("sdpa", "eager")
"""The names of attention and mask functions that sinkscope reads a model through."""


@dataclass(eq=False)
class _Layer:
    thread: int
    functions: Mapping[str, Any]


class _Layered(MutableMapping[str, Any]):
    """A registry over which each thread sees its own layers. What is written goes to the registry below."""

    def __init__(self, below: MutableMapping[str, Any]) -> None:
        self.below = below
        self.layers: list[_Layer] = []

    def __getitem__(self, name: str) -> Any:
        thread = get_ident()
        for layer in reversed(self.layers):
            if layer.thread == thread and name in layer.functions:
                return layer.functions[name]
        return self.below[name]

    def __setitem__(self, name: str, function: Any) -> None:
        self.below[name] = function

    def __delitem__(self, name: str) -> None:
        del self.below[name]

    def __iter__(self) -> Iterator[str]:
        thread = get_ident()
        names = (name for layer in self.layers if layer.thread == thread for name in layer.functions)
        return iter(dict.fromkeys([*self.below, *names]))

    def __len__(self) -> int:
        return len(list(iter(self)))


_lock = RLock()


@contextmanager
def layered(interface: type[Any], functions: Mapping[str, Any]) -> Iterator[None]:
    """Puts `functions` over the registry of `interface` until the block ends, for this thread alone.

    Other threads find what they found before, also where a name was absent. Blocks may end in any order: the last one
    puts the registry itself back.
    """
    layer = _Layer(get_ident(), functions)
    with _lock:
        registry = registry_of(interface)
        if not isinstance(registry, _Layered):
            registry = _Layered(registry)
            set_registry(interface, registry)
        registry.layers.append(layer)
    try:
        yield
    finally:
        with _lock:
            registry.layers.remove(layer)
            if not registry.layers and registry_of(interface) is registry:
                set_registry(interface, registry.below)


def check_registries() -> None:
    """Raises SinkscopeError where a function behind a name of `READ` is not transformers' own.

    Our function takes its place, so what the other one computes would not be measured.
    """
    for what, registry in shared_registries().items():
        for name in READ:
            function = registry.get(name)
            if function is not None and not is_own(function):
                raise SinkscopeError(
                    f"transformers' {what} function {name!r} was replaced by {_name(function)}, and sinkscope cannot "
                    f"know what that computes: put transformers' own back, register yours under another name, "
                    "and scan a model that was loaded with attn_implementation='sdpa' or 'eager'"
                )


def is_own(function: Any) -> bool:
    """Whether a registered function is one that transformers (or sinkscope) defines, not one wrapped around it."""
    module = str(getattr(function, "__module__", ""))
    if module.startswith("sinkscope."):
        return True
    defined = getattr(sys.modules.get(module), getattr(function, "__name__", ""), None)
    return module.startswith("transformers.") and defined is function


def _name(function: Any) -> str:
    return f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', type(function).__name__)}"


# Changes the attention that a model's configurations choose, and back; runs compiled modules uncompiled.


@contextmanager
def renamed(model: nn.Module, choose: Callable[[nn.Module, str | None], str | None]) -> Iterator[None]:
    """Sets the attention of every configuration of the model's modules for the block, then restores each.

    `choose` takes the outermost module that holds the configuration, and the name that it chooses now.
    """
    configs = _configs(model)
    before = [(config, attention_name(config)) for config, _ in configs]
    try:
        for (config, owner), (_, name) in zip(configs, before, strict=True):
            set_attention_name(config, choose(owner, name))
        yield
    finally:
        for config, name in before:
            set_attention_name(config, name)


@contextmanager
def readable(model: nn.Module) -> Iterator[None]:
    """Makes a model attend through a name that sinkscope reads for the block.

    Flex attention and the flash packages compute the same, but their masks cannot be read. A function that the user
    registered under another name may compute anything: its name stays, and its torch calls are watched.
    """

    def choose(owner: nn.Module, name: str | None) -> str | None:
        if name is None or name in READ or not is_own(registry_of(AttentionInterface).get(name)):
            return name
        return "sdpa" if has_sdpa(type(owner)) else "eager"

    with renamed(model, choose):
        yield


@contextmanager
def uncompiled(model: nn.Module | None = None) -> Iterator[None]:
    """Runs what torch.compile has compiled as plain Python until the block ends: compiled code calls no hooks.

    torch's flex_attention compiles itself where it is called; `model` is asked whether its code may call it.
    """
    # Whoever compiles loads torch._dynamo; loading it for nothing would take seconds.
    compiled = "torch._dynamo" in sys.modules or (model is not None and _calls_flex(model))
    with torch.compiler.set_stance("force_eager") if compiled else nullcontext():
        yield


def _calls_flex(model: nn.Module) -> bool:
    homes = {type(module).__module__ for module in model.modules()}
    homes = {home for home in homes if not home.startswith(("torch.", "transformers."))}
    return any("flex_attention" in vars(sys.modules[home]) for home in homes if home in sys.modules)


def _configs(model: nn.Module) -> list[tuple[PreTrainedConfig, nn.Module]]:
    configs: dict[int, tuple[PreTrainedConfig, nn.Module]] = {}
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if isinstance(config, PreTrainedConfig):
            configs.setdefault(id(config), (config, module))
    return list(configs.values())
