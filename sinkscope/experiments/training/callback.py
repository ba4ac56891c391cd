"""SinkCallback: measures attention sinks while a model trains, and logs them where the Trainer logs its loss."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn
from transformers import Trainer, TrainerCallback

from sinkscope.checkpoints.wrappers import is_sharded
from sinkscope.engine.launch import ALONE, Processes
from sinkscope.engine.scan import scan
from sinkscope.errors import SinkscopeError, in_one_line
from sinkscope.experiments.training.live_model import Replica, gathered, processes_of_training, undisturbed
from sinkscope.experiments.training.trajectory import trajectory_rows
from sinkscope.runs.defaults import EPSILON
from sinkscope.runs.run import Run
from sinkscope.runs.schema.stream import StreamSummary

TRAJECTORY_FILE = "trajectory.csv"


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
    measurement that fails is a warning, and training goes on.
    """

    def __init__(
        self, every: int = 500, data: Any = None, *, num_sequences: int = 8, seq_len: int | None = None,
        tokenizer: Any = None, epsilon: float = EPSILON, bos: str = "auto", batch_size: int | None = None,
        metrics: Sequence[Callable[..., Any]] = (), output: str | Path | None = None,
        log: Callable[[dict[str, float]], Any] | None = None,
    ) -> None:  # fmt: skip
        """
        Args:
            every: training steps between two measurements.
            data, num_sequences, seq_len, bos, batch_size, metrics, epsilon: as in `sinkscope.scan`. `data` may be token
                ids, [sequence, T], which need no tokenizer.
            tokenizer: the Trainer's `processing_class` where it is None.
            output: the file for the rows; trajectory.csv in the Trainer's output folder where it is None.
            log: receives the values too, for a loop of your own (`accelerator.log`, `wandb.log`).

        Raises SinkscopeError where `every` is below 1.
        """
        if every < 1:
            raise SinkscopeError(f"every={every}: give a number of training steps, 1 or more")
        self.every, self.tokenizer, self.log = every, tokenizer, log
        self.output = None if output is None else Path(output)
        self.run: Run | None = None
        """The last measurement; under FSDP the main process alone has it."""
        self._settings: dict[str, Any] = {
            "data": data, "num_sequences": num_sequences if _is_text(data) else None, "seq_len": seq_len, "bos": bos,
            "epsilon": epsilon, "batch_size": batch_size, "metrics": metrics, "self_check": False,
        }  # fmt: skip
        self._replica = Replica()
        self._measured: int | None = None
        self._trainer: Trainer | None = None

    def measure(self, step: int, model: nn.Module) -> dict[str, float]:
        """Measures the model as it is after `step` training steps, and returns what it logs.

        Every process of the training must call it. Writes to `output` and calls `log` where these were given. Raises
        SinkscopeError as `sinkscope.scan` does.
        """
        processes = processes_of_training()
        self.run = self._scan(model, processes)
        self._measured = step
        values = {} if self.run is None else logged_values(self.run)
        values = processes.on_main(lambda: values)
        processes.on_main(lambda: self._write(step))
        if self.log is not None and processes.index == 0:
            self.log(values)
        return values

    def _scan(self, model: nn.Module, processes: Processes) -> Run | None:
        if not is_sharded(model):
            with undisturbed(model):
                return scan(model, tokenizer=self.tokenizer, processes=processes, **self._settings)
        with undisturbed(model):
            weights = gathered(model)
            found: list[Run] = []

            def measured() -> None:
                copy = self._replica.refreshed(model, weights)
                found.append(scan(copy, tokenizer=self.tokenizer, processes=ALONE, **self._settings))

            processes.on_main(measured)  # what fails in there is told to the other processes, which wait for it
        return found[0] if found else None

    def _write(self, step: int) -> None:
        if self.output is None or self.run is None:
            return
        rows = trajectory_rows(self.run, step)
        try:
            self.output.parent.mkdir(parents=True, exist_ok=True)
            rows.to_csv(
                self.output, mode="a", index=False, header=not self.output.exists(), float_format="%.9g",
                lineterminator="\n",
            )  # fmt: skip
        except OSError as error:
            raise SinkscopeError(f"cannot write {self.output}: {error.strerror or error}") from None

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

    sink/rate_0.3: percent of heads with alpha_0 above epsilon. sink/bos_mass: mean attention on the first token.
    sink/dormant: number of dormant heads. sink/max_abs: the largest absolute activation of the residual stream.
    sink/norm_ratio: the first token's norm over the others', in the layer where it is largest. sink/entropy_min: the
    lowest mean entropy of a head, in nats. sink/layer_07/bos_mass: mean over the layer's heads. Models with several
    streams have the stream's name after `sink/`. What is missing is left out.
    """
    values: dict[str, float] = {}
    for stream, found in run.summary.streams.items():
        start = "sink/" if len(run.summary.streams) == 1 else f"sink/{stream}/"
        values |= {f"{start}{name}": value for name, value in _of_stream(run, stream, found).items()}
    return {name: float(value) for name, value in values.items() if value is not None and np.isfinite(value)}


def _of_stream(run: Run, stream: str, found: StreamSummary) -> dict[str, Any]:
    layers = run.layers[run.layers["stream"] == stream]
    heads = run.heads[run.heads["stream"] == stream]
    epsilon = f"{run.manifest.request.epsilon:g}"
    by_layer = layers.groupby("layer")["mean_bos_mass"].mean()  # one row a domain
    width = len(str(by_layer.index.max()))
    return {
        f"rate_{epsilon}": found.sink_rate_percent[epsilon].T,
        "bos_mass": found.bos_mass.mean,
        "dormant": found.dormant.count,
        "max_abs": layers["inf_norm"].max(),
        "norm_ratio": layers["norm_ratio"].max(),
        "entropy_min": heads["entropy"].min(),
        **{f"layer_{layer:0{width}}/bos_mass": value for layer, value in by_layer.items()},
    }


def keep_until(path: Path, step: int) -> None:
    """Removes the rows after `step`: training goes on from there, or starts anew at 0.

    Raises SinkscopeError where the file is no trajectory.
    """
    import pandas as pd

    from sinkscope.experiments.training.trajectory import TRAJECTORY
    from sinkscope.runs.folder import write_file

    if not path.exists():
        return
    try:
        lines = pd.read_csv(path, dtype=str, keep_default_na=False)
        steps = pd.to_numeric(lines["step"])
        if list(lines.columns) != list(TRAJECTORY):
            raise ValueError
    except (OSError, ValueError, KeyError):
        raise SinkscopeError(f"{path} is no trajectory of sinkscope's: move it, or give another output") from None
    kept = lines[steps < step]  # the step itself is measured again
    if len(kept):
        write_file(path, kept.to_csv(index=False, lineterminator="\n"))
    else:
        path.unlink()


def _before_the_trackers(callback: TrainerCallback, trainer: Trainer) -> None:
    """Puts the callback first. Trackers close when training ends, and the last measurement must come before that.

    The list is replaced, since the Trainer is walking over it.
    """
    handler = trainer.callback_handler
    handler.callbacks = [callback, *(other for other in handler.callbacks if other is not callback)]


def _is_text(data: Any) -> bool:
    return data is None or isinstance(data, str)


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
