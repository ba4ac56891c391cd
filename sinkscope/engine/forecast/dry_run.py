"""The dry run of a scan: what it would read, hold and cost, from the configuration alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sinkscope.capture.alone import alone
from sinkscope.checkpoints import LoadOptions
from sinkscope.checkpoints.adapters import adapter_asked
from sinkscope.checkpoints.forward import SEVERAL, Forward
from sinkscope.checkpoints.loading import check_device_map, pick_device
from sinkscope.checkpoints.outline import Outline, outline_of, outlined
from sinkscope.engine.forecast.build import Look, Workload, built, looked_for, pieces_of, short_passes
from sinkscope.engine.forecast.costs import check_machine, kept_bytes
from sinkscope.engine.input_kinds import check_asked
from sinkscope.engine.measurement import Measurement, measurements
from sinkscope.engine.requested import requested
from sinkscope.engine.self_check import LENGTH, SHORT
from sinkscope.metrics.quantities import quantity_set
from sinkscope.runs.dormancy import check_rule
from sinkscope.runs.forecast import Forecast, Passes
from sinkscope.runs.request import Request
from sinkscope.tables.columns import metric_set


def dry_run(
    model: Any,
    *,
    data: Any = None,
    measure: str | Sequence[str] = (),
    metrics: Sequence[Callable[..., Any] | str | Path] = (),
    machine: str | None = None,
    **settings: Any,
) -> Forecast:
    """Says what `scan` would read of a model, what memory it would take and how long: no weights are loaded.

    Args:
        model: a name, of which only the configuration is read (of a hub id, config.json alone is downloaded), or a
            transformers model, of which a copy without numbers is made.
        data, measure, metrics, settings: as `sinkscope.scan` takes them.
        machine: what the time is estimated for: `here` (measured in a quarter of a second; the default), `h100`,
            `a100`.

    Returns:
        A Forecast: attention calls and how each is read, bytes, forward passes, floating-point operations, seconds.

    Raises:
        SinkscopeError: one line, for anything that a scan would refuse before it loads the model.
    """
    keywords = {"bos": "auto", "first": (), "prepend": (), "images": None, "audio": None, "adapter": None} | settings
    request = requested(model, data, {**keywords, "measures": measure})
    return forecast_request(request, model=model, metrics=metrics, machine=machine)


def forecast_request(
    request: Request,
    *,
    model: Any = None,
    metrics: Sequence[Callable[..., Any] | str | Path] = (),
    machine: str | None = None,
) -> Forecast:
    """The forecast of a request. `model`: a model object in place of `request.model`. Raises as `dry_run` does."""
    check_machine(machine)
    check_asked(request)
    measured = metric_set(metrics).asked(request.measures)
    check_rule(request.dormant_rule, measured.names("heads"))
    device = pick_device(request.device)
    check_device_map(request.device_map)
    with alone(f"a dry run of {request.model}"):
        outline = _outline(request, model)
        look = looked_for(outline, request)
        pieces = [piece for domain in look.domains for piece in pieces_of(*domain, device, request.batch_size)]
        kinds = measurements(request.measures)
        times = 1 + sum(kind.again is not Measurement.again for kind in kinds)
        quantities = quantity_set(measured, request.lengths)
        width = getattr(outline.model.config.get_text_config(), "hidden_size", None)  # type: ignore[union-attr,operator]
        sites = [] if look.plan is None else look.plan.sites
        kept = sum(kept_bytes(quantities, sites, *domain, width or 0) for domain in look.domains) if sites else None
        if kinds:
            look.notes.append("what --measure keeps and computes beside its passes is not counted")
        if request.device_map is not None:
            look.notes.append("the memory is that of all devices of --device-map together")
        others = short_passes(look, _checks(request, look, kinds))
        return built(outline, look, Workload("scan", device, machine, "scan", pieces, others, times, kept=kept))


def _outline(request: Request, model: Any) -> Outline:
    writes = request.generate is not None
    if model is not None and not isinstance(model, str):
        return outline_of(model, writes)
    adapter = adapter_asked(request.adapter, request.device_map is not None)
    outline = outlined(
        request.model,
        LoadOptions(
            request.revision, dtype=request.dtype, trust_remote_code=request.trust_remote_code, head=False,
        ),
    )  # fmt: skip
    if adapter is not None:
        size = sum(path.stat().st_size for path in adapter.paths)
        outline.notes.append(f"the adapter's {size:,} bytes and its operations are not counted")
    return outline


def _self_check(look: Look) -> list[Passes]:
    """A watched and an eager pass, whose maps are compared, and a short plain one, whose output is compared with the
    beginning of the eager one's. Only where later tokens change that, it is computed again."""
    length = look.domains[0][1]
    if length <= SHORT or Forward(look.model).signal is not None:  # what is read whole is read three times
        return [Passes("self-check", 3, 3, length)]
    short = 1 if look.plan is not None and all(site.causal for site in look.plan.sites) else 2
    return [Passes("self-check", 2, 2, min(LENGTH, length)), Passes("self-check, outputs", short, short, SHORT)]


def _checks(request: Request, look: Look, kinds: Sequence[type[Measurement]]) -> list[Passes]:
    """The passes before the scan, but for the dry run's."""
    checks = []
    if Forward(look.model).signal is None:  # they are found in a pass over token ids alone
        found = ["W_V"] * any(kind.wired for kind in kinds) + [kind.finds for kind in kinds if kind.finds]
        checks += [Passes(f"find {what}", 1, *SEVERAL) for what in found]
    if request.self_check and look.domains:
        checks += _self_check(look)
    if request.generate is not None:
        sequences = sum(count for count, _ in look.domains)
        look.notes.append("--generate: each token is a pass of its own, which is slower than its operations say")
        checks.append(Passes("generate", sequences * request.generate, sequences * request.generate, 1))
    return checks
