"""The configuration of a trigger model: its sizes and its kind of attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import PretrainedConfig

from sinkscope.capture.scores import SCORES, normalises, score_of
from sinkscope.errors import SinkscopeError, did_you_mean
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
        known = list(dict.fromkeys([*KINDS, *SCORES]))
        raise SinkscopeError(
            f"unknown attention {attention!r}: one of {', '.join(known)}{did_you_mean(attention, known)}"
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
