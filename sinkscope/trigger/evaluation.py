"""Evaluates a trained model on the evaluation sequences: its error, its attention maps, and where the mass goes.

The model returns its whole attention maps here; `sinkscope scan` finds the same BOS masses inside the attention call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor, nn

from sinkscope.capture.hooks import hooked
from sinkscope.errors import SinkscopeError
from sinkscope.trigger import task
from sinkscope.trigger.as_input import SINK, split_rows
from sinkscope.trigger.model import TriggerModel
from sinkscope.trigger.patterns import Pattern, head_pattern


@dataclass(frozen=True)
class Evaluation:
    """The result of `evaluate`.

    Attributes:
        error: the largest absolute error over all sequences, positions and coordinates.
        loss: mean squared error over all sequences, positions and coordinates.
        maps: A[i, t], mean over sequences.
        heads: one row per head: layer, head, and the columns of `as_input.COLUMNS` and of COLUMNS below.
        patterns: each head's verdict, in the same order.
    """

    error: float
    loss: float
    maps: Float[Tensor, "layer head query key"]
    heads: list[dict[str, Any]]
    patterns: list[Pattern]

    @property
    def sinks(self) -> int:
        """Heads whose mean BOS mass over non-trigger rows is 0.9 or more."""
        return sum(row["bos_mean"] >= SINK for row in self.heads)


COLUMNS = {
    "bos_worst": "smallest A[i,0] over all sequences and non-trigger rows i >= 1",
    "self_mean": "mean over non-trigger rows of A[i,i]",
    "others_mean": "mean over non-trigger rows of the mass on keys 1 .. i-1",
    "outside_mean": "mean over non-trigger rows of 1 - sum_t A[i,t]: an extra logit's, or of empty rows; NaN if raw",
    "trigger_mean_key": "mean over keys t = 1 .. j of A[j,t], the trigger's row (1/j would be the exact mean)",
    "gate_mean": "mean over non-trigger rows of the output gate; NaN without one",
    "gate_trigger": "mean of the output gate in the trigger's row; NaN without one",
}


LARGEST = 2**31
"""Bytes that the attention maps of one evaluation may take, all layers and heads together."""


def evaluate(
    model: TriggerModel,
    seed: int = 0,
    count: int = task.EVALUATION_SEQUENCES,
    length: int | None = None,
    trigger: int | None = None,
) -> Evaluation:
    """Runs the model on `count` evaluation sequences of `length` positions; by default as many as in training.

    The trigger is at position 7 (at L-1 where L < 8), or at `trigger`. Raises SinkscopeError for sizes without a task,
    a trigger outside of 1 .. L-1, and where the attention maps would take more than 2 GiB.
    """
    config = model.config
    length = config.length if length is None else length
    task.check_sizes(config.hidden_size, length)
    check_size(count, length, config.num_hidden_layers * config.num_attention_heads)
    data = task.evaluation(count, length, config.hidden_size, seed, trigger)
    gates: list[Tensor] = []
    gated = [layer.self_attn.gate_proj for layer in model.layers if config.kind.gated]

    def keep(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        gates.append(torch.sigmoid(output))

    with hooked(gated, post=keep), torch.no_grad():
        outputs = model(inputs_embeds=data.inputs, output_attentions=True)
    errors = outputs.last_hidden_state - task.targets(data, config.residual, config.off, config.target)
    trigger = int(data.trigger[0])
    heads = [
        _head(layer, head, weights[:, head].double(), trigger, config.kind.normalised)
        | _gate(gates, layer, head, config.hidden_size, trigger)
        for layer, weights in enumerate(outputs.attentions)
        for head in range(config.num_attention_heads)
    ]
    maps = torch.stack([weights.mean(0) for weights in outputs.attentions])
    patterns = [
        head_pattern(layer, head, weights[:, head].double(), trigger)
        for layer, weights in enumerate(outputs.attentions)
        for head in range(config.num_attention_heads)
    ]
    return Evaluation(float(errors.abs().max()), float(errors.square().mean()), maps, heads, patterns)


def check_size(count: int, length: int, heads: int) -> None:
    """Raises SinkscopeError for no sequence, and where the attention maps of all of them would take more than 2 GiB."""
    if count < 1:
        raise SinkscopeError(f"{count} sequences: at least 1 is needed")
    if (taken := 4 * count * heads * length**2) > LARGEST:
        raise SinkscopeError(
            f"{count} sequences of length {length} in {heads} heads have attention maps of {taken / 2**30:.1f} GiB, "
            "more than 2: pass a smaller --num-sequences or --length"
        )


def _head(layer: int, head: int, a: Float[Tensor, "batch query key"], trigger: int, normalised: bool) -> dict[str, Any]:
    """One head's row: `split_rows` of BOS mass and of its share of the row, and where the rest of the mass goes."""
    total = a.abs().sum(-1)
    share = torch.where(total > 0, a[..., 0].abs() / total, 0.0)
    rows = torch.tensor([i for i in range(1, a.shape[1]) if i != trigger])
    own = a.diagonal(0, -2, -1)
    outside = (1 - a.sum(-1)) if normalised else torch.full_like(total, torch.nan)
    return {
        "layer": layer,
        "head": head,
        **split_rows(a[..., 0].mean(0).numpy(), trigger, "bos"),
        **split_rows(share.mean(0).numpy(), trigger, "share"),
        "bos_worst": float(a[:, rows, 0].min()),
        "self_mean": float(own[:, rows].mean()),
        "others_mean": float((a[..., 1:].sum(-1) - own)[:, rows].mean()),
        "outside_mean": float(outside[:, rows].mean()),
        "trigger_mean_key": float(a[:, trigger, 1 : trigger + 1].mean()),
    }


def _gate(gates: list[Tensor], layer: int, head: int, dim: int, trigger: int) -> dict[str, float]:
    if not gates:
        return {"gate_mean": float("nan"), "gate_trigger": float("nan")}
    rows = gates[layer][..., head * dim : (head + 1) * dim].mean((0, 2)).numpy()
    values = split_rows(rows, trigger, "gate")
    return {"gate_mean": values["gate_mean"], "gate_trigger": values["gate_trigger"]}


KEPT = ("layer", "head", "bos_min", "bos_mean", "bos_worst", "bos_trigger", "share_min", "share_mean", "share_trigger")


def by_length(
    model: TriggerModel,
    lengths: Sequence[int],
    triggers: Sequence[int] = (),
    seed: int = 0,
    count: int = task.EVALUATION_SEQUENCES,
) -> pd.DataFrame:
    """Returns one row per length, trigger's position, layer and head, each on `count` sequences.

    Columns: length, trigger, error (the largest absolute one) and loss of the model, then of the head: KEPT, pattern
    and pattern_share. Without `triggers` the trigger stands at position 7 and at the last one.
    Raises SinkscopeError as `evaluate` does.
    """
    rows = []
    for length in lengths:
        task.check_sizes(model.config.hidden_size, length)
        for trigger in triggers or dict.fromkeys((task.evaluation_trigger(length), length - 1)):
            found = evaluate(model, seed, count, length, trigger)
            for head, pattern in zip(found.heads, found.patterns, strict=True):
                rows.append({
                    "length": length, "trigger": trigger, "error": found.error, "loss": found.loss,
                    **{name: head[name] for name in KEPT},
                    "pattern": pattern.pattern, "pattern_share": pattern.pattern_share,
                })  # fmt: skip
    return pd.DataFrame(rows)
