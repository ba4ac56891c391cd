"""Compares our capture of one short sequence (or picture, or recording), before a scan, with a reference that forms
every attention map whole: the model's own eager attention, or float64 attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sinkscope.capture import Capture, LayerView, Plan, Site
from sinkscope.capture.calls import AttentionCall
from sinkscope.capture.kernels.map_walk import AttentionMap
from sinkscope.capture.output_projection import quantiser
from sinkscope.capture.precision import as_float64
from sinkscope.capture.registries import uncompiled
from sinkscope.checkpoints.forward import Forward, eager
from sinkscope.checkpoints.quiet import quiet_transformers
from sinkscope.engine.batch_size import memory_needed, overflow_words
from sinkscope.errors import SinkscopeError
from sinkscope.runs.defaults import EPSILON

if TYPE_CHECKING:
    from sinkscope.engine.loop import Loop  # a check needs no loop, and not all that a loop imports

Pass = Callable[..., Any]
LENGTH = 128
SHORT = 16
"""Tokens on which the unwatched model is held against its eager attention. Whatever one of them leaves out (a bias, a
soft-cap, a learned sink, a score) changes these too, and on a CPU they cost a fraction of a pass of 128."""

BOUNDS = {torch.float64: 1e-3, torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Largest difference of a probability that rounding explains. Eager rounds probabilities to the model's dtype
before they are compared, and rounded logits (bf16 keeps 8 bits) move a single row's probability by percents."""


EAGER = "eager attention maps"
DENSE = "float64 attention from each layer's own queries, keys and mask"
OTHER_OUTPUT = "eager attention computes another output"
EAGER_OTHERWISE = (
    "loaded with attn_implementation='eager', this model attends otherwise: by up to {:.2g} in a probability of its "
    "first attention call; a program that loads it so has other numbers"
)
MAPS = {
    "encoder": "encoder_attentions", "decoder": "decoder_attentions", "cross": "cross_attentions",
    "vision": "vision_attentions", "audio": "audio_attentions",
}  # fmt: skip
"""Fields of a model's output that hold the maps of one of several streams; `attentions` for all others."""


@dataclass
class _Reference:
    """The values to compare with, by site name: A[i,0] of every query and the column sums of A, float64."""

    name: str
    first: dict[str, Tensor]
    columns: dict[str, Tensor]
    reason: str | None = None
    other_output: bool = False
    """Whether eager attention computes another output than the attention that was measured."""


def check_loop(loop: Loop) -> dict[str, Any]:
    """Runs the self-check of a scan and returns its record; in a launch, that of the process with the largest
    difference."""
    loop.report("checking", 0, loop.reading.total)

    def check() -> dict[str, Any]:
        with memory_needed("the self-check (--no-self-check skips it)"):
            sequence, extra = loop.reading.first_sequence(loop.checkpoint.device)
            return self_check(loop.checkpoint.model, loop.plan, loop.forward, sequence, extra)

    return max(loop.processes.together(check), key=lambda record: record["max_difference"] or 0.0)


def self_check(
    model: nn.Module, plan: Plan, forward: Forward, ids: Tensor, extra: dict[str, Tensor] | None = None
) -> dict[str, Any]:
    """Compares A[i,0] of every query and alpha_k of every key over the first 128 tokens of one sequence.

    A picture, a recording or a sequence with pictures (in `extra`, the forward's other keywords) is compared whole.

    The reference is the model's own eager attention. Where that lacks a map for some call, or computes another output
    than the model, the reference is float64 attention from the inputs of each call. So it is where a quantised model
    differs from its eager attention: rounding turns a small difference into a large one from layer to layer.

    Whether the model without capture computes what its eager attention does is asked of the first 16 tokens.

    Returns what the manifest records: tokens, attention layers compared, `reference` (with `reason` where it is not
    eager), `max_difference` (absolute, in probability), `bound`, and `status` `passed`, `warning` (half precision
    beyond its bound) or `not possible`. Raises SinkscopeError where a float32 model differs by more than 1e-3: then our
    numbers cannot be trusted.
    """
    run: Pass = partial(forward, **extra) if extra else forward
    whole = forward.signal is not None
    short = ids
    if not whole and not extra:
        short = ids = ids[:, :LENGTH]
        if ids.shape[1] > SHORT:
            short = ids[:, :SHORT]
    ours: dict[str, LayerView] = {}
    dense = _Reference(DENSE, {}, {})
    hides_sinks: set[str] = set()

    def see(site: Site, call: AttentionCall | AttentionMap) -> None:
        _keep(dense, site, dense_map(call))
        if isinstance(call, AttentionCall) and call.sinks is not None:
            hides_sinks.add(site.name)

    capture = Capture(model, plan, lambda view, row: ours.__setitem__(view.site.name, view), EPSILON, on_call=see)
    with capture.watching():
        run(ids)
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    bound = BOUNDS.get(dtype, BOUNDS[torch.float32])
    eager_reference = _eager_reference(model, plan, run, (ids, short), bound, hides_sinks, ours)
    if eager_reference.reason is None and _rounds(model) and _worst(plan, ours, eager_reference)[0] > bound:
        eager_reference.reason = "the model is quantised: where a layer rounds what it reads, two passes of it differ"
    reference = eager_reference if eager_reference.reason is None else dense
    record: dict[str, Any] = {
        "tokens": plan.positions if whole else ids.shape[1],
        "bound": bound,
        "reference": reference.name,
    }
    if eager_reference.reason is not None:
        record["reason"] = eager_reference.reason
        record["eager_difference"] = _eager_difference(model, plan, ours, eager_reference, bound)
    if len(reference.first) != len(plan.sites):
        return record | {"status": "not possible", "layers": 0, "max_difference": None}
    return _verdict(record, plan, ours, reference, dtype)


