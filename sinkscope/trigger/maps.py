"""Attention maps of a model of the task for figures: mean and standard deviation over sequences, and single inputs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from sinkscope.trigger import task
from sinkscope.trigger.evaluation import check_size
from sinkscope.trigger.model import TriggerModel


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
        outputs = model(inputs_embeds=data.inputs, output_attentions=True)
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
