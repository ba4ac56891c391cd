"""What a measurement on request is: quantities of every layer, what it watches beside them, tables and words."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np
import pandas as pd
from torch import nn

from sinkscope.capture import AttentionCall, Plan, Site
from sinkscope.capture.kernels.map_walk import AttentionMap
from sinkscope.engine.batch_size import memory_needed
from sinkscope.engine.collector import Parts
from sinkscope.engine.outside import guarded
from sinkscope.errors import SinkscopeError
from sinkscope.inputs.batches import Batch
from sinkscope.metrics.quantities import Quantity, table_by_head
from sinkscope.metrics.registry import ALWAYS, MetricSet
from sinkscope.runs.questions import QUESTIONS, Question
from sinkscope.runs.request import Request
from sinkscope.runs.schema.stream import StreamSummary
from sinkscope.tables.frames import measured_table
from sinkscope.tables.values import Domain
from sinkscope.wiring.trace import Wiring, trace

if TYPE_CHECKING:
    from sinkscope.engine.input_kinds.kind import Reading

Found = TypeVar("Found")


@dataclass
class Subject:
    """What measurements can read before the first batch.

    `metrics`: the metrics of the scan, also those of the measurements' own tables. `short_pass`: runs the model on a
    few short sequences, every token at position 0; it raises SinkscopeError for a model that cannot be run so.
    `forward`: runs the model on a batch once more. `request`: what the scan is asked for.
    `bos_id`: the tokenizer's BOS (or CLS); None where it has none.
    """

    model: nn.Module
    plan: Plan
    metrics: MetricSet
    short_pass: Callable[[], Any]
    forward: Callable[[Batch], Any]
    request: Request
    bos_id: int | None = None

    @cached_property
    def wirings(self) -> dict[str, Wiring]:
        """The linear maps around every attention call, by the site's name; found once for all measurements."""
        with memory_needed("a short pass that looks for W_V (--measure)"):
            return trace(self.model, self.plan, self.short_pass)


@dataclass(frozen=True)
class Findings:
    """What the tables of a measurement are made of.

    Attributes:
        domains: the values of every site, and what `Measurement.parts` returned, joined over all sequences.
        sites: the attention calls with all their heads.
        heads, layers: the tables of every scan.
        reading: the sequences, and the tokenizer that spells their tokens.
        request: what the scan is asked for.
    """

    domains: list[Domain]
    sites: list[Site]
    heads: pd.DataFrame
    layers: pd.DataFrame
    reading: Reading
    request: Request


