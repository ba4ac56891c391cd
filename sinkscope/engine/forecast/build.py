"""Puts a forecast together: looks at a model without numbers, and counts the passes, what they hold and what
they cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sinkscope.capture import Plan, plan
from sinkscope.capture.shapes import Shapes
from sinkscope.checkpoints.checkpoint import check_length, default_length
from sinkscope.checkpoints.forward import DRY_RUN_TOKENS, Forward
from sinkscope.checkpoints.outline import Outline
from sinkscope.engine.batch_size import chosen_batch, free_bytes, not_square
from sinkscope.engine.forecast.costs import GPU_BYTES, MARGIN, PassCosts, check_machine, counted, estimated
from sinkscope.engine.input_kinds import claim
from sinkscope.errors import SinkscopeError
from sinkscope.inputs.documents import Texts
from sinkscope.inputs.images import picture_paths
from sinkscope.inputs.signals import PIXELS
from sinkscope.inputs.sound import sound_paths
from sinkscope.runs.defaults import NUM_SEQUENCES, SEQ_LEN
from sinkscope.runs.forecast import CONFIGURATION, DRY, Attention, Forecast, Memory, Passes
from sinkscope.runs.openings import openings
from sinkscope.runs.request import Request


@dataclass(frozen=True)
class Workload:
    """What a forecast is made of beside the model.

    Attributes:
        pieces: (sequences, length) of every pass over the text, once; `times`: how often each of them is read.
        others: the passes before them.
        logits: bytes of next-token logits that are kept beside those of a pass.
        kept: bytes of what is kept of all sequences.
        layers: the layers that some of these passes leave out, and `starts`: how many of them each of `times` does.
    """

    command: str
    device: torch.device
    machine: str | None
    what: str
    pieces: list[tuple[int, int]]
    others: list[Passes]
    times: int = 1
    trials: int | None = None
    logits: int = 0
    kept: int | None = None
    layers: Sequence[nn.Module] = ()
    starts: Sequence[int] = ()


def pieces_of(sequences: int, length: int, device: torch.device, batch_size: int | None) -> list[tuple[int, int]]:
    """(sequences, length) of each pass that a scan makes over one domain, while memory suffices."""
    size = batch_size or min(sequences, chosen_batch(length, device))
    pieces, left = [], sequences
    while left:
        taken = not_square(min(size, left), length)
        pieces.append((taken, length))
        left -= taken
    return pieces


def built(outline: Outline, look: Look, workload: Workload) -> Forecast:
    """The forecast. Raises SinkscopeError for an unknown machine."""
    check_machine(workload.machine)
    model, notes = outline.model, [*outline.warnings, *outline.notes, *look.notes]
    sites = [] if look.plan is None else look.plan.sites
    attention = attention_of(look.plan) if look.plan is not None else attention_named(model.config)
    largest = max(workload.pieces, key=lambda piece: piece[0] * piece[1] ** 2, default=(0, 0))
    costs = _costs(outline, look, largest, workload, notes)
    passes = [*workload.others, *_over_text(workload)]
    flops = None if costs is None else sum(costs.flops(entry.sequences, entry.length) for entry in passes)
    if costs is not None and flops and any(workload.starts):
        left_out = sum(sum(costs.layers[:start]) for start in workload.starts)
        left_out = left_out * sum(count for count, _ in workload.pieces) // costs.sequences
        late = sum(map(bool, workload.starts))
        notes.append(
            f"{late} of {workload.times} passes over each sequence begin above the first layer, which leaves out "
            f"{left_out / flops:.0%} of all operations; a model that does not allow it runs whole"
        )
        flops -= left_out
    weights = sum(tensor.numel() * tensor.element_size() for tensor in model.parameters())
    activations, watching = (None, None) if costs is None else (costs.activations, costs.watching)
    memory = Memory(
        weights, outline.facts["weight_bytes"], activations, workload.logits, watching,
        workload.kept, str(workload.device), free_bytes(workload.device),
    )  # fmt: skip
    held = None if costs is None else weights + costs.activations + costs.watching + workload.logits
    calls = sum(entry.passes for entry in passes) * len(sites)
    dtype = outline.facts["dtype"]
    config = model.config
    return Forecast(
        command=workload.command,
        model=outline.name,
        revision=outline.facts["revision"],
        model_type=getattr(config, "model_type", None),
        family=type(model).__name__,
        parameters=sum(tensor.numel() for tensor in model.parameters()),
        dtype=dtype,
        found_by=CONFIGURATION if look.plan is None else DRY,
        why=look.why,
        attention=attention,
        layers=sum(kind.calls for kind in attention),
        heads=sum(kind.calls * kind.heads for kind in attention),
        unread=[] if look.plan is None else list(look.plan.unread),
        memory=memory,
        passes=passes,
        batch_size=largest[0],
        seq_len=largest[1],
        flops=flops,
        time=None if flops is None else estimated(flops, calls, dtype, workload.machine, workload.device),
        gpus=None if held is None else max(1, -(-held // int(GPU_BYTES * MARGIN))),
        gpu_bytes=GPU_BYTES,
        margin=MARGIN,
        trials=workload.trials,
        notes=notes,
    )


def _costs(
    outline: Outline, look: Look, largest: tuple[int, int], workload: Workload, notes: list[str]
) -> PassCosts | None:
    """What the largest pass costs; None where it cannot be run on shapes."""
    inputs = look.inputs
    if look.plan is None or inputs is None or not largest[0]:
        return None
    try:
        return counted(
            outline.model, lambda: Forward(outline.model)(inputs(*largest)), *largest, workload.device, workload.layers
        )
    except (RuntimeError, SinkscopeError) as error:
        notes.append(f"the pass cannot be counted: {' '.join(str(error).split())[:160]}")
        return None


def _over_text(workload: Workload) -> list[Passes]:
    by_length: dict[int, list[tuple[int, int]]] = {}
    for piece in workload.pieces:
        by_length.setdefault(piece[1], []).append(piece)
    return [
        Passes(workload.what, workload.times * len(pieces), workload.times * sum(count for count, _ in pieces), length)
        for length, pieces in by_length.items()
    ]


def short_passes(look: Look, checks: Sequence[Passes]) -> list[Passes]:
    """The dry run's own passes, then others."""
    inline = look.plan is not None and look.plan.inline
    return [Passes("find attention", 2 if inline else 1, 2 if inline else 1, DRY_RUN_TOKENS), *checks]


