"""What claims have measured: runs over text, losses under interventions, the trigger task."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from sinkscope.claims.claim import NotTested
from sinkscope.claims.evidence import NO_TEXT
from sinkscope.claims.subject import ARMS, not_tested

if TYPE_CHECKING:
    import pandas as pd

    from sinkscope.claims.evidence import Evidence
    from sinkscope.claims.subject import Subject
    from sinkscope.runs.forecast import Forecast
    from sinkscope.runs.run import Run
    from sinkscope.trigger.evaluation import Evaluation
    from sinkscope.trigger.model import TriggerConfig


@dataclass(frozen=True)
class Scan:
    """A scan with these settings. A saved run takes its place where it holds the tables, and is a scan of this kind.

    Attributes:
        name: the folder that keeps it. words: what it is, and which options of `sinkscope scan` make it.
        settings: of `sinkscope.scan`, beside those of reading and loading.
        tables: those of questions that a claim reads.
        fewer: whether a quarter of the sequences are read. spectra: whether columns that need spectra are measured on
            all sequences, of which there are at most 32.
        is_it: whether a saved run is of this kind, its tables aside.
        must: whether a model that cannot be scanned so is an error, and no claim can be put to it.
        holds: what a run of this kind has that others lack, in words; its name by default.
    """

    name: str
    words: str
    settings: dict[str, Any] = field(default_factory=dict)
    tables: tuple[str, ...] = ()
    fewer: bool = False
    spectra: bool = False
    is_it: Callable[[Run], bool] = lambda run: True
    must: bool = False
    holds: str = ""

    def with_tables(self, *tables: str) -> Scan:
        """The same scan, of which a claim reads these tables of questions."""
        return replace(self, tables=tables)

    def of(self, subject: Subject) -> Evidence:
        """Its tables. Raises NotTested where a saved run does not hold them."""
        run = self.run_of(subject) if subject.given is None else subject.given
        lacking = [name for name in self.tables if name not in run.measured and subject.given is not None]
        if not self.is_it(run) or lacking:
            absent = f"table {' and no table '.join(lacking)}" if lacking else self.holds or self.name
            raise NotTested(f"the run has no {absent}: {self.words}")
        return subject.evidence(run)

    def run_of(self, subject: Subject) -> Run:
        """The scan of a model."""
        return subject.scan(self.name, must=self.must, **self._settings_for(subject))

    def measurements(self) -> dict[str, Scan]:
        """Itself; what it reads of the tables changes no pass."""
        return {self.name: self}

    def forecast(self, subject: Subject, machine: str | None) -> Forecast:
        """What the scan of a model would cost."""
        from sinkscope.engine.forecast.dry_run import dry_run

        settings = {**subject.reading, **self._settings_for(subject), **subject.loading}
        with nullcontext() if self.must else not_tested():
            return dry_run(subject.model, machine=machine, **settings)

    def _settings_for(self, subject: Subject) -> dict[str, Any]:
        settings = dict(self.settings)
        if self.fewer:
            settings["num_sequences"] = max(2, subject.sequences // 4)
        if self.spectra:
            settings["spectra"] = min(subject.sequences, 32)
        return settings


def _is_control(run: Run) -> bool:
    return all(data.spec in NO_TEXT for data in run.manifest.data)


TEXT = Scan(
    "text", "scan with --measure switch --measure smoothing", {"measure": ("switch", "smoothing")}, spectra=True,
    is_it=lambda run: not _is_control(run), must=True,
)  # fmt: skip
OPENINGS = Scan(
    "openings", "scan with --first bos --first none --prepend 0 --prepend 8",
    {"first": ("bos", "none"), "prepend": (0, 8)}, ("first",), fewer=True,
)  # fmt: skip
CONTROLS = Scan(
    "controls", "scan with --data random --data repeated --seq-len 64", {"data": ("random", "repeated"), "seq_len": 64},
    is_it=_is_control, holds="random and repeated tokens",
)  # fmt: skip


@dataclass(frozen=True)
class Losses:
    """The loss under arms that hide the first token's key, or set its value to 0, and under the same with others."""

    words: str = "sinkscope arms MODEL --arm keys:first1 --arm value:first1 --draws 2"

    def of(self, subject: Subject) -> pd.DataFrame:
        """One row an arm, by its name: increase and increase_sem, in nats per token."""
        arms = subject.arms()
        return arms.table.set_index("arm")

    def measurements(self) -> dict[str, Losses]:
        """The arms."""
        return {"arms": self}

    def forecast(self, subject: Subject, machine: str | None) -> Forecast:
        """What the passes of all arms and their controls would cost."""
        from sinkscope.experiments.arms.forecast import dry_run_arms

        with not_tested():
            return dry_run_arms(subject.model, ARMS, machine=machine, **subject.arms_settings())


@dataclass(frozen=True)
class Solved:
    """A model of the trigger task, evaluated.

    `masses`: A[i,0] in rows without a trigger, its mean over them for each sequence and head, [sequence, head].
    """

    config: TriggerConfig
    result: Evaluation
    masses: Any
    model: Any

    @property
    def solved(self) -> bool:
        """Whether the largest absolute error is below the bound at which training stops."""
        return self.result.error < 0.005

    @property
    def plain_softmax(self) -> bool:
        """Whether its attention is a softmax alone, without an extra logit or a gate."""
        kind = self.config.kind
        return kind.softmax and kind.sink is None and not kind.gated

    @property
    def relu(self) -> bool:
        """Whether its attention is ReLU that no sum divides."""
        return bool(self.config.kind.score == "relu")

    @property
    def other_task(self) -> str:
        """What it was trained for in place of the paper's task; empty for the paper's own."""
        if self.config.off.kind != "zero":
            return f"--default {self.config.off.kind}"
        return "" if self.config.target == "mean" else f"--target {self.config.target}"


@dataclass(frozen=True)
class Task:
    """The trigger task: 1000 evaluation sequences, the trigger at position 7."""

    words: str = "sinkscope trigger evaluate MODEL"

    def of(self, subject: Subject) -> Solved:
        """Raises NotTested for a model of anything else, and for one that is too large to be evaluated."""
        if subject.given is not None and (subject.given.summary.task or {}).get("name") != "trigger":
            raise NotTested(NO_TASK)
        if subject.given is None and not _has_task(subject):
            raise NotTested(NO_TASK)
        with not_tested():
            return solved(subject.open())

    def measurements(self) -> dict[str, Scan]:
        """The run over text, by which a model of the task is told; its evaluation takes a second."""
        return TEXT.measurements()


NO_TASK = "the claim is about models of the trigger task (sinkscope trigger train)"


def _has_task(subject: Subject) -> bool:
    """Told by the run over text, so that no other model is loaded again."""
    return (TEXT.run_of(subject).summary.task or {}).get("name") == "trigger"


def solved(model: Any) -> Solved:
    """Evaluates a model of the task."""
    import numpy as np
    import torch

    from sinkscope.trigger import task
    from sinkscope.trigger.evaluation import evaluate

    config, result = model.config, evaluate(model)
    data = task.evaluation(task.EVALUATION_SEQUENCES, config.length, config.hidden_size, 0)
    with torch.no_grad():
        maps = model(inputs_embeds=data.inputs.to(model.dtype), output_attentions=True).attentions
    first = torch.cat([layer[..., 0] for layer in maps], 1).double().numpy()  # [sequence, layer x head, query]
    rows = np.delete(first, [0, int(data.trigger[0])], axis=2)
    return Solved(config, result, rows.mean(2), model)


TASK, LOSSES = Task(), Losses()
