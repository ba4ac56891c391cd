"""Holds a configuration against its weights, before a model that is far larger than they are takes all memory or time.

A config.json of some hundred bytes can ask for 10^12 layers. transformers first makes the model without numbers, on the
meta device; there every parameter is counted, and the first one past the bounds ends the loading.
"""

from __future__ import annotations

import threading
from contextlib import ExitStack
from pathlib import Path

from torch import Tensor, nn
from torch.nn.modules import module as modules

from sinkscope.checkpoints.sources import Source, weight_paths
from sinkscope.errors import SinkscopeError, first_line

TENSORS_EACH, NUMBERS_EACH = 16, 16
"""Parameters of the model for each tensor of the files, and their numbers for each byte of the files. Both leave room:
a layer with quantised weights is made twice, a weight takes two bits or more, and a model may have a head more."""

SPARE_TENSORS, SPARE_NUMBERS = 2_000, 2**27
"""What any model may have beyond that."""

PICKLED_TENSORS = 10_000
"""Stands for the number of tensors in pickled files, which is not known without opening them."""


class Bounds:
    """While the context lasts, a model that this thread makes on the meta device must not exceed the source's weights.

    Raises SinkscopeError, from within the model's constructor, where it does.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self._every = False
        self._thread = threading.get_ident()
        self._tensors = self._numbers = 0
        self._most: tuple[int, int] | None = None
        self._hooks = ExitStack()

    def __enter__(self) -> None:
        for register in (
            modules.register_module_parameter_registration_hook,
            modules.register_module_buffer_registration_hook,
        ):
            self._hooks.callback(register(self._count).remove)

    def __exit__(self, *_: object) -> None:
        self._hooks.close()

    def _count(self, module: nn.Module, name: str, tensor: Tensor | None) -> None:
        if tensor is None or not (self._every or tensor.is_meta) or threading.get_ident() != self._thread:
            return
        if self._most is None:  # the files of a hub id are there once its model is made
            self._most = _most(self._files())
        self._tensors += 1
        self._numbers += tensor.numel()
        if self._tensors > self._most[0] or self._numbers > self._most[1]:
            raise SinkscopeError(self._refusal())

    def _files(self) -> list[Path]:
        return weight_paths(self._source)

    def _refusal(self) -> str:
        teller = "metadata describe" if self._source.gguf else "config.json describes"
        return (
            f"{self._source.name}: its {teller} a model far larger than its weights: the two do not belong together; "
            "download it again"
        )


def _most(files: list[Path]) -> tuple[int, int]:
    """The largest number of parameters, and of numbers in them, that a model of these weights may have."""
    tensors = sum(_tensors(str(file)) for file in files)
    size = sum(file.stat().st_size for file in files)
    return TENSORS_EACH * tensors + SPARE_TENSORS, NUMBERS_EACH * size + SPARE_NUMBERS


def _tensors(file: str) -> int:
    from safetensors import safe_open

    if file.endswith(".safetensors"):
        try:
            with safe_open(file, framework="pt") as opened:
                return len(opened.keys())
        except Exception as error:
            raise SinkscopeError(f"{file} is damaged or truncated ({first_line(error)}): download it again") from None
    if file.endswith(".gguf"):
        from gguf import GGUFReader

        return len(GGUFReader(file).tensors)
    return PICKLED_TENSORS
