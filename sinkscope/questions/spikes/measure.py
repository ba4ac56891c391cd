"""`--measure spikes`: which part of which block, and which neuron, writes the massive activations?

Only at its end does the pass show at which token each sequence's residual stream is largest. It reads what each part
writes at the first token, which mostly is that one, and keeps the tensors of all tokens (`kept`). A batch of which too
much would be kept takes a second pass, which reads what is written there. Where attention is causal the second pass
ends behind the last of these tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from sinkscope.capture import LayerView, Missing
from sinkscope.capture.axes import by_sequence
from sinkscope.capture.hooks import hooked
from sinkscope.capture.output_projection import projection_weight
from sinkscope.capture.precision import as_widest
from sinkscope.capture.private_doors import rotates_by_length
from sinkscope.engine.collector import Part, Parts
from sinkscope.engine.measurement import Findings, Measurement, Subject
from sinkscope.inputs.batches import Batch
from sinkscope.metrics.quantities import Quantity
from sinkscope.questions.spikes.kept import AGREED, AGREED_HALF, ENTERING, Kept
from sinkscope.questions.spikes.kept import ATTENTION as BY_ATTENTION
from sinkscope.questions.spikes.kept import MLP as BY_MLP
from sinkscope.questions.spikes.tables import ATTENTION, MLP, Writers, add_spikes, name_of, spike_table
from sinkscope.runs.schema.stream import StreamSummary
from sinkscope.wiring.parts import find_parts, first_tensor, stream_in

NAME = "spikes"
SHORTEST = 16
"""Tokens of a second pass at least: some models read a single token in another way than a text."""


def _no(view: LayerView) -> Tensor:
    raise Missing


class Spikes(Measurement):
    """Measures the rows of spikes.csv."""

    name = NAME
    spread = "what a neuron writes takes the whole of its weights, and no process holds them all"
    finds = "parts of blocks"

    def __init__(self, subject: Subject) -> None:
        super().__init__(subject)
        self.parts_of = self.looked_for(lambda: find_parts(subject.model, subject.plan, subject.short_pass))
        self.streams = {site.block: site.stream for site in subject.plan.sites if site.block in self.parts_of}
        self._found: dict[str, dict[str, Tensor]] = {}
        self._kept = Kept(0)

    def quantities(self) -> tuple[Quantity, ...]:
        vectors = ("spike_entering", "spike_write", "spike_neurons")
        return (*(Quantity(name, ("sequence", "channel"), _no) for name in vectors),
                Quantity("spike_position", ("sequence",), _no))  # fmt: skip

    @contextmanager
    def watching(self, batch: Batch, ids: np.ndarray) -> Iterator[None]:
        self._found, self._peaks, self._kept = {}, _Peaks(batch), Kept(len(batch))
        starts = self._peaks.starts
        with ExitStack() as stack:
            for block, stream in self.streams.items():
                module = self.subject.model.get_submodule(block)
                stack.enter_context(hooked(module, pre=self._peaks.hook(stream), with_kwargs=True))
                kept = self._kept.hooks(self.subject.model, block, self.parts_of[block])
                for hook in (*self._hooks(block, starts, starts), *kept):
                    stack.enter_context(hook)
            yield

    def again(self, batch: Batch) -> None:
        peaks = self._peaks
        if all(torch.equal(tokens, peaks.starts) for tokens in peaks.tokens.values()):
            self._kept.drop()
            return
        kept = self._from_kept()
        self._kept.drop()
        if kept is not None:
            self._found = kept
            return
        self._found = {}
        short = self._cut(batch)
        if short is None or not self._run(short):
            self._run(batch)

    def _from_kept(self) -> dict[str, dict[str, Tensor]] | None:
        """What stands at the spikes' tokens, of what the pass has kept; None where it has not kept all of it."""
        by_part: dict[str, dict[str, Tensor]] = {}
        for block, stream in self.streams.items():
            if stream in self._peaks.tokens:
                of_block = self._block_from_kept(block, self._peaks.tokens[stream])
                if of_block is None:
                    return None
                by_part |= of_block
        return by_part

    def _block_from_kept(self, block: str, tokens: Tensor) -> dict[str, dict[str, Tensor]] | None:
        parts, kept = self.parts_of[block], self._kept
        entering, attention = kept.at(block, ENTERING, tokens), kept.at(block, BY_ATTENTION, tokens)
        if entering is None or attention is None:
            return None
        positions = {"spike_position": (tokens.cpu() - self._peaks.starts).float()}
        by_part = {
            name_of(block, ATTENTION): positions | {"spike_entering": _read(entering), "spike_write": _read(attention)}
        }
        if parts.mlp is not None:
            write, of_mlp = kept.at(block, BY_MLP, tokens), dict[str, Tensor]()
            if write is None:
                return None
            if parts.neurons is not None:
                neurons = kept.neurons(self.subject.model, block, parts.neurons, tokens)
                if neurons is None:
                    return None
                of_mlp["spike_neurons"] = _read(neurons)
            by_part[name_of(block, MLP)] = {"spike_write": _read(write)} | of_mlp
        return by_part

    def _cut(self, batch: Batch) -> Batch | None:
        """The batch up to its last spike; None where later tokens may have a say in what is written there."""
        causal = all(site.causal and not site.cross for site in self.subject.plan.sites)
        apart = causal and not batch.extra and batch.mask is None and not rotates_by_length(self.subject.model)
        past = max(SHORTEST, *(int(tokens.max()) + 1 for tokens in self._peaks.tokens.values()))
        if not apart or past >= batch.inputs.shape[1]:
            return None
        return replace(batch, inputs=batch.inputs[:, :past])

    def _run(self, batch: Batch) -> bool:
        """Reads the spikes' tokens; returns whether their largest elements are those of the first pass."""
        peaks = self._peaks
        with ExitStack() as stack, torch.no_grad():
            for block, stream in self.streams.items():
                if stream in peaks.tokens:
                    for hook in self._hooks(block, peaks.tokens[stream], peaks.starts):
                        stack.enter_context(hook)
            self.subject.forward(batch)
        return all(self._agrees(stream) for stream in peaks.tokens)

    def _agrees(self, stream: str) -> bool:
        blocks = [block for block, name in self.streams.items() if name == stream]
        entering = [self._found[name_of(block, ATTENTION)].get("spike_entering") for block in blocks]
        sizes = [x.abs().amax(-1) for x in entering if x is not None]  # of one block at least, or there were no peaks
        largest = self._peaks.largest[stream]
        peak = torch.stack(sizes).amax(0).to(largest.dtype)
        return torch.allclose(peak, largest, rtol=AGREED if self._peaks.exact else AGREED_HALF, atol=0.0)

    def _hooks(self, block: str, tokens: Tensor, starts: Tensor) -> Iterator[AbstractContextManager[None]]:
        model, parts = self.subject.model, self.parts_of[block]
        of_attention: dict[str, Tensor] = {"spike_position": (tokens.cpu() - starts).float()}
        of_mlp: dict[str, Tensor] = {}
        self._found[name_of(block, ATTENTION)] = of_attention
        if parts.mlp is not None:
            self._found[name_of(block, MLP)] = of_mlp

        length: list[int] = []  # of the sequences in this block; empty where they are not seen

        def entering(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            x = stream_in(args, kwargs)
            length[:] = []
            if x is not None and len(x) == len(tokens):
                length[:] = [x.shape[1]]
                of_attention["spike_entering"] = _at(x, tokens)

        def keep(kept: dict[str, Tensor], name: str, tensor: Tensor | None) -> None:
            rows = None if tensor is None or not length else by_sequence(tensor, len(tokens), length[0])
            if rows is not None:
                kept[name] = _at(rows, tokens)

        def writing(kept: dict[str, Tensor]) -> Callable[..., None]:
            def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
                keep(kept, "spike_write", first_tensor(output))

            return hook

        def active(module: nn.Module, args: tuple[Any, ...]) -> None:
            keep(of_mlp, "spike_neurons", args[0])

        yield hooked(model.get_submodule(block), pre=entering, with_kwargs=True)
        yield hooked(model.get_submodule(parts.attention), post=writing(of_attention))
        if parts.mlp is not None:
            yield hooked(model.get_submodule(parts.mlp), post=writing(of_mlp))
        if parts.neurons is not None:
            yield hooked(model.get_submodule(parts.neurons), pre=active)

    def parts(self) -> Parts:
        by_part, self._found = self._found, {}
        read = {name_of(block, part) for block, stream in self.streams.items() for part in (ATTENTION, MLP)
                if stream in self._peaks.tokens}  # fmt: skip
        seen = {name: tensors for name, tensors in by_part.items() if "spike_write" in tensors and name in read}
        return {name: [Part(len(tensors["spike_write"]), True, 0, 0, tensors)] for name, tensors in seen.items()}

    def tables(self, findings: Findings) -> dict[str, pd.DataFrame]:
        writers = {
            block: Writers(parts.mlp is not None, self._weights(block)) for block, parts in self.parts_of.items()
        }
        return {NAME: spike_table(findings.domains, findings.sites, writers)}

    def _weights(self, block: str) -> Callable[[int, int], np.ndarray] | None:
        """The function (channel, neurons) -> weight[channel, :] of the linear layer that reads a block's neurons."""
        path = self.parts_of[block].neurons
        if path is None:
            return None
        module = self.subject.model.get_submodule(path)
        kept: dict[int, np.ndarray] = {}

        def row(channel: int, neurons: int) -> np.ndarray:
            if channel not in kept:
                kept[channel] = as_widest(projection_weight(module, neurons)[channel]).cpu().numpy()
            return kept[channel]

        return row

    def summarise(self, streams: dict[str, StreamSummary], tables: dict[str, pd.DataFrame]) -> None:
        blind = {site.stream for site in self.subject.plan.sites} - set(self.streams.values())
        add_spikes(streams, tables[NAME], blind)


class _Peaks:
    """Where each sequence's residual stream has its largest element, by stream, over the blocks' inputs.

    `tokens`: positions in the batch [sequence]. `largest`: the size of that element. `starts`: the first valid position
    of each sequence. `exact`: whether the stream is in float32 or wider.
    """

    def __init__(self, batch: Batch) -> None:
        self.batch, self.tokens = batch, dict[str, Tensor]()
        self.starts = torch.tensor([first for first, _ in batch.spans or [(0, 0)] * len(batch)])
        self.largest: dict[str, Tensor] = {}
        self.exact = True

    def hook(self, stream: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            x = stream_in(args, kwargs)
            if x is None or len(x) != len(self.batch):
                return
            self.exact &= x.dtype.itemsize >= 4
            sizes = torch.maximum(x.amax(-1), -x.amin(-1)).detach().float().cpu()  # no copy of x, as abs would make
            for row, (first, past) in enumerate(self.batch.spans or []):
                sizes[row, :first] = sizes[row, past:] = -1.0
            largest, tokens = sizes.max(-1)
            larger = largest > self.largest.get(stream, torch.full_like(largest, -1.0))
            self.largest[stream] = torch.where(larger, largest, self.largest.get(stream, largest))
            self.tokens[stream] = torch.where(larger, tokens, self.tokens.get(stream, tokens))

        return hook


def _at(values: Tensor, tokens: Tensor) -> Tensor:
    """[sequence, channel]: the values at one token of each sequence, on the CPU."""
    return _read(values[torch.arange(len(tokens), device=values.device), tokens.to(values.device)])


def _read(rows: Tensor) -> Tensor:
    """On the CPU, in float32 or wider."""
    return (rows if rows.dtype == torch.float64 else rows.float()).detach().cpu()


MEASUREMENT = Spikes
