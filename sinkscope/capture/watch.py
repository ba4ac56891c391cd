"""The context that watches a model: finds its attention calls in a dry run, then hands over a LayerView for each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from sinkscope.capture.blocks import AttentionCall, AttentionSums, attend
from sinkscope.capture.dispatch import RawCall, shadowed
from sinkscope.capture.masks import Visibility, read_mask
from sinkscope.capture.projection import head_factors, output_projection
from sinkscope.capture.sites import block_of, kind_of, stream_of
from sinkscope.capture.view import LayerView, Site
from sinkscope.errors import SinkscopeError

Span = tuple[int, int]
"""First and past-the-last valid position of one sequence."""


@dataclass(frozen=True)
class Plan:
    """The attention calls of one forward pass, in their order, as the dry run found them."""

    sites: list[Site]


def plan(model: nn.Module, forward: Callable[[], Any]) -> Plan:
    """Runs `forward` once (8 to 16 tokens are enough) and notes every attention call the model makes.

    Raises SinkscopeError when none reaches us: the model has no softmax attention, or computes it inline.
    """
    names = {module: name for name, module in model.named_modules()}
    seen: list[tuple[str, RawCall, bool]] = []

    def note(call: RawCall) -> Tensor:
        if call.module not in names:
            raise SinkscopeError(f"an attention module outside the model called: {type(call.module).__name__}")
        normal = normalise(call, read_mask(call.mask, call.causal, *_lengths(call), call.query.device))
        seen.append((names[call.module], call, normal.visible.causal))
        return attend(normal)[0]

    with torch.no_grad(), shadowed(note):
        forward()
    if not seen:
        raise SinkscopeError(
            f"no attention call of {type(model).__name__} could be read: it has no softmax attention, or computes it "
            "outside transformers' attention interface; use a model whose attention goes through that interface"
        )
    return Plan(_sites(model, seen))


def _sites(model: nn.Module, seen: list[tuple[str, RawCall, bool]]) -> list[Site]:
    paths = {path for path, _, _ in seen}
    calls: Counter[str] = Counter()
    unplaced: Counter[str] = Counter()
    sites = []
    for path, call, causal in seen:
        cross = call.query.shape[2] != call.key.shape[2]
        stream = stream_of(model, path, cross)
        block = block_of(model, path, paths)
        if block is None:
            layer = unplaced[stream]
            unplaced[stream] += 1
        else:
            layer = block[1]
        heads, value_dim = call.query.shape[1], call.value.shape[-1]
        sites.append(
            Site(
                stream=stream,
                layer=layer,
                module=path,
                call=calls[path],
                kind=kind_of(call.module, call.window, stream == "cross", layer),
                heads=heads,
                kv_groups=call.key.shape[1],
                head_dim=call.query.shape[-1],
                value_dim=value_dim,
                causal=causal,
                block=block[0] if block else None,
                projection=output_projection(model, path, heads * value_dim),
                score=call.score,
            )
        )
        calls[path] += 1
    return sites


@dataclass
class _Pending:
    """One attention call of the pass under way, until its block has ended."""

    site: Site
    call: RawCall
    parts: list[tuple[slice, Span | None, AttentionSums]]
    output: Tensor
    projected: Tensor | None = None


@dataclass
class Capture:
    """Watches forward passes of `model` and calls `on_layer` with one LayerView for each site and sequence group.

    Use as `with capture.watching(): model(...)`. Afterwards, also after an exception, the model has no hook of ours
    and the attention registry is as it was. Nothing of a layer is kept once its block has ended.
    """

    model: nn.Module
    plan: Plan
    on_layer: Callable[[LayerView, int], None]
    epsilon: float = 0.3
    spans: list[Span] | None = None
    _factors: dict[str, Tensor] = field(default_factory=dict)

    @contextmanager
    def watching(self, spans: list[Span] | None = None) -> Iterator[None]:
        """Watches until the block ends. `spans`: valid positions of each sequence where a batch holds padding."""
        self.spans = spans
        self._reset()
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            stack.enter_context(shadowed(self._attention))
            for handle in self._hooks():
                stack.callback(handle.remove)
            stack.callback(self._reset)
            yield
            self._finish([pending for waiting in self._waiting.values() for pending in waiting])

    def _reset(self) -> None:
        self._calls: Counter[str] = Counter()
        self._waiting: dict[str | None, list[_Pending]] = {}
        self._inputs: dict[str, Tensor] = {}
        self._masks: dict[tuple[Any, ...], tuple[Tensor | None, Visibility]] = {}
        self._latest: dict[str, _Pending] = {}

    def _hooks(self) -> Iterator[Any]:
        self._names = {module: name for name, module in self.model.named_modules()}
        self._by_call = {(site.module, site.call): site for site in self.plan.sites}
        blocks = {site.block for site in self.plan.sites if site.block is not None}
        attentions = {site.module for site in self.plan.sites}
        for path in sorted(blocks | attentions):
            module = self.model.get_submodule(path)
            yield module.register_forward_pre_hook(self._keep_input(path), with_kwargs=True)
        for path in sorted(blocks):
            yield self.model.get_submodule(path).register_forward_hook(self._end_block(path))
        for site in self.plan.sites:
            if site.projection is not None and site.call == 0:
                hook = self._keep_projected(site.module)
                yield self.model.get_submodule(site.projection).register_forward_pre_hook(hook)

    def _keep_input(self, path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            hidden = kwargs.get("hidden_states", args[0] if args else None)
            if isinstance(hidden, Tensor) and hidden.dim() == 3:
                self._inputs[path] = hidden

        return hook

    def _keep_projected(self, path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            pending = self._latest.get(path)
            if pending is not None and args and args[0].numel() == pending.output.numel():
                pending.projected = args[0].reshape(pending.output.shape)

        return hook

    def _end_block(self, path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            hidden = output[0] if isinstance(output, tuple) else output
            plain = isinstance(hidden, Tensor) and hidden.dim() == 3  # hyper-connections carry several streams
            self._finish(self._waiting.pop(path, []), hidden if plain else None)
            self._inputs.pop(path, None)

        return hook

    def _attention(self, call: RawCall) -> Tensor:
        path = self._names.get(call.module, "")
        site = self._by_call.get((path, self._calls[path]))
        if site is None:
            raise SinkscopeError(f"attention module {path!r} was called once more than in the dry run")
        self._calls[path] += 1
        output, parts = self._measure(call)
        pending = _Pending(site, call, parts, output)
        self._waiting.setdefault(site.block, []).append(pending)
        self._latest[path] = pending
        return output

    def _measure(self, call: RawCall) -> tuple[Tensor, list[tuple[slice, Span | None, AttentionSums]]]:
        batch = call.query.shape[0]
        if self.spans is None or len(self.spans) != batch:
            output, sums = attend(normalise(call, self._visibility(call, None)))
            return output, [(slice(0, batch), None, sums)]
        output = call.query.new_zeros(batch, call.query.shape[2], call.query.shape[1], call.value.shape[-1])
        parts: list[tuple[slice, Span | None, AttentionSums]] = []
        for index, (first, last) in enumerate(self.spans):
            part = _cut(call, index, first, last)
            rows, sums = attend(normalise(part, self._visibility(part, index, call.mask)))
            output[index, first:last] = rows[0]
            parts.append((slice(index, index + 1), (first, last), sums))
        return output, parts

    def _visibility(self, call: RawCall, index: int | None, owner: Tensor | None = None) -> Visibility:
        """Each mask of a pass is read once: layers of one kind share one tensor, kept here so that its id stays its."""
        owner = call.mask if owner is None else owner
        key = (id(owner), index, call.causal, *_lengths(call))
        if key not in self._masks:
            self._masks[key] = (owner, read_mask(call.mask, call.causal, *_lengths(call), call.query.device))
        return self._masks[key][1]

    def _finish(self, ended: list[_Pending], residual_out: Tensor | None = None) -> None:
        for pending in ended:
            for rows, span, sums in pending.parts:
                self.on_layer(self._view(pending, rows, span, sums, residual_out), rows.start)

    def _view(
        self, pending: _Pending, rows: slice, span: Span | None, sums: AttentionSums, residual_out: Tensor | None
    ) -> LayerView:
        site, call = pending.site, pending.call
        cut = slice(None) if span is None else slice(*span)

        def tokens(tensor: Tensor | None) -> Tensor | None:
            fits = tensor is not None and tensor.shape[0] == call.query.shape[0]
            return tensor[rows, cut] if fits and tensor is not None else None

        residual = self._inputs.get(site.block) if site.block is not None else None
        return LayerView(
            site=site,
            epsilon=self.epsilon,
            attention=sums,
            output=pending.output[rows, cut],
            raw_query=call.query[rows, :, cut],
            raw_key=call.key[rows, :, cut],
            raw_value=call.value[rows, :, cut],
            raw_projected=tokens(pending.projected),
            factors=self._head_factors(site),
            residual_in=tokens(residual),
            attention_input=tokens(self._inputs.get(site.module)),
            residual_out=tokens(residual_out),
        )

    def _head_factors(self, site: Site) -> Tensor | None:
        if site.projection is None:
            return None
        if site.projection not in self._factors:
            projection = self.model.get_submodule(site.projection)
            self._factors[site.projection] = head_factors(projection, site.heads, site.value_dim)
        return self._factors[site.projection]


def normalise(call: RawCall, visible: Visibility) -> AttentionCall:
    """The call as the kernel takes it."""
    return AttentionCall(
        query=call.query,
        key=call.key,
        value=call.value,
        visible=visible,
        scaling=call.scaling,
        softcap=call.softcap,
        bias=call.bias,
        sinks=call.sinks,
        score=call.score,
    )


def _lengths(call: RawCall) -> tuple[int, int]:
    return call.query.shape[2], call.key.shape[2]


def _cut(call: RawCall, index: int, first: int, last: int) -> RawCall:
    """One sequence of a padded batch, its valid positions only: everything after this is free of padding."""
    one, span = slice(index, index + 1), slice(first, last)

    def square(tensor: Tensor | None) -> Tensor | None:
        if tensor is None:
            return None
        row = tensor[one] if tensor.shape[0] > 1 else tensor
        return row[..., span, span] if row.shape[-2] > 1 else row[..., span]

    sinks = call.sinks
    if sinks is not None and sinks.shape[0] > 1:
        sinks = sinks[one]
    if sinks is not None and sinks.shape[2] > 1:
        sinks = sinks[:, :, span]
    return RawCall(
        module=call.module,
        query=call.query[one, :, span],
        key=call.key[one, :, span],
        value=call.value[one, :, span],
        mask=square(call.mask),
        causal=call.causal,
        scaling=call.scaling,
        softcap=call.softcap,
        bias=square(call.bias),
        sinks=sinks,
        window=call.window,
        score=call.score,
    )