class Measurement:
    """What one question measures during one scan. Everything here may be overridden, and nothing need be.

    A quantity is a function of a LayerView. Its axes say how batches join, how processes gather it and what a shard
    holds (`metrics.quantities`). Those with the axes (sequence, head, metric) are columns of sequences.parquet too, and
    their name is that of a table whose metrics `measured_metric` declares. What a LayerView does not show, `watching`
    can collect by hooks, for a quantity to read or for `parts` to return; `of_call` reads an attention call itself.

    Attributes:
        name: the question's, as `--measure` takes it.
        wired: whether it reads `Subject.wirings`; --tp is then refused.
        writing: whether it reads what heads write, so that views hold `raw_written`, what the output projection
            returns, and keep `written` and `written_values`.
        spread: why --tp is refused for another reason; empty where it is not.
        finds: what it looks for in a short pass of its own, in a word or two; empty where it makes none.
    """

    name: ClassVar[str]
    wired: ClassVar[bool] = False
    writing: ClassVar[bool] = False
    spread: ClassVar[str] = ""
    finds: ClassVar[str] = ""

    def __init__(self, subject: Subject) -> None:
        """Raises SinkscopeError where the model lacks what the measurement needs."""
        self.subject = subject
        if self.wired:
            self.wirings = self.looked_for(lambda: subject.wirings)

    def looked_for(self, look: Callable[[], Found]) -> Found:
        """What `look` finds in the model. A SinkscopeError then names the measurement."""
        try:
            return look()
        except SinkscopeError as error:
            raise SinkscopeError(f"--measure {self.name}: {error}") from None

    def quantities(self) -> tuple[Quantity, ...]:
        """What it measures on every LayerView, the same at every call.

        By default the columns of its tables that `measured_metric` declares, each a function LayerView ->
        [sequence, head].
        """
        metrics = self.subject.metrics
        return tuple(
            table_by_head(table, metrics)
            for table, columns in metrics.tables.items()
            if table not in ALWAYS and any(metric.measure == self.name for metric in columns.values())
        )

    def of_call(self, call: AttentionCall | AttentionMap) -> Any:
        """What it makes of an attention call besides the sums of every scan; `LayerView.readings` has it by `name`.

        It gets each call with its mask read, and each sequence's part of a padded batch; it must not keep the call.
        """
        return None

    @contextmanager
    def watching(self, batch: Batch, ids: np.ndarray) -> Iterator[None]:
        """In force during the forward pass of a batch; it leaves no hook behind, also after an exception.

        `ids`: the ids of the batch's tokens as the tables show them, [sequence, T], -1 past a sequence's end.
        """
        yield

    def again(self, batch: Batch) -> None:
        """Reads the batch once more with `Subject.forward`, after the pass that all watch, when their hooks are off."""

    def parts(self) -> Parts:
        """What it measured of the batch besides LayerViews, on the CPU, by names that no site has.

        The values bear names of `quantities`. They end in `Domain.others`.
        """
        return {}

    def tables(self, findings: Findings) -> dict[str, pd.DataFrame]:
        """Its tables, by name: those that its question declares."""
        return {
            quantity.name: measured_table(
                quantity.name, findings.domains, findings.sites, lambda domain, site, means: means
            )
            for quantity in self.quantities()
        }

    def left_out(self, tables: dict[str, pd.DataFrame]) -> list[str]:
        """Warnings that name what its own `tables` hold nothing of, though the question asks for it."""
        return []

    def summarise(self, streams: dict[str, StreamSummary], tables: dict[str, pd.DataFrame]) -> None:
        """Adds to the summary of each stream what the tables say. Called for the whole run, then for each domain.

        `tables`: those of all measurements, and `heads` and `layers`.
        """


def measurements(names: Sequence[str]) -> list[type[Measurement]]:
    """What is measured for each question of these names, in this order."""
    return [_measurement(QUESTIONS[name]) for name in names]


def _measurement(question: Question) -> type[Measurement]:
    """The MEASUREMENT of the question's folder; where it has none, one that measures its columns alone. Raises
    SinkscopeError where a module of the folder does not load."""
    question.part("columns")
    module = question.part("measure")
    kind = type(question.name, (Measurement,), {}) if module is None else getattr(module, "MEASUREMENT", None)
    if not isinstance(kind, type) or not issubclass(kind, Measurement):
        raise SinkscopeError(
            f"--measure {question.name}: {question.module}.measure has no MEASUREMENT, a subclass of Measurement"
        )
    kind.name = question.name
    return kind if QUESTIONS.ships(question.name) else guarded(kind, question)


def refuse_spread(kinds: Sequence[type[Measurement]]) -> None:
    """Raises SinkscopeError where --tp leaves no process with the weights that one of these measurements reads."""
    for kind in kinds:
        why = "finding W_V takes the whole of it, and no process holds it all" if kind.wired else kind.spread
        if why:
            raise SinkscopeError(f"--tp with --measure {kind.name}: {why}")


def begun(names: Sequence[str], subject: Subject, tensor: bool) -> tuple[list[Measurement], dict[str, str]]:
    """What measures the questions of these names, and why the others are left out, by their names.

    `tensor`: whether --tp spreads the heads. Raises SinkscopeError for a question that cannot be answered and is asked
    by its own name; one that only `all` asks is left out.
    """
    found, left_out = [], {}
    for kind in measurements(names):
        try:
            if tensor:
                refuse_spread([kind])
            found.append(kind(subject))
        except SinkscopeError as error:
            if kind.name not in subject.request.optional:
                raise
            why = str(error).removeprefix("--tp with ").removeprefix(f"--measure {kind.name}: ")
            left_out[kind.name] = why
    return found, left_out


def left_out_words(left_out: Mapping[str, str]) -> list[str]:
    """A line for each reason why `--measure all` leaves questions out. `left_out`: the reasons, by the questions."""
    reasons = dict.fromkeys(left_out.values())
    named = {why: ", ".join(name for name, reason in left_out.items() if reason == why) for why in reasons}
    return [f"--measure all leaves out {names}: {why}" for why, names in named.items()]
