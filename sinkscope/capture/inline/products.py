"""Reads the matrix products in a model's code (matmul, bmm, baddbmm, einsum) in one form: left @ right = out."""

from __future__ import annotations

from dataclasses import dataclass
from string import ascii_letters
from typing import Any

from torch import Tensor

MATMULS = ("matmul", "__matmul__", "bmm")


@dataclass(frozen=True, eq=False)
class Product:
    """left (..., n, k) @ right (..., k, m) = out (..., n, m); the leading axes are batch axes.

    `factors` are left and right as the tensors that the model's code passed. `exact`: `out` is the product itself, with
    nothing added.
    """

    left: Tensor
    right: Tensor
    out: Tensor
    factors: tuple[Tensor, Tensor]
    exact: bool = True


def read_product(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor) -> Product | None:
    """The product that a call of the torch function `name` computed; None where it is no batched matrix product."""
    if name == "einsum":
        operands = args[1] if len(args) == 2 and isinstance(args[1], list | tuple) else args[1:]
        return _einsum(args[0], operands, result) if len(operands) == 2 and isinstance(args[0], str) else None
    if name in MATMULS:
        pair = [*args, *kwargs.values()][:2]
    elif name == "baddbmm":
        pair = [*args[1:3], *(kwargs[key] for key in ("batch1", "batch2") if key in kwargs)]
    else:
        return None
    if len(pair) != 2 or not all(isinstance(tensor, Tensor) and tensor.dim() > 2 for tensor in pair):
        return None
    return Product(pair[0], pair[1], result, (pair[0], pair[1]), name != "baddbmm")


def _einsum(equation: str, operands: Any, result: Tensor) -> Product | None:
    """Reads an einsum as a batched matrix product: exactly one index is summed, each operand keeps exactly one index of
    its own, all others are batch axes. None for any other einsum."""
    equation = _spelled_out(equation.replace(" ", ""), operands)
    terms, arrow, out = equation.partition("->")
    first, comma, second = terms.partition(",")
    if not arrow or not comma or "." in equation or len({*first}) < len(first) or len({*second}) < len(second):
        return None
    summed = [index for index in first if index in second and index not in out]
    shared = [index for index in out if index in first and index in second]
    own = [index for index in out if (index in first) != (index in second)]
    if len(summed) != 1 or len(own) != 2 or (own[0] in first) == (own[1] in first):
        return None
    left, right = operands
    if own[0] in second:
        first, second, left, right = second, first, right, left
    if len(first) != len(shared) + 2 or len(second) != len(shared) + 2:
        return None

    def axes(tensor: Tensor, names: str, order: list[str]) -> Tensor:
        return tensor.permute([names.index(index) for index in order])

    return Product(
        axes(left, first, [*shared, own[0], summed[0]]),
        axes(right, second, [*shared, summed[0], own[1]]),
        axes(result, out, [*shared, *own]),
        (left, right),
    )


def _spelled_out(equation: str, operands: Any) -> str:
    """The equation with letters in place of `...`; unchanged where the operands disagree on how many axes it covers."""
    terms = equation.partition("->")[0].split(",")
    hidden = {each.dim() - len(term) + 3 for term, each in zip(terms, operands, strict=False) if "..." in term}
    if len(hidden) != 1:
        return equation
    free = [letter for letter in ascii_letters if letter not in equation]
    return equation.replace("...", "".join(free[: hidden.pop()]))
