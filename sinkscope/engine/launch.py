"""The processes of one launch (accelerate launch, torchrun): this process's rank, and what the processes exchange.

A single process is the default and imports nothing. In a launch every process takes the same steps in the same order,
and reports how each ended to all others: a failure of one, or Ctrl-C, reaches all, and none waits for one that ended.
"""

from __future__ import annotations

import os
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

from sinkscope.engine.launcher import UNSET, is_main, size, told_by
from sinkscope.errors import OutOfMemory, SinkscopeError, first_line, in_one_line

T = TypeVar("T")

PATIENCE = timedelta(hours=2)
"""How long a process waits for the others: one may load from a slow disk, or save, while the rest are done."""

START = timedelta(minutes=1)
"""How long a process waits for the others to start. A launcher starts them together, but their disks may be slow."""

FAREWELL, MAIN_FAREWELL = timedelta(seconds=30), timedelta(seconds=5)
"""How long a command that was refused waits for the others: the main process says why, and no other may end it."""

GONE = "another process of the launch has ended (killed, or out of memory); --resume goes on with what was measured"


class Processes:
    """This process and the others of its launch. The base class is a single process, whose steps are plain calls.

    Attributes:
        index, count: 0 .. count - 1; 0 is the main process, which alone prints and writes.
        tensor: the heads of one model are spread over the processes (--tp), not the sequences.
    """

    index, count, tensor = 0, 1, False

    def device(self, name: str) -> str:
        """The device to load on for --device `name`: in a launch auto and cuda mean a GPU for each process."""
        return name

    def check(self, model: Any, device_map: Any) -> None:
        """Raises SinkscopeError for a scan that several processes cannot share."""

    def share(self, work: Sequence[T]) -> list[T]:
        """Returns this process's part of the work: every count-th piece, or all of it under --tp."""
        return list(work)

    def together(self, step: Callable[[], T]) -> list[T]:
        """Runs the step in every process; returns the results of all, by process (they must be picklable).

        Raises what the step raised here, or a SinkscopeError naming the process in which it failed; KeyboardInterrupt
        where any process was interrupted. Either all processes raise or none.
        """
        return [step()]

    def run(self, step: Callable[[], T]) -> T:
        """Runs the step in every process; returns the result of this one. Raises as `together` does."""
        results: list[T] = []
        self.together(lambda: results.append(step()))
        return results[0]

    def require_same(self, facts: Any) -> None:
        """Raises SinkscopeError where another process has other facts, because its machine sees other files."""

    def on_main(self, step: Callable[[], T]) -> T:
        """Runs the step in the main process alone; returns its result in all. Raises as `together` does."""
        return step()


ALONE = Processes()


@dataclass(frozen=True)
class _Report:
    """What one process reports to the others at the end of a step. `left`: its exit code, once it is done."""

    value: Any = None
    error: str | None = None
    interrupted: bool = False
    left: int | None = None


