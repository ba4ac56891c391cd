"""The engine of all arms: batch after batch, the unablated model and then every arm, on the same sequences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sinkscope.checkpoints.forward import Forward, probe
from sinkscope.engine.batch_size import memory_needed, overflow_words
from sinkscope.engine.launch import ALONE, Processes
from sinkscope.engine.loop import Progress
from sinkscope.errors import SinkscopeError
from sinkscope.experiments.arms.arm import Arm, Pass, Setting, Unablated, blaming
from sinkscope.experiments.arms.changes import watched
from sinkscope.experiments.arms.finished import Finished
from sinkscope.experiments.arms.readings import Cosines, Reference, SinkCount, batch_size, layers_of
from sinkscope.experiments.arms.replay import Kept, Layers, kept_starts
from sinkscope.runs.saved.arms_table import MEASURES, ArmNumbers


@dataclass(frozen=True)
class Piece:
    """One batch under some of the trials.

    Attributes:
        start, count: the batch's first sequence, and how many it has.
        trials: numbers of the trials. Trial 0, the unablated model, is in every piece: all others are held against it.
        last: no later piece is of this batch.
    """

    start: int
    count: int
    trials: tuple[int, ...]
    last: bool

    @property
    def rows(self) -> slice:
        """The batch's sequences."""
        return slice(self.start, self.start + self.count)


