"""What a training of the trigger task is asked for: everything that its weights depend on."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from sinkscope.errors import SinkscopeError
from sinkscope.runs.defaults import check_not_too_large
from sinkscope.trigger import task
from sinkscope.trigger.config import TriggerConfig
from sinkscope.trigger.task import draw_default


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

    @property
    def learning_rate(self) -> float:
        return 1e-3 if self.layers == 1 else 1e-4

    @property
    def name(self) -> str:
        off = "" if self.default == "zero" else f"-{self.default}"
        return f"{self.attention}{off}-{self.layers}x{self.heads}-seed{self.seed}"

    @property
    def command(self) -> str:
        """The command that trains this model, without --out, and without the default of 0.1's commands."""
        options = asdict(self)
        if self.default == "zero":
            del options["default"]
        return "sinkscope trigger train " + " ".join(f"--{key} {value}" for key, value in options.items())

    def config(self) -> TriggerConfig:
        """The model's configuration.

        Raises SinkscopeError for sizes, steps, an attention or a default that are not possible.
        """
        if self.steps < 1:
            raise SinkscopeError(f"steps {self.steps}: at least 1 is needed")
        check_not_too_large("steps", self.steps)
        task.check_seed(self.seed)
        default = draw_default(self.default, self.dim, self.seed)
        return TriggerConfig(
            attention=self.attention,
            hidden_size=self.dim,
            length=self.length,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            default=default.kind,
            default_values=None if default.values is None else default.values.tolist(),
        )
