"""Evaluates a trained model on the evaluation sequences: its error, its attention maps, and where the mass goes.

All means are over evaluation sequences and over rows i >= 1 without a trigger. With a[i,t] >= 0 as below,

- `none`: the mean of sum_t a[i,t] is below 0.1, so that the rows are (next to) empty;
- `sink`: otherwise, the mean of a[i,0] is 0.9 or more;
- `diagonal`: otherwise, the mean of a[i,i] is 0.9 or more;
- `spread`: anything else, also where both means reach 0.9, which only rows of sum above 1 can do.

Each head gets two verdicts. `pattern` takes a = |A|, the attention as the model uses it: mass for softmax, an
unnormalised weight for relu and sigmoid. `pattern_share` takes Gu et al.'s proxy a = |A[i,t]| / sum_t |A[i,t]|, 0 in a
row of zeros. They differ where rows do not sum to 1: in relu, sigmoid, softmax1 and learned-sink. The bound 0.9 is the
paper's for heads with a sink, 0.1 its counterpart; both are conventions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor, nn

from sinkscope.capture.hooks import hooked
from sinkscope.errors import SinkscopeError
from sinkscope.trigger import task
from sinkscope.trigger.as_input import SINK, split_rows
from sinkscope.trigger.model import TriggerModel

EMPTY = 0.1
"""Rows whose mean sum is below this hold no attention."""

PATTERN_COLUMNS = {
    "total_mean": "mean over non-trigger rows of sum_t |A[i,t]|",
    "self_share_mean": "mean over non-trigger rows of |A[i,i]| / sum_t |A[i,t]|, 0 in a row of zeros",
    "filled_mean": "share of non-trigger rows that are not all zero",
    "pattern": "sink, diagonal, spread or none, by |A|",
    "pattern_share": "sink, diagonal, spread or none, by each row's shares",
}


@dataclass(frozen=True)
class Pattern:
    """One head's verdicts, and the means of COLUMNS that `Evaluation.heads` lacks."""

    layer: int
    head: int
    total_mean: float
    self_share_mean: float
    filled_mean: float
    pattern: str
    pattern_share: str

    def as_dict(self) -> dict[str, Any]:
        """The pattern as plain data, by field."""
        return asdict(self)


def name_pattern(total: float, first: float, own: float) -> str:
    """The verdict by the means of a row's sum, of its first entry and of its own entry; see the module's docstring."""
    if total < EMPTY:
        return "none"
    if (first >= SINK) == (own >= SINK):
        return "spread"
    return "sink" if first >= SINK else "diagonal"


def head_pattern(layer: int, head: int, weights: Float[Tensor, "batch query key"], trigger: int) -> Pattern:
    """The verdicts on one head's attention A, whose trigger stands at one position in all sequences."""
    rows = torch.tensor([i for i in range(1, weights.shape[1]) if i != trigger])
    a = weights[:, rows].abs()
    total, first, diagonal = a.sum(-1), a[..., 0], a.gather(-1, rows.expand(len(a), -1)[..., None])[..., 0]

    def share(part: Tensor) -> float:
        return float(torch.where(total > 0, part / total, 0.0).mean())

    filled = float((total > 0).to(a.dtype).mean())
    return Pattern(
        layer,
        head,
        float(total.mean()),
        share(diagonal),
        filled,
        name_pattern(float(total.mean()), float(first.mean()), float(diagonal.mean())),
        name_pattern(filled, share(first), share(diagonal)),
    )


def join_patterns(names: list[str]) -> str:
    """A model's verdict from its heads': `sink`, or `diagonal + sink` where they differ."""
    return " + ".join(sorted(set(names)))


# Evaluates a trained model on the evaluation sequences: its error, its attention maps, and where the mass goes.
#
# The model returns its whole attention maps here; `sinkscope scan` finds the same BOS masses inside the attention call.


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
        outputs = model(inputs_embeds=data.inputs.to(model.dtype), output_attentions=True)
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
    diagonal = a.diagonal(0, -2, -1)
    outside = (1 - a.sum(-1)) if normalised else torch.full_like(total, torch.nan)
    return {
        "layer": layer,
        "head": head,
        **split_rows(a[..., 0].mean(0).numpy(), trigger, "bos"),
        **split_rows(share.mean(0).numpy(), trigger, "share"),
        "bos_worst": float(a[:, rows, 0].min()),
        "self_mean": float(diagonal[:, rows].mean()),
        "others_mean": float((a[..., 1:].sum(-1) - diagonal)[:, rows].mean()),
        "outside_mean": float(outside[:, rows].mean()),
        "trigger_mean_key": float(a[:, trigger, 1 : trigger + 1].mean()),
    }


def _gate(gates: list[Tensor], layer: int, head: int, dim: int, trigger: int) -> dict[str, float]:
    if not gates:
        return {"gate_mean": float("nan"), "gate_trigger": float("nan")}
    rows = gates[layer][..., head * dim : (head + 1) * dim].double().mean((0, 2)).numpy()
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
            evaluation = evaluate(model, seed, count, length, trigger)
            for head, pattern in zip(evaluation.heads, evaluation.patterns, strict=True):
                rows.append({
                    "length": length, "trigger": trigger, "error": evaluation.error, "loss": evaluation.loss,
                    **{name: head[name] for name in KEPT},
                    "pattern": pattern.pattern, "pattern_share": pattern.pattern_share,
                })  # fmt: skip
    return pd.DataFrame(rows)


# Attention maps of a model of the task for figures: mean and standard deviation over sequences, and single inputs.


@dataclass(frozen=True)
class TriggerMaps:
    """Maps of one model at one length.

    Attributes:
        kind: kind of attention.
        trigger: position of the trigger in every sequence.
        mean, deviation: mean and standard deviation (1/n) of A over the sequences, [layer, head, query, key] float64.
        single: A of the first sequences, [sequence, layer, head, query, key] float64.
    """

    kind: str
    trigger: int
    mean: np.ndarray
    deviation: np.ndarray
    single: np.ndarray


def trigger_maps(
    model: TriggerModel, length: int | None = None, seed: int = 0, count: int = task.EVALUATION_SEQUENCES,
    singles: int = 2,
) -> TriggerMaps:  # fmt: skip
    """Runs the model on `count` evaluation sequences of `length` positions, by default as many as in training.

    `singles`: sequences whose own maps are kept. Raises SinkscopeError for sizes without a task, and where the maps
    would take more than 2 GiB.
    """
    config = model.config
    length = config.length if length is None else length
    task.check_sizes(config.hidden_size, length)
    check_size(count, length, config.num_hidden_layers * config.num_attention_heads)
    data = task.evaluation(count, length, config.hidden_size, seed)
    with torch.no_grad():
        outputs = model(inputs_embeds=data.inputs.to(model.dtype), output_attentions=True)
    means, deviations, kept = [], [], []
    for weights in outputs.attentions:
        wide = weights.double()
        means.append(wide.mean(0))
        deviations.append(wide.std(0, correction=0))
        kept.append(wide[:singles])
    return TriggerMaps(
        config.attention, int(data.trigger[0]), torch.stack(means).numpy(), torch.stack(deviations).numpy(),
        torch.stack(kept, 1).numpy(),
    )  # fmt: skip
