"""Looks at a model without numbers: its attention calls, by the engine's own plan, and what a scan would read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sinkscope.capture import Plan, plan
from sinkscope.capture.shapes import Shapes
from sinkscope.checkpoints.checkpoint import check_length
from sinkscope.checkpoints.forward import DRY_RUN_TOKENS, Forward
from sinkscope.checkpoints.outline import Outline
from sinkscope.engine.input_kinds import claim
from sinkscope.errors import SinkscopeError
from sinkscope.inputs.documents import Texts
from sinkscope.inputs.images import picture_paths
from sinkscope.inputs.signals import PIXELS
from sinkscope.inputs.sound import sound_paths
from sinkscope.runs.defaults import NUM_SEQUENCES, SEQ_LEN
from sinkscope.runs.forecast import Attention
from sinkscope.runs.openings import openings
from sinkscope.runs.request import Request

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
            found = plan(model, lambda: forward(short))
    except SinkscopeError as error:
        if error.__cause__ is None:
            raise
        return Look(model, None, str(error), None, domains)
    return Look(model, found, None, inputs, domains)


def looked_for(outline: Outline, request: Request) -> Look:
    """The look of a scan's request. Raises SinkscopeError for what a scan would refuse."""
    model, forward = outline.model, Forward(outline.model)
    if request.images is not None or request.audio is not None or forward.signal is not None:
        return _signals(outline, request, forward)
    texts = isinstance(request.handed, Texts)  # read as a SPEC is, which takes a tokenizer
    if outline.task is not None or (request.handed is not None and not texts):
        kind = claim(request, outline, forward)
        sample, _ = kind.probe()
        domains = [(len(data.ids), data.ids.shape[1]) for data in kind.read(0).tokens]
        inputs = partial(_resized, sample) if sample.is_floating_point() else token_ids
        return looked(model, inputs, domains)
    length, count = request.seq_len or SEQ_LEN, request.num_sequences or NUM_SEQUENCES
    check_length(outline, length + (request.generate or 0))
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
        found = looked(outline.model, token_ids, [])
        found.notes.append("pictures or sound beside text: how many positions they take is not known before loading")
        return found
    shape = _signal_shape(outline.model.config, forward.signal)
    inputs = None if shape is None else (lambda count, length: torch.zeros(count, *shape))
    found = looked(outline.model, inputs, [])
    if found.plan is not None:
        found.domains = [(files or 1, found.plan.positions)]
        found.notes.append("the size of a picture or recording is the configuration's; a processor may make another")
    if files is None:
        found.notes.append("no folder of pictures or recordings is given: the passes are those of one")
    return found


def _signal_shape(config: Any, name: str) -> tuple[int, ...] | None:
    """The shape of one picture or recording; None where the configuration does not tell it."""
    if name == PIXELS:
        size, channels = getattr(config, "image_size", None), getattr(config, "num_channels", 3)
        sides = (size, size) if isinstance(size, int) else tuple(size) if isinstance(size, list | tuple) else ()
        return (channels, *sides) if len(sides) == 2 else None
    bins, frames = getattr(config, "num_mel_bins", None), getattr(config, "max_source_positions", None)
    return (bins, 2 * frames) if isinstance(bins, int) and isinstance(frames, int) else None


def attention_of(found: Plan) -> list[Attention]:
    """The calls of a plan, those of one kind together, in the order of the first of each."""
    kinds = Counter(
        (site.stream, str(site.kind), site.path, site.score, site.heads, site.kv_groups) for site in found.sites
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
    names = Counter(str(each).removesuffix("_attention") for each in types)
    return [
        Attention("text", name, None, "unknown", count, heads, groups if isinstance(groups, int) else heads)
        for name, count in names.items()
    ]
