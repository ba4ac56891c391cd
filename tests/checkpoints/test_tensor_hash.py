"""The hash of a model object: every number counts, wherever it lies, and no kind of tensor ends it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import cpu_offload, disk_offload
from conftest import make_model
from torch import Tensor, nn

from sinkscope.checkpoints.tensor_hash import tensors_sha256


def test_every_parameter_and_buffer_counts() -> None:
    model: Any = make_model()
    whole = tensors_sha256(model)
    assert whole == tensors_sha256(make_model())
    for tensor in (*model.parameters(), *model.buffers()):
        with torch.no_grad():
            flat = tensor.view(-1)
            before = flat[-1].clone()
            flat[-1] += 1
            assert tensors_sha256(model) != whole
            flat[-1] = before
    assert tensors_sha256(model) == whole


@pytest.mark.parametrize("change", [lambda model: model.double(), lambda model: nn.ModuleList([model])])
def test_dtypes_and_names_count(change: Callable[[Any], nn.Module]) -> None:
    assert tensors_sha256(change(make_model())) != tensors_sha256(make_model())


def test_views_and_odd_kinds_of_number() -> None:
    class Odd(nn.Module):
        def __init__(self, last: float) -> None:
            super().__init__()
            numbers = torch.tensor([[1.0, 2.0], [3.0, last]])
            for name, value in {
                "turned": numbers.T, "alone": numbers[1, 1], "none": torch.empty(0), "flags": numbers > 3,
                "complex": torch.complex(numbers, numbers).conj(), "eight": numbers.to(torch.float8_e4m3fn),
                "short": numbers.bfloat16(), "codes": numbers.to(torch.int8),
            }.items():  # fmt: skip
                self.register_buffer(name, value)

    assert tensors_sha256(Odd(4.0)) == tensors_sha256(Odd(4.0)) is not None
    assert tensors_sha256(Odd(4.0)) != tensors_sha256(Odd(5.0))


def test_weights_that_lie_elsewhere_are_the_same(tmp_path: Path) -> None:
    whole = tensors_sha256(make_model())
    assert tensors_sha256(cpu_offload(make_model())) == whole
    assert tensors_sha256(disk_offload(make_model(), str(tmp_path))) == whole


class Codes(nn.Parameter):
    """As bitsandbytes keeps them: a plain tensor of codes, with its scales beside it."""


def coded(scale: float) -> nn.Module:
    module = nn.Module()
    weight = Codes(torch.arange(6, dtype=torch.uint8), requires_grad=False)
    weight.state = SimpleNamespace(absmax=torch.tensor([scale]), nested=SimpleNamespace(offset=torch.ones(1)))  # type: ignore[attr-defined]
    module.weight = weight
    return module


def test_the_scales_of_codes_count() -> None:
    assert isinstance(coded(1.0).weight, Codes)
    assert tensors_sha256(coded(1.0)) == tensors_sha256(coded(1.0)) is not None
    assert tensors_sha256(coded(1.0)) != tensors_sha256(coded(2.0))


class Wrapped(Tensor):
    """A tensor that torch says is made of another one, as torchao's."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapped:
        made: Any = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(function)


def test_a_quantised_tensor_is_what_it_is_made_of() -> None:
    def model(value: float) -> nn.Module:
        module = nn.Module()
        module.register_buffer("weight", Wrapped(torch.full((2, 3), value)))
        return module

    assert tensors_sha256(model(1.0)) == tensors_sha256(model(1.0)) is not None
    assert tensors_sha256(model(1.0)) != tensors_sha256(model(2.0))


def test_what_has_no_numbers_has_no_hash() -> None:
    assert tensors_sha256(copy.deepcopy(make_model()).to("meta")) is None
    sparse = nn.Module()
    sparse.register_buffer("weight", torch.eye(3).to_sparse())
    assert tensors_sha256(sparse) is None
