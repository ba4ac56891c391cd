"""torch's own multi-head attention multiplies by its weights without calling a module: the same numbers must be found
in it as in a model of the same weights whose projections are linear layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from modeling_torch import TorchConfig, TorchModel
from torch import Tensor, nn
from torch.nn import functional

import sinkscope


class Linear(nn.Module):
    """What nn.MultiheadAttention computes under a causal mask, by four linear layers."""

    def __init__(self, of: nn.MultiheadAttention) -> None:
        super().__init__()
        self.heads, width = of.num_heads, of.embed_dim
        self.query, self.key, self.value, self.out_proj = (nn.Linear(width, width) for _ in range(4))
        weights, biases = of.in_proj_weight.chunk(3), of.in_proj_bias.chunk(3)
        with torch.no_grad():
            for layer, weight, bias in zip((self.query, self.key, self.value), weights, biases, strict=True):
                layer.weight.copy_(weight)
                layer.bias.copy_(bias)
        self.out_proj.load_state_dict(of.out_proj.state_dict())
        self.batch_first = True

    def forward(self, x: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        query, key, value = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out_proj(mixed.transpose(1, 2).flatten(2)), None


def model_of(kind: str, batch_first: bool) -> TorchModel:
    torch.manual_seed(0)
    model = TorchModel(TorchConfig(kind, batch_first, causal=True)).eval()
    with torch.no_grad():
        for block in model.blocks:
            block.attention.in_proj_weight.mul_(3)
            for vector in (block.attention.in_proj_bias, block.attention.out_proj.bias, block.norm.bias):
                vector.add_(0.1 * torch.randn_like(vector))
            block.norm.weight.mul_(1 + 0.3 * torch.randn_like(block.norm.weight))
    return model


def scanned(model: Any, ids: Tensor) -> sinkscope.Run:
    return sinkscope.scan(model, data=ids, measure=["smoothing", "switch"])


@pytest.mark.parametrize(
    ("kind", "batch_first", "shape"),
    [("weights", True, (3, 12)), ("no_weights", False, (3, 12)), ("weights", False, (8, 8))],
)
def test_its_maps_are_those_of_linear_layers(kind: str, batch_first: bool, shape: tuple[int, int]) -> None:
    ids = torch.randint(0, 97, shape, generator=torch.Generator().manual_seed(1))
    twin = model_of("no_weights", True)
    for block in twin.blocks:
        block.attention = Linear(block.attention).eval()
    ours, expected = scanned(model_of(kind, batch_first), ids), scanned(twin, ids)
    for name in ("smoothing", "switch", "sequences"):
        there, found = expected.tables()[name], ours.tables()[name]
        for column in there.select_dtypes("number"):
            torch.testing.assert_close(
                torch.tensor(found[column].to_numpy(float)), torch.tensor(there[column].to_numpy(float)),
                rtol=1e-4, atol=1e-5, equal_nan=True, msg=lambda text, column=column: f"{column}: {text}",
            )  # fmt: skip
    for column in ("tr_bw", "avgcos_attention", "cost_actual"):
        assert ours.tables()["smoothing"][column].notna().all(), column
    assert ours.layers["compensation"].notna().all()
