"""Models built from torch's own attention: nn.MultiheadAttention in custom blocks, and nn.TransformerEncoder."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput


class TorchConfig(PretrainedConfig):
    """`kind`: weights or no_weights (what nn.MultiheadAttention is asked for), or encoder (nn.TransformerEncoder).
    `bias_kv`, `zero_attn`: nn.MultiheadAttention puts a learned key, or one of zeros, behind those of the tokens."""

    model_type = "torch_attention"

    def __init__(
        self, kind: str = "weights", batch_first: bool = True, causal: bool = False, width: int = 32, heads: int = 4,
        vocab_size: int = 97, bias_kv: bool = False, zero_attn: bool = False, **kwargs: Any,
    ) -> None:  # fmt: skip
        self.kind, self.batch_first, self.causal, self.width, self.heads = kind, batch_first, causal, width, heads
        self.vocab_size, self.bias_kv, self.zero_attn = vocab_size, bias_kv, zero_attn
        super().__init__(**kwargs)


class TorchBlock(nn.Module):
    def __init__(self, config: TorchConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.width)
        self.attention = nn.MultiheadAttention(
            config.width, config.heads, batch_first=config.batch_first, add_bias_kv=config.bias_kv,
            add_zero_attn=config.zero_attn,
        )  # fmt: skip
        self.causal = config.causal

    def forward(self, hidden: Tensor, padding: Tensor | None, weights: bool) -> tuple[Tensor, Tensor | None]:
        length = hidden.shape[1 if self.attention.batch_first else 0]
        later = torch.ones(length, length, dtype=torch.bool).triu(1) if self.causal else None
        normed = self.norm(hidden)
        mixed, maps = self.attention(
            normed, normed, normed, key_padding_mask=padding, attn_mask=later, need_weights=weights,
            average_attn_weights=False,
        )  # fmt: skip
        return hidden + mixed, maps


class TorchModel(PreTrainedModel):
    config_class = TorchConfig

    def __init__(self, config: TorchConfig) -> None:
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.width)
        if config.kind == "encoder":
            layer = nn.TransformerEncoderLayer(config.width, config.heads, 48, batch_first=config.batch_first)
            self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=config.batch_first)
        else:
            self.blocks = nn.ModuleList(TorchBlock(config) for _ in range(2))
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, output_attentions: bool = False
    ) -> BaseModelOutput:
        hidden = self.embed(input_ids)
        hidden = hidden if self.config.batch_first else hidden.transpose(0, 1)
        padding = None if attention_mask is None else attention_mask == 0
        maps = None
        if self.config.kind == "encoder":
            hidden = self.encoder(hidden, src_key_padding_mask=padding)
        else:
            maps = []
            for block in self.blocks:
                hidden, weights = block(hidden, padding, output_attentions or self.config.kind == "weights")
                maps.append(weights)
        hidden = hidden if self.config.batch_first else hidden.transpose(0, 1)
        return BaseModelOutput(last_hidden_state=hidden, attentions=tuple(maps) if output_attentions and maps else None)

    def reference(self, input_ids: Tensor, attention_mask: Tensor) -> list[Tensor]:
        """The maps [sequence, head, query, key] of torch's own layers, also where the model does not ask for them."""
        if self.config.kind != "encoder":
            return list(self(input_ids, attention_mask, output_attentions=True).attentions)
        hidden, maps = self.embed(input_ids), []
        for layer in self.encoder.layers:
            rows = hidden if self.config.batch_first else hidden.transpose(0, 1)
            maps.append(
                layer.self_attn(
                    rows, rows, rows, key_padding_mask=attention_mask == 0, average_attn_weights=False
                )[1]
            )  # fmt: skip
            hidden = layer(rows, src_key_padding_mask=attention_mask == 0)
            hidden = hidden if self.config.batch_first else hidden.transpose(0, 1)
        return maps


def torch_model(**settings: Any) -> TorchModel:
    """A random model in eval mode. All weights are shifted, biases too: zeros would hide mistakes."""
    torch.manual_seed(0)
    model = TorchModel(TorchConfig(**settings)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape))
    return model
