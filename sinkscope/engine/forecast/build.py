"""Puts a forecast together: the passes that a measurement makes, and what they hold and cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from sinkscope.checkpoints.forward import DRY_RUN_TOKENS, Forward
from sinkscope.checkpoints.outline import Outline
from sinkscope.engine.batch_size import chosen_batch, free_bytes, not_square
from sinkscope.engine.forecast.costs import PassCosts, counted
from sinkscope.engine.forecast.look import Look, attention_named, attention_of
from sinkscope.engine.forecast.rates import GPU_BYTES, MARGIN, check_machine, estimated
from sinkscope.errors import SinkscopeError
from sinkscope.runs.forecast import CONFIGURATION, DRY, Forecast, Memory, Passes


@dataclass(frozen=True)
class Asked:
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


def pieces_of(sequences: int, length: int, device: torch.device, asked: int | None) -> list[tuple[int, int]]:
    """(sequences, length) of each pass that a scan makes over one domain, while memory suffices."""
    size = asked or min(sequences, chosen_batch(length, device))
    found, left = [], sequences
    while left:
        taken = not_square(min(size, left), length)
        found.append((taken, length))
        left -= taken
    return found


def built(outline: Outline, look: Look, asked: Asked) -> Forecast:
    """The forecast. Raises SinkscopeError for an unknown machine."""
    check_machine(asked.machine)
    model, notes = outline.model, [*outline.warnings, *outline.notes, *look.notes]
    sites = [] if look.plan is None else look.plan.sites
    attention = attention_of(look.plan) if look.plan is not None else attention_named(model.config)
    largest = max(asked.pieces, key=lambda piece: piece[0] * piece[1] ** 2, default=(0, 0))
    costs = _costs(outline, look, largest, asked, notes)
    passes = [*asked.others, *_over_text(asked)]
    flops = None if costs is None else sum(costs.flops(each.sequences, each.length) for each in passes)
    if costs is not None and flops and any(asked.starts):
        left_out = sum(sum(costs.layers[:start]) for start in asked.starts)
        left_out = left_out * sum(count for count, _ in asked.pieces) // costs.sequences
        late = sum(map(bool, asked.starts))
        notes.append(
            f"{late} of {asked.times} passes over each sequence begin above the first layer, which leaves out "
            f"{left_out / flops:.0%} of all operations; a model that does not allow it runs whole"
        )
        flops -= left_out
    weights = sum(tensor.numel() * tensor.element_size() for tensor in model.parameters())
    activations, watching = (None, None) if costs is None else (costs.activations, costs.watching)
    memory = Memory(
        weights, outline.facts["weight_bytes"], activations, asked.logits, watching,
        asked.kept, str(asked.device), free_bytes(asked.device),
    )  # fmt: skip
    held = None if costs is None else weights + costs.activations + costs.watching + asked.logits
    calls = sum(each.passes for each in passes) * len(sites)
    dtype = outline.facts["dtype"]
    config = model.config
    return Forecast(
        command=asked.command,
        model=outline.name,
        revision=outline.facts["revision"],
        model_type=getattr(config, "model_type", None),
        family=type(model).__name__,
        parameters=sum(tensor.numel() for tensor in model.parameters()),
        dtype=dtype,
        found_by=CONFIGURATION if look.plan is None else DRY,
        why=look.why,
        attention=attention,
        layers=sum(each.calls for each in attention),
        heads=sum(each.calls * each.heads for each in attention),
        unread=[] if look.plan is None else list(look.plan.unread),
        memory=memory,
        passes=passes,
        batch_size=largest[0],
        seq_len=largest[1],
        flops=flops,
        time=None if flops is None else estimated(flops, calls, dtype, asked.machine, asked.device),
        gpus=None if held is None else max(1, -(-held // int(GPU_BYTES * MARGIN))),
        gpu_bytes=GPU_BYTES,
        margin=MARGIN,
        trials=asked.trials,
        notes=notes,
    )


def _costs(outline: Outline, look: Look, largest: tuple[int, int], asked: Asked, notes: list[str]) -> PassCosts | None:
    """What the largest pass costs; None where it cannot be run on shapes."""
    inputs = look.inputs
    if look.plan is None or inputs is None or not largest[0]:
        return None
    try:
        return counted(
            outline.model, lambda: Forward(outline.model)(inputs(*largest)), *largest, asked.device, asked.layers
        )
    except (RuntimeError, SinkscopeError) as error:
        notes.append(f"the pass cannot be counted: {' '.join(str(error).split())[:160]}")
        return None


def _over_text(asked: Asked) -> list[Passes]:
    found: dict[int, list[tuple[int, int]]] = {}
    for piece in asked.pieces:
        found.setdefault(piece[1], []).append(piece)
    return [
        Passes(asked.what, asked.times * len(own), asked.times * sum(count for count, _ in own), length)
        for length, own in found.items()
    ]


def short_passes(found: Look, checks: Sequence[Passes]) -> list[Passes]:
    """The dry run's own passes, then others."""
    inline = found.plan is not None and found.plan.inline
    return [Passes("find attention", 2 if inline else 1, 2 if inline else 1, DRY_RUN_TOKENS), *checks]
