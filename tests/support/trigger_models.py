"""Models of the trigger task that are written down, for the tests."""

from __future__ import annotations

from copy import deepcopy

import torch

from sinkscope.trigger import task
from sinkscope.trigger.explicit import explicit
from sinkscope.trigger.model import TriggerModel


def relu_with_a_sink() -> TriggerModel:
    """ReLU that solves the task with a large weight on BOS wherever no trigger stands: BOS's value is 0."""
    network = deepcopy(explicit("relu"))
    layer, last = network.layers[0].self_attn, network.config.hidden_size - 1
    with torch.no_grad():
        layer.q_proj.weight[1, last] = 100.0
        layer.k_proj.weight[1, task.BOS] = 1.0
        layer.v_proj.weight[:, task.BOS] = 0.0
    return network
