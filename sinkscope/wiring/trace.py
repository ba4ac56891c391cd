"""Finds the input norm, W_V, W_Q and W_K of an attention call by the values they produce, not by their names, and reads
a head's bilinear form from its weights.

One short pass records the input and output of every module of a block. The module that reads the block's normalised
input and returns exactly the v of the attention call holds W_V, whatever its name and its row layout (fused,
interleaved). Where no module does (latent attention, keys and values of another layer, norms on v), the map is missing,
never guessed.

Every block reads random tokens in this pass, not the residual stream of the block before. Behind a massive activation
all tokens of a real residual stream have nearly one direction, and then the features of q and k, compared over tokens,
could not be told apart."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from sinkscope.capture.axes import hidden_given
from sinkscope.capture.calls import AttentionCall
from sinkscope.capture.hooks import hooked
from sinkscope.capture.inline.calls import InlineCall, SdpaCall
from sinkscope.capture.inline.mode import InlineWatch
from sinkscope.capture.interface import shadowed
from sinkscope.capture.kernels.attend import read
from sinkscope.capture.kernels.map_walk import AttentionMap
from sinkscope.capture.output_projection import is_linear, projection_weight
from sinkscope.capture.plan import INLINE, Plan
from sinkscope.capture.precision import as_float64
from sinkscope.capture.read_inside import ReadInside, reading_path
from sinkscope.capture.sites import Site
from sinkscope.capture.uncalled import is_uncalled, members
from sinkscope.capture.view import need
from sinkscope.wiring.linear_maps import FIT, InputNorm, LinearCall, Projection, find_norm, find_projection
from sinkscope.wiring.mixes import largest_eigenvalue


@dataclass(frozen=True)
class Wiring:
    """One site's linear maps, folded with the gain of the norm before them. None where a map could not be read.

    Attributes:
        norm: the norm that turns x into z.
        constant: v where the normalised token is the zero vector, b_V + W_V b with the norm's bias b, (G, dv).
        rank_w, rank_qk: stable ranks of W_O^h W_V^h and of W_Q^hT W_K^h for each head.
        scale: the factor s by which the attention call multiplies q.k, and the model its projected q and k.
        cost_qk: (|W_Q^h|_F^2 + |W_K^h|_F^2) / 2 of each head; None also where a norm lies between W_Q or W_K and the
            attention call, since the size of the weights then says nothing.
    """

    norm: InputNorm | None
    constant: Float[Tensor, "group vdim"] | None
    rank_w: Float[Tensor, " head"] | None
    rank_qk: Float[Tensor, " head"] | None
    scale: float | None = None
    cost_qk: Float[Tensor, " head"] | None = None


def trace(model: nn.Module, plan: Plan, forward: Callable[[], Any]) -> dict[str, Wiring]:
    """The wiring of every site, by the site's name, from one call of `forward` on a few short sequences.

    `forward` should put every token at position 0, where a rotation leaves q and k as they were projected. Otherwise
    only position 0 can be used, and many models have the same vector there whatever the text. Modules that call
    attention several times in a pass are left out.
    """
    return _Trace(model, plan).run(forward)


@dataclass(frozen=True)
class _Signals:
    """What an attention call attends with, (B, H or G, T, d). `scaling`: the factor of q.k; None where it is not known.
    `square`: it has as many queries as keys."""

    query: Tensor
    key: Tensor
    value: Tensor
    scaling: float | None
    square: bool


def _scaling(seen: AttentionMap) -> float | None:
    """The number by which a model's own code multiplies q.k; None where its logits are no such multiple, beside a bias
    of positions."""
    if seen.logits is None or seen.query is None or seen.key is None:
        return None
    if seen.key.shape[1] not in (1, seen.query.shape[1]):
        return None
    visible = (seen.probabilities > 0).all(0)
    products = _around(as_float64(seen.query) @ as_float64(seen.key).mT, visible)
    logits = _around(as_float64(seen.logits[..., : seen.key.shape[2]]), visible)
    scaling = (products * logits).sum() / products.square().sum()
    error = torch.linalg.vector_norm(logits - scaling * products)
    fits = error <= FIT.get(seen.query.dtype, FIT[torch.float32]) * torch.linalg.vector_norm(logits)
    return float(scaling) if bool(fits) else None


def _around(pairs: Float[Tensor, "batch head query key"], seen: Bool[Tensor, "head query key"]) -> Tensor:
    """The numbers of the pairs that queries see, around their mean over several sequences: a bias of positions, which
    is the same in each, goes out."""
    numbers = pairs.expand(-1, len(seen), -1, -1)[:, seen]
    return numbers - numbers.mean(0) if len(numbers) > 1 else numbers


class _Trace:
    """The state of the pass: inputs and outputs of the current block's modules."""

    def __init__(self, model: nn.Module, plan: Plan) -> None:
        self.model, self.plan, self.failures = model, plan, plan.failures
        repeated = {site.module for site in plan.sites if site.call}
        self.sites = {site.module: site for site in plan.sites if site.module not in repeated}
        self.blocks = {site.block for site in plan.sites if site.block is not None}
        self.names = {module: name for name, module in model.named_modules()}
        self.records: list[tuple[str, LinearCall]] = []
        self.calls: dict[str, _Signals] = {}
        self.torch = InlineWatch(self._inline, model)
        self.inputs: dict[str, Tensor] = {}
        self.before: dict[str, int] = {}
        self.found: dict[str, Wiring] = {}
        self.busy = False
        self.running: str | None = None
        self.generator = torch.Generator().manual_seed(0)

    def run(self, forward: Callable[[], Any]) -> dict[str, Wiring]:
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            stack.enter_context(shadowed(self.model, self._attention))
            stack.enter_context(self.torch.watched(self.model))
            for hooks in self._hooks():
                stack.enter_context(hooks)
            forward()
        return self.found

    def _hooks(self) -> Iterator[AbstractContextManager[None]]:
        watched = self.blocks | set(self.sites)
        for block in sorted(path for path in self.blocks if is_uncalled(self.model.get_submodule(path))):
            for member in members(self.model, block):
                yield hooked(self.model.get_submodule(member), pre=self._enter_member(block), with_kwargs=True)
        for path, module in self.model.named_modules():
            if path in watched:
                yield hooked(module, pre=self._enter(path), with_kwargs=True)
            if any(path.startswith(f"{above}.") or path == above for above in watched):
                yield hooked(module, post=self._leave(path), with_kwargs=True)

    def _attention(self, module: nn.Module, call: AttentionCall) -> Tensor:
        path = self.names.get(module, "")
        self.before[path] = len(self.records)
        with self.torch.paused():
            own = self.plan.of_tokens(path, call)
            self.calls[path] = _Signals(own.query, own.key, own.value, own.scaling, own.square)
            return read(call, self.failures)[0]

    def _inline(self, found: InlineCall | SdpaCall) -> None:
        """Keeps what a call in the model's own code attends with, where batch and heads are two axes, or one that
        torch's multi-head attention has made of them.

        A softmax that is no attention has another number of heads, or stands beside a call of transformers' interface.
        """
        site = self.sites.get(found.module)
        if site is None or site.path != INLINE or (found.folded and not found.feeds_projection):
            return
        with self.torch.paused():
            self._keep(site, found)

    def _keep(self, site: Site, found: InlineCall | SdpaCall) -> None:
        if isinstance(found, SdpaCall):
            call = self.plan.of_tokens(found.module, found.unfolded(site.heads))
            signals = _Signals(call.query, call.key, call.value, call.scaling, call.square)
        else:
            seen = self.plan.of_tokens(found.module, found.unfolded(site.heads))
            queries, keys = seen.lengths
            if seen.query is None or seen.key is None or seen.value is None:
                return
            signals = _Signals(seen.query, seen.key, seen.value, _scaling(seen), queries == keys)
        if signals.query.shape[1] == site.heads:
            self.calls[found.module] = signals
            self.before[found.module] = len(self.records)

    def _enter(self, path: str) -> Callable[..., tuple[tuple[Any, ...], dict[str, Any]] | None]:
        def hook(
            module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
            hidden = _first(args, kwargs) if path in self.blocks else _floats(hidden_given(args, kwargs))
            if path in self.blocks:
                self.records.clear()
            if hidden is None:
                return None
            if path in self.blocks and hidden.dim() == 3:
                hidden = self._random(hidden)
                args, kwargs = _with_first(args, kwargs, hidden)
            self.inputs[path] = hidden
            return args, kwargs

        return hook

    def _enter_member(self, block: str) -> Callable[..., tuple[tuple[Any, ...], dict[str, Any]] | None]:
        """What the first module to run of a block that the model never calls is given enters the block."""
        enter = self._enter(block)

        def hook(
            module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
            before, self.running = self.running, block
            return None if before == block else enter(module, args, kwargs)

        return hook

    def _random(self, like: Tensor) -> Tensor:
        """Normal numbers, the same on every process that holds a part of the model."""
        return torch.randn(like.shape, generator=self.generator).to(like.device, like.dtype)

    def _leave(self, path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            if self.busy:  # `_wiring` calls modules itself; these calls are not the model's
                return
            read = _first(args, kwargs)
            if read is not None and isinstance(output, Tensor):
                self.records.append((path, LinearCall(module, read, output)))  # a norm may serve both q and k
            site = self.sites.get(path)
            if site is not None and path in self.calls:
                self.busy = True
                with self.torch.paused():
                    self.found[site.name] = self._wiring(site, self.calls.pop(path))
                self.busy = False

        return hook

    def _wiring(self, site: Site, call: _Signals) -> Wiring:
        x = self.inputs.get(site.block) if site.block is not None else None
        reading = reading_path(self.model, site.module) if site.path == INLINE else site.module
        own = self.records[: self.before.get(site.module)]
        inside = [record for path, record in own if path.startswith(f"{reading}.".removeprefix("."))]
        z, before = self._read(reading, own), [record for _, record in own]
        if z is None or x is None or z.dim() != 3 or x.shape != z.shape or site.cross or not call.square:
            return Wiring(None, None, None, None)
        norm = find_norm(x.to(z.device), z, before)
        attention = self.model.get_submodule(site.module)
        if isinstance(attention, nn.MultiheadAttention):  # it multiplies by its weights without a module's call
            inside = in_projections(attention, z)
        if (call.value.shape[0], call.value.shape[2]) == (z.shape[1], z.shape[0]) != z.shape[:2]:  # time comes first
            z = z.transpose(0, 1)
            inside = [LinearCall(one.module, *_turned(one.read, one.returned)) for one in inside]
        value = find_projection(call.value, z, inside, exact=True)
        if norm is None:
            return Wiring(None, None, None, None)
        query = find_projection(call.query, z, inside)
        key = find_projection(call.key, z, inside)
        constant = rank_w = rank_qk = cost_qk = None
        scale = call.scaling
        if value is not None:
            constant = value.constant + torch.einsum("gvd,d->gv", value.weight, norm.bias)
            rank_w = self._rank_w(site, value.weight * norm.gain)
        if query is not None and key is not None:
            read_by_query, read_by_key = (projection.weight * norm.gain for projection in (query, key))
            rank_qk = stable_rank(read_by_query.mT, read_by_key.mT)
            factors = [
                one_factor(projection, signal, z) for projection, signal in ((query, call.query), (key, call.key))
            ]
            if scale is not None and None not in factors:
                scale *= math.prod(factor for factor in factors if factor is not None)
                cost_qk = weight_cost(read_by_query, read_by_key)
        return Wiring(norm, constant, rank_w, rank_qk, scale, cost_qk)

    def _read(self, path: str, records: list[tuple[str, LinearCall]]) -> Tensor | None:
        """What the projections inside a module read, of which it made these calls before it attended."""
        given, inside = self.inputs.get(path), ReadInside()
        for layer, record in records:
            if layer.startswith(f"{path}.".removeprefix(".")) and is_linear(record.module):
                inside.add(given, layer, record.read)
        return inside.tensor(given)

    def _rank_w(self, site: Site, value: Float[Tensor, "group vdim channel"]) -> Float[Tensor, " head"] | None:
        slices = output_slices(self.model, site)
        if slices is None or slices.shape[-1] != value.shape[-1]:  # W maps the residual stream to itself
            return None
        return stable_rank(slices.mT, value.mT)


def _turned(*tensors: Tensor) -> list[Tensor]:
    """Hidden states [T, B, D] as [B, T, D]; other tensors as they are."""
    return [tensor.transpose(0, 1) if tensor.dim() == 3 else tensor for tensor in tensors]


def in_projections(attention: nn.MultiheadAttention, z: Tensor) -> list[LinearCall]:
    """W_Q, W_K and W_V of torch's own multi-head attention, as linear layers that read z."""
    apart: list[Tensor] = [attention.q_proj_weight, attention.k_proj_weight, attention.v_proj_weight]
    weights = apart if attention.in_proj_weight is None else attention.in_proj_weight.chunk(3)
    biases = [None] * 3 if attention.in_proj_bias is None else attention.in_proj_bias.chunk(3)
    calls = []
    for weight, bias in zip(weights, biases, strict=True):
        if weight.shape[1] == z.shape[-1]:
            layer = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
            layer.weight = nn.Parameter(weight, requires_grad=False)
            if bias is not None:
                layer.bias = nn.Parameter(bias, requires_grad=False)
            calls.append(LinearCall(layer, z, layer(z)))
    return calls


def output_slices(model: nn.Module, site: Site) -> Float[Tensor, "head vdim channel"] | None:
    """W_O^hT of every head, in float32 or wider; None where the site has no output projection or its values were not
    seen."""
    if site.projection is None or site.value_dim is None:
        return None
    weight = projection_weight(model.get_submodule(site.projection), site.heads * site.value_dim)
    return need(weight).mT.unflatten(0, (site.heads, site.value_dim))


def _first(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """A module's main input, `hidden_states` or its first argument; None where that is no float tensor."""
    return _floats(kwargs.get("hidden_states", args[0] if args else None))


def _floats(read: Any) -> Tensor | None:
    return read if isinstance(read, Tensor) and read.is_floating_point() else None


def _with_first(args: tuple[Any, ...], kwargs: dict[str, Any], first: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with `first` in place of what `_first` reads."""
    return (args, kwargs | {"hidden_states": first}) if "hidden_states" in kwargs else ((first, *args[1:]), kwargs)


# What can be said of a head's bilinear form from its weights, and by what number the model multiplies it.


SAME_RATIO = 1e-3
"""Two tokens are multiplied by the same number where the numbers differ by less than this share."""


def stable_rank(
    left: Float[Tensor, "head channel dim"], right: Float[Tensor, "group channel dim"]
) -> Float[Tensor, " head"]:
    """|M|_F^2 / |M|_2^2 of M = left_h right_g^T, from d x d matrices; NaN where M is 0. The heads of a group are
    adjacent.

    The squared singular values of M are the eigenvalues of R left^T left R^T with right = Q R. Squaring costs digits of
    the small ones, which neither the trace nor the largest needs.
    """
    grams = as_float64(left).mT @ as_float64(left)
    factors = torch.linalg.qr(as_float64(right), mode="r").R.repeat_interleave(len(left) // len(right), dim=0)
    squared = factors @ grams @ factors.mT
    largest = largest_eigenvalue(squared)
    return squared.diagonal(dim1=-2, dim2=-1).sum(-1) / torch.where(largest > 0, largest, torch.nan)


def weight_cost(
    query: Float[Tensor, "head dim channel"], key: Float[Tensor, "group dim channel"]
) -> Float[Tensor, " head"]:
    """(|W_Q^h|_F^2 + |W_K^g|_F^2) / 2 of every head; it is at least the nuclear norm of W_Q^hT R W_K^g for every
    rotation R. The heads of a group are adjacent."""
    keys = as_float64(key).square().sum((1, 2)).repeat_interleave(len(query) // len(key))
    return (as_float64(query).square().sum((1, 2)) + keys) / 2


def one_factor(projection: Projection, signal: Float[Tensor, "batch head token dim"], z: Tensor) -> float | None:
    """The one number by which the model multiplies the projection of z to make `signal`, up to a rotation.

    None where that number is another one for each token, as behind a norm. The lengths of many channels differ less
    among tokens than a quantised layer's outputs from its weight's, so that a norm's are not compared.
    """
    if projection.normed:
        return None
    made = torch.einsum("btc,hdc->bhtd", as_float64(z), projection.weight) + projection.constant[:, None]
    lengths = torch.linalg.vector_norm(as_float64(signal), dim=-1)
    ratio = (lengths / torch.linalg.vector_norm(made, dim=-1)).flatten()
    ratio = ratio[ratio.isfinite()]
    if not len(ratio):
        return None
    typical = ratio.median()
    bound = max(FIT.get(signal.dtype, FIT[torch.float32]), SAME_RATIO, projection.fit)
    return float(typical) if bool(((ratio / typical - 1).abs() < bound).all()) else None
