"""Tells keys that a model has learned, and puts beside those of the tokens: memory, null or bias keys.

Their places are no positions of a sequence: the first of them would stand for the first token, and more keys than
queries look like another text, or like a cache.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from sinkscope.capture.calls import AttentionCall
from sinkscope.capture.kernels.map_walk import AttentionMap
from sinkscope.capture.sites import place_of, shown_name, stream_of


class LearnedKeys:
    """Knows of each module of `model` whether it puts learned keys beside those of its tokens."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._known: dict[str, bool] = {}

    def beside(self, path: str, record: AttentionCall | AttentionMap) -> bool:
        """Whether a call in the module at `path` attends to such keys. The first call that may, tells it of all."""
        if path not in self._known:
            module = self._model.get_submodule(path)
            if isinstance(module, nn.MultiheadAttention):
                self._known[path] = module.bias_k is not None or module.add_zero_attn
            elif self._may(path, record):
                self._known[path] = _holds_some(self._model, path, record.key, record.value)
        return self._known.get(path, False)

    def _may(self, path: str, record: AttentionCall | AttentionMap) -> bool:
        """Whether a call has other keys than those of its queries."""
        queries, keys = record.lengths
        return queries != keys or place_of(stream_of(self._model, path, False), path) == "cross"


def _holds_some(model: nn.Module, path: str, key: Tensor | None, value: Tensor | None) -> bool:
    """Whether the first or the last key or value, (B, G, Tk, d) each, is a parameter of the module at `path` or of one
    that holds it, or whether the first are zero in every sequence. False where all keys are parameters, or all are
    zero: none is beside a token's."""
    if key is None or value is None or key.is_meta:
        return False
    if not bool(key[:, :, 0].any()) and not bool(value[:, :, 0].any()):
        return bool(key.any())  # a text of zeros, as a diffusion model's empty prompt, has none that are others
    weights = [*_weights(model, path)]
    ends = [
        [any(_holds(weight, tensor[0, 0, place]) for weight in weights) for place in (0, -1)] for tensor in (key, value)
    ]
    return any(first != last for first, last in ends)


def learned_keys(name: str) -> str:
    """What is said of a call with such keys."""
    return (
        f"{shown_name(name)} attends to learned keys beside those of its tokens (memory, null or bias keys), "
        "which are not read"
    )


def _weights(model: nn.Module, path: str) -> Iterator[Tensor]:
    """The parameters of the modules from the one at `path` up to the model, without those of their other children."""
    parts = path.split(".") if path else []
    for depth in range(len(parts), -1, -1):
        yield from model.get_submodule(".".join(parts[:depth])).parameters(recurse=False)


def _holds(weight: Tensor, vector: Tensor) -> bool:
    """Whether a parameter holds the numbers of a vector, one after another at a multiple of its width."""
    if weight.is_meta or weight.device != vector.device or weight.numel() % vector.numel() or not bool(vector.any()):
        return False
    rows = weight.detach().to(vector.dtype).reshape(-1, vector.numel())
    return bool((rows == vector).all(1).any())
