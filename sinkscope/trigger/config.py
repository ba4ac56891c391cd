"""The configuration of a trigger model: its sizes and its kind of attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import PretrainedConfig

from sinkscope.errors import SinkscopeError, did_you_mean
from sinkscope.trigger.task import LARGEST, Default, check_sizes, read_default

MODEL_TYPE = "sinkscope_trigger"


@dataclass(frozen=True)
class AttentionForm:
    """A kind of attention. `score`: how a logit becomes attention; `sink`: an extra logit in the softmax's
    denominator, `zero` (fixed at 0) or `learned` (one a head); `gated`: head outputs times sigmoid(W_g x)."""

    score: str = "softmax"
    sink: str | None = None
    gated: bool = False


KINDS = {
    "softmax": AttentionForm(),
    "relu": AttentionForm(score="relu"),
    "sigmoid": AttentionForm(score="sigmoid"),
    "softmax1": AttentionForm(sink="zero"),
    "learned-sink": AttentionForm(sink="learned"),
    "gated": AttentionForm(gated=True),
}


class TriggerConfig(PretrainedConfig):  # type: ignore[misc]
    """Sizes and attention of a trigger model, and how it was trained (`training`: seed, command, steps, errors).

    `default` and `default_values` say what the target is in rows without a trigger (`default.Default`). They are
    written only where it is not zero: a config without them, such as 0.1 wrote, means zero.
    Raises SinkscopeError for an unknown attention or default, values that do not fit it, sizes below 1, d < 4, L < 4.
    """

    model_type = MODEL_TYPE
    default = "zero"
    default_values = None

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
        **kwargs: Any,
    ) -> None:
        if attention not in KINDS:
            raise SinkscopeError(
                f"unknown attention {attention!r}: one of {', '.join(KINDS)}{did_you_mean(attention, KINDS)}"
            )
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
        return KINDS[self.attention]

    @property
    def off(self) -> Default:
        """The target in rows without a trigger."""
        return read_default(self.default, self.default_values, self.hidden_size)

    @property
    def residual(self) -> bool:
        """Whether layers add to a residual stream: those of a model with several layers do, a single layer does not."""
        return self.num_hidden_layers > 1