def warnings_of(checked: dict[str, Any]) -> list[str]:
    """Returns the warnings that a self-check's record calls for."""
    otherwise = checked.get("eager_difference")
    told = [] if otherwise is None else [EAGER_OTHERWISE.format(otherwise)]
    if checked["status"] in ("passed", "skipped"):
        return told
    if checked["status"] == "warning":
        return [
            *told,
            f"self-check: {checked['max_difference']:.2g} from eager attention at {checked['where']}, more than the "
            f"{checked['bound']:g} that half precision explains; try --dtype float32",
        ]
    return [*told, f"self-check not possible: {checked['reason']}"]


def _verdict(
    record: dict[str, Any], plan: Plan, ours: dict[str, LayerView], reference: _Reference, dtype: torch.dtype
) -> dict[str, Any]:
    worst, where = _worst(plan, ours, reference)
    bound = record["bound"]
    if worst != worst:
        raise SinkscopeError(f"self-check: attention of {where} is NaN: {overflow_words(str(dtype))}")
    record |= {"layers": len(plan.sites), "max_difference": worst, "where": where}
    if worst <= bound:
        return record | {"status": "passed"}
    if dtype in (torch.bfloat16, torch.float16):
        return record | {"status": "warning"}
    raise SinkscopeError(
        f"self-check failed: at {where} our attention differs from {reference.name} by {worst:.2g} "
        f"(allowed {bound:g}); the numbers could not be trusted (--no-self-check scans anyway)"
    )


def _rounds(model: nn.Module) -> bool:
    """Whether the model is quantised, so that its layers may round what they read."""
    configured = getattr(getattr(model, "config", None), "quantization_config", None) is not None
    return configured or quantiser(model) is not None


def _worst(plan: Plan, ours: dict[str, LayerView], reference: _Reference) -> tuple[float, str]:
    """The largest difference, NaN where there is one, and the site where it is; 0 for sites without a reference."""
    worst, where = 0.0, plan.sites[0].name
    for site in plan.sites:
        if site.name in reference.first:
            difference = _difference(ours[site.name], reference.first[site.name], reference.columns[site.name])
            if not difference <= worst:
                worst, where = difference, site.name
    return worst, where


def _eager_difference(
    model: nn.Module, plan: Plan, ours: dict[str, LayerView], eager: _Reference, bound: float
) -> float | None:
    """How far eager attention that computes another output is from ours in the first call whose map is returned, where
    both read the same. None where rounding explains it: later calls read what rounding has made of it."""
    first = next((site.name for site in plan.sites if site.name in eager.first), None)
    if not eager.other_output or _rounds(model) or first is None:
        return None
    if eager.first[first].shape != ours[first].attention.first.shape:
        return None
    difference = _difference(ours[first], eager.first[first], eager.columns[first])
    return difference if difference > bound else None


def _difference(view: LayerView, first: Tensor, columns: Tensor) -> float:
    sums = view.attention
    in_columns = ((columns - as_float64(sums.columns)) / as_float64(sums.seen_by.clamp(min=1))).abs().max()
    return float(torch.maximum((first - as_float64(sums.first)).abs().max(), in_columns))


def _keep(reference: _Reference, site: Site, probabilities: Tensor | None) -> None:
    if probabilities is not None:
        reference.first[site.name] = as_float64(probabilities[..., 0])
        reference.columns[site.name] = as_float64(probabilities).sum(-2)


