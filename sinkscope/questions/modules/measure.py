"""`--measure modules`: what do the inputs of the linear modules lose in 8 bits?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from sinkscope.capture import LayerView, Missing
from sinkscope.capture.axes import by_sequence
from sinkscope.capture.hooks import hooked
from sinkscope.capture.output_projection import is_linear
from sinkscope.engine.collector import Part, Parts
from sinkscope.engine.measurement import Findings, Measurement, Subject
from sinkscope.errors import SinkscopeError
from sinkscope.inputs.batches import Batch
from sinkscope.inputs.rules import token_text
from sinkscope.metrics.quantities import Quantity
from sinkscope.questions.modules.columns import INPUT_COLUMNS, Sizes
from sinkscope.questions.modules.tables import PLACES, PREFIX, VALUES, add_modules, module_table, name_of
from sinkscope.runs.schema.stream import StreamSummary

NAME = "modules"
SHOWN = 3
"""Modules that a warning names at most."""


def _no(view: LayerView) -> Tensor:
    raise Missing


class Modules(Measurement):
    """Measures the rows of modules.csv."""

    name = NAME
    spread = "a process holds a part of the features that a linear module reads"
    finds = "rows of tokens"

    def __init__(self, subject: Subject) -> None:
        super().__init__(subject)
        modules = subject.model.named_modules()
        self.linear = [name for name, module in modules if is_linear(module)]
        self._found: dict[str, dict[str, Tensor]] = {}

    def quantities(self) -> tuple[Quantity, ...]:
        return (Quantity(VALUES, ("sequence", "channel"), _no), Quantity(PLACES, ("sequence",), _no))

    @contextmanager
    def watching(self, batch: Batch, ids: np.ndarray) -> Iterator[None]:
        self._found, self._last = {}, (None, {})
        calls: Counter[str] = Counter()
        with ExitStack() as stack:
            for name in self.linear:
                hook = self._hook(name, batch, calls)
                stack.enter_context(hooked(self.subject.model.get_submodule(name), pre=hook))
            yield
        self._last = (None, {})

    _last: tuple[Tensor | None, dict[str, Tensor]] = (None, {})
    """The input read last and what was measured of it: q, k and v read the same tensor."""

    def _hook(self, name: str, batch: Batch, calls: Counter[str]) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            read = _rows(args[0] if args else None, batch)
            if read is None:
                return
            if args[0] is not self._last[0]:
                self._last = (args[0], _measured(read, batch))
            self._found[name_of(name, calls[name])] = self._last[1]
            calls[name] += 1

        return hook

    def parts(self) -> Parts:
        by_module, self._found = self._found, {}
        # Modules that read one tensor get copies: shards must not hold tensors that share memory.
        copies = {name: {key: value.clone() for key, value in tensors.items()} for name, tensors in by_module.items()}
        return {name: [Part(len(tensors[PLACES]), True, 0, 0, tensors)] for name, tensors in copies.items()}

    def tables(self, findings: Findings) -> dict[str, pd.DataFrame]:
        tokenizer = findings.reading.tokenizer

        def spelled(token: int) -> str | None:
            return None if tokenizer is None or token < 0 else token_text(tokenizer, token)

        table, apart = module_table(findings.domains, findings.sites, spelled), self._apart()
        return {NAME: table[~table["module"].isin(apart)].reset_index(drop=True)}

    def _apart(self) -> set[str]:
        """The calls that read rows of the whole batch, none of each sequence, as DeBERTa's relative positions. In a
        batch of one sequence, or where they are as many as its tokens, they look like tokens."""
        leading: dict[str, torch.Size] = {}
        calls: Counter[str] = Counter()

        def hook_of(name: str) -> Callable[..., None]:
            def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
                if args and isinstance(args[0], Tensor):
                    leading[name_of(name, calls[name]).removeprefix(PREFIX)] = args[0].shape[:-1]
                calls[name] += 1

            return hook

        with ExitStack() as stack, torch.no_grad(), suppress(SinkscopeError):  # pictures and sound have no such pass
            for name in self.linear:
                stack.enter_context(hooked(self.subject.model.get_submodule(name), pre=hook_of(name)))
            self.subject.short_pass()
        tokens = Counter(sizes.numel() for sizes in leading.values()).most_common(1)  # of several sequences
        return {
            name
            for name, sizes in leading.items()
            if len(sizes) > 1 and sizes[0] == 1 and sizes.numel() != tokens[0][0]
        }

    def left_out(self, tables: dict[str, pd.DataFrame]) -> list[str]:
        measured = set(tables[NAME]["module"])
        absent = [name for name in self.linear if name not in measured]
        if not absent:
            return []
        named = ", ".join(absent[:SHOWN]) + (f" and {len(absent) - SHOWN} more" if len(absent) > SHOWN else "")
        count = f"{len(absent)} of {len(self.linear)} linear modules"
        return [f"--measure {NAME} leaves out {count}, as they do not read a row for each token: {named}"]

    def summarise(self, streams: dict[str, StreamSummary], tables: dict[str, pd.DataFrame]) -> None:
        add_modules(streams, tables[NAME])


def _rows(read: Any, batch: Batch) -> Tensor | None:
    """A module's input as [sequence, token, feature]; None where its rows are no tokens of the sequences."""
    if not isinstance(read, Tensor) or not read.is_floating_point() or not read.numel():
        return None
    length = batch.inputs.shape[1]
    if length > 1 or read.dim() > 2:  # a row for each sequence of one token may be a pooled one
        rows = by_sequence(read, len(batch), length)
        if rows is not None:
            return rows.detach()
    other_length = batch.spans is None and read.dim() == 3 and len(read) == len(batch)  # patches, frames
    return read.detach() if other_length else None


def _measured(read: Tensor, batch: Batch) -> dict[str, Tensor]:
    """The columns [sequence, column] and the position of the largest entry [sequence], on the CPU."""
    if batch.spans is None:
        return _of(read)
    parts = [_of(read[row : row + 1, first:past]) for row, (first, past) in enumerate(batch.spans)]
    return {name: torch.cat([part[name] for part in parts]) for name in (VALUES, PLACES)}


def _of(read: Tensor) -> dict[str, Tensor]:
    sizes = Sizes.of(read)
    values = torch.stack([column.compute(sizes) for column in INPUT_COLUMNS.values()], -1)
    return {VALUES: values.cpu(), PLACES: sizes.of_tokens.argmax(-1).float().cpu()}


MEASUREMENT = Modules
