"""Hears continuous batches: passes in a thread of their own, over pages of one cache that many requests share.

In such a pass the tokens of all requests stand one after another in a single row, and so do the keys that each of them
reads out of the pages. `passes_of` cuts it into the passes of the requests, each over a cache of its own.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from sinkscope.capture.calls import AttentionCall
from sinkscope.capture.generation_doors import batch_step, replayed, requests_of, set_batch_step, under_way
from sinkscope.capture.heard import Around, Heard, Pass, Share
from sinkscope.capture.kept import Kept
from sinkscope.capture.listeners import Listeners
from sinkscope.errors import SinkscopeError, in_one_line

Ear = Callable[[Any, nn.Module], AbstractContextManager[None]]
"""Takes what runs a continuous batch, and the model: its block holds one pass."""


def continuous_batches(ear: Ear) -> AbstractContextManager[None]:
    """Runs every pass of a continuous batch, in whatever thread, in a block of `ear`, until the end."""
    return _listeners.joined_by(ear)


def _put() -> Callable[[], None]:
    kind, plain = batch_step()

    def step(self: Any, model: nn.Module) -> Any:
        with ExitStack() as stack:
            for ear in _listeners.everywhere():
                stack.enter_context(ear(self, model))
            return plain(self, model)

    set_batch_step(kind, step)
    return partial(set_batch_step, kind, plain)


_listeners: Listeners[Ear] = Listeners(_put)


@dataclass(eq=False)
class Pages:
    """Stands for the pages of one request, as a cache of its own. `owner`: what runs the continuous batch."""

    owner: weakref.ref[Any]


class Requests:
    """The requests under way, each with its pages until it is over."""

    def __init__(self) -> None:
        self._pages: dict[str, Pages] = {}

    def of(self, batches: Any) -> list[Share]:
        """The shares of the pass that a continuous batch is about to run. Raises SinkscopeError where Python would not
        see it."""
        if replayed(batches):
            raise SinkscopeError(
                "continuous batches that run compiled, or as CUDA graphs, are not read: set use_cuda_graph=False and "
                "no compile configuration in their ContinuousBatchingConfig"
            )
        for name, pages in [*self._pages.items()]:
            owner = pages.owner()
            if owner is None or not under_way(owner, name):
                del self._pages[name]  # which ends its sequence
        shares, start = list[Share](), 0
        for name, before, tokens in requests_of(batches):
            if name not in self._pages or self._pages[name].owner() is not batches:
                self._pages[name] = Pages(weakref.ref(batches))
            shares.append(Share(self._pages[name], start, start + tokens, before))
            start += tokens
        return shares


def passes_of(now: Pass) -> Iterator[tuple[Share, Pass]]:
    """The pass of each request that is wanted. What does not belong to it alone is copied: pages are written anew."""
    assert now.shares is not None
    masks: dict[tuple[int, int], Tensor] = {}
    for number, share in enumerate(now.shares):
        if share.wanted:
            yield share, _own(now, number, share, masks)


def _own(now: Pass, number: int, share: Share, masks: dict[tuple[int, int], Tensor]) -> Pass:
    rows = slice(share.start, share.stop)
    request_pass = Pass(
        now.root, 1, share.stop - share.start, None if now.ids is None else now.ids[:, rows].long(),
        cache=share.pages, before=share.before, unmatched=now.unmatched, split=now.split, refused=now.refused,
        counts=now.counts, entered=now.entered, idle=now.idle, changes=now.changes,
    )  # fmt: skip
    try:
        request_pass.heard = [_cut(heard, number, rows, share.before, masks) for heard in now.heard]
        request_pass.around = [_part(around, rows) for around in now.around]
    except Exception as error:  # whatever it is, the pass is somebody else's and goes on
        request_pass.refused = request_pass.refused or in_one_line(error)
    return request_pass


def _cut(heard: Heard, number: int, rows: slice, before: int, masks: dict[tuple[int, int], Tensor]) -> Heard:
    """The rows of one request in an attention call, with the keys that it read."""
    if heard.call is None:
        raise SinkscopeError(f"{heard.name} attends in its own code in a continuous batch: it is not read")
    if heard.ends is None or heard.call.mask is None:
        raise SinkscopeError("continuous batches are read with transformers 5.24 or newer")
    if heard.changed:
        raise SinkscopeError(f"{heard.name} writes into the tensors that it attends with: they cannot be read")
    call, (first, past) = heard.call, heard.ends[number : number + 2]
    beyond = call.beyond({"query", "key", "value", "mask", "causal", "scaling", "softcap", "sinks", "window"})
    if beyond or (call.sinks is not None and call.sinks.shape[2] != 1):
        what = beyond[0] if beyond else "sinks"
        raise SinkscopeError(f"the {what} of {heard.name} in a continuous batch: they are not read")
    mask = masks.get((id(call.mask), number))
    if mask is None:  # the layers of a kind share one
        mask = masks[id(call.mask), number] = heard.call.mask[:, :, rows, first:past].clone()
    query = call.query[:, :, rows].clone()
    key, value = call.key[:, :, first:past], call.value[:, :, first:past]
    if not before:  # a first pass is kept as it is, and not the whole batch with it
        key, value = key.clone(), value.clone()
    cut: AttentionCall = replace(call, query=query, key=key, value=value, mask=mask)
    output, projected = (None if piece is None else piece[:, rows].clone() for piece in (heard.output, heard.projected))
    return replace(
        heard, call=cut, query=query, key=key, value=value, output=output, queries=query.shape[2], keys=past - first,
        projected=projected, versions=(), ends=None,
    )  # fmt: skip


def _part(around: Around, rows: slice) -> Around:
    given = _rows(around.given, rows)
    read = given if around.read is around.given else _rows(around.read, rows)
    return replace(around, given=given, returned=_rows(around.returned, rows), read=read)


def _rows(kept: Kept | None, rows: slice) -> Kept | None:
    whole = None if kept is None else kept.unwritten
    return None if whole is None else Kept.of(whole[:, rows].clone())
