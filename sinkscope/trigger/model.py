"""The trigger task's model as an ordinary transformers model: attention layers and nothing else.

Heads of full width d: q, k, v project d -> H d, o projects H d -> d; no bias, no positions, no norm, no MLP; scores
are not divided by sqrt(d). Attention goes through transformers' attention interface, so that sinkscope
measures it as it measures a Llama. `config.KINDS` lists the kinds of attention.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from sinkscope.capture.scores import score_of
from sinkscope.trigger.as_input import TriggerTask
from sinkscope.trigger.config import MODEL_TYPE, TriggerConfig


def plain_attention(
    module: nn.Module,
    query: Float[Tensor, "batch head query dim"],
    key: Float[Tensor, "batch head key dim"],
    value: Float[Tensor, "batch head key dim"],
    attention_mask: Tensor | None = None,
    scaling: float = 1.0,
    s_aux: Float[Tensor, " head"] | None = None,
    score: str = "softmax",
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Causal attention that forms the whole matrix, for training and as the model's `eager`: output (B, L, H, d), A.

    `s_aux`: one extra logit per head in the softmax's denominator. `score`: softmax, or a name of
    `sinkscope.capture.scores`. `attention_mask` is not used: sequences have no padding.
    """
    logits = query @ key.mT * scaling
    steps = logits.shape[-1]
    future = torch.ones(steps, steps, dtype=torch.bool, device=logits.device).triu(1)
    if score != "softmax":
        rows = torch.arange(steps, device=logits.device)[:, None]
        found = score_of(score)
        weights = found(logits.masked_fill(future, 0.0), rows)  # a hidden logit may be too large for exp's gradient
        weights = found.finish(weights.masked_fill(future, 0.0))
    else:
        logits = logits.masked_fill(future, -torch.inf)
        if s_aux is not None:
            logits = torch.cat([logits, s_aux.view(1, -1, 1, 1).expand(*logits.shape[:3], 1)], -1)
        weights = logits.softmax(-1)[..., :steps]
    return (weights @ value).transpose(1, 2), weights


class TriggerAttention(nn.Module):
    """H heads of width d. Reads hidden_states (B, L, d); returns its output, same shape, and A where it was formed."""

    is_causal = True
    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear
    o_proj: nn.Linear
    gate_proj: nn.Linear

    def __init__(self, config: TriggerConfig) -> None:
        super().__init__()
        self.config, self.heads = config, config.num_attention_heads
        inside = config.hidden_size * self.heads
        for name in ("q_proj", "k_proj", "v_proj", *(("gate_proj",) if config.kind.gated else ())):
            self.add_module(name, nn.Linear(config.hidden_size, inside, bias=False))
        self.o_proj = nn.Linear(inside, config.hidden_size, bias=False)
        self.sinks = nn.Parameter(torch.zeros(self.heads)) if config.kind.sink == "learned" else None

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor | None]:
        kind = self.config.kind

        def heads(projection: Any) -> Tensor:
            return projection(hidden_states).unflatten(-1, (self.heads, -1)).transpose(1, 2)

        keywords: dict[str, Any] = {} if kind.softmax else {"score": kind.score}
        if kind.sink is not None:
            keywords["s_aux"] = self.sinks if self.sinks is not None else hidden_states.new_zeros(self.heads)
        attend: Callable[..., tuple[Tensor, Tensor | None]] = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, plain_attention
        )
        mixed, weights = attend(
            self, heads(self.q_proj), heads(self.k_proj), heads(self.v_proj), None, scaling=1.0, **keywords
        )
        mixed = mixed.flatten(2)
        if kind.gated:
            mixed = mixed * torch.sigmoid(self.gate_proj(hidden_states))
        return self.o_proj(mixed), weights


class TriggerLayer(nn.Module):
    """One attention layer, which adds to a residual stream where the model has several layers."""

    def __init__(self, config: TriggerConfig) -> None:
        super().__init__()
        self.self_attn = TriggerAttention(config)
        self.residual = config.residual

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor | None]:
        written, weights = self.self_attn(hidden_states)
        return (hidden_states + written if self.residual else written), weights


class TriggerModel(PreTrainedModel):  # type: ignore[misc]
    """Reads real vectors `inputs_embeds` (B, L, d); `last_hidden_state` is the prediction, same shape."""

    config_class = TriggerConfig
    base_model_prefix = "model"
    main_input_name = "inputs_embeds"
    _supports_sdpa = False
    layers: Any

    def __init__(self, config: TriggerConfig) -> None:
        super().__init__(config)
        self.layers = nn.ModuleList(TriggerLayer(config) for _ in range(config.num_hidden_layers))
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=self.config.initializer_range)
        elif isinstance(module, TriggerAttention) and module.sinks is not None:
            nn.init.zeros_(module.sinks)

    def input_task(self) -> TriggerTask:
        """Returns the task that a scan draws its inputs from."""
        return TriggerTask(self.config)

    def forward(self, inputs_embeds: Tensor, output_attentions: bool = False, **kwargs: Any) -> BaseModelOutput:
        hidden, maps = inputs_embeds, []
        for layer in self.layers:
            hidden, weights = layer(hidden)
            maps.append(weights)
        return BaseModelOutput(last_hidden_state=hidden, attentions=tuple(maps) if output_attentions else None)


def register() -> None:
    """Makes AutoConfig and AutoModel know the model type; calling it again changes nothing."""
    AutoConfig.register(MODEL_TYPE, TriggerConfig, exist_ok=True)
    AutoModel.register(TriggerConfig, TriggerModel, exist_ok=True)
