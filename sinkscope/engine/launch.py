"""The processes of one launch (accelerate launch, torchrun): which one this is, and how they tell each other.

Nothing else in the package asks for a rank. A process alone is the default: it costs nothing and imports nothing. In a
launch every process takes the same steps in the same order, and tells all others at the end of each how it went. So a
failure of one, or Ctrl-C, reaches all at the next step, and none waits for a process that has gone.
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

from sinkscope.engine.launcher import size
from sinkscope.errors import OutOfMemory, SinkscopeError, in_one_line

T = TypeVar("T")

PATIENCE = timedelta(hours=2)
"""How long a process waits for the others: one may load from a slow disk, or save, while the rest are done."""

GONE = "another process of the launch has ended (killed, or out of memory); --resume goes on with what was measured"


class Processes:
    """This process and the others of its launch. This class: a process alone, whose steps are plain calls.

    Attributes:
        index, count: 0 .. count - 1; 0 is the main process, which alone prints and writes.
        tensor: the heads of one model are spread over the processes (--tp), not the sequences.
    """

    index, count, tensor = 0, 1, False

    def device(self, name: str) -> str:
        """The device to load on where the user gave `name`: in a launch auto and cuda mean a GPU for each process."""
        return name

    def check(self, model: Any, device_map: Any, smoothing: bool) -> None:
        """Refuses a scan that several processes cannot share. Raises SinkscopeError."""

    def share(self, work: Sequence[T]) -> list[T]:
        """The part of the work that is this process's: every count-th piece; all of it under --tp."""
        return list(work)

    def together(self, step: Callable[[], T]) -> list[T]:
        """Every process takes the step; what it gave in each, in their order (it must be picklable).

        Raises what the step raised here, or a SinkscopeError naming the process it failed in; KeyboardInterrupt where
        any was interrupted. All processes raise, or none.
        """
        return [step()]

    def agree(self, step: Callable[[], T]) -> T:
        """Every process takes the step; what it gave in this one. Raises as `together` does."""
        given: list[T] = []
        self.together(lambda: given.append(step()))
        return given[0]

    def same(self, facts: Any) -> None:
        """Raises a SinkscopeError where another process has found other facts: a machine that sees other files."""

    def on_main(self, step: Callable[[], T]) -> T:
        """The main process alone takes the step; all get what it gave. Raises as `together` does."""
        return step()


ALONE = Processes()


@dataclass(frozen=True)
class _Told:
    """What one process tells the others at the end of a step. `left`: it is done, with this exit code."""

    value: Any = None
    error: str | None = None
    interrupted: bool = False
    left: int | None = None


