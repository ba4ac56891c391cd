"""Runs the layers below an arm's first change once: there every arm hands on what the unablated model does.

The unablated pass of a batch keeps what some layers return. A pass under an arm then runs the model's own code, but for
the layers below the arm's start: the last of them returns what was kept, those before it return NaN. No numbers change,
because nothing else of these layers is read; `Layers.sound` tries that out before the first batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from sinkscope.capture.hooks import instead
from sinkscope.experiments.arms.arm import Arm, Pass, Setting
from sinkscope.experiments.arms.readings import Cosines, SinkCount

KEPT_BYTES = 512 * 2**20
"""Most memory for what layers returned in the unablated pass of a batch: as much as its logits may take."""

RunPass = Callable[[Tensor, SinkCount, AbstractContextManager[Any]], Tensor]
"""Runs the unablated model on ids, within a context; returns the logits."""


@dataclass
class Kept:
    """What the unablated pass of a batch leaves for the passes under arms.

    Attributes:
        sinks, cosines: its sinks, and the cosines of its tokens behind each layer.
        before: how many attention calls it had counted when layer 0 began.
        entered: the tensors that layer 0 read.
        returned: what the layer below a start returned, by start, and `calls`: how many calls were counted by then.
        order: numbers of the layers in the order of their calls.
    """

    sinks: SinkCount
    cosines: Cosines
    before: int = 0
    entered: list[Tensor] = field(default_factory=list)
    returned: dict[int, Any] = field(default_factory=dict)
    calls: dict[int, int] = field(default_factory=dict)
    order: list[int] = field(default_factory=list)

    def begins_alike(self, read: list[Tensor]) -> bool:
        """Whether layer 0 reads what it read here, and each layer was called once, in their order."""
        return (
            self.order == list(range(len(self.order)))
            and len(read) == len(self.entered)
            and all(torch.equal(*pair) for pair in zip(read, self.entered, strict=True))
        )


class Layers:
    """The layers of a model that may be left out: those of the one list that holds all its attention."""

    def __init__(self, setting: Setting) -> None:
        lists = {(site.block or "").rpartition(".")[0] for site in setting.sites}
        self._base = setting.base
        only = lists.pop() if len(lists) == 1 else ""
        self.blocks = list(setting.base.get_submodule(only).children()) if only else []
        self._place: dict[nn.Module, int] = {}
        for place, block in enumerate(self.blocks):
            for module in block.modules():
                self._place.setdefault(module, place)  # one that several layers share belongs to the first

    def start(self, arm: Arm, forward: Pass) -> int:
        """How many layers come before the first that the arm changes; 0 where that is not known."""
        paths = arm.changes(forward) if self.blocks else None
        if paths is None:
            return 0
        return min((self._place.get(self._base.get_submodule(path), 0) for path in paths), default=len(self.blocks))

    def sound(self, starts: Iterable[int], ids: Tensor, run: RunPass, epsilon: float) -> tuple[set[int], int]:
        """The starts at which a pass over `ids`, [1, T], has the logits of a whole pass to the last bit; and the bytes
        that one keeps for each token.

        Between the two passes the model reads other ids, so that what a layer leaves in the model for a later one is
        found out.
        """
        candidates = sorted(set(starts) - {0})
        if not candidates:
            return set(), 0
        kept = Kept(SinkCount(epsilon), Cosines({}))
        whole = run(ids, kept.sinks, self.recorded(kept, candidates))
        run(ids.flip(-1), SinkCount(epsilon), nullcontext())

        def same(start: int) -> bool:
            sinks = SinkCount(epsilon)
            try:
                logits = run(ids, sinks, self.replayed(kept, start, sinks, Cosines({})))
            except Exception:  # whatever the model's code does without what these layers leave there
                return False
            return torch.equal(logits, whole) and sinks.calls == kept.sinks.calls

        passed = {start for start in candidates if start in kept.returned and same(start)}
        sizes = [sum(_bytes(tensor) for tensor in _tensors(kept.returned[start])) for start in passed]
        return passed, -(-max(sizes, default=0) // ids.numel())

    @contextmanager
    def recorded(self, kept: Kept, starts: Iterable[int]) -> Iterator[None]:
        """Around the unablated pass: keeps in `kept` what the layers below these starts return, but for start 0."""
        wanted = set(starts) - {0}

        def keep(place: int) -> Callable[..., Any]:
            def compute(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
                if place == 0:
                    kept.before, kept.entered = kept.sinks.calls, [part.clone() for part in _tensors((args, kwargs))]
                output = forward(*args, **kwargs)
                kept.order.append(place)
                if place + 1 in wanted:
                    kept.returned[place + 1] = _copied(output, Tensor.clone)
                    kept.calls[place + 1] = kept.sinks.calls
                return output

            return compute

        with ExitStack() as stack:
            for place, block in enumerate(self.blocks if wanted else ()):
                stack.enter_context(instead(block, keep(place)))
            yield

    @contextmanager
    def replayed(self, kept: Kept, start: int, sinks: SinkCount, cosines: Cosines) -> Iterator[None]:
        """Around a pass under an arm: the layers before `start` do not run where layer 0 reads what it read in the
        unablated pass. `sinks` and `cosines` get what that pass found in them."""
        left_out = False

        def replace(place: int) -> Callable[..., Any]:
            def compute(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
                nonlocal left_out
                if place == 0:
                    left_out = kept.begins_alike(_tensors((args, kwargs)))
                    if left_out:
                        sinks.take(kept.sinks, slice(kept.before, kept.calls[start]))
                        cosines.take(kept.cosines, self.blocks[:start])
                if not left_out:
                    return forward(*args, **kwargs)
                return _copied(kept.returned[start], Tensor.clone if place == start - 1 else _nothing)

            return compute

        with ExitStack() as stack:
            for place, block in enumerate(self.blocks[:start]):
                stack.enter_context(instead(block, replace(place)))
            yield


def kept_starts(starts: Sequence[int], sound: set[int], state_bytes: int) -> list[int]:
    """At which layer each pass starts, where what is kept for all of them takes KEPT_BYTES at most.

    `starts`: the layer at which each could. A pass starts at the last layer up to there that is sound and kept, or at
    0. Where too many layers are asked for, those are kept at which the passes in the order of their starts are cut into
    equal parts.
    """
    most = KEPT_BYTES // max(1, state_bytes)
    possible = sorted(_last(start, sound) for start in starts)
    possible = [start for start in possible if start]
    chosen = set(possible)
    if len(chosen) > most:
        chosen = {possible[len(possible) * part // most] for part in range(most)}
    return [_last(start, chosen) for start in starts]


def _last(start: int, known: set[int]) -> int:
    return max((layer for layer in known if layer <= start), default=0)


def _nothing(like: Tensor) -> Tensor:
    """A tensor of the same shape that takes no memory: NaN, so that nothing reads it unnoticed."""
    return like.new_full((), float("nan") if like.is_floating_point() else 0).expand(like.shape)


def _copied(output: Any, copy: Callable[[Tensor], Tensor]) -> Any:
    """What a layer returned, with a copy of every tensor. Other objects than tuples, lists and dicts stay."""
    if isinstance(output, Tensor):
        return copy(output)
    if type(output) in (tuple, list):
        return type(output)(_copied(part, copy) for part in output)
    if type(output) is dict:
        return {name: _copied(part, copy) for name, part in output.items()}
    return output


def _tensors(held: Any) -> list[Tensor]:
    """The plain tensors of arguments, in order; a mask that is not made yet is none of them."""
    if isinstance(held, Tensor):
        return [held] if type(held) in (Tensor, nn.Parameter) else []
    parts = held.values() if isinstance(held, dict) else held if isinstance(held, tuple | list) else ()
    return [tensor for part in parts for tensor in _tensors(part)]


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
