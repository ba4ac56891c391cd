"""What a training of the trigger task is asked for: everything that its weights depend on."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields

from sinkscope.errors import SinkscopeError, did_you_mean
from sinkscope.runs.defaults import check_not_too_large
from sinkscope.trigger import task
from sinkscope.trigger.config import TriggerConfig
from sinkscope.trigger.task import draw_default

TOLERANCE = 5e-3
"""The paper's bound on the largest absolute error of a solved task."""

OPTIMIZERS = ("adam", "adamw", "sgd", "muon")
"""Adam and AdamW with betas 0.9 and 0.95, SGD with momentum 0.9, and torch's Muon as it is by default."""


@dataclass(frozen=True)
class Recipe:
    """Everything the weights depend on."""

    attention: str = "softmax"
    layers: int = 1
    heads: int = 1
    dim: int = 16
    length: int = 16
    seed: int = 0
    steps: int = 50_000
    default: str = "zero"
    target: str = "mean"
    tolerance: float = TOLERANCE
    optimizer: str = "adam"
    learning_rate: float | None = None
    weight_decay: float = 0.0
    init: float = 0.02

    @property
    def rate(self) -> float:
        """The learning rate: as given, else the paper's."""
        if self.learning_rate is not None:
            return self.learning_rate
        return 1e-3 if self.layers == 1 else 1e-4

    @property
    def changed(self) -> dict[str, str | float]:
        """The options beyond 0.1's, of those that are not at their defaults."""
        return {name: value for name, value in asdict(self).items() if name in LATER and value != LATER[name]}

    @property
    def name(self) -> str:
        others = {name: value for name, value in self.changed.items() if name != "default"}
        told = [f"-{name.replace('_', '-')}-{value}" for name, value in others.items()]
        off = "" if self.default == "zero" else f"-{self.default}"
        return f"{self.attention}{off}{''.join(told)}-{self.layers}x{self.heads}-seed{self.seed}"

    @property
    def command(self) -> str:
        """The command that trains this model, without --out, and without the defaults of later options than 0.1's."""
        options = {name: value for name, value in asdict(self).items() if name not in LATER} | self.changed
        told = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in options.items())
        return f"sinkscope trigger train {told}"

    def config(self) -> TriggerConfig:
        """The model's configuration.

        Raises SinkscopeError for sizes, steps, an attention or a default that are not possible.
        """
        if self.steps < 1:
            raise SinkscopeError(f"steps {self.steps}: at least 1 is needed")
        check_not_too_large("steps", self.steps)
        task.check_seed(self.seed)
        task.check_target(self.target)
        self._check_numbers()
        default = draw_default(self.default, self.dim, self.seed)
        return TriggerConfig(
            attention=self.attention,
            hidden_size=self.dim,
            length=self.length,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            default=default.kind,
            default_values=None if default.values is None else default.values.tolist(),
            target=self.target,
            initializer_range=self.init,
        )

    def _check_numbers(self) -> None:
        if self.optimizer not in OPTIMIZERS:
            known = f"one of {', '.join(OPTIMIZERS)}{did_you_mean(self.optimizer, OPTIMIZERS)}"
            raise SinkscopeError(f"unknown optimizer {self.optimizer!r}: {known}")
        if self.optimizer == "muon" and self.attention == "learned-sink":
            raise SinkscopeError("optimizer muon trains matrices, and a learned sink is none: give another optimizer")
        for name, value in (("tolerance", self.tolerance), ("learning rate", self.rate), ("init", self.init)):
            if not 0 < value < math.inf:
                raise SinkscopeError(f"{name} {value:g}: a number above 0 is needed")
        if not 0 <= self.weight_decay < math.inf:
            raise SinkscopeError(f"weight decay {self.weight_decay:g}: 0 or more is needed")


LATER = {
    each.name: each.default
    for each in fields(Recipe)
    if each.name not in ("attention", "layers", "heads", "dim", "length", "seed", "steps")
}
"""The options that came after 0.1, and their defaults. A training that names none of them has these."""
