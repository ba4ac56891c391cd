"""The axes of hidden states: a model's own code may put time or channels before others, or all tokens in one row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from sinkscope.capture.output_projection import is_linear


def hidden_given(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """What a module reads as its hidden states: `hidden_states`, its first argument, the queries that are also its
    keys, as self-attention of FSMT is given them, or the one tensor of three axes that it is given. None without
    these."""
    if "hidden_states" in kwargs:
        return kwargs["hidden_states"]
    if args:
        return args[0]
    if (query := kwargs.get("query")) is not None:
        return query if query is kwargs.get("key") and kwargs.get("value", query) is query else None
    tensors = [given for given in kwargs.values() if isinstance(given, Tensor) and given.dim() == 3]
    return tensors[0] if len(tensors) == 1 and tensors[0].is_floating_point() else None


def given_several(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a module is given hidden states of several places: more than one tensor of real numbers with three axes
    or four, or something that may hold one."""
    values = [*args, *kwargs.values()]
    tensors = [value for value in values if isinstance(value, Tensor) and value.is_floating_point() and value.dim() > 2]
    return len(tensors) != 1 or any(map(_may_hold_tensors, values))


def _may_hold_tensors(value: Any) -> bool:
    """Whether something that is no tensor itself may hold one: the sizes of a picture do not."""
    if isinstance(value, list | tuple):
        return any(isinstance(inner, Tensor) or _may_hold_tensors(inner) for inner in value)
    return not (value is None or isinstance(value, Tensor | int | float | str))


def channels_last(layer: nn.Module) -> bool | None:
    """Whether a layer reads channels on the last axis, as linear ones do, or on the second, as convolutions over
    positions do (False). None for a layer that tells neither."""
    if isinstance(layer, nn.Conv1d):
        return False
    return True if is_linear(layer) else None


def by_sequence_and_position(tensor: Tensor | None, rows: tuple[int, int], last: bool | None) -> Tensor | None:
    """Hidden states as [..., B, T, D], which may come as [..., T, B, D] or [..., B, D, T]. None where they are of other
    positions, or where their channels cannot be told from these.

    `rows`: B and T. `last`: whether the channels stand last, as a layer that reads them shows; None = nothing shows it.
    Where B = T, sizes do not tell whether time comes first: such a tensor is returned as it came.
    """
    if tensor is None:
        return None
    (sequences, positions), shape = rows, tensor.shape[-3:]
    if last is False:
        return tensor.mT if (shape[0], shape[2]) == rows else None
    if sequences != positions and shape[:2] == (positions, sequences):
        return tensor.transpose(-3, -2)
    if shape[:2] != rows or (last is None and shape[2] == positions):
        return None
    return tensor


def in_one_order(
    tensors: Sequence[Tensor | None], rows: Sequence[tuple[int, int]], last: bool | None
) -> list[Tensor | None]:
    """The hidden states that a module had in each pass, as `by_sequence_and_position`. What the sizes of one pass do
    not show, those of another may: the order of the axes is the same in all. `rows`: B and T of each pass. Passes of
    the same B and T may come together, along a first axis."""
    shapes = [(tensor.shape[-3:], sizes) for tensor, sizes in zip(tensors, rows, strict=True) if tensor is not None]
    if last is None and any(shape[2] != sizes[1] and {*shape[:2]} == {*sizes} for shape, sizes in shapes):
        last = True
    turned = {shape[:2] != sizes for shape, sizes in shapes if sizes[0] != sizes[1]}
    ordered = [by_sequence_and_position(tensor, sizes, last) for tensor, sizes in zip(tensors, rows, strict=True)]
    if turned != {True} or not last:
        return ordered
    return [
        tensor.transpose(-3, -2) if tensor is not None and sizes[0] == sizes[1] else tensor
        for tensor, sizes in zip(ordered, rows, strict=True)
    ]


def by_sequence(rows: Tensor, sequences: int, length: int) -> Tensor | None:
    """A row for each token as [sequence, token, feature], without a copy; None where `rows` holds something else.

    They may come as [sequence, token, feature] or, one sequence behind the other, as [sequence * token, feature], with
    axes of size 1 among those: latent attention holds [sequence, 1, token, feature].
    """
    leading, count = list(rows.shape[:-1]), sequences * length
    sizes = [size for size in leading if size != 1]
    apart = sizes == [size for size in (sequences, length) if size != 1]
    in_one_row = sizes == [count] and leading[-1] == count
    # [token, 1, feature] is how a model that puts its tokens first holds a single sequence. It is refused like several
    # of them, or what is read of a model would hang on the size of a batch.
    tokens_first = sequences == 1 < length and len(leading) > 1 and leading[0] == length
    if not leading or tokens_first or not (apart or in_one_row):
        return None
    return rows.reshape(sequences, length, rows.shape[-1])