def _eager_reference(
    model: nn.Module, plan: Plan, forward: Pass, sequences: tuple[Tensor, Tensor], bound: float, hides_sinks: set[str],
    ours: dict[str, LayerView],
) -> _Reference:  # fmt: skip
    """Returns the model's own eager maps; `reason` says why they cannot serve as reference.

    `sequences`: the one whose maps are compared, and its beginning, of which outputs are compared (itself where it
    cannot be cut).
    """
    reference = _Reference(EAGER, {}, {})
    ids, short = sequences
    try:
        with torch.no_grad(), quiet_transformers(), uncompiled():
            plain = forward(short)[0]
            with eager(model):
                outputs = forward(ids, output_attentions=True)
                eager_output = outputs[0]
                if short is not ids:
                    eager_output = _beginning(eager_output, plain, bound)
                    if eager_output is None:  # what follows changes what the beginning computes
                        eager_output = forward(short, output_attentions=True)[0]
    except (TypeError, ValueError, KeyError, RuntimeError, AttributeError):
        reference.reason = "the model gives no eager attention maps"
        return reference
    for sites, maps in _pairs(outputs, plan.sites):
        for site, probabilities in zip(sites, maps, strict=False):
            views = ours[site.name].attention
            if probabilities.shape != (*views.first.shape, views.columns.shape[-1]):
                reference.reason = f"the eager attention map of {site.name} has the shape {tuple(probabilities.shape)}"
            elif site.score == "softmax" and _not_probabilities(probabilities, bound):
                reference.reason = "what the model returns as attention maps are no probabilities"
            elif site.heads > 1 and bool((probabilities == probabilities[:, :1]).all()):
                reference.reason = "the model returns its attention maps averaged over the heads"
            elif site.name in hides_sinks and bool((probabilities.sum(-1) - 1).abs().max() < bound):
                reference.reason = "the model's eager attention maps leave its learned sinks out"
            _keep(reference, site, probabilities)
        if len(maps) != len(sites):
            reference.reason = f"the model returns {len(maps)} eager attention maps for {len(sites)} attention calls"
    difference = _relative_difference(plain, eager_output)
    reference.other_output = not difference <= bound
    if reference.reason is None and reference.other_output:
        reference.reason = f"{OTHER_OUTPUT} (relative difference {difference:.2g})"
    return reference


def _beginning(output: Any, plain: Any, bound: float) -> Tensor | None:
    """As many first positions of an output as `plain` has, (1, T, D) each, where they agree with it; else None."""
    if not all(isinstance(each, Tensor) and each.ndim == 3 for each in (output, plain)):
        return None
    beginning = output[:, : plain.shape[1]]
    return beginning if _relative_difference(plain, beginning) <= bound else None


def _not_probabilities(maps: Tensor, bound: float) -> bool:
    return bool((maps < 0).any()) or bool((maps.sum(-1) - 1).max() > bound)


def _pairs(outputs: Any, sites: list[Site]) -> Iterator[tuple[list[Site], list[Tensor]]]:
    """Pairs the sites with their returned maps: all in one list, or a list for each stream."""

    def maps(name: str) -> list[Tensor]:
        return [entry for entry in getattr(outputs, name, None) or () if isinstance(entry, Tensor)]

    if len(maps("attentions")) == len(sites):
        yield sites, maps("attentions")
        return
    streams = dict.fromkeys(site.stream for site in sites)
    for stream in streams:
        own = MAPS.get(stream, "attentions")
        field = own if len(streams) > 1 or maps(own) else "attentions"
        yield [site for site in sites if site.stream == stream], maps(field)


def _relative_difference(plain: Any, other: Any) -> float:
    """NaN where the two cannot be compared: no bound allows it."""
    if not isinstance(plain, Tensor) or not isinstance(other, Tensor) or plain.shape != other.shape:
        return float("nan")
    return float((plain - other).float().norm() / plain.float().norm().clamp(min=1e-30))


# Forms whole attention maps in float64; the self-check compares the kernels' sums with them.
#
# It shares no computation with the kernels of `sinkscope.capture`: it applies masks as they come and forms every map.


def dense_map(seen: AttentionCall | AttentionMap) -> Tensor | None:
    """Returns A of one call, (B, H, Tq, Tk) in float64; None for a score that is not softmax.

    A map that the model formed itself is computed from its logits where it is their softmax, else taken as it is.
    """
    if isinstance(seen, AttentionMap):
        if seen.logits is None or not seen.is_softmax(slice(None)):
            return as_float64(seen.probabilities)
        return as_float64(seen.logits).softmax(-1)[..., : seen.probabilities.shape[-1]]
    if seen.score != "softmax":
        return None
    key = as_float64(seen.key).repeat_interleave(seen.query.shape[1] // seen.key.shape[1], 1)
    logits = as_float64(seen.query) @ key.mT * seen.scaling
    if seen.softcap is not None:
        logits = (logits / seen.softcap).tanh() * seen.softcap
    if seen.bias is not None:
        logits = logits + as_float64(seen.bias)
    mask = None if seen.mask is None else seen.mask.to(logits.device)
    logits = _masked(logits, mask, seen.causal)
    if seen.sinks is not None:
        sinks = as_float64(seen.sinks)
        shape = (*logits.shape[:-1], sinks.shape[-1])
        logits = torch.cat([logits, sinks.expand(shape)], -1)
    probabilities = logits.softmax(-1)[..., : key.shape[-2]]
    return probabilities if mask is None else probabilities.masked_fill(_blind(mask, key.shape[-2]), 0.0)


def _blind(mask: Tensor, keys: int) -> Tensor:
    """Marks queries that see no key: they attend to nothing (softmax itself would give NaN, or equal weights)."""
    mask = mask[..., :keys]
    seen = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    return ~seen.any(-1, keepdim=True)


def _masked(logits: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    if mask is None:
        later = torch.ones_like(logits, dtype=torch.bool).triu(1)
        return logits.masked_fill(later, -torch.inf) if causal else logits
    mask = mask[..., : logits.shape[-1]]
    return logits.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else logits + as_float64(mask)
