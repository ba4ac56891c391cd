"""Words the error where a model gives NaN or infinity although its weights are finite."""

from __future__ import annotations

WIDER = {"float16": "float32", "bfloat16": "float32", "float32": "float64"}
"""The dtype that holds what overflows in another."""


def overflow_words(dtype: str) -> str:
    """What overflows, and which dtype to try; of float64 that there is none. `dtype`: that the model computes in."""
    name = dtype.removeprefix("torch.")
    if name not in WIDER:
        return f"{name} overflows, and no dtype is wider: the model's own numbers are not finite"
    return f"{name} overflows; try --dtype {WIDER[name]}"
