"""A model such as a checkpoint's own Python file may define: it computes attention without transformers' interface.

`causal` False: every token sees every other, as in masked diffusion language models. `fused`: attention is torch's
scaled_dot_product_attention, as in LLaDA's code.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput


class PlantedConfig(PretrainedConfig):
    model_type = "planted"

    def __init__(
        self, vocab_size: int = 97, hidden_size: int = 32, heads: int = 4, layers: int = 2, causal: bool = True,
        fused: bool = False, **kwargs: Any,
    ) -> None:  # fmt: skip
        self.causal, self.fused = causal, fused
        self.vocab_size, self.hidden_size, self.heads, self.layers = vocab_size, hidden_size, heads, layers
        super().__init__(**kwargs)


class PlantedAttention(nn.Module):
    def __init__(self, config: PlantedConfig) -> None:
        super().__init__()
        self.num_heads, width = config.heads, config.hidden_size
        self.causal, self.fused = config.causal, config.fused
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor | None]:
        batch, length, width = hidden_states.shape
        parts = self.qkv(hidden_states).view(batch, length, 3, self.num_heads, -1)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        if self.fused:
            mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
            return self.out(mixed.transpose(1, 2).reshape(batch, length, width)), None
        scores = torch.matmul(query, key.transpose(-1, -2)) / query.shape[-1] ** 0.5
        later = torch.ones(length, length, dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later, torch.finfo(scores.dtype).min) if self.causal else scores
        weights = torch.softmax(scores, dim=-1)
        mixed = torch.matmul(weights, value).transpose(1, 2).reshape(batch, length, width)
        return self.out(mixed), weights


class PlantedBlock(nn.Module):
    def __init__(self, config: PlantedConfig) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(config.hidden_size), PlantedAttention(config)
        self.mlp = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor | None]:
        mixed, weights = self.attention(self.norm(hidden_states))
        hidden_states = hidden_states + mixed
        return hidden_states + self.mlp(hidden_states).tanh(), weights


class PlantedModel(PreTrainedModel):
    config_class = PlantedConfig

    def __init__(self, config: PlantedConfig) -> None:
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList(PlantedBlock(config) for _ in range(config.layers))
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def forward(self, input_ids: Tensor, output_attentions: bool = False) -> BaseModelOutput:
        hidden, maps = self.embed(input_ids), []
        for block in self.blocks:
            hidden, weights = block(hidden)
            maps.append(weights)
        return BaseModelOutput(last_hidden_state=hidden, attentions=tuple(maps) if output_attentions else None)


def planted(**settings: bool) -> PlantedModel:
    """A random model in eval mode. All weights are shifted, biases too: zeros would hide mistakes."""
    torch.manual_seed(0)
    model = PlantedModel(PlantedConfig(**settings)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape))
    return model