# Looks at a model without numbers: its attention calls, by the engine's own plan, and what a scan would read.


Inputs = Callable[[int, int], Tensor]
"""Makes an input of so many sequences of so many positions."""


@dataclass
class Look:
    """What is known of a model and its inputs.

    Attributes:
        plan: the attention calls; None where the model cannot be run without numbers, and `why` then says why.
        inputs: makes what a pass reads; None where no such input can be made.
        domains: for each domain the number of sequences, and positions in each; empty where they are not known.
    """

    model: nn.Module
    plan: Plan | None
    why: str | None
    inputs: Inputs | None
    domains: list[tuple[int, int]]
    notes: list[str] = field(default_factory=list)


def looked(model: nn.Module, inputs: Inputs | None, domains: list[tuple[int, int]]) -> Look:
    """Makes the dry run of a model on shapes.

    Raises SinkscopeError where the model can be run, and none of its attention can be read: a scan would say the same.
    """
    if inputs is None:
        return Look(model, None, "what it reads cannot be made from its configuration", None, domains)
    forward, short = Forward(model), inputs(1, DRY_RUN_TOKENS)
    try:
        with Shapes():
            call_plan = plan(model, lambda: forward(short))
    except SinkscopeError as error:
        if error.__cause__ is None:
            raise
        return Look(model, None, str(error), None, domains)
    return Look(model, call_plan, None, inputs, domains)


