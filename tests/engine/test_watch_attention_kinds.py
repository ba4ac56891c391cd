"""sinkscope.watch over kinds of attention that models from other packages bring."""

from __future__ import annotations

import warnings

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

import sinkscope

WIDTH, HEADS = 32, 4


class Attention(nn.Module):
    """Causal or bidirectional attention through torch's function. `windows`: over windows of so many positions, which
    stand in an axis of their own, as in timm's Hiera and NesT."""

    def __init__(self, causal: bool = False, windows: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.causal, self.windows = causal, windows
        self.qkv, self.out_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def heads(self, x: Tensor) -> Tensor:
        """(B, T, ...) -> (B, H, T, d), or (B, H, windows, T, d)."""
        x = x if self.windows is None else x.unflatten(1, (-1, self.windows))
        return x.unflatten(-1, (HEADS, -1)).movedim(-2, 1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = map(self.heads, self.qkv(x).chunk(3, -1))
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal).movedim(1, -2).flatten(-2)
        return self.out_proj(out if self.windows is None else out.flatten(1, 2))  # type: ignore[no-any-return]

    def masses(self, x: Tensor) -> np.ndarray:
        """bos_mass of each head in float64, mean over sequences."""
        q, k, _ = (self.heads(part).double() for part in self.qkv(x).chunk(3, -1))
        logits = q @ k.mT * q.shape[-1] ** -0.5
        if self.causal:
            logits = logits.masked_fill(~torch.ones(logits.shape[-2:], dtype=torch.bool).tril(), -torch.inf)
        return np.asarray(logits.softmax(-1)[:, :, 1:, 0].mean((0, 2)).detach())


def vectors(rows: int = 2, length: int = 12) -> Tensor:
    return torch.randn(rows, length, WIDTH, generator=torch.Generator().manual_seed(1))


def watched(model: nn.Module, x: Tensor) -> sinkscope.Watch:
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        alone = model(x)
        with sinkscope.watch(model) as seen:
            assert torch.equal(model(x), alone)
    return seen


def test_windows_in_an_axis_of_their_own_are_named_beside_what_is_read() -> None:
    model = nn.Sequential(Attention(windows=4), Attention()).eval()
    x = vectors()
    run = watched(model, x).run()
    assert run.summary.warnings == ["attention that is no map of queries and keys was not read: 0"]
    np.testing.assert_allclose(run.heads["bos_mass"], model[1].masses(model[0](x)), atol=1e-6)
    alone = watched(nn.Sequential(Attention(windows=4)).eval(), x)
    assert alone.left_out == ["attention that is no map of queries and keys was not read: 0"]
