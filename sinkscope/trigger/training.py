"""Trains a model of the task as Ran-Milo 2603.11487 does: mean squared error over all outputs, Adam, fresh batches."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from time import monotonic
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from sinkscope.checkpoints.quiet import quiet_transformers
from sinkscope.errors import SinkscopeError, did_you_mean
from sinkscope.runs.defaults import check_not_too_large
from sinkscope.trigger import task
from sinkscope.trigger.model import TriggerConfig, TriggerModel
from sinkscope.trigger.saving import held_interrupts, making, one_thread, saving
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
        """A name for the model's folder, of the options that were changed."""
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
            hint = f"choose one of {', '.join(OPTIMIZERS)}{did_you_mean(self.optimizer, OPTIMIZERS)}"
            raise SinkscopeError(f"unknown optimizer {self.optimizer!r}: {hint}")
        if self.optimizer == "muon" and self.attention == "learned-sink":
            raise SinkscopeError("optimizer muon trains matrices, and a learned sink is none: give another optimizer")
        for name, value in (("tolerance", self.tolerance), ("learning rate", self.rate), ("init", self.init)):
            if not 0 < value < math.inf:
                raise SinkscopeError(f"{name} {value:g}: a number above 0 is needed")
        if not 0 <= self.weight_decay < math.inf:
            raise SinkscopeError(f"weight decay {self.weight_decay:g}: 0 or more is needed")


LATER = {
    setting.name: setting.default
    for setting in fields(Recipe)
    if setting.name not in ("attention", "layers", "heads", "dim", "length", "seed", "steps")
}
"""The options that came after 0.1, and their defaults. A training that names none of them has these."""


# Trains a model of the task as Ran-Milo 2603.11487 does: mean squared error over all outputs, Adam, fresh batches.
#
# The paper stops at the first batch whose largest absolute error is below 5e-3. One lucky batch of 128 is enough for
# that, so here 1000 evaluation sequences, never trained on, must meet the bound too: see `Training.solved`.
# The same recipe gives the same weights on the same machine, also when it is interrupted and resumed.


BATCH, BETAS, MOMENTUM = 128, (0.9, 0.95), 0.9
"""Sequences per step; Adam's betas; SGD's momentum."""

REPORT_STEPS, SAVE_SECONDS = 50, 15.0
STATE = "training-state.safetensors"
"""File in the output folder during training: weights, Adam's moments, the generator's state."""

LATEST = ("step", "loss", "error", "evaluation_error", "bos_mass")
"""Attributes of Training that a resumed training also restores: its step, and whether it had already ended."""

Progress = Callable[[int, float, float, float], None]
"""Called with (steps done, loss, largest absolute error, mean BOS mass over non-trigger rows) of the latest batch."""


Keep = Callable[["Training"], None]
"""Called with the training before its first step and after each."""


