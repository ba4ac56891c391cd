"""Metrics of others as guests of a scan: one that fails loses its columns, and the scan's other columns stand.

A guest sees views that it cannot change (`capture.sealed`). It fails where it raises an exception, returns something
else than real numbers of the right shape, or changes the process: torch's settings, the working directory, stdout. What
it changed of these is put back. It is not called again in that scan.
"""

from __future__ import annotations

import copy
import inspect
import io
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sinkscope.capture.precision import as_widest
from sinkscope.capture.private_doors import is_out_of_memory, times_written
from sinkscope.capture.sites import Site
from sinkscope.capture.view import LayerView, Missing, sealed
from sinkscope.errors import SinkscopeError
from sinkscope.metrics.registry import Metric, MetricSet

SLOW_SECONDS = 5.0
"""A guest that takes less than this is never called slow."""

ELSEWHERE = "it failed in another process of the launch"


class Failed(SinkscopeError):
    """A guest did something it must not do. The text says what, in one line."""


@dataclass(eq=False)
class Guest:
    """One function of others, which declares one metric, or two where it is `normalised`.

    Attributes:
        names: the names of its metrics.
        failed: why it failed in this scan, in one line; None while it has not.
        seconds: how long it took in this process.
    """

    names: tuple[str, ...]
    failed: str | None = None
    seconds: float = 0.0

    @property
    def title(self) -> str:
        """The name of its metric; the name of a second one follows in brackets."""
        return self.names[0] + "".join(f" (with {name})" for name in self.names[1:])

    def calling(self, metric: Metric) -> Metric:
        """The metric as a scan computes it. Its function raises Missing once the guest has failed."""

        @wraps(metric.compute)
        def compute(view: LayerView) -> Tensor:
            if self.failed is not None:
                raise Missing
            began = time.perf_counter()
            try:
                return self._numbers(metric, view)
            finally:
                self.seconds += time.perf_counter() - began

        compute.guest = self  # type: ignore[attr-defined]
        return replace(metric, compute=compute, begin=None)

    def _numbers(self, metric: Metric, view: LayerView) -> Tensor:
        """What the metric returns for a view. Where it fails, in any process of --tp, `failed` says why.

        Raises Missing there; SinkscopeError where others cannot trust what they read of the view any more.
        """
        before = _counted(view)
        together = None if view.head_mean is None or metric.sampled else _Together(view)
        values = None
        try:
            values = self._checked(metric, view if together is None else together.shown)
        except Missing:
            pass
        except Failed as failure:
            self.failed = str(failure)
        if together is not None and not together.end(self.failed is None):
            self.failed = self.failed or ELSEWHERE
        changed = next((name for name, tensor, times in before if times_written(tensor) != times), None)
        if changed is not None:
            raise SinkscopeError(
                f"metric {metric.name}: it changed `{changed}`, which other columns read, from where sinkscope cannot "
                "hold it off (a thread of its own): leave it out, or let it work on copies: .clone()"
            )
        if values is None or self.failed is not None:
            raise Missing
        return values

    def _checked(self, metric: Metric, view: LayerView) -> Tensor:
        try:
            with _unchanged(), printed_to_stderr(), sealed(view) as shown:
                return _real_numbers(metric.compute(shown), metric, view.attention.first)
        except (Failed, Missing, MemoryError, KeyboardInterrupt):
            raise
        except BaseException as error:  # sys.exit too: a guest does not end the scan
            if isinstance(error, RuntimeError) and is_out_of_memory(error):
                raise  # the batch is halved and measured again
            raise Failed(one_line(error, _file_of(metric.compute))) from error


def as_guests(metrics: Iterable[Metric]) -> list[Metric]:
    """The metrics, each called as a guest; those of one function are one guest. Each call makes new guests."""
    by_function: dict[int, list[Metric]] = {}
    for metric in metrics:
        by_function.setdefault(id(inspect.unwrap(metric.compute)), []).append(metric)
    guests = [(Guest(tuple(metric.name for metric in group)), group) for group in by_function.values()]
    return [guest.calling(metric) for guest, group in guests for metric in group]


class Guests:
    """The guests of one scan."""

    def __init__(self, metrics: MetricSet) -> None:
        functions = [metric.compute for table in metrics.tables.values() for metric in table.values()]
        self._guests: list[Guest] = list(
            {id(function.guest): function.guest for function in functions if hasattr(function, "guest")}.values()
        )

    @property
    def failed(self) -> dict[str, str]:
        """Why a metric failed, by its name."""
        return {name: guest.failed for guest in self._guests if guest.failed is not None for name in guest.names}

    @property
    def left_out(self) -> list[str]:
        """A line for each guest that failed."""
        return [
            f"metric {guest.title} is left out: {guest.failed}" for guest in self._guests if guest.failed is not None
        ]

    def learn(self, failed: dict[str, str]) -> None:
        """Takes over what failed in another process, or in an earlier scan that this one goes on with."""
        for guest in self._guests:
            reason = next((failed[name] for name in guest.names if name in failed), None)
            if reason is not None and guest.failed in (None, ELSEWHERE):
                guest.failed = reason

    @property
    def seconds(self) -> dict[str, float]:
        """How long each guest took in this process, by the name of its first metric."""
        return {guest.names[0]: guest.seconds for guest in self._guests}