def looked_for(outline: Outline, request: Request) -> Look:
    """The look of a scan's request. Raises SinkscopeError for what a scan would refuse."""
    model, forward = outline.model, Forward(outline.model)
    if request.images is not None or request.audio is not None or forward.signal is not None:
        return _signals(outline, request, forward)
    texts = isinstance(request.handed, Texts)  # read as a SPEC is, which takes a tokenizer
    if outline.task is not None or (request.handed is not None and not texts):
        kind = claim(request, outline)
        sample, _ = kind.probe()
        domains = [(len(data.ids), data.ids.shape[1]) for data in kind.read(0).tokens]
        inputs = partial(_resized, sample) if sample.is_floating_point() else token_ids
        return looked(model, inputs, domains)
    length, count = request.seq_len or default_length(outline, SEQ_LEN), request.num_sequences or NUM_SEQUENCES
    check_length(outline, length, request.generate or 0)
    begun = len(openings(request.first, request.prepend)) if request.first or request.prepend else len(request.bos)
    domains = [(count, length + (request.generate or 0))] * len(request.data or ("prose",)) * begun
    outline.vocabulary  # noqa: B018 raises for a model that has none
    return looked(model, token_ids, domains)


def token_ids(sequences: int, length: int) -> Tensor:
    """Token ids that any vocabulary has."""
    return torch.arange(length).remainder(2).expand(sequences, -1)


def _resized(sample: Tensor, count: int, length: int) -> Tensor:
    return sample[:1, :1].expand(count, length, *sample.shape[2:])


def _signals(outline: Outline, request: Request, forward: Forward) -> Look:
    """Pictures and sound are processed by files of the checkpoint that were not read: their shape comes of the
    configuration, and their number of the folder."""
    files: int | None = None
    if request.images is not None:
        files = len(picture_paths(Path(request.images)))
    elif request.audio is not None:
        files = len(sound_paths(Path(request.audio)))
    if forward.signal is None:
        look = looked(outline.model, token_ids, [])
        look.notes.append("pictures or sound beside text: how many positions they take is not known before loading")
        return look
    shape = _signal_shape(outline.model.config, forward.signal)
    inputs = None if shape is None else (lambda count, length: torch.zeros(count, *shape))
    look = looked(outline.model, inputs, [])
    if look.plan is not None:
        look.domains = [(files or 1, look.plan.positions)]
        look.notes.append("the size of a picture or recording is the configuration's; a processor may make another")
    if files is None:
        look.notes.append("no folder of pictures or recordings is given: the passes are those of one")
    return look


def _signal_shape(config: Any, name: str) -> tuple[int, ...] | None:
    """The shape of one picture or recording; None where the configuration does not tell it."""
    if name == PIXELS:
        size, channels = getattr(config, "image_size", None), getattr(config, "num_channels", 3)
        sides = (size, size) if isinstance(size, int) else tuple(size) if isinstance(size, list | tuple) else ()
        return (channels, *sides) if len(sides) == 2 else None
    bins, frames = getattr(config, "num_mel_bins", None), getattr(config, "max_source_positions", None)
    return (bins, 2 * frames) if isinstance(bins, int) and isinstance(frames, int) else None


def attention_of(call_plan: Plan) -> list[Attention]:
    """The calls of a plan, those of one kind together, in the order of the first of each."""
    kinds = Counter(
        (site.stream, str(site.kind), site.path, site.score, site.heads, site.kv_groups) for site in call_plan.sites
    )
    return [
        Attention(stream, kind, path, score, count, heads, groups)
        for (stream, kind, path, score, heads, groups), count in kinds.items()
    ]


def attention_named(config: Any) -> list[Attention]:
    """The calls that a configuration names by its counts of layers and heads; none where it names none."""
    text = config.get_text_config()
    layers, heads = getattr(text, "num_hidden_layers", None), getattr(text, "num_attention_heads", None)
    if not isinstance(layers, int) or not isinstance(heads, int):
        return []
    groups = getattr(text, "num_key_value_heads", None)
    types = getattr(text, "layer_types", None) or ["full_attention"] * layers
    names = Counter(str(layer_type).removesuffix("_attention") for layer_type in types)
    return [
        Attention("text", name, None, "unknown", count, heads, groups if isinstance(groups, int) else heads)
        for name, count in names.items()
    ]
