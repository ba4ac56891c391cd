"""Places a model's weights on several devices and the disk (accelerate's device map) or over processes (--tp)."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import align_module_device
from torch import Tensor, nn

from sinkscope.capture.output_projection import local_part
from sinkscope.capture.private_doors import execution_devices
from sinkscope.checkpoints.weight_files import cache_folder
from sinkscope.errors import SinkscopeError

NO_PLAN = "--tp: transformers has no plan to spread this kind of model over processes: scan it without --tp"


class Placement:
    """Arguments of from_pretrained that place the weights.

    Weights that a device map sends to the disk lie in a folder of the cache, which is removed with the model.
    """

    def __init__(self, device_map: str | dict[str, Any] | None, tensor_parallel: int) -> None:
        self.folder: Path | None = None
        self.arguments: dict[str, Any] = {}
        self._count = tensor_parallel
        if tensor_parallel > 1:
            from transformers.distributed import DistributedConfig

            self.arguments["distributed_config"] = DistributedConfig(tp_size=tensor_parallel)
        elif device_map is not None:
            try:
                cache_folder().mkdir(parents=True, exist_ok=True)
                self.folder = Path(tempfile.mkdtemp(prefix=".offload-", dir=cache_folder()))
            except OSError as error:
                raise SinkscopeError(
                    f"cannot write the cache {cache_folder()}: {error.strerror}; set SINKSCOPE_CACHE"
                ) from None
            self.arguments |= {"device_map": device_map, "offload_folder": str(self.folder)}

    def check(self, name: str, config: Any) -> None:
        """Raises SinkscopeError for a model whose heads the processes cannot share evenly."""
        if self._count > 1:
            _check_heads(name, config, self._count)

    def settle(self, model: nn.Module) -> None:
        """Ties the folder to the loaded model. Raises SinkscopeError where --tp did not spread the model."""
        if self._count > 1:
            _check_plan(model)
        if self.folder is not None:
            weakref.finalize(model, shutil.rmtree, self.folder, ignore_errors=True)

    def __enter__(self) -> None:
        """The block loads the model; where that fails, `__exit__` removes the folder."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if kind is not None and self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)


def _check_heads(name: str, config: Any, count: int) -> None:
    """Raises SinkscopeError for a model whose heads do not divide evenly among the processes."""
    text = config.get_text_config()
    for what in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(text, what, None)
        if isinstance(heads, int) and heads % count:
            raise SinkscopeError(
                f"--tp: {name} has {heads} {'key/value' if 'key' in what else 'query'} heads in a layer, which {count} "
                "processes cannot share evenly: start a number that divides it, or scan without --tp"
            )


def _check_plan(model: nn.Module) -> None:
    """Raises SinkscopeError for a model that transformers did not spread: every process would hold all of it."""
    if not any(hasattr(parameter, "to_local") for parameter in model.parameters()):
        raise SinkscopeError(NO_PLAN)


def held(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields every weight, or this process's part of it, with its name. Reads weights on disk module by module."""
    for path, module in model.named_modules():
        if not any(True for _ in module.parameters(recurse=False)):
            continue
        with align_module_device(module):
            for name, parameter in module.named_parameters(recurse=False):
                yield f"{path}.{name}" if path else name, local_part(parameter.detach())


def input_device(model: nn.Module) -> torch.device:
    """The device for token ids: that of the first parameter, or the one it is moved to from the disk."""
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    if device.type != "meta":
        return device
    return next((as_device(device) for device in execution_devices(model)), torch.device("cpu"))


def as_device(device: Any) -> torch.device:
    """Converts accelerate's name of a device, which is a bare number for a GPU."""
    return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)


def devices(model: nn.Module) -> str:
    """Names the model's devices for the manifest: `cuda:0`, or all places of a device map: `cpu, disk`."""
    placed = getattr(model, "hf_device_map", None)
    if not placed:
        return str(input_device(model))
    return ", ".join(sorted({place if place == "disk" else str(as_device(place)) for place in placed.values()}))
