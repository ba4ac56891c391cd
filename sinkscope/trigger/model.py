"""The trigger task's model as an ordinary transformers model, attention layers and nothing else, and its
configuration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from sinkscope.capture.scores import SCORES, normalises, score_of
from sinkscope.errors import SinkscopeError, did_you_mean
from sinkscope.trigger.as_input import TriggerTask
from sinkscope.trigger.task import LARGEST, Default, check_sizes, check_target, read_default

MODEL_TYPE = "sinkscope_trigger"


@dataclass(frozen=True)
class AttentionForm:
    """A kind of attention. `score`: how a logit becomes attention, softmax or a name of `capture.scores`; `sink`: an
    extra logit in the softmax's denominator, `zero` (fixed at 0) or `learned` (one a head); `gated`: head outputs times
    sigmoid(W_g x)."""

    score: str = "softmax"
    sink: str | None = None
    gated: bool = False

    @property
    def softmax(self) -> bool:
        """Whether softmax turns the logits into attention."""
        return self.score == "softmax"

    @property
    def normalised(self) -> bool:
        """Whether the rows of attention are divided by their sum, an extra logit's share included."""
        return normalises(self.score)


KINDS = {
    "softmax": AttentionForm(),
    "relu": AttentionForm(score="relu"),
    "sigmoid": AttentionForm(score="sigmoid"),
    "softmax1": AttentionForm(sink="zero"),
    "learned-sink": AttentionForm(sink="learned"),
    "gated": AttentionForm(gated=True),
    "exp-free": AttentionForm(score="exp-free"),
    "relu-norm": AttentionForm(score="relu-norm"),
    "sigmoid-norm": AttentionForm(score="sigmoid-norm"),
    "sigmoid-free": AttentionForm(score="sigmoid-free"),
}
"""The kinds that ship with sinkscope. Every other declared score is a kind too, see `form_of`."""


def form_of(attention: str) -> AttentionForm:
    """The kind of that name: one of KINDS, or a score that was declared elsewhere (`capture.attention_score`).

    Raises SinkscopeError where there is none.
    """
    if attention in KINDS:
        return KINDS[attention]
    if attention not in SCORES:
        choices = list(dict.fromkeys([*KINDS, *SCORES]))
        raise SinkscopeError(
            f"unknown attention {attention!r}: choose one of {', '.join(choices)}{did_you_mean(attention, choices)}"
        )
    score_of(attention)  # raises where its package does not load
    return AttentionForm(score=attention)


class TriggerConfig(PretrainedConfig):  # type: ignore[misc]
    """Sizes and attention of a trigger model, and how it was trained (`training`: seed, command, steps, errors).

    `default` and `default_values` say what the target is in rows without a trigger (`default.Default`). They are
    written only where it is not zero: a config without them, such as 0.1 wrote, means zero. So is `target`, what the
    trigger's row asks for (`task.TARGETS`), where it is not the mean.
    Raises SinkscopeError for an unknown attention, target or default, values that do not fit it, sizes below 1, d < 4
    and L < 4.
    """

    model_type = MODEL_TYPE
    default = "zero"
    default_values = None
    target = "mean"

    def __init__(
        self,
        attention: str = "softmax",
        hidden_size: int = 16,
        length: int = 16,
        num_hidden_layers: int = 1,
        num_attention_heads: int = 1,
        initializer_range: float = 0.02,
        training: dict[str, Any] | None = None,
        default: str = "zero",
        default_values: list[Any] | None = None,
        target: str = "mean",
        **kwargs: Any,
    ) -> None:
        form_of(attention)
        for name, value in (("layers", num_hidden_layers), ("heads", num_attention_heads)):
            if value < 1:
                raise SinkscopeError(f"{name} {value}: at least 1 is needed")
        if num_hidden_layers * num_attention_heads > LARGEST:
            raise SinkscopeError(
                f"{num_hidden_layers} x {num_attention_heads} heads: a model of at most {LARGEST} heads"
            )
        check_sizes(hidden_size, length)
        if read_default(default, default_values, hidden_size).values is not None:
            self.default, self.default_values = default, default_values
        check_target(target)
        if target != "mean":
            self.target = target
        self.attention = attention
        self.hidden_size = hidden_size
        self.length = length
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.initializer_range = initializer_range
        self.training = training or {}
        super().__init__(**kwargs)

    @property
    def kind(self) -> AttentionForm:
        return form_of(self.attention)

    @property
    def off(self) -> Default:
        """The target in rows without a trigger."""
        return read_default(self.default, self.default_values, self.hidden_size)

    @property
    def residual(self) -> bool:
        """Whether layers add to a residual stream: those of a model with several layers do, a single layer does not."""
        return self.num_hidden_layers > 1


# The trigger task's model as an ordinary transformers model: attention layers and nothing else.
#
# Heads of full width d: q, k, v project d -> H d, o projects H d -> d; no bias, no positions, no norm, no MLP; scores
# are not divided by sqrt(d). Attention goes through transformers' attention interface, so that sinkscope
# measures it as it measures a Llama. KINDS lists the kinds of attention.


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
        rule = score_of(score)
        weights = rule(logits.masked_fill(future, 0.0), rows)  # a hidden logit may be too large for exp's gradient
        weights = rule.finish(weights.masked_fill(future, 0.0))
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