class Launched(Processes):
    """One of several processes."""

    def __init__(self, device: str = "auto", tensor: bool = False, wait: timedelta = START) -> None:
        import torch

        self.tensor = tensor
        own_gpu = device in ("auto", "cuda") and torch.cuda.is_available()
        local, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count()
        if own_gpu and local > gpus:
            raise SinkscopeError(f"{local} processes, but {gpus} GPUs here: start one per GPU, or give --device")
        self._state = join(not own_gpu, wait, PATIENCE if wait == START else wait)
        self.index, self.count = self._state.process_index, self._state.num_processes
        self._in_step = self._pending = self._stopping = self._broken = False
        signal.signal(signal.SIGINT, self._interrupted)

    def device(self, name: str) -> str:
        return str(self._state.device) if name in ("auto", "cuda") else name

    def check(self, model: Any, device_map: Any) -> None:
        if device_map is not None:
            raise SinkscopeError(
                "--device-map spreads a model over the devices of one process: start one, or give --tp"
            )
        if self.tensor and not isinstance(model, str):
            raise SinkscopeError("--tp spreads a model while it is loaded: give the model's name")

    def share(self, work: Sequence[T]) -> list[T]:
        return list(work) if self.tensor else list(work[self.index :: self.count])

    def require_same(self, facts: Any) -> None:
        answers = self.together(lambda: facts)
        process = next((index for index, answer in enumerate(answers) if answer != answers[0]), None)
        if process is not None:
            raise SinkscopeError(
                f"process {process} reads other weights or text than process 0: do both see the same files?"
            )

    def on_main(self, step: Callable[[], T]) -> T:
        return self.together(lambda: step() if self.index == 0 else None)[0]  # type: ignore[return-value]

    def together(self, step: Callable[[], T]) -> list[T]:
        own_report, error = self._take(step)
        reports = self._exchange(own_report)
        if any(report.interrupted for report in reports):
            self._stopping, self._pending = True, False  # the launcher sends the signal again while main saves
            raise KeyboardInterrupt
        for index, report in enumerate(reports):
            if report.error is not None:
                raise error if error is not None and index == self.index else _elsewhere(index, report.error)
            if report.left is not None:
                raise _elsewhere(index, f"ended with exit code {report.left}")
        return [report.value for report in reports]

    def leave(self, code: int) -> int:
        """Waits until all processes are done, so that none ends the others early; returns the exit code they share."""
        shared = None
        try:
            while shared is None and not self._broken:
                codes = [report.left for report in self._exchange(_Report(left=code))]
                if None not in codes:  # else another process has learned only now that this one is done
                    shared = next((exit_code for exit_code in codes if exit_code), 0)
                    self._exchange(_Report())  # all know the code now; it does no harm if one has ended
        except SinkscopeError:
            return code or 2 if shared is None else shared
        return code if shared is None else shared

    def _take(self, step: Callable[[], T]) -> tuple[_Report, Exception | None]:
        try:
            try:
                self._in_step = True
                if self._pending:
                    raise KeyboardInterrupt
                return _Report(step()), None
            finally:
                self._in_step = False
        except KeyboardInterrupt:
            self._in_step = False
            return _Report(interrupted=True), None
        except Exception as error:
            if self.tensor and (isinstance(error, OutOfMemory) or not isinstance(error, SinkscopeError)):
                self._end_alone(error)
            return _Report(error=in_one_line(error)), error

    def _end_alone(self, error: Exception) -> None:
        """Ends this process alone: under --tp the others may be inside a layer, waiting for its part of the heads.

        This process cannot tell them; the launcher ends them as soon as it has ended.
        """
        from sinkscope.capture.private_doors import lost_process

        self._broken = True
        if lost_process(error):
            raise SinkscopeError(GONE) from None
        if self.index:
            print(f"sinkscope: error: {_elsewhere(self.index, in_one_line(error))}", file=sys.__stderr__)
        raise error

    def _exchange(self, own: _Report) -> list[_Report]:
        from accelerate.utils import gather_object

        try:
            if not self._broken:
                return gather_object([own])
        except RuntimeError:
            self._broken = True
        raise SinkscopeError(GONE)

    def _interrupted(self, number: int, frame: Any) -> None:
        """Ends a step on Ctrl-C, but never an exchange, nor under --tp a pass, whose layers wait for each other."""
        if self._stopping:
            return
        if self._in_step and not self.tensor:
            raise KeyboardInterrupt
        self._pending = True


_launched: Launched | None = None


def start_processes(device: str = "auto", tensor: bool = False) -> Processes:
    """Joins the other processes of the launch and returns them; ALONE where there are none. `device`: as --device.

    `tensor`: they spread the heads of one model (--tp). From then on Ctrl-C takes effect within steps only. Raises
    SinkscopeError where there are fewer GPUs than processes.
    """
    global _launched  # noqa: PLW0603 - the process group of torch is one for the whole process
    if size() == 1:
        return ALONE
    if _launched is None:
        _launched = Launched(device, tensor)
    return _launched


def leave(code: int) -> int:
    """Ends a command: waits for the other processes, then ends this one with the exit code that all share.

    Without a launch it returns the code. In a launch it does not return: threads of torch's process group still run,
    and sometimes abort a process that exits in the ordinary way.
    """
    if size() == 1 or waited_in_vain():
        return code
    try:
        launched = _launched or Launched("cpu", wait=MAIN_FAREWELL if is_main() else FAREWELL)
    except SinkscopeError:  # there are no others: what a launcher left in the environment
        return code
    code = launched.leave(code)
    sys.stderr.flush()
    os._exit(code)


def _elsewhere(index: int, text: str) -> SinkscopeError:
    return SinkscopeError(f"process {index}: {text}")


# Joins the processes of a launch, and does not wait long for processes that never start.


_in_vain = False


def waited_in_vain() -> bool:
    """Whether this process has waited for others that did not appear."""
    return _in_vain


def join(cpu: bool, wait: timedelta, patience: timedelta) -> Any:
    """Returns accelerate's state of this process once all processes of the launch have started.

    Args:
        cpu: whether the process computes on the CPU although there is a GPU.
        wait: how long the processes may take to start; a launcher starts them together.
        patience: how long a step of the joined processes may take.

    Raises SinkscopeError where the others do not start in time: variables of another launch were left behind. A
    process that is not the main one also prints it, since all else that it prints is discarded.
    """
    global _in_vain  # noqa: PLW0603 - a process has one launch
    from accelerate import PartialState

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            state = PartialState(cpu=cpu, timeout=wait)
            _ = state.process_index
            _be_patient(patience)
        except (ValueError, KeyError, AttributeError, RuntimeError, OSError) as error:
            detail = first_line(error)
            line = (
                f"the environment tells of a launch ({told_by()}) whose other processes did not appear within "
                f"{wait.total_seconds():.0f} s ({detail}): {UNSET}"
            )
            _in_vain = True
            if not is_main() and sys.__stderr__ is not None:
                print(f"sinkscope: error: {line}", file=sys.__stderr__)
            raise SinkscopeError(line) from None
    return state


def _be_patient(patience: timedelta) -> None:
    """Lets the processes wait longer for each other than for their start."""
    from sinkscope.capture.private_doors import set_process_timeout

    set_process_timeout(patience)
