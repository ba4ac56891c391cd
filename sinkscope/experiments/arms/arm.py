"""What an arm is: a name, and a change to the model that is in force during one forward pass and taken off after it.
Where an arm of another package fails, the error names it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sinkscope.capture import Plan, Site
from sinkscope.capture.calls import AttentionCall
from sinkscope.capture.hooks import hooked
from sinkscope.capture.plan import INTERFACE
from sinkscope.capture.private_doors import is_out_of_memory
from sinkscope.checkpoints import Checkpoint
from sinkscope.errors import SinkscopeError, first_line
from sinkscope.lookup import OWN
from sinkscope.runs.run import Run
from sinkscope.runs.saved.arms_table import UNABLATED

CallChange = Callable[[Site, AttentionCall], AttentionCall]
"""Takes an attention call before it is read; returns the call that is read in its place."""


@dataclass
class Setting:
    """What all arms of one measurement share.

    Attributes:
        checkpoint: the model with its next-token head, its tokenizer and its facts.
        base: the model without the head; `plan.sites` are its attention calls.
        ids: the token ids that the loss is measured on, [sequence, T], on the CPU.
        run: the run of this model that an arm may ask; None where none was given.
        seed: seeds the random arms.
        epsilon: a head has a sink at key k where alpha_k exceeds this.
        more_text: gives so many more sequences, or fewer, [sequence, T], of which the loss is not measured on any
            token; None where there is no more text.
        to_map: the sites whose attention an arm maps token by token; maps: their sums, once they are read.
        rows_read: whether a short pass has shown that every linear module reads a row for each token.
    """

    checkpoint: Checkpoint
    base: nn.Module
    plan: Plan
    ids: Tensor
    run: Run | None
    seed: int
    epsilon: float
    more_text: Callable[[int], Tensor] | None = None
    to_map: set[str] = field(default_factory=set)
    maps: dict[str, Any] = field(default_factory=dict)
    rows_read: bool = False

    @property
    def model(self) -> nn.Module:
        """The model with its next-token head."""
        return self.checkpoint.model

    @property
    def sites(self) -> list[Site]:
        """The attention calls of the base model, in the order of a pass."""
        return self.plan.sites

    @property
    def no_sinks(self) -> str:
        """Why nobody knows which keys are sinks in a pass; empty where the attention sums tell it."""
        if any(site.path != INTERFACE for site in self.sites):
            return "the model computes attention in its own way, so its sinks are not seen"
        if any(site.cross for site in self.sites):
            return "the model attends from one sequence to another, so a key need not be a token of the text"
        if any(site.score != "softmax" for site in self.sites):
            return "the model's attention is no softmax, so no threshold tells a sink"
        return ""

    def called_again(self, module: nn.Module) -> bool:
        """Whether a module of the base model is called several times in a pass: a hook on it changes every call."""
        repeated = [path for path, count in self.plan.calls.items() if count > 1]
        return any(self.base.get_submodule(path) is module for path in repeated)

    def runs(self, path: str) -> bool:
        """Whether the module of the base model at this path, or one that holds it, is called in a pass over text: its
        weights may be used without a call of its own. False in the tower of a model that reads pictures too."""
        parts = path.split(".")
        return any(".".join(parts[:depth]) in self.plan.calls for depth in range(1, len(parts) + 1))


@dataclass
class Pass:
    """One forward pass over a batch, while an arm is in force.

    Attributes:
        ids: what the model reads, [sequence of the batch, T]; an arm may put other ids here. The loss is always that of
            the text.
        start: number of the batch's first sequence.
        draw: number of the random draw; 0 for an arm that is not random.
        sinks: the keys that are sinks of the unablated model, [sequence of the batch, T]: alpha_k > epsilon in a head,
            over keys k with n_k >= n_max/4. None while the unablated model itself runs.
        changes: applied to every attention call, in order.
        size: how much of each sequence the arm touches (heads, positions, elements), [sequence of the batch]. None
            where the arm does not say.
    """

    setting: Setting
    ids: Tensor
    start: int = 0
    draw: int = 0
    sinks: Tensor | None = None
    changes: list[CallChange] = field(default_factory=list)
    size: Tensor | None = None

    def generator(self, row: int) -> np.random.Generator:
        """The random numbers of this draw for a sequence of the batch: the same in any batch."""
        return np.random.default_rng([self.setting.seed, self.draw, self.start + row])

    def common_generator(self) -> np.random.Generator:
        """The random numbers of this draw that all sequences share."""
        return np.random.default_rng([self.setting.seed, self.draw])

    def touches(self, size: float | Tensor) -> None:
        """Records how much of each sequence the arm touches."""
        self.size = torch.as_tensor(size, dtype=torch.float64).cpu().expand(len(self.ids))

    @contextmanager
    def changed(self, change: CallChange) -> Iterator[None]:
        """Changes every attention call until the block ends."""
        self.changes.append(change)
        try:
            yield
        finally:
            self.changes.remove(change)

    @contextmanager
    def hooked(self, module: nn.Module, hook: Callable[..., Any]) -> Iterator[None]:
        """Registers a forward pre-hook, called with (module, args, kwargs), until the block ends."""
        with hooked(module, pre=hook, with_kwargs=True):
            yield


class Arm(ABC):
    """One way to run the model. A kind of arm is a subclass; `arm_kind` gives it a place in the grammar.

    Attributes:
        name: the arm as the grammar writes it; no two arms of a measurement share one.
        random: the arm is a random choice and is measured several times, as draws 0, 1, ... of `Pass.draw`.
        family, kept: the arms of a grid share a family (`window:256`) and differ by a number (its sinks); None for
            others. The knee is looked for in a family.
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """The arm as the grammar writes it."""

    @property
    def random(self) -> bool:
        return False

    @property
    def family(self) -> str | None:
        return None

    @property
    def kept(self) -> int | None:
        return None

    @abstractmethod
    def applied(self, forward: Pass) -> AbstractContextManager[Any]:
        """Puts the arm in force until the block ends; nothing of it may stay, also after an exception."""

    def changes(self, forward: Pass) -> Iterable[str] | None:
        """Paths within the base model of the modules in which the arm begins: outside them and what they hand on, it
        changes nothing. Layers below the first of them need not run again. None where anything may change: then the
        whole model runs. Called before the pass, of which the sinks are not known yet."""
        return None

    def ready(self, setting: Setting) -> Arm:
        """The arm for this model and text. Raises SinkscopeError where it cannot apply; does not run the model."""
        return self

    @property
    def from_run(self) -> str:
        """What a run tells the arm, in one clause; empty where it needs no run. `ready` is called with a run then."""
        return ""

    @property
    def tries(self) -> bool:
        """Whether `tried` runs the model, once for all such arms."""
        return False

    def tried(self, setting: Setting) -> Arm:
        """The arm, after a pass of a few tokens where only this shows whether it applies; then raises SinkscopeError if
        it does not. Called once every arm is ready, before any is prepared, and not where arms are only counted."""
        return self

    @property
    def reads_first(self) -> bool:
        """Whether `prepared` runs the model once over all sequences."""
        return False

    @property
    def reads_tokens(self) -> bool:
        """Whether `ready` needs the tokenizer."""
        return False

    def foreseen(self) -> Arm:
        """The arm in place of `prepared` where arms are only counted: nothing is measured."""
        return self

    def prepared(self, setting: Setting) -> Arm:
        """The arm with what it has to measure first. Called once every arm is ready."""
        return self

    def told(self) -> list[str]:
        """Sentences on what the arm measured before all passes."""
        return []

    def companions(self) -> list[Arm]:
        """Arms that are measured wherever this one is, because its numbers need them. One that cannot apply is left
        out, with a warning, and so are numbers that need it."""
        return []

    def control(self) -> Arm | None:
        """The random arm that this one is held against; None where there is none. Called once it is prepared. A control
        that cannot apply is left out, with a warning."""
        return None


def check_run(arm: Arm, run: object) -> None:
    """Raises SinkscopeError where the arm needs a run and there is none."""
    if arm.from_run and run is None:
        raise SinkscopeError(f"--arm {arm.name}: {arm.from_run}: give --run")


class Unablated(Arm):
    """The model as it is."""

    @property
    def name(self) -> str:
        return UNABLATED

    def applied(self, forward: Pass) -> AbstractContextManager[Any]:
        forward.touches(0)
        return nullcontext()


@contextmanager
def blaming(arm: Arm) -> Iterator[None]:
    """Raises SinkscopeError with the arm's name and its module, where the block fails while an arm from outside is in
    force: the unablated model has run by then. Errors in sinkscope's own words pass, and so does memory that ran
    out."""
    try:
        yield
    except Exception as error:
        module = type(arm).__module__
        own = module.partition(".")[0] == OWN or isinstance(error, SinkscopeError | MemoryError)
        if own or (isinstance(error, RuntimeError) and is_out_of_memory(error)):
            raise
        raise SinkscopeError(f"--arm {arm.name}: {module} fails: {first_line(error)}") from error