def slow(seconds: dict[str, float], scan: float) -> list[str]:
    """Warns of each guest that took longer than everything else together. `scan`: seconds in passes and metrics."""
    rest = max(0.0, scan - sum(seconds.values()))
    return [
        f"metric {name} took {spent:.0f} s, longer than the model and all other columns together ({rest:.0f} s)"
        for name, spent in seconds.items()
        if spent > max(rest, SLOW_SECONDS)
    ]


def _file_of(function: Any) -> str | None:
    """The name of the file that holds a function; None for what is called without being a function of Python."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return None if code is None else Path(code.co_filename).name


def one_line(error: BaseException, file: str | None = None) -> str:
    """An error in the code of others, in one line, with the line of their file that led to it."""
    try:
        text = str(error).strip()
    except Exception:  # an exception of theirs, whose text fails in turn
        text = ""
    if isinstance(error, SinkscopeError):
        return text
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).name == file]
    place = f" (line {frames[-1].lineno} of {file})" if frames else ""
    return f"{type(error).__name__}: {text.splitlines()[0] if text else ''}{place}"


@contextmanager
def printed_to_stderr() -> Iterator[None]:
    """Sends what the block prints to stderr, once it has ended: stdout is for results.

    Raises Failed where the block closes one of the two.
    """
    told = io.StringIO()
    try:
        with redirect_stdout(told), redirect_stderr(told):
            yield
    finally:
        if not told.closed:
            sys.stderr.write(told.getvalue())
    if told.closed:
        raise Failed("it closes stdout or stderr, which are not its own")


def _real_numbers(values: Any, metric: Metric, first: Tensor) -> Tensor:
    """A copy of what a metric returned, in the widest float type. Raises Failed where it is something else."""
    wanted = tuple(first.shape[:2] if metric.table == "heads" else first.shape[:1])
    returned = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
    if returned != wanted:
        of = "[sequence, head]" if metric.table == "heads" else "[sequence]"
        raise Failed(f"returned {returned}; a tensor {of} = {wanted} is needed")
    kinds = {
        "complex numbers": values.is_complex(),
        "quantised numbers": values.is_quantized,
        "a sparse tensor": values.layout != torch.strided,
        "a tensor without numbers (meta)": values.is_meta,
    }
    kind = next((name for name, is_so in kinds.items() if is_so), None)
    if kind is not None:
        raise Failed(f"returned {kind}; a dense tensor of real numbers is needed")
    return as_widest(values.detach().to(first.device)).clone()


def _folder() -> str | None:
    try:
        return str(Path.cwd())
    except OSError:  # it was removed
        return None


def _set_device(device: torch.device) -> None:
    torch.set_default_device(None if device.type == "cpu" else device)  # a default of cpu would slow torch down


STATES: tuple[tuple[str, Callable[[], Any], Callable[[Any], Any]], ...] = (
    ("whether torch follows gradients (write `with torch.enable_grad():`)", torch.is_grad_enabled,
     torch.set_grad_enabled),
    ("torch's default dtype", torch.get_default_dtype, torch.set_default_dtype),
    ("torch's default device", torch.get_default_device, _set_device),
    ("the number of torch's threads", torch.get_num_threads, torch.set_num_threads),
    ("the precision of torch's products", torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    ("torch's deterministic algorithms", torch.are_deterministic_algorithms_enabled,
     torch.use_deterministic_algorithms),
    ("the working directory", _folder, os.chdir),
)  # fmt: skip
"""What belongs to the whole process: its name in an error, how it is asked and how it is set."""


@contextmanager
def _unchanged() -> Iterator[None]:
    """Puts back what the block changes of the process. Raises Failed where it changed something."""
    before, changed = [ask() for _, ask, _ in STATES], list[str]()
    with torch.inference_mode(torch.is_inference_mode_enabled()), torch.set_grad_enabled(before[0]):
        try:
            yield
        finally:
            for (what, ask, put_back), state in zip(STATES, before, strict=True):
                if ask() != state:
                    changed.append(what)
                    put_back(state)
    if changed:
        raise Failed(f"it changes {changed[0]} for all that comes after it")


def _counted(view: LayerView) -> list[tuple[str, Tensor, int]]:
    """The tensors that a metric is shown, by name, each with torch's count of the writes into it."""
    named = [*vars(view).items(), *vars(view.attention).items()]
    return [(name, value, times_written(value)) for name, value in named if isinstance(value, Tensor)]


class _Together:
    """--tp: the processes, each with its own heads, call a guest together, and agree on each of its steps.

    A guest that fails in one process alone would otherwise leave the others waiting in `LayerView.layer_mean`.
    """

    MEAN, END, FAILURE = range(3)

    def __init__(self, view: LayerView) -> None:
        self.shown = copy.copy(view)
        self.shown.head_mean = self._head_mean
        self._mean, self._device = view.head_mean, view.attention.first.device
        self._agreed = True

    def _head_mean(self, site: Site, local: Tensor) -> Tensor:
        """The mean over all heads. Raises Failed where another process does not ask for one."""
        if self._mean is None or not self._all(self.MEAN):
            raise Failed(ELSEWHERE)
        return self._mean(site, local)

    def end(self, well: bool) -> bool:
        """Whether the guest's call ended well in all processes."""
        return self._all(self.END if well else self.FAILURE) and well

    def _all(self, step: int) -> bool:
        """Whether all processes take the same step; False from the first time on that they do not."""
        from accelerate.utils import reduce

        if self._agreed:
            steps = torch.zeros(3, device=self._device)
            steps[step] = 1
            total = reduce(steps, "sum")
            self._agreed = bool(total[step] == total.sum())
        return self._agreed
