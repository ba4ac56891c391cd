"""The engine of all arms: batch after batch, the unablated model and then every arm, on the same sequences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from sinkscope.capture.plan import INTERFACE
from sinkscope.checkpoints.forward import Forward
from sinkscope.engine.batch_size import memory_needed
from sinkscope.engine.launch import ALONE, Processes
from sinkscope.engine.loop import Progress
from sinkscope.errors import SinkscopeError
from sinkscope.experiments.arms.arm import Arm, Pass, Setting, Unablated
from sinkscope.experiments.arms.calls import watched
from sinkscope.experiments.arms.compared import Reference
from sinkscope.experiments.arms.finished import Finished
from sinkscope.experiments.arms.loss import batch_size
from sinkscope.experiments.arms.measured import MEASURES, Measured
from sinkscope.experiments.arms.sharing import Piece, pieces
from sinkscope.experiments.arms.sinks import SinkCount

Job = tuple[Arm, int | None]
"""An arm, and the number of its draw where it is random."""


def measure(
    setting: Setting,
    arms: Sequence[Arm],
    draws: int,
    report: Progress,
    finished: Finished | None = None,
    processes: Processes = ALONE,
) -> list[Measured]:
    """Measures the unablated model and every arm, a random one `draws` times; the unablated model comes first.

    `finished` keeps the batches that are done. `processes` share the work, and all get the same numbers. Raises
    SinkscopeError where an arm's loss is not finite, and what an arm raises; OutOfMemory where the memory does not
    suffice.
    """
    jobs: list[Job] = [(Unablated(), None)]
    for arm in arms:
        jobs += [(arm, draw) for draw in range(draws)] if arm.random else [(arm, None)]
    with nullcontext() if finished is None else finished.kept(main=processes.index == 0):
        values = Engine(setting, jobs, report, finished, processes).measured()
    return [
        Measured(arm.name, arm.family, arm.kept, draw, {name: values[:, job, at] for at, name in enumerate(MEASURES)})
        for job, (arm, draw) in enumerate(jobs)
    ]


class Engine:
    """One measurement of all jobs on all sequences."""

    def __init__(
        self, setting: Setting, jobs: list[Job], report: Progress, finished: Finished | None, processes: Processes
    ) -> None:
        self._setting, self._jobs, self._report = setting, jobs, report
        self._finished, self._processes = finished, processes
        self._values = np.full((len(setting.ids), len(jobs), len(MEASURES)), np.nan)

    def measured(self) -> np.ndarray:
        """Numbers of all sequences, [sequence, job, measure]: taken from `finished`, or measured and put there."""
        count, size = len(self._setting.ids), batch_size(self._setting.model, self._setting.ids.shape[1])
        batches = [(start, min(size, count - start)) for start in range(0, count, size)]
        self._tell()
        kept = self._processes.on_main(lambda: [self._kept(*batch) for batch in batches])
        for (start, own), known in zip(batches, kept, strict=True):
            if known is not None:
                self._values[start : start + own] = known
                self._tell()
        left = [batch for batch, known in zip(batches, kept, strict=True) if known is None]
        work = pieces(left, len(self._jobs), self._processes.count)
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
        for piece, numbers in zip(work, chain(*(found for found, _ in outcomes)), strict=True):
            self._values[piece.rows, piece.jobs] = numbers
        self._setting.plan.failures[:] = dict.fromkeys(chain(*(failures for _, failures in outcomes)))
        self._processes.on_main(lambda: self._keep([piece.rows for piece in work if piece.last]))
        self._tell()

    def _keep(self, batches: list[slice]) -> None:
        if self._finished is not None:
            for rows in batches:
                self._finished.write(rows.start, self._values[rows])

    def _piece(self, piece: Piece) -> np.ndarray:
        with memory_needed("the loss"):
            return _measured(self._setting, [self._jobs[job] for job in piece.jobs], piece.rows, self._tell)

    def _tell(self, more: int = 0) -> None:
        """Reports how many (sequence, job) are measured, with `more` of a piece that is not filed yet."""
        losses = self._values[..., MEASURES.index("loss")]
        self._report("ablating", min(int((~np.isnan(losses)).sum()) + more, losses.size), losses.size)


def _measured(setting: Setting, jobs: list[Job], rows: slice, passed: Callable[[int], None]) -> np.ndarray:
    """Numbers of one batch, [sequence, job, measure]; the first job is the unablated model. `passed` gets how many
    (sequence, job) are done."""
    text = setting.ids[rows].to(setting.checkpoint.device)
    reference, keys = None, None
    found = []
    for arm, draw in jobs:
        one = Pass(setting, text, rows.start, draw or 0, keys)
        sinks = SinkCount(setting.epsilon)
        logits = run(one, arm, sinks)
        if reference is None:
            reference, keys = Reference(logits, text), _keys(setting, sinks, text)
        numbers = reference.compare(logits) | _sink_rates(setting, sinks, len(text))
        del logits  # or the next pass would run beside three passes' logits
        numbers["size"] = torch.zeros(len(text)) if one.size is None else one.size
        if not bool(numbers["loss"].isfinite().all()):
            raise SinkscopeError(
                f"the loss under {arm.name} is NaN or infinite: the dtype overflows; try --dtype float32"
            )
        found.append(torch.stack([numbers[name].double().cpu() for name in MEASURES], -1))
        passed(len(found) * len(text))
    return torch.stack(found, 1).numpy()


def run(one: Pass, arm: Arm, sinks: SinkCount) -> Tensor:
    """The next-token logits under an arm, [sequence, T, vocabulary]; `sinks` gets its attention sums."""
    with torch.no_grad(), watched(one, sinks), arm.applied(one):
        logits: Tensor = Forward(one.setting.model)(one.ids).logits
    return logits


def _readable(setting: Setting) -> bool:
    return all(site.path == INTERFACE for site in setting.sites)


def _keys(setting: Setting, sinks: SinkCount, text: Tensor) -> Tensor | None:
    return sinks.keys if _readable(setting) else None


def _sink_rates(setting: Setting, sinks: SinkCount, count: int) -> dict[str, Tensor]:
    """Missing where the model computes some attention in its own code."""
    rates = sinks.rates() if _readable(setting) else torch.full((count, 2), torch.nan)
    return {"sink_rate_first": rates[:, 0], "sink_rate_any": rates[:, 1]}
