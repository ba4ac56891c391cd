"""Small tensors are copied beside each other: the same numbers, each tensor once, and few pieces of memory."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sinkscope.capture.call_rows import SMALL, Place, pack


def holder(held: list[Tensor]) -> Callable[[Place], None]:
    def hold(place: Place) -> None:
        held[:] = map(place, held)

    return hold


def test_tensors_are_the_same_in_few_pieces() -> None:
    held = [torch.randn(2, 1, 3) for _ in range(6)] + [torch.randn(4), torch.randn(2, 1, 3).half()]
    before = [tensor.clone() for tensor in held]
    shared, large = [held[0], held[5]], [torch.zeros(SMALL)]
    untouched = large[0]
    pack([holder(held), holder(shared), holder(large)])
    assert all(map(torch.equal, held, before))
    assert len({tensor.untyped_storage().data_ptr() for tensor in held}) == 3, "one for each shape and type"
    assert shared[0] is held[0], "what two hold is copied once"
    assert shared[1] is held[5]
    assert large[0] is untouched


def test_two_views_of_the_same_numbers_are_copied_once() -> None:
    """An output projection reads the attention's output in another shape: (1, 1, H, d) here, whose strides may differ
    where there is one item."""
    output = torch.randn(1, 3, 1, 2).transpose(1, 2)
    read = output.reshape(1, 1, 6).view(1, 1, 3, 2)
    other = output.as_strided((1, 1, 3, 2), (1, 1, 1, 2))
    held = [output, read, other]
    before = [tensor.clone() for tensor in held]
    assert output.data_ptr() == read.data_ptr()
    pack([holder(held)])
    assert all(map(torch.equal, held, before))
    assert held[0] is held[1]
    assert held[2] is not held[0]


def test_two_views_that_show_opposite_numbers_are_two() -> None:
    numbers = torch.randn(3, dtype=torch.complex64)
    held = [numbers.imag, numbers.conj().imag]
    before = [tensor.clone() for tensor in held]
    pack([holder(held)])
    assert all(map(torch.equal, held, before))


def test_tensors_of_inference_mode_and_strides_are_packed() -> None:
    with torch.inference_mode():
        held = [torch.randn(2, 3).mT for _ in range(2)]
        before = [tensor.clone() for tensor in held]
        pack([holder(held)])
    assert all(map(torch.equal, held, before))
    assert not held[0].is_inference()
    pack([])


def test_tensors_of_another_class_stay_where_they_are() -> None:
    own = torch.randn(3).as_subclass(type("Own", (Tensor,), {}))
    held = [own, torch.randn(3)]
    pack([holder(held)])
    assert held[0] is own
