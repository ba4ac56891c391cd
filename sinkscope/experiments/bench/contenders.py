"""The passes that a scan is compared with: with logits, without them, scanned, and with eager attention maps."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sinkscope.capture import Capture, Plan, plan
from sinkscope.checkpoints.forward import DRY_RUN_TOKENS, Forward, eager
from sinkscope.checkpoints.loading import unwrapped
from sinkscope.engine.collector import Collector
from sinkscope.experiments.bench.memory import peak_bytes
from sinkscope.runs.defaults import EPSILON
from sinkscope.runs.saved.speed import BACKBONE, EAGER, LATER, PLAIN, SCAN


@dataclass(frozen=True)
class Passes:
    """The contenders on one model; each is a function of token ids, [sequence, T]."""

    model: nn.Module
    found: Plan
    run: dict[str, Callable[[Tensor], Any]]

    @classmethod
    def of(cls, model: nn.Module, has_head: bool, ids: Tensor) -> Passes:
        """`has_head`: whether the model gives logits. `ids`: token ids for the dry run that finds attention calls."""
        base = unwrapped(model)
        forward, whole = Forward(base), Forward(model)
        found = plan(base, lambda: forward(ids[:1, :DRY_RUN_TOKENS]))
        capture = Capture(base, found, lambda view, row: None, EPSILON)

        def scan(ids: Tensor, sampled: int | None = None) -> None:
            collector = Collector(ids.shape[1], sampled=sampled)
            collector.begin()
            capture.on_layer = collector.add
            with capture.watching(None, ids.shape[1]):
                forward(ids)
            collector.commit()

        def maps(ids: Tensor) -> Any:
            with eager(base):
                return forward(ids, output_attentions=True)

        run: dict[str, Callable[[Tensor], Any]] = {PLAIN: whole} if has_head else {}
        run |= {BACKBONE: forward, SCAN: scan, LATER: partial(scan, sampled=0), EAGER: maps}
        return cls(model, found, run)

    def leave_out(self, count: int, length: int, vocabulary: int, free: int | None) -> dict[str, int]:
        """Removes the contenders that would not fit into memory; returns the bytes that each would need."""
        size = next(parameter.element_size() for parameter in self.model.parameters())
        needs = {PLAIN: count * length * vocabulary * size, EAGER: count * self.map_bytes(length)}
        left_out = {
            name: needed for name, needed in needs.items() if name in self.run and free is not None and needed > free
        }
        for name in left_out:
            del self.run[name]
        return left_out

    def timed(self, ids: Tensor, rounds: int, done: Callable[[int, int], None]) -> dict[str, list[float]]:
        """Seconds of each contender in each round. A round runs every contender once, so that a slow phase of the
        machine affects them all. `done` is called before each pass with the number of passes done, and of all."""
        seconds: dict[str, list[float]] = {name: [] for name in self.run}
        with torch.no_grad():
            for number in range(rounds + 1):
                for place, (name, run) in enumerate(self.run.items()):
                    done(number * len(self.run) + place, (rounds + 1) * len(self.run))
                    began = time.perf_counter()
                    run(ids)
                    _finish(ids.device)
                    if number:  # the first round warms up
                        seconds[name].append(time.perf_counter() - began)
        return seconds

    def peak(self, name: str, ids: Tensor) -> int | None:
        """Peak memory of one pass in bytes, above what was held before it; None where it cannot be measured."""
        with torch.no_grad():
            return peak_bytes(lambda: self.run[name](ids), ids.device)

    def map_bytes(self, length: int) -> int:
        """Bytes of the eager attention maps of one sequence: heads x T x T in every layer, in the model's dtype."""
        size = next(parameter.element_size() for parameter in self.model.parameters())
        return sum(site.heads for site in self.found.sites) * length * length * size


def _finish(device: torch.device) -> None:
    """Waits until an accelerator has done its queued work."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize()
