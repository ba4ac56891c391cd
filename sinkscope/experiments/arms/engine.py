"""The engine of all arms: batch after batch, the unablated model and then every arm, on the same sequences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext

import numpy as np
import torch
from torch import Tensor

from sinkscope.capture.plan import INTERFACE
from sinkscope.checkpoints.forward import Forward
from sinkscope.engine.batch_size import memory_needed
from sinkscope.engine.loop import Progress
from sinkscope.errors import SinkscopeError
from sinkscope.experiments.arms.arm import Arm, Pass, Setting, Unablated
from sinkscope.experiments.arms.calls import watched
from sinkscope.experiments.arms.compared import Reference
from sinkscope.experiments.arms.finished import Finished
from sinkscope.experiments.arms.loss import batch_size
from sinkscope.experiments.arms.measured import MEASURES, Measured
from sinkscope.experiments.arms.sinks import SinkCount


def measure(
    setting: Setting, arms: Sequence[Arm], draws: int, report: Progress, finished: Finished | None = None
) -> list[Measured]:
    """Measures the unablated model and every arm, a random one `draws` times; the unablated model comes first.

    `finished` keeps the batches that are done. Raises SinkscopeError where an arm's loss is not finite, and what an arm
    raises; OutOfMemory where the memory does not suffice.
    """
    jobs: list[tuple[Arm, int | None]] = [(Unablated(), None)]
    for arm in arms:
        jobs += [(arm, draw) for draw in range(draws)] if arm.random else [(arm, None)]
    with nullcontext() if finished is None else finished.kept():
        values = np.concatenate(list(_batches(setting, jobs, report, finished)))
    return [
        Measured(arm.name, arm.family, arm.kept, draw, {name: values[:, job, at] for at, name in enumerate(MEASURES)})
        for job, (arm, draw) in enumerate(jobs)
    ]


def _batches(
    setting: Setting, jobs: list[tuple[Arm, int | None]], report: Progress, finished: Finished | None
) -> Iterator[np.ndarray]:
    """Numbers of batch after batch, [sequence, job, measure]: taken from `finished`, or measured and put there."""
    count, size = len(setting.ids), batch_size(setting.model, setting.ids.shape[1])
    total = len(jobs) * count
    report("ablating", 0, total)
    for start in range(0, count, size):
        known = None if finished is None else finished.read(start, (min(size, count - start), len(jobs), len(MEASURES)))
        if known is None:
            with memory_needed("the loss"):
                known = _batch(setting, jobs, start, size, report, total)
            if finished is not None:
                finished.write(start, known)
        yield known
        report("ablating", min(start + size, count) * len(jobs), total)


def _batch(
    setting: Setting, jobs: list[tuple[Arm, int | None]], start: int, size: int, report: Progress, total: int
) -> np.ndarray:
    """Numbers of one batch, [sequence, job, measure]."""
    text = setting.ids[start : start + size].to(setting.checkpoint.device)
    reference, keys = None, None
    found = []
    for job, (arm, draw) in enumerate(jobs):
        one = Pass(setting, text, start, draw or 0, keys)
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
        report("ablating", start * len(jobs) + (job + 1) * len(text), total)
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
