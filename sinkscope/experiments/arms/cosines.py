"""How alike the tokens of a sequence are behind every layer of one forward pass: does an arm smooth them?"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from sinkscope.capture.hooks import hooked
from sinkscope.capture.token_sums import token_sums
from sinkscope.errors import SinkscopeError
from sinkscope.experiments.arms.arm import Setting


def layers_of(setting: Setting) -> dict[int, nn.Module]:
    """The layers that hold the model's attention, by number, in order. Raises SinkscopeError where one is not known."""
    found = {}
    for site in setting.sites:
        if site.block is None:
            raise SinkscopeError(f"--cosines: the layer around {site.module} was not found in the model")
        found[site.layer] = setting.base.get_submodule(site.block)
    return dict(sorted(found.items()))


class Cosines:
    """Reads what the layers return in one pass."""

    def __init__(self, layers: dict[int, nn.Module]) -> None:
        self._layers = layers
        self._found: dict[nn.Module, Tensor] = {}

    def take(self, other: Cosines, layers: Iterable[nn.Module]) -> None:
        """Takes over what another pass found of some layers; what they return in this one is not read."""
        self._found |= {layer: other._found[layer] for layer in layers if layer in other._found}

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Reads the pass that runs in the block."""
        with ExitStack() as stack:
            for layer in self._layers.values():
                stack.enter_context(hooked(layer, post=self._read))
            yield

    def _read(self, layer: nn.Module, args: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        if not isinstance(hidden, Tensor) or hidden.dim() != 3:
            raise SinkscopeError(f"--cosines: {type(layer).__name__} returns no single residual stream")
        if layer not in self._found:
            wide = hidden if hidden.dtype == torch.float64 else hidden.float()
            self._found[layer] = token_sums(wide).pair_cosine.cpu().double()

    @property
    def values(self) -> Tensor:
        """Mean cosine over pairs i != j, both >= 1, of what each layer returns, [sequence, layer] float64; NaN with
        fewer than three tokens."""
        return torch.stack([self._found[layer] for layer in self._layers.values()], 1)
