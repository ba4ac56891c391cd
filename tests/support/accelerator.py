"""A simulated accelerator: its tensors report the device `mps` and follow a device's rules; the CPU computes.

It refuses float64, operations between one of its tensors and a CPU tensor, and reading memory except by a copy to the
CPU. Code that a GPU would refuse fails here too. It cannot show speed or a device's own rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

DEVICE = torch.device("mps")
CPU = torch.device("cpu")
ACROSS = ("_to_copy", "copy_", "index", "index_put", "index_put_", "_index_put_impl_", "__getitem__", "__setitem__")
"""Operations that take tensors of both devices."""
MISSING = ("linalg_qr", "_linalg_eigh", "_linalg_svd", "linalg_lstsq")
"""Some operations that Apple's GPUs lack."""


DEVICES = (str, torch.device)
NAMES = (torch.device, torch._C._nn._parse_to)  # type: ignore[attr-defined]
"""Functions that take the device's name but put no tensor on it."""


class DeviceTensor(torch.Tensor):
    """A tensor on the device; `inner` holds its numbers."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> DeviceTensor:
        made = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
            device=DEVICE,
        )  # fmt: skip
        made.inner = inner
        return made

    def __repr__(self, **kwargs: Any) -> str:
        return f"DeviceTensor({self.inner!r})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class _Operations(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class _Functions(TorchFunctionMode):
    """Handles calls that torch's C++ sends to the device before any dispatch: moves, indexing, fused attention."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in NAMES and any(_is_device(one) for one in (*args, *kwargs.values())):
            if args and isinstance(args[0], torch.Tensor) and not isinstance(args[0], DeviceTensor):
                args = (DeviceTensor(args[0].detach().clone()), *args[1:])  # a move
            return _run(
                func, *tree_map_only(DEVICES, lambda one: CPU if _is_device(one) else one, (args, kwargs)), True
            )
        if func is torch.Tensor.tolist and isinstance(args[0], DeviceTensor):
            return args[0].inner.tolist()
        if func is torch.nn.functional.scaled_dot_product_attention:
            return _run(func, args, kwargs)
        try:
            return func(*args, **kwargs)
        except RuntimeError as error:
            if "not linked" not in str(error) and "'MPS' backend" not in str(error):
                raise
            return _run(func, args, kwargs)


def _is_device(given: Any) -> bool:
    return isinstance(given, DEVICES) and str(given).partition(":")[0] == DEVICE.type


@contextmanager
def accelerator() -> Iterator[torch.device]:
    """Within the block, tensors can be created on the device and moved to it."""
    before = torch.__future__.get_overwrite_module_params_on_conversion()
    # A parameter cannot become a DeviceTensor in place.
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        with _Operations(), _Functions():
            yield DEVICE
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(before)


def _run(func: Any, args: Any, kwargs: dict[str, Any], result_on_device: bool = False) -> Any:
    name = func.__name__.split(".")[0]
    tensors = [one for one in tree_flatten((args, kwargs))[0] if isinstance(one, torch.Tensor)]
    on_device = {id(one.inner): one for one in tensors if isinstance(one, DeviceTensor)}
    on_cpu = [one for one in tensors if not isinstance(one, DeviceTensor) and one.dim()]
    if on_device and name in MISSING:
        raise NotImplementedError(f"{name} is not implemented for {DEVICE}")
    if name.strip("_").startswith(("index", "getitem", "setitem")) and not isinstance(args[0], DeviceTensor):
        on_cpu = [args[0]]  # a CPU tensor takes no indices from the device
    elif name in ACROSS:
        on_cpu = []
    if on_device and not result_on_device and any(one.dtype == torch.float64 for one in tensors):
        raise TypeError(f"{name}: cannot convert a MPS Tensor to float64 as the MPS framework does not support it")
    if on_device and on_cpu:
        raise RuntimeError(f"{name}: expected all tensors to be on the same device, found {DEVICE} and cpu")
    to_cpu = kwargs.get("device") is not None and not result_on_device
    result_on_device = result_on_device or (bool(on_device) and not to_cpu)
    if name == "copy_":
        result_on_device = isinstance(args[0], DeviceTensor)
    args, kwargs = tree_map_only(DeviceTensor, lambda one: one.inner, (args, kwargs))
    made = func(*args, **kwargs)
    return tree_map_only(torch.Tensor, lambda one: _placed(one, on_device, name), made) if result_on_device else made


def _placed(made: torch.Tensor, on_device: dict[int, DeviceTensor], name: str) -> DeviceTensor:
    if made.dtype == torch.float64:
        raise TypeError(f"{name}: cannot convert a MPS Tensor to float64 as the MPS framework does not support it")
    return on_device[id(made)] if id(made) in on_device else DeviceTensor(made)
