"""SinkCallback: measures attention sinks while a model trains, and logs them where the Trainer logs its loss."""

from __future__ import annotations

import inspect
import operator
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import nn
from transformers import PreTrainedModel, Trainer, TrainerCallback

from sinkscope.checkpoints.wrappers import is_sharded
from sinkscope.engine.launch import ALONE, Launched, Processes
from sinkscope.engine.scan import scan
from sinkscope.errors import SinkscopeError, in_one_line
from sinkscope.experiments.training.trajectory import trajectory_rows
from sinkscope.runs.defaults import EPSILON
from sinkscope.runs.folder import write_file
from sinkscope.runs.per_sequence import not_shares
from sinkscope.runs.run import Run
from sinkscope.runs.saved.trajectory import TRAJECTORY_FILE, read_rows
from sinkscope.runs.schema.stream import StreamSummary
from sinkscope.runs.words import dormant_count

SEQUENCES = 8


class SinkCallback(TrainerCallback):  # type: ignore[misc] # transformers exports it untyped
    """Measures a model's attention sinks every so many training steps.

        Trainer(..., callbacks=[SinkCallback(every=500, data="prose", num_sequences=8)])

    It measures before the first step, after every `every` steps and after the last one. The values are logged by the
    Trainer itself, so they reach TensorBoard, trackio or W&B beside the loss (see `logged_values`), and every
    measurement adds rows to trajectory.csv in the Trainer's output folder (`sinkscope schema trajectory`). The
    measurement is that of `sinkscope scan`: the model runs in eval mode, in the dtype of its weights, without a cache.
    Afterwards the model, its gradients and all random states are as before: weights and losses of the training are the
    same to the last bit.

    In several processes (DDP) all share the sequences. Under FSDP the main process measures a copy of the whole model.
    In a loop of your own, call `measure`.

    A setting that cannot work, such as an unknown text, raises SinkscopeError before the first step. A later
    measurement that fails is a warning, and training goes on. A `log` that fails is one warning, however often.
    """

    def __init__(
        self, every: int = 500, data: Any = None, *, num_sequences: int | None = None, seq_len: int | None = None,
        tokenizer: Any = None, epsilon: float = EPSILON, bos: str = "auto", batch_size: int | None = None,
        metrics: Sequence[Callable[..., Any]] = (), output: str | Path | None = None,
        log: Callable[[dict[str, float]], Any] | None = None,
    ) -> None:  # fmt: skip
        """
        Args:
            every: training steps between two measurements.
            data, seq_len, bos, batch_size, metrics, epsilon: as in `sinkscope.scan`. `data` may be token ids,
                [sequence, T], which need no tokenizer.
            num_sequences: sequences per SPEC; None takes 8 of text, and all token ids.
            tokenizer: the Trainer's `processing_class` where it is None.
            output: the file for the rows; trajectory.csv in the Trainer's output folder where it is None.
            log: receives the values too, for a loop of your own (`accelerator.log`, `wandb.log`).

        Raises SinkscopeError where `every` is no whole number from 1 on.
        """
        self.every, self.tokenizer, self.log = _whole_steps(every), tokenizer, log
        self.output = None if output is None else Path(output)
        self.run: Run | None = None
        """The last measurement; under FSDP the main process alone has it."""
        self._settings: dict[str, Any] = {
            "data": data, "num_sequences": SEQUENCES if num_sequences is None and _is_text(data) else num_sequences,
            "seq_len": seq_len, "bos": bos, "epsilon": epsilon, "batch_size": batch_size,
            "metrics": metrics, "self_check": False,
        }  # fmt: skip
        self._replica = Replica()
        self._measured: int | None = None
        self._written: set[int] | None = None
        self._log_failed = False
        self._trainer: Trainer | None = None

    def measure(self, step: int, model: nn.Module) -> dict[str, float]:
        """Measures the model as it is after `step` training steps, and returns what it logs.

        Every process of the training must call it. Writes to `output`, where rows of the same step are replaced, and
        calls `log` where these were given; the first time that `log` fails is a warning. Raises SinkscopeError as
        `sinkscope.scan` does, and where `output` is no trajectory of sinkscope's.
        """
        processes = processes_of_training()
        self.run = self._scan(model, processes)
        self._measured = step
        values = {} if self.run is None else logged_values(self.run)
        values = processes.on_main(lambda: values)
        processes.on_main(lambda: self._write(step))
        if self.log is not None and processes.index == 0:
            self._hand_over(step, values)
        return values

    def _hand_over(self, step: int, values: dict[str, float]) -> None:
        """Calls `log`. What it does is not the training's matter, which may have run for days."""
        try:
            assert self.log is not None
            self.log(values)
        except Exception as error:
            if not self._log_failed:
                reason = f"{type(error).__name__}: {error}"
                warnings.warn(f"log= of SinkCallback failed at step {step}: {reason}; training goes on", stacklevel=3)
            self._log_failed = True

    def _scan(self, model: nn.Module, processes: Processes) -> Run | None:
        if not is_sharded(model):
            with undisturbed(model):
                return scan(model, tokenizer=self.tokenizer, processes=processes, **self._settings)
        with undisturbed(model):
            weights = gathered(model)
            runs: list[Run] = []

            def measured() -> None:
                copy = self._replica.refreshed(model, weights)
                runs.append(scan(copy, tokenizer=self.tokenizer, processes=ALONE, **self._settings))

            processes.on_main(measured)  # what fails in there is told to the other processes, which wait for it
        return runs[0] if runs else None

    def _write(self, step: int) -> None:
        if self.output is None or self.run is None:
            return
        rows = trajectory_rows(self.run, step)
        if self._written is None:
            self._written = set(read_rows(self.output, "output")["step"]) if self.output.exists() else set()
        if step in self._written:
            self._replace(rows, step)
            return
        try:
            self.output.parent.mkdir(parents=True, exist_ok=True)
            before = self.output.read_bytes() if self.output.exists() else b""
        except OSError as error:
            raise SinkscopeError(f"cannot write {self.output}: {error.strerror or error}") from None
        # The whole file is written anew: what a kill or a full disk leaves of an appended row would join the next one.
        write_file(self.output, before + _as_csv(rows, header=not before).encode())
        self._written.add(step)

    def _replace(self, rows: pd.DataFrame, step: int) -> None:
        """Puts the rows of a step that was measured before into its place."""
        assert self.output is not None
        table = read_rows(self.output, "output")
        before, after = table[table["step"] < step], table[table["step"] > step]
        write_file(self.output, _as_csv(before) + _as_csv(rows, False) + _as_csv(after, False))

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._trainer = _calling_trainer(self)
        if self._trainer is not None:
            _before_the_trackers(self, self._trainer)
        if self.tokenizer is None:
            self.tokenizer = kwargs.get("processing_class")
        if self.output is None:
            self.output = Path(args.output_dir) / TRAJECTORY_FILE
        if state.is_world_process_zero:
            keep_until(self.output, state.global_step)
        self._written = self._measured = None
        if state.global_step % self.every == 0:
            self._log(self.measure(state.global_step, kwargs["model"]))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % self.every == 0:
            self._measure_on(state.global_step, kwargs["model"])

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step != self._measured:
            self._measure_on(state.global_step, kwargs["model"])

    def _measure_on(self, step: int, model: nn.Module) -> None:
        """Measures during training, where a failure must not end what may have run for days."""
        try:
            values = self.measure(step, model)
        except Exception as error:
            warnings.warn(f"sinkscope could not measure step {step}: {in_one_line(error)}", stacklevel=2)
            return
        self._log(values)

    def _log(self, values: dict[str, float]) -> None:
        if self._trainer is None:
            return
        due = self._trainer.control.should_log
        self._trainer.log(dict(values))
        self._trainer.control.should_log = due  # `log` clears it, and the loss of this step would be left out