def pieces(batches: Sequence[tuple[int, int]], trials: int, processes: int) -> list[Piece]:
    """The pieces of batches (first sequence, number of sequences), in their order; each process takes one a round.

    A batch's trials are dealt to as many pieces as end soonest: few pieces leave processes idle, and each runs the
    unablated model again. The sequences of a batch stay together, because a pass rounds by how many it has: so any
    number of processes finds the same numbers to the last bit.
    """
    arms = range(1, trials)

    def passes(parts: int) -> int:
        rounds = -(-len(batches) * parts // processes)
        return rounds * (1 + -(-len(arms) // parts))

    parts = min(range(1, processes + 1), key=passes)
    return [
        Piece(start, count, (0, *arms[part::parts]), part == parts - 1)
        for start, count in batches
        for part in range(parts)
    ]


# The engine of all arms: batch after batch, the unablated model and then every arm, on the same sequences.


Trial = tuple[Arm, int | None]
"""An arm, and the number of its draw where it is random."""


def measure(
    setting: Setting,
    arms: Sequence[Arm],
    draws: int,
    report: Progress,
    finished: Finished | None = None,
    processes: Processes = ALONE,
    cosines: bool = False,
) -> list[ArmNumbers]:
    """Measures the unablated model and every arm, a random one `draws` times; the unablated model comes first.

    `cosines`: also those of the tokens behind each layer. `finished` keeps the batches that are done. `processes` share
    the work, and all get the same numbers. Raises SinkscopeError where an arm's loss is not finite, and what an arm
    raises; OutOfMemory where the memory does not suffice.
    """
    trials = trials_of(arms, draws)
    read = layers_of(setting) if cosines else {}
    with nullcontext() if finished is None else finished.kept(main=processes.index == 0):
        values = Engine(setting, trials, report, finished, processes, read).measured()
    return [
        ArmNumbers(
            arm.name,
            arm.family,
            arm.kept,
            draw,
            {name: values[:, trial, at] for at, name in enumerate(MEASURES)},
            {layer: values[:, trial, len(MEASURES) + place] for place, layer in enumerate(read)},
        )
        for trial, (arm, draw) in enumerate(trials)
    ]


def trials_of(arms: Sequence[Arm], draws: int) -> list[Trial]:
    """The unablated model, then every arm, a random one once for each draw: what each sequence is read under."""
    trials: list[Trial] = [(Unablated(), None)]
    for arm in arms:
        trials += [(arm, draw) for draw in range(draws)] if arm.random else [(arm, None)]
    return trials


class Engine:
    """One measurement of all trials on all sequences; `read`: the layers whose tokens are held against each other."""

    def __init__(
        self, setting: Setting, trials: list[Trial], report: Progress, finished: Finished | None,
        processes: Processes, read: dict[int, nn.Module],
    ) -> None:  # fmt: skip
        self._setting, self._trials, self._report = setting, trials, report
        self._finished, self._processes = finished, processes
        self._layers, self._read = Layers(setting), read
        self._starts: dict[int, list[int]] = {}
        self._values = np.full((len(setting.ids), len(trials), len(MEASURES) + len(read)), np.nan)

    def measured(self) -> np.ndarray:
        """Numbers of all sequences, [sequence, trial, measure]: taken from `finished`, or measured and put there."""
        count, size = len(self._setting.ids), batch_size(self._setting.model, self._setting.ids.shape[1])
        batches = [(start, min(size, count - start)) for start in range(0, count, size)]
        self._tell()
        kept = self._processes.on_main(lambda: [self._kept(*batch) for batch in batches])
        for (start, sequences), numbers in zip(batches, kept, strict=True):
            if numbers is not None:
                self._values[start : start + sequences] = numbers
                self._tell()
        left = [batch for batch, numbers in zip(batches, kept, strict=True) if numbers is None]
        if left:
            self._starts = self._processes.run(lambda: starts_of(self._setting, self._layers, self._trials, left))
        work = pieces(left, len(self._trials), self._processes.count)
        for first in range(0, len(work), self._processes.count):
            self._round(work[first : first + self._processes.count])
        return self._values

    def _kept(self, start: int, count: int) -> np.ndarray | None:
        """The numbers that `finished` holds of a batch; None where it holds none that are whole."""
        return None if self._finished is None else self._finished.read(start, (count, *self._values.shape[1:]))

    def _round(self, work: list[Piece]) -> None:
        """Measures one piece in each process; every process then gets the numbers of all."""
        outcomes = self._processes.together(
            lambda: ([self._piece(piece) for piece in self._processes.share(work)], self._setting.plan.failures)
        )
        for piece, numbers in zip(work, chain(*(pieces_done for pieces_done, _ in outcomes)), strict=True):
            self._values[piece.rows, piece.trials] = numbers
        self._setting.plan.failures[:] = dict.fromkeys(chain(*(failures for _, failures in outcomes)))
        self._processes.on_main(lambda: self._keep([piece.rows for piece in work if piece.last]))
        self._tell()

    def _keep(self, batches: list[slice]) -> None:
        if self._finished is not None:
            for rows in batches:
                self._finished.write(rows.start, self._values[rows])

    def _piece(self, piece: Piece) -> np.ndarray:
        with memory_needed("the loss"):
            trials = [self._trials[trial] for trial in piece.trials]
            starts = [self._starts[piece.start][trial] for trial in piece.trials]
            return _measured(self._setting, self._layers, self._read, trials, starts, piece.rows, self._tell)

    def _tell(self, more: int = 0) -> None:
        """Reports how many (sequence, trial) are measured, with `more` of a piece that is not filed yet."""
        losses = self._values[..., MEASURES.index("loss")]
        self._report("ablating", min(int((~np.isnan(losses)).sum()) + more, losses.size), losses.size)


def starts_of(
    setting: Setting, layers: Layers, trials: list[Trial], batches: list[tuple[int, int]]
) -> dict[int, list[int]]:
    """The layer at which each trial starts in each batch, by the batch's first sequence: layers before it are not run
    again. The first trial, the unablated model, runs them all."""
    possible = {
        first: [layers.start(arm, Pass(setting, setting.ids[first : first + count], first, draw or 0))
                if trial else 0 for trial, (arm, draw) in enumerate(trials)]
        for first, count in batches
    }  # fmt: skip

    def unablated(ids: Tensor, sinks: SinkCount, around: AbstractContextManager[Any]) -> Tensor:
        return run(Pass(setting, ids), Unablated(), sinks, around)

    sound, row = layers.sound(set(chain(*possible.values())), probe(setting.checkpoint), unablated, setting.epsilon)
    length = setting.ids.shape[1]
    return {first: kept_starts(possible[first], sound, row * count * length) for first, count in batches}


def _measured(
    setting: Setting, layers: Layers, read: dict[int, nn.Module], trials: list[Trial], starts: list[int], rows: slice,
    passed: Callable[[int], None],
) -> np.ndarray:  # fmt: skip
    """Numbers of one batch, [sequence, trial, measure], behind the measures the cosines of the layers `read`.

    The first trial is the unablated model. `starts`: the layer at which each trial starts. `passed` gets how many
    (sequence, trial) are done.
    """
    text = setting.ids[rows].to(setting.checkpoint.device)
    reference, keys = None, None
    by_trial = []
    kept = Kept(SinkCount(setting.epsilon), Cosines(read))
    for (arm, draw), start in zip(trials, starts, strict=True):
        forward = Pass(setting, text, rows.start, draw or 0, keys)
        if reference is None:
            sinks, cosines, around = kept.sinks, kept.cosines, layers.recorded(kept, starts)
        else:
            sinks, cosines = SinkCount(setting.epsilon), Cosines(read)
            around = layers.replayed(kept, start, sinks, cosines)
        with cosines.watched():
            logits = run(forward, arm, sinks, around)
        if reference is None:
            reference, keys = Reference(logits, text), None if setting.no_sinks else sinks.keys
        numbers = reference.compare(logits) | _sink_rates(setting, sinks, len(text))
        if not reference.normalised:
            reference.normalise()
        del logits  # or the next pass would run beside three passes' logits
        numbers["size"] = torch.full((len(text),), torch.nan) if forward.size is None else forward.size
        if not bool(numbers["loss"].isfinite().all()):
            dtype = setting.checkpoint.facts["dtype"]
            raise SinkscopeError(f"the loss under {arm.name} is NaN or infinite: {overflow_words(dtype)}")
        measures = torch.stack([numbers[name].double().cpu() for name in MEASURES], -1)
        by_trial.append(torch.cat([measures, cosines.values], -1) if read else measures)
        passed(len(by_trial) * len(text))
    return torch.stack(by_trial, 1).numpy()


def run(forward: Pass, arm: Arm, sinks: SinkCount, around: AbstractContextManager[Any] | None = None) -> Tensor:
    """The next-token logits under an arm, [sequence, T, vocabulary]; `sinks` gets its attention sums. `around`: what
    else is in force."""
    with torch.no_grad(), watched(forward, sinks), blaming(arm), arm.applied(forward), around or nullcontext():
        logits: Tensor = Forward(forward.setting.model)(forward.ids).logits
    return logits


def _sink_rates(setting: Setting, sinks: SinkCount, count: int) -> dict[str, Tensor]:
    """Missing where the model computes some attention in its own code, or not by a softmax."""
    rates = torch.full((count, 2), torch.nan) if setting.no_sinks else sinks.rates()
    return {"sink_rate_first": rates[:, 0], "sink_rate_any": rates[:, 1]}
