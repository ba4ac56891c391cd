"""What stands before an attention call, found by numbers, not by names: its input norm, and W_V, W_Q, W_K.

One short pass records every module of a block. The module whose output is the very v the call got, and whose input is
the block's normalised input, holds W_V, whatever it is called and however its rows are laid out (fused, interleaved).
Where none is found (latent attention, keys and values of another layer, norms on v) the map is missing, never guessed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from sinkscope.capture.calls import AttentionCall
from sinkscope.capture.interface import shadowed
from sinkscope.capture.kernels.attend import read
from sinkscope.capture.output_projection import projection_weight
from sinkscope.capture.plan import Plan
from sinkscope.capture.precision import float64
from sinkscope.capture.view import Site
from sinkscope.capture.wiring.linear_maps import InputNorm, Record, find_norm, find_projection, stable_rank


@dataclass(frozen=True)
class Wiring:
    """One site's linear maps, folded with the gain of the norm before them. None: not to be read.

    Attributes:
        norm: from x to the normalised token and to z.
        constant: v of the normalised token 0, that is b_V + W_V b of the norm's own bias, (G, dv).
        rank_w, rank_qk: stable ranks of W_O^h W_V^h and of W_Q^hT W_K^h, one a head.
    """

    norm: InputNorm | None
    constant: Float[Tensor, "group vdim"] | None
    rank_w: Float[Tensor, " head"] | None
    rank_qk: Float[Tensor, " head"] | None


def trace(model: nn.Module, plan: Plan, forward: Callable[[], Any]) -> dict[str, Wiring]:
    """The wiring of every site, by its name, from one call of `forward` on a few short sequences.

    Best with every token at position 0, where a rotation leaves q and k as they were projected (else position 0 alone
    tells, and there many models hold the same vector whatever the text). Modules that call attention several times in
    a pass are left out.
    """
    return _Trace(model, plan).run(forward)


class _Trace:
    """The pass under way: inputs and outputs of the modules of the current block."""

    def __init__(self, model: nn.Module, plan: Plan) -> None:
        self.model, self.failures = model, plan.failures
        repeated = {site.module for site in plan.sites if site.call}
        self.sites = {site.module: site for site in plan.sites if site.module not in repeated}
        self.blocks = {site.block for site in plan.sites if site.block is not None}
        self.names = {module: name for name, module in model.named_modules()}
        self.records: dict[str, Record] = {}
        self.calls: dict[str, AttentionCall] = {}
        self.inputs: dict[str, Tensor] = {}
        self.found: dict[str, Wiring] = {}
        self.busy = False

    def run(self, forward: Callable[[], Any]) -> dict[str, Wiring]:
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            stack.enter_context(shadowed(self._attention))
            for handle in self._hooks():
                stack.callback(handle.remove)
            forward()
        return self.found

    def _hooks(self) -> Iterator[Any]:
        watched = self.blocks | set(self.sites)
        for path, module in self.model.named_modules():
            if path in watched:
                yield module.register_forward_pre_hook(self._enter(path), with_kwargs=True)
            if any(path.startswith(f"{above}.") or path == above for above in watched):
                yield module.register_forward_hook(self._leave(path), with_kwargs=True)

    def _attention(self, module: nn.Module, call: AttentionCall) -> Tensor:
        self.calls[self.names.get(module, "")] = call
        return read(call, self.failures)[0]

    def _enter(self, path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            hidden = _first(args, kwargs)
            if path in self.blocks:
                self.records.clear()
            if hidden is not None:
                self.inputs[path] = hidden

        return hook

    def _leave(self, path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            if self.busy:  # a module asked for its weights, outside the model's own pass
                return
            read = _first(args, kwargs)
            if read is not None and isinstance(output, Tensor):
                self.records[path] = Record(module, read, output)
            site = self.sites.get(path)
            if site is not None and path in self.calls:
                self.busy = True
                self.found[site.name] = self._wiring(site, self.calls.pop(path))
                self.busy = False

        return hook

    def _wiring(self, site: Site, call: AttentionCall) -> Wiring:
        z = self.inputs.get(site.module)
        x = self.inputs.get(site.block) if site.block is not None else None
        own = {path: record for path, record in self.records.items() if path.startswith(f"{site.module}.")}
        before = [record for path, record in self.records.items() if path not in own]
        if z is None or x is None or z.dim() != 3 or x.shape != z.shape or call.key.shape[2] != call.query.shape[2]:
            return Wiring(None, None, None, None)
        norm = find_norm(x.to(z.device), z, before)
        value = find_projection(call.value, z, list(own.values()), exact=True)
        if norm is None:
            return Wiring(None, None, None, None)
        query = find_projection(call.query, z, list(own.values()))
        key = find_projection(call.key, z, list(own.values()))
        constant = rank_w = rank_qk = None
        if value is not None:
            constant = value.constant + torch.einsum("gvd,d->gv", value.weight, norm.bias)
            rank_w = self._rank_w(site, value.weight * norm.gain)
        if query is not None and key is not None:
            rank_qk = stable_rank((query.weight * norm.gain).mT, (key.weight * norm.gain).mT)
        return Wiring(norm, constant, rank_w, rank_qk)

    def _rank_w(self, site: Site, value: Float[Tensor, "group vdim channel"]) -> Float[Tensor, " head"] | None:
        slices = output_slices(self.model, site)
        return None if slices is None else stable_rank(slices.mT, value.mT)


def output_slices(model: nn.Module, site: Site) -> Float[Tensor, "head vdim channel"] | None:
    """W_O^hT of every head, in float64; None where the site has no output projection, or no values were seen."""
    if site.projection is None or site.value_dim is None:
        return None
    weight = projection_weight(model.get_submodule(site.projection), site.heads * site.value_dim)
    return float64(weight).mT.unflatten(0, (site.heads, site.value_dim))


def _first(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """The tensor a module reads first: `hidden_states`, or its first argument."""
    read = kwargs.get("hidden_states", args[0] if args else None)
    return read if isinstance(read, Tensor) and read.is_floating_point() else None
