"""An accelerator that is not there: tensors say they are on `mps`; the arithmetic is the CPU's, the rules a device's.

No float64, no operation between a tensor there and one on the CPU, nothing read from memory except by a copy to the
CPU. What a GPU would refuse of our code fails here too. Speed, and a device's own rounding, it cannot show.
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
"""Some that Apple's GPUs do not have."""


DEVICES = (str, torch.device)
NAMES = (torch.device, torch._C._nn._parse_to)  # type: ignore[attr-defined]
"""Functions that take the device's name, and put nothing there."""


class There(torch.Tensor):
    """A tensor on the device; `inner` holds its numbers."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> There:
        made = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
            device=DEVICE,
        )  # fmt: skip
        made.inner = inner
        return made

    def __repr__(self, **kwargs: Any) -> str:
        return f"There({self.inner!r})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class _Operations(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class _Functions(TorchFunctionMode):
    """What torch's C++ asks of the device itself before it asks anyone: moves to it, indexing, fused attention."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in NAMES and any(_is_device(one) for one in (*args, *kwargs.values())):
            if args and isinstance(args[0], torch.Tensor) and not isinstance(args[0], There):
                args = (There(args[0].detach().clone()), *args[1:])  # a move
            return _run(
                func, *tree_map_only(DEVICES, lambda one: CPU if _is_device(one) else one, (args, kwargs)), True
            )
        if func is torch.Tensor.tolist and isinstance(args[0], There):
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
    """Inside, tensors can be made on the device and moved to it."""
    before = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(True)  # a parameter cannot become a There in place
    try:
        with _Operations(), _Functions():
            yield DEVICE
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(before)


def _run(func: Any, args: Any, kwargs: dict[str, Any], made_there: bool = False) -> Any:
    name = func.__name__.split(".")[0]
    tensors = [one for one in tree_flatten((args, kwargs))[0] if isinstance(one, torch.Tensor)]
    there = {id(one.inner): one for one in tensors if isinstance(one, There)}
    here = [one for one in tensors if not isinstance(one, There) and one.dim()]
    if there and name in MISSING:
        raise NotImplementedError(f"{name} is not implemented for {DEVICE}")
    if name.strip("_").startswith(("index", "getitem", "setitem")) and not isinstance(args[0], There):
        here = [args[0]]  # a tensor of the CPU takes no indices from elsewhere
    elif name in ACROSS:
        here = []
    if there and not made_there and any(one.dtype == torch.float64 for one in tensors):
        raise TypeError(f"{name}: cannot convert a MPS Tensor to float64 as the MPS framework does not support it")
    if there and here:
        raise RuntimeError(f"{name}: expected all tensors to be on the same device, found {DEVICE} and cpu")
    to_cpu = kwargs.get("device") is not None and not made_there
    made_there = isinstance(args[0], There) if name == "copy_" else made_there or (bool(there) and not to_cpu)
    args, kwargs = tree_map_only(There, lambda one: one.inner, (args, kwargs))
    made = func(*args, **kwargs)
    return tree_map_only(torch.Tensor, lambda one: _placed(one, there, name), made) if made_there else made


def _placed(made: torch.Tensor, there: dict[int, There], name: str) -> There:
    if made.dtype == torch.float64:
        raise TypeError(f"{name}: cannot convert a MPS Tensor to float64 as the MPS framework does not support it")
    return there[id(made)] if id(made) in there else There(made)
