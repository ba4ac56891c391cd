"""The SHA-256 of a model object's numbers: it has no files by whose hash two models are told apart."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator
from typing import Any

import torch
from accelerate.utils import align_module_device
from torch import Tensor, nn

from sinkscope.capture.output_projection import local_part
from sinkscope.capture.private_doors import inner_tensors
from sinkscope.errors import first_line

LOG = logging.getLogger(__name__)

DEEPEST = 3
"""How far from a tensor its other tensors are looked for: bitsandbytes keeps scales of scales."""


def tensors_sha256(model: nn.Module) -> str | None:
    """SHA-256 over name, type, shape and bytes of every parameter and buffer; None where some cannot be read.

    Where they lie does not count. Of a weight that is spread over processes, the part of this one counts; of a
    quantised one, its codes and scales. Weights on disk are read module by module.
    """
    digest = hashlib.sha256()
    try:
        for name, tensor in _tensors(model):
            for part in _parts(tensor):
                digest.update(f"\n{name} {part.dtype} {list(part.shape)}\n".encode())
                plain = part.detach().resolve_conj().resolve_neg().contiguous().cpu()
                digest.update(plain.flatten().view(torch.uint8).numpy().data)
    except Exception as error:  # kinds of tensor are made anew all the time, and may raise anything
        LOG.info("the weights of %s have no SHA-256: %s", type(model).__name__, first_line(error))
        return None
    return digest.hexdigest()


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for path, module in model.named_modules():
        with align_module_device(module):
            for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
                yield f"{path}.{name}", local_part(tensor)


def _parts(tensor: Tensor) -> Iterator[Tensor]:
    """The plain tensors that a tensor is made of. Raises ValueError for one without numbers."""
    if tensor.is_meta:
        raise ValueError("a weight has no numbers")
    if type(tensor) in (Tensor, nn.Parameter, nn.Buffer):
        yield tensor
        return
    inner = inner_tensors(tensor)
    for part in inner:
        yield from _parts(part)
    if not inner:  # bitsandbytes: a plain tensor of codes, with its scales among the attributes
        yield tensor.detach().as_subclass(Tensor)
        yield from _beside(tensor, DEEPEST)


def _beside(holder: Any, depth: int) -> Iterator[Tensor]:
    """The tensors among the attributes of something, and among theirs, in the order of their names."""
    for _, value in sorted(getattr(holder, "__dict__", {}).items()):
        if isinstance(value, Tensor):
            yield value.detach().as_subclass(Tensor)
        elif depth and not isinstance(value, nn.Module | type):
            yield from _beside(value, depth - 1)