def logged_values(run: Run) -> dict[str, float]:
    """What SinkCallback logs of a measurement.

    sink/rate_0.3: percent of (sequence, head) pairs with alpha_0 above epsilon. sink/bos_mass: mean attention on the
    first token. sink/dormant: number of dormant heads. sink/max_abs: the largest absolute activation of the residual
    stream. sink/norm_ratio: the first token's norm over the others', in the layer where it is largest.
    sink/entropy_min: the lowest mean entropy of a head, in nats. sink/layer_07/bos_mass: mean over the layer's heads.
    Models with several streams have the stream's name after `sink/`. What is missing is left out, and so is the rate
    where attention is no softmax.
    """
    values: dict[str, float] = {}
    for stream, summary in run.summary.streams.items():
        start = "sink/" if len(run.summary.streams) == 1 else f"sink/{stream}/"
        values |= {f"{start}{name}": value for name, value in _of_stream(run, stream, summary).items()}
    return {name: float(value) for name, value in values.items() if value is not None and np.isfinite(value)}


def _of_stream(run: Run, stream: str, found: StreamSummary) -> dict[str, Any]:
    layers = run.layers[run.layers["stream"] == stream]
    heads = run.heads[run.heads["stream"] == stream]
    epsilon = f"{run.manifest.request.epsilon:g}"
    by_layer = layers.groupby("layer")["mean_bos_mass"].mean()  # one row a domain
    width = len(str(by_layer.index.max()))
    return {
        f"rate_{epsilon}": None if stream in not_shares(run) else found.sink_rate_percent[epsilon].T,
        "bos_mass": found.bos_mass.mean,
        "dormant": dormant_count(found.dormant, found.heads),
        "max_abs": layers["max_abs"].max(),
        "norm_ratio": layers["norm_ratio"].max(),
        "entropy_min": heads["entropy"].min(),
        **{f"layer_{layer:0{width}}/bos_mass": value for layer, value in by_layer.items()},
    }


def keep_until(path: Path, step: int) -> None:
    """Removes the rows after `step`: training goes on from there, or starts anew at 0.

    Raises SinkscopeError where the file is no trajectory.
    """
    if not path.exists():
        return
    rows = read_rows(path, "output")
    kept = rows[(rows["step"] <= step) & (step > 0)]  # where the step is measured again, its rows are replaced
    if len(kept):
        write_file(path, _as_csv(kept))
    else:
        path.unlink()


