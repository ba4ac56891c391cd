"""Puts heads together that a model computes one by one: in a module each, or in a call each."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
from torch import Tensor, nn

from sinkscope.capture.calls import AttentionCall
from sinkscope.capture.inline.calls import InlineCall, SdpaCall
from sinkscope.capture.kernels.map_walk import AttentionMap
from sinkscope.capture.output_projection import output_projection
from sinkscope.capture.sites import head_counts

Found = TypeVar("Found", InlineCall, SdpaCall)
HEAD_AXIS = {"output": 2}
"""The axis of heads in the tensors of AttentionMap where it is not the second."""


@dataclass
class HeadsTogether:
    """Holds the calls of single heads of `model` that read the same input, until they make up a layer.

    In a list of modules (nn.ModuleList), the heads of which have no output projection of their own, they belong to the
    module that holds the list. Other heads are the calls of one module, which names their number.
    """

    model: nn.Module
    _held: list[InlineCall | SdpaCall] = field(default_factory=list)
    _owner: tuple[str, int] | None = None
    _given: Tensor | None = None

    def take(self, call: InlineCall | SdpaCall, given: Tensor | None) -> list[InlineCall | SdpaCall]:
        """The calls that are whole now: none while other heads of a layer are still to come, and all heads as one call
        with the last. Heads that nothing follows on are handed over as they came. `given`: what the module was given.
        """
        owner = _owner(self.model, call, given, len(self._held))
        fresh = _owner(self.model, call, given, 0)
        follows = owner is not None and owner == self._owner and given is self._given and _alike(self._held[-1], call)
        before = [] if follows else self.rest()
        if not follows and fresh is None:
            return [*before, call]
        if not follows:
            self._owner, self._given = fresh, given
        self._held.append(call)
        assert self._owner is not None
        path, count = self._owner
        return [_together(path, self.rest())] if len(self._held) == count else before

    def rest(self) -> list[InlineCall | SdpaCall]:
        """The calls that are held; none is afterwards."""
        held, self._held, self._owner, self._given = self._held, [], None, None
        return held


def _owner(
    model: nn.Module, call: InlineCall | SdpaCall, given: Tensor | None, number: int
) -> tuple[str, int] | None:  # fmt: skip
    """The module that a call of a single head belongs to, as its head of this number, and how many heads it has. None
    where the call is none."""
    value = call.seen.value if isinstance(call, InlineCall) else call.call.value
    if given is None or given.dim() != 3 or value is None or call.feeds_projection or not _one_head(call, given):
        return None
    parent, _, name = call.module.rpartition(".")
    width, wide = value.shape[-1], given.shape[2]
    count, rest = divmod(wide, width)
    if isinstance(heads := model.get_submodule(parent), nn.ModuleList) and call.module:
        owner = parent.rpartition(".")[0]
        whole = len(heads) * width == wide or output_projection(model, owner, len(heads) * width) is not None
        alone = output_projection(model, call.module, width) is not None
        if name == str(number) and len(heads) > 1 and whole and not alone:
            return owner, len(heads)
    named = count > 1 and not rest and count in head_counts(model, call.module)
    return (call.module, count) if named else None


def _one_head(call: InlineCall | SdpaCall, given: Tensor) -> bool:
    """Whether a call's axes are those of one head of the sequences and positions of `given` (B, T, D)."""
    tensor = call.seen.probabilities if isinstance(call, InlineCall) else call.call.query
    leading = (given.shape[0],) if call.folded else (given.shape[0], 1)
    return tensor.shape[:-1] == (*leading, given.shape[1])


def _alike(call: InlineCall | SdpaCall, other: InlineCall | SdpaCall) -> bool:
    """Whether two calls of single heads can be one call's."""
    if isinstance(call, InlineCall) and isinstance(other, InlineCall):
        return _shapes(call.seen) == _shapes(other.seen) and call.dropped == other.dropped
    if not isinstance(call, SdpaCall) or not isinstance(other, SdpaCall) or call.output.shape != other.output.shape:
        return False
    own, others = call.call, other.call
    same = _shapes(own) == _shapes(others) and own.mask is others.mask and call.dropped == other.dropped
    return same and (own.causal, own.scaling) == (others.causal, others.scaling)


def _shapes(record: AttentionCall | AttentionMap) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in vars(record).items() if isinstance(value, Tensor)}


def _together(path: str, calls: list[InlineCall | SdpaCall]) -> InlineCall | SdpaCall:
    """Calls of single heads, all alike, as one call of the module at `path`."""
    first = calls[0]
    if isinstance(first, InlineCall):
        maps = [call.unfolded(1) for call in calls if isinstance(call, InlineCall)]
        joined = {
            name: torch.cat([getattr(each, name) for each in maps], HEAD_AXIS.get(name, 1)) for name in _shapes(maps[0])
        }
        return replace(first, module=path, seen=replace(maps[0], **joined))
    own = [call for call in calls if isinstance(call, SdpaCall)]
    heads = [call.unfolded(1) for call in own]
    query, key, value = (torch.cat([getattr(each, name) for each in heads], 1) for name in ("query", "key", "value"))
    output = torch.cat([call.unfolded_output(1) for call in own], 2).transpose(1, 2)
    return replace(first, module=path, output=output, call=replace(heads[0], query=query, key=key, value=value))
