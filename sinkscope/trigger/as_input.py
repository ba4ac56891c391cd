"""Gives the engine the trigger task's sequences, and reports the sinks that a scan's tables show."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from sinkscope.errors import SinkscopeError
from sinkscope.inputs.corpus import Corpus
from sinkscope.runs.words import of_heads
from sinkscope.trigger import task

if TYPE_CHECKING:
    import pandas as pd

    from sinkscope.trigger.model import TriggerConfig


SINK = 0.9
"""A head has a sink from this mean BOS mass over non-trigger rows on: the bound by which the paper counts heads."""

COLUMNS = {
    "bos_min": "mean over sequences of A[i,0] in the non-trigger row i >= 1 in which this mean is smallest",
    "bos_mean": "mean over non-trigger rows i >= 1, and over sequences, of A[i,0]",
    "bos_trigger": "mean over sequences of A[j,0] in the trigger's row j",
    "share_min": "as bos_min, of |A[i,0]| / sum_t |A[i,t]| (0 in a zero row), Gu et al.'s proxy",
    "share_mean": "as bos_mean, of that proxy",
    "share_trigger": "as bos_trigger, of that proxy",
}


class TriggerTask:
    """Draws evaluation sequences of the model's width, the trigger at one position; by default 1000 of its length."""

    name = "trigger"
    tokens = ("bos", "ordinary", "trigger")

    def __init__(self, config: TriggerConfig) -> None:
        self.config = config

    def read(self, seq_len: int | None, num_sequences: int | None, seed: int) -> Corpus:
        """Draws the sequences: `ids` are kinds of position (see `tokens`), `vectors` are what the model reads."""
        length, count = seq_len or self.config.length, num_sequences or task.EVALUATION_SEQUENCES
        drawn = task.evaluation(count, length, self.config.hidden_size, seed)
        kinds = np.ones((count, length), dtype=np.int64)
        kinds[:, 0] = 0
        kinds[np.arange(count), drawn.trigger.numpy()] = 2
        names = [(f"trigger[{number}]",) for number in range(count)]
        return Corpus(self.name, kinds, names, bos="the task's own", vectors=drawn.inputs.numpy())

    def report(self, positions: pd.DataFrame) -> dict[str, Any]:
        """Returns each head's BOS mass, raw and as Gu et al.'s proxy, for non-trigger rows and the trigger's row."""
        length = int(positions["position"].max()) + 1
        trigger = task.evaluation_trigger(length)
        heads = [
            {"layer": int(layer), "head": int(head), **_split(rows, trigger)}
            for (layer, head), rows in positions.groupby(["layer", "head"], sort=False)
        ]
        return {
            "name": self.name,
            "attention": self.config.attention,
            "trigger_position": trigger,
            "columns": COLUMNS,
            "heads": heads,
            "in_words": [*_words(heads, self.config.attention, self.config.kind.normalised), *self._off()],
        }

    def _off(self) -> list[str]:
        """Says what the model was asked for where no trigger stands, if that is not the paper's zero."""
        kind = self.config.off.kind
        targets = {"constant": "a constant c, not 0", "self": "G x_i, not 0"}
        return [f"In rows without a trigger the target is {targets[kind]}."] if kind in targets else []


def split_rows(first: np.ndarray, trigger: int, name: str) -> dict[str, float]:
    """Returns min and mean over non-trigger rows i >= 1, and the trigger's row, of one value per query, [T]."""
    others = np.delete(first, [0, trigger])
    return {
        f"{name}_min": float(others.min()),
        f"{name}_mean": float(others.mean()),
        f"{name}_trigger": float(first[trigger]),
    }


def _split(rows: pd.DataFrame, trigger: int) -> dict[str, float]:
    rows = rows.sort_values("position")
    return split_rows(rows["bos_mass"].to_numpy(), trigger, "bos") | split_rows(
        rows["bos_share"].to_numpy(), trigger, "share"
    )


def _words(heads: list[dict[str, Any]], attention: str, normalised: bool) -> list[str]:
    sinks = [head for head in heads if head["bos_mean"] >= SINK]
    lowest, highest = (f"{find(head['bos_mean'] for head in heads):.3f}" for find in (min, max))
    masses = f"heads: {lowest} to {highest}" if len(heads) > 1 else lowest
    words = [
        f"{of_heads(len(sinks), len(heads), 'have')} a sink: mean BOS mass of {SINK:g} or more where no trigger stands "
        f"({masses})."
    ]
    if not normalised:
        words.append(
            f"Attention is {attention}, not normalised: BOS mass is the unnormalised weight, not a probability; the "
            "proxy share is |A[i,0]| over the row's sum."
        )
    return words


def need_task(model: Any, name: str) -> TriggerTask:
    """The model's trigger task. Raises SinkscopeError for any other model."""
    bring = getattr(model, "input_task", None)
    input_task = bring() if callable(bring) else None
    if not isinstance(input_task, TriggerTask):
        raise SinkscopeError(f"{name} is not a model of the trigger task: train one with `sinkscope trigger train`")
    return input_task