def _as_csv(rows: pd.DataFrame, header: bool = True) -> str:
    return str(rows.to_csv(index=False, header=header, float_format="%.9g", lineterminator="\n"))


def _whole_steps(every: Any) -> int:
    try:
        steps = 0 if isinstance(every, bool) else operator.index(every)
    except TypeError:
        steps = 0
    if steps < 1:
        raise SinkscopeError(f"every={every}: give a number of training steps, 1 or more")
    return steps


def _before_the_trackers(callback: TrainerCallback, trainer: Trainer) -> None:
    """Puts the callback first. Trackers close when training ends, and the last measurement must come before that.

    The list is replaced, since the Trainer is walking over it.
    """
    handler = trainer.callback_handler
    handler.callbacks = [callback, *(other for other in handler.callbacks if other is not callback)]


def _is_text(data: Any) -> bool:
    """Whether the data are text: a SPEC, several, or texts."""
    several = data if isinstance(data, list | tuple) and data else [data]
    return all(item is None or isinstance(item, str) for item in several)


def _calling_trainer(callback: TrainerCallback) -> Trainer | None:
    """The Trainer whose event is running. A callback is handed everything but the Trainer, whose `log` alone reaches
    the trackers; so it is looked for among the callers. None in a loop that uses the callback without a Trainer."""
    frame = inspect.currentframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, Trainer) and callback in caller.callback_handler.callbacks:
            return caller
        frame = frame.f_back
    return None


# A model that is being trained: measured as it stands, and left exactly as it was.


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Puts a model into eval mode until the block ends; then every module's mode and all random states are as before.

    Dropout is off inside the block, and so is gradient checkpointing, which only runs in training mode. The random
    generators of torch (CPU and accelerators), numpy and Python are put back, so that training draws the same numbers
    as without the block. Autocast is off: the model runs in the dtype of its weights.
    """
    modes = {module: module.training for module in model.modules()}
    python, old = random.getstate(), np.random.get_state()
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    with ExitStack() as stack:
        devices = [] if device.type == "cpu" else [device]
        stack.enter_context(torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"))
        stack.enter_context(torch.autocast(device.type, enabled=False))
        try:
            model.eval()
            yield
        finally:
            for module, training in modes.items():
                module.training = training
            random.setstate(python)
            np.random.set_state(old)


class Replica:
    """A whole copy of a model that FSDP has spread over the processes. Only the main process holds it.

    FSDP gathers a block's weights for its own forward pass only, so the copy is measured in place of the model. It
    takes the memory of all weights, on the CPU.
    """

    def __init__(self) -> None:
        self._model: nn.Module | None = None

    def refreshed(self, model: nn.Module, weights: dict[str, Any]) -> nn.Module:
        """Returns the copy with these weights, which `gathered` gave the main process.

        Raises SinkscopeError where the model cannot be built from its configuration.
        """
        if self._model is None:
            self._model = _built_like(model)
        try:
            self._model.load_state_dict(weights)
        except RuntimeError:
            raise _not_told_by_configuration(self._model) from None
        return self._model


def gathered(model: nn.Module) -> dict[str, Any]:
    """All weights by name, on the CPU, in the main process; every process must call it."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel, StateDictType

    if not any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    on_cpu = all(parameter.device.type == "cpu" for parameter in model.parameters())
    whole = FullStateDictConfig(offload_to_cpu=not on_cpu, rank0_only=True)  # offloading from the CPU crashes torch
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # the newer function crashes for this kind on the CPU
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT, whole):
            return model.state_dict()


def _built_like(model: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import FSDPModule

    inner: Any = model
    while not isinstance(inner, PreTrainedModel):
        held = getattr(inner, "module", None)
        if held is None:  # PEFT's model, among others
            raise _not_told_by_configuration(inner)
        inner = held
    family: Any = next(ancestor for ancestor in type(inner).__mro__ if not issubclass(ancestor, FSDPModule))
    dtype = next(parameter.dtype for parameter in inner.parameters())
    return family(inner.config).to(dtype).eval()


def _not_told_by_configuration(model: nn.Module) -> SinkscopeError:
    return SinkscopeError(
        f"{type(model).__name__} under FSDP holds weights that its configuration does not name (adapters, perhaps): "
        "measure the saved checkpoints with `sinkscope track`"
    )


class TrainingProcesses(Launched):
    """The processes of a training job, which share a measurement. Ctrl-C stays the training loop's own matter."""

    def __init__(self) -> None:
        self.tensor = False
        self.index, self.count = torch.distributed.get_rank(), torch.distributed.get_world_size()
        self._in_step = self._pending = self._stopping = self._broken = False

    def device(self, name: str) -> str:
        return name  # the model stands where the training has put it

    def _exchange(self, own: Any) -> list[Any]:
        reports: list[Any] = [None] * self.count
        torch.distributed.all_gather_object(reports, own)
        return reports


def processes_of_training() -> Processes:
    """The processes of this training job; ALONE where there is one."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return ALONE
    return TrainingProcesses() if torch.distributed.get_world_size() > 1 else ALONE
