"""A model that is being trained: measured as it stands, and left exactly as it was."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from sinkscope.engine.launch import ALONE, Launched, Processes
from sinkscope.errors import SinkscopeError


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Puts a model into eval mode until the block ends; then every module's mode and all random states are as before.

    Dropout is off inside the block, and so is gradient checkpointing, which only runs in training mode. The random
    generators of torch (CPU and accelerators), numpy and Python are put back, so that training draws the same numbers
    as without the block. Autocast is off: the model runs in the dtype of its weights.
    """
    modes = {module: module.training for module in model.modules()}
    python, old = random.getstate(), np.random.get_state()
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    with ExitStack() as stack:
        own = [] if device.type == "cpu" else [device]
        stack.enter_context(torch.random.fork_rng(own, device_type=device.type if own else "cuda"))
        stack.enter_context(torch.autocast(device.type, enabled=False))
        try:
            model.eval()
            yield
        finally:
            for module, training in modes.items():
                module.training = training
            random.setstate(python)
            np.random.set_state(old)


class Replica:
    """A whole copy of a model that FSDP has spread over the processes. Only the main process holds it.

    FSDP gathers a block's weights for its own forward pass only, so the copy is measured in place of the model. It
    takes the memory of all weights, on the CPU.
    """

    def __init__(self) -> None:
        self._model: nn.Module | None = None

    def refreshed(self, model: nn.Module, weights: dict[str, Any]) -> nn.Module:
        """Returns the copy with these weights, which `gathered` gave the main process.

        Raises SinkscopeError where the model cannot be built from its configuration.
        """
        if self._model is None:
            self._model = _built_like(model)
        try:
            self._model.load_state_dict(weights)
        except RuntimeError:
            raise _not_told_by_configuration(self._model) from None
        return self._model


def gathered(model: nn.Module) -> dict[str, Any]:
    """All weights by name, on the CPU, in the main process; every process must call it."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel, StateDictType

    if not any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    on_cpu = all(parameter.device.type == "cpu" for parameter in model.parameters())
    whole = FullStateDictConfig(offload_to_cpu=not on_cpu, rank0_only=True)  # offloading from the CPU crashes torch
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # the newer function crashes for this kind on the CPU
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT, whole):
            return model.state_dict()


def _built_like(model: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import FSDPModule

    inner: Any = model
    while not isinstance(inner, PreTrainedModel):
        held = getattr(inner, "module", None)
        if held is None:  # PEFT's model, among others
            raise _not_told_by_configuration(inner)
        inner = held
    family: Any = next(each for each in type(inner).__mro__ if not issubclass(each, FSDPModule))
    dtype = next(parameter.dtype for parameter in inner.parameters())
    return family(inner.config).to(dtype).eval()


def _not_told_by_configuration(model: nn.Module) -> SinkscopeError:
    return SinkscopeError(
        f"{type(model).__name__} under FSDP holds weights that its configuration does not name (adapters, perhaps): "
        "measure the saved checkpoints with `sinkscope track`"
    )


class TrainingProcesses(Launched):
    """The processes of a training job, which share a measurement. Ctrl-C stays the training loop's own matter."""

    def __init__(self) -> None:
        self.tensor = False
        self.index, self.count = torch.distributed.get_rank(), torch.distributed.get_world_size()
        self._in_step = self._pending = self._stopping = self._broken = False

    def device(self, name: str) -> str:
        return name  # the model stands where the training has put it

    def _exchange(self, own: Any) -> list[Any]:
        reports: list[Any] = [None] * self.count
        torch.distributed.all_gather_object(reports, own)
        return reports


def processes_of_training() -> Processes:
    """The processes of this training job; ALONE where there is one."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return ALONE
    return TrainingProcesses() if torch.distributed.get_world_size() > 1 else ALONE
