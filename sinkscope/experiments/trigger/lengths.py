"""Evaluates a model of the task at lengths other than that of its training: does the sink keep its mass, and the error?

The models have no positions, so that every length can be read. A softmax sink that was learned at L = 16 holds its
mass against i other keys with a fixed score: at a longer length there are more of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from sinkscope.checkpoints.trigger import task
from sinkscope.checkpoints.trigger.model import TriggerModel
from sinkscope.experiments.trigger.evaluation import evaluate

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