class Training:
    """The state of one training: `run` continues to the criterion or the last step; `save` and `load` resume it.

    Attributes: model; step: steps done; loss, error, bos_mass: of the latest batch; evaluation_error: the largest
    absolute error on the evaluation sequences after the latest step, infinite where the batch missed the criterion.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        config = recipe.config()
        self.off, self.target = config.off, config.target
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(recipe.seed)
            self.model = TriggerModel(config)
        self.generator = torch.Generator().manual_seed(recipe.seed)
        self.optimizer = _optimizer(recipe, list(self.model.parameters()))
        self.evaluation = task.evaluation(task.EVALUATION_SEQUENCES, recipe.length, recipe.dim, recipe.seed)
        self.step, self.loss, self.error, self.bos_mass = 0, float("nan"), float("inf"), float("nan")
        self.evaluation_error = float("inf")

    @property
    def solved(self) -> bool:
        """The largest absolute error is below the tolerance, the paper's 5e-3, in the latest batch and, after its step,
        on the 1000 evaluation sequences."""
        return self.error < self.recipe.tolerance and self.evaluation_error < self.recipe.tolerance

    @property
    def ended(self) -> bool:
        """Whether the task is solved or the last step done."""
        return self.solved or self.step >= self.recipe.steps

    def run(self, progress: Progress | None = None, folder: Path | None = None, keep: Keep | None = None) -> None:
        """Trains to the end; saves the state to `folder`, where given, every 15 seconds and on an interrupt.

        Raises SinkscopeError where the training diverges.
        """
        saved = monotonic()
        try:
            with one_thread(), held_interrupts() as interrupt:
                if keep and folder and not self.step:
                    self.save(folder)  # a training that is killed before its first save shall know its own folders
                while not self.ended:
                    if keep:
                        keep(self)
                    self.advance()
                    interrupt()
                    if progress and (self.step % REPORT_STEPS == 0 or self.solved):
                        progress(self.step, self.loss, self.error, self.bos_mass)
                    if folder and monotonic() - saved > SAVE_SECONDS:
                        self.save(folder)
                        saved = monotonic()
                self._refuse_diverged(self.evaluated())  # the last step's weights have met no batch
                if keep:
                    keep(self)
        except KeyboardInterrupt:
            if folder:
                self.save(folder)
            raise

    def advance(self) -> None:
        """Takes one step on a fresh batch. Raises SinkscopeError where its loss is no finite number."""
        recipe, config = self.recipe, self.model.config
        data = task.draw(BATCH, recipe.length, recipe.dim, self.generator)
        outputs = self.model(inputs_embeds=data.inputs, output_attentions=True)
        errors = outputs.last_hidden_state - task.targets(data, config.residual, self.off, self.target)
        loss = errors.square().mean()
        self._refuse_diverged(loss.item())
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.step += 1
        self.loss, self.error = loss.item(), float(errors.detach().abs().max())
        self.evaluation_error = self.evaluated() if self.error < self.recipe.tolerance else float("inf")
        if not self.step % REPORT_STEPS or self.solved:
            self.bos_mass = _bos_mass(outputs.attentions, data)

    def _refuse_diverged(self, value: float) -> None:
        if not math.isfinite(value):
            raise SinkscopeError(
                f"the training diverged: loss or error is {value} after step {self.step}; give a smaller "
                "--learning-rate or --init, and another --out"
            )

    def evaluated(self) -> float:
        """The largest absolute error of the current weights on the evaluation sequences."""
        with one_thread(), torch.no_grad():
            predicted = self.model(inputs_embeds=self.evaluation.inputs).last_hidden_state
        targets = task.targets(self.evaluation, self.model.config.residual, self.off, self.target)
        return float((predicted - targets).abs().max())

    def save(self, folder: Path) -> None:
        """Writes the state to a new file, then renames it into place. Raises SinkscopeError where it cannot."""
        tensors = {f"model.{name}": value for name, value in self.model.state_dict().items()}
        for number, moments in self.optimizer.state_dict()["state"].items():
            tensors |= {f"adam.{number}.{name}": value for name, value in moments.items()}
        tensors["generator"] = self.generator.get_state()
        facts = json.dumps({"recipe": asdict(self.recipe), **{name: getattr(self, name) for name in LATEST}})
        whole, partial = {name: value.contiguous() for name, value in tensors.items()}, folder / f"{STATE}.new"
        with saving(folder):
            folder.mkdir(parents=True, exist_ok=True)
            save_file(whole, partial, {"of": facts})
            partial.replace(folder / STATE)

    def load(self, folder: Path) -> None:
        """Restores a saved state. Raises SinkscopeError where it is damaged or belongs to another recipe."""
        path = folder / STATE
        try:
            with safe_open(path, framework="pt") as file:
                metadata = json.loads(file.metadata()["of"])
                facts = {name: metadata[name] for name in ("recipe", *LATEST)}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError, ValueError, KeyError) as error:
            raise SinkscopeError(f"{path} is damaged ({error}): remove it and start again") from None
        if LATER | facts["recipe"] | {"steps": 0} != asdict(self.recipe) | {"steps": 0}:
            raise SinkscopeError(
                f"{path} belongs to another training ({facts['recipe']}): pass its options, or another --out"
            )
        self.model.load_state_dict({n[6:]: v for n, v in tensors.items() if n.startswith("model.")})
        state: dict[int, dict[str, Any]] = {}
        for name, value in tensors.items():
            if name.startswith("adam."):
                _, number, moment = name.split(".")
                state.setdefault(int(number), {})[moment] = value
        self.optimizer.load_state_dict(self.optimizer.state_dict() | {"state": state})
        self.generator.set_state(tensors["generator"])
        for name in LATEST:
            setattr(self, name, facts[name])


def train(
    recipe: Recipe,
    folder: Path,
    resume: bool = False,
    progress: Progress | None = None,
    keep: Keep | None = None,
) -> TriggerModel:
    """Trains and writes a transformers folder: config.json (with `training`: seed, command, errors), model.safetensors.

    `keep` is called before the first step and after each (`trajectory.keeper` keeps checkpoints).
    `resume` continues an interrupted training, returns a finished one, and starts a new one where there is neither.
    Raises SinkscopeError where the folder holds anything that would be lost, or cannot be written.
    """
    finished, state = folder / "config.json", folder / STATE
    if finished.exists() and not state.exists():
        return _finished(recipe, folder, resume)
    if state.exists() and not resume:
        raise SinkscopeError(f"{folder} holds an unfinished training: pass --resume to go on, or another --out")
    if folder.exists() and not folder.is_dir():
        raise SinkscopeError(f"{folder} is a file: give another --out")
    partial = folder / f"{STATE}.new"  # left by a process killed during its first save
    if not state.exists() and folder.exists() and set(folder.iterdir()) - {partial}:
        raise SinkscopeError(f"{folder} is not empty: give another --out")
    training = Training(recipe)
    with making(folder):
        if state.exists():
            training.load(folder)
        training.run(progress, folder, keep)
        model = training.model.eval()
        model.config.training = training_record(training)
        with saving(folder):
            model.save_pretrained(folder)
        state.unlink(missing_ok=True)
    return model


def _finished(recipe: Recipe, folder: Path, resume: bool) -> TriggerModel:
    if not resume:
        raise SinkscopeError(f"{folder} holds a finished model: give another --out")
    with quiet_transformers():
        model = TriggerModel.from_pretrained(folder)
    if model.config.training.get("command") != recipe.command:
        raise SinkscopeError(f"{folder} holds another model: {model.config.training.get('command')}")
    return model.eval()


def training_record(training: Training) -> dict[str, Any]:
    """How the model was trained and its errors, for config.json. An error is the largest absolute error.

    `stopped` is `checkpoint` where training goes on. An untrained model has no batch, and no error in one.
    """
    recipe, end = training.recipe, "criterion" if training.solved else "steps"
    return {
        "command": recipe.command,
        "seed": recipe.seed,
        "batch": BATCH,
        "learning_rate": recipe.rate,
        "steps": training.step,
        "tolerance": recipe.tolerance,
        "stopped": end if training.ended else "checkpoint",
        "loss": training.loss if training.step else None,
        "batch_error": training.error if training.step else None,
        "evaluation_error": training.evaluated(),
        "evaluation_sequences": task.EVALUATION_SEQUENCES,
    }


def _bos_mass(maps: tuple[torch.Tensor, ...], data: task.Draw) -> float:
    """Mean of A[i,0] over the layers, heads, sequences and non-trigger rows i >= 1 of a batch."""
    first = torch.stack([weights.detach()[..., 0] for weights in maps]).mean((0, 2))
    kept = torch.ones_like(first)
    kept[:, 0] = 0
    kept[torch.arange(len(first)), data.trigger] = 0
    return float((first * kept).sum() / kept.sum())


def _optimizer(recipe: Recipe, weights: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Weight decay is decoupled in AdamW and Muon, part of the gradient in Adam and SGD."""
    rate, decay = recipe.rate, recipe.weight_decay
    if recipe.optimizer == "sgd":
        return torch.optim.SGD(weights, lr=rate, momentum=MOMENTUM, weight_decay=decay)
    if recipe.optimizer == "muon":
        return torch.optim.Muon(weights, lr=rate, weight_decay=decay)
    kind = torch.optim.AdamW if recipe.optimizer == "adamw" else torch.optim.Adam
    return kind(weights, lr=rate, betas=BETAS, weight_decay=decay, fused=True)