class Launched(Processes):
    """One of several processes."""

    def __init__(self, device: str = "auto", tensor: bool = False) -> None:
        import torch
        from accelerate import PartialState

        self.tensor = tensor
        own_gpu = device in ("auto", "cuda") and torch.cuda.is_available()
        here, there = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count()
        if own_gpu and here > there:
            raise SinkscopeError(f"{here} processes, but {there} GPUs here: start one for each, or give --device")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._state = PartialState(cpu=not own_gpu, timeout=PATIENCE)
        self.index, self.count = self._state.process_index, self._state.num_processes
        self._in_step = self._pending = self._stopping = self._broken = False
        signal.signal(signal.SIGINT, self._interrupted)

    def device(self, name: str) -> str:
        return str(self._state.device) if name in ("auto", "cuda") else name

    def check(self, model: Any, device_map: Any, smoothing: bool) -> None:
        if device_map is not None:
            raise SinkscopeError(
                "--device-map spreads a model over the devices of one process: start one, or give --tp"
            )
        if self.tensor and not isinstance(model, str):
            raise SinkscopeError("--tp: a model is spread while it is loaded: give its name")
        if self.tensor and smoothing:
            raise SinkscopeError("--tp with --smoothing: W_V is found by its numbers, which no process holds whole")

    def share(self, work: Sequence[T]) -> list[T]:
        return list(work) if self.tensor else list(work[self.index :: self.count])

    def same(self, facts: Any) -> None:
        told = self.together(lambda: facts)
        other = next((index for index, each in enumerate(told) if each != told[0]), None)
        if other is not None:
            raise SinkscopeError(f"process {other} reads other weights or text than process 0: see all the same files?")

    def on_main(self, step: Callable[[], T]) -> T:
        return self.together(lambda: step() if self.index == 0 else None)[0]  # type: ignore[return-value]

    def together(self, step: Callable[[], T]) -> list[T]:
        own, error = self._take(step)
        told = self._tell(own)
        if any(each.interrupted for each in told):
            self._stopping, self._pending = True, False  # the launcher sends the signal again while main saves
            raise KeyboardInterrupt
        for index, each in enumerate(told):
            if each.error is not None:
                raise error if error is not None and index == self.index else _elsewhere(index, each.error)
            if each.left is not None:
                raise _elsewhere(index, f"ended with exit code {each.left}")
        return [each.value for each in told]

    def leave(self, code: int) -> int:
        """Waits until all processes are done, so that none ends the others early; the exit code they share."""
        shared = None
        try:
            while shared is None and not self._broken:
                codes = [each.left for each in self._tell(_Told(left=code))]
                if None not in codes:  # else another has learned only now that this one is done
                    shared = next((other for other in codes if other), 0)
                    self._tell(_Told())  # all know the code now; where one has gone already, nothing is lost
        except SinkscopeError:
            return code or 2 if shared is None else shared
        return code if shared is None else shared

    def _take(self, step: Callable[[], T]) -> tuple[_Told, Exception | None]:
        try:
            try:
                self._in_step = True
                if self._pending:
                    raise KeyboardInterrupt
                return _Told(step()), None
            finally:
                self._in_step = False
        except KeyboardInterrupt:
            self._in_step = False
            return _Told(interrupted=True), None
        except Exception as error:
            if self.tensor and (isinstance(error, OutOfMemory) or not isinstance(error, SinkscopeError)):
                self._fall(error)
            return _Told(error=in_one_line(error)), error

    def _fall(self, error: Exception) -> None:
        """Ends this process alone: under --tp the others may be inside a layer, waiting for its part of the heads.

        They cannot be told; the launcher ends them as soon as this one has ended.
        """
        self._broken = True
        if "gloo/transport" in str(error) or type(error).__name__.startswith("Dist"):
            raise SinkscopeError(GONE) from None
        if self.index:
            print(f"sinkscope: error: {_elsewhere(self.index, in_one_line(error))}", file=sys.__stderr__)
        raise error

    def _tell(self, own: _Told) -> list[_Told]:
        from accelerate.utils import gather_object

        try:
            if not self._broken:
                return gather_object([own])
        except RuntimeError:
            self._broken = True
        raise SinkscopeError(GONE)

    def _interrupted(self, number: int, frame: Any) -> None:
        """Ctrl-C breaks a step off, but never an exchange, nor a pass whose layers wait for each other (--tp)."""
        if self._stopping:
            return
        if self._in_step and not self.tensor:
            raise KeyboardInterrupt
        self._pending = True


_launched: Launched | None = None


def start_processes(device: str = "auto", tensor: bool = False) -> Processes:
    """Joins the other processes of the launch; ALONE where there are none. `device`: the user's --device.

    From then on Ctrl-C takes effect in the steps that all take. Raises SinkscopeError: no GPU for each process.
    """
    global _launched  # noqa: PLW0603 - the process group of torch is one for the whole process
    if size() == 1:
        return ALONE
    if _launched is None:
        _launched = Launched(device, tensor)
    return _launched


def leave(code: int) -> int:
    """At the end of a command: waits for the other processes, then ends this one with the exit code of all.

    Alone: gives the code back. In a launch it does not return: torch's threads of a process group still run then, and
    now and then abort a process that ends in the ordinary way, after all its work.
    """
    if size() == 1:
        return code
    code = (_launched or Launched("cpu")).leave(code)
    sys.stderr.flush()
    os._exit(code)


def _elsewhere(index: int, text: str) -> SinkscopeError:
    return SinkscopeError(f"process {index}: {text}")
