"""The paper's claim without training: a ReLU model without a sink, and the loss of a softmax head by its BOS mass."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from sinkscope.checkpoints.trigger import task
from sinkscope.checkpoints.trigger.config import TriggerConfig
from sinkscope.checkpoints.trigger.model import TriggerModel

MASSES = (0.0, 0.25, 0.5, 0.75, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999, 1.0)


def explicit_relu(dim: int = 16, length: int = 16) -> TriggerModel:
    """One ReLU head with zero loss and no sink: score x_i[1] * (1 - x_t[0]), W_V = W_O = identity.

    1 - x_t[0] equals x_t[1] + x_t[d-1], since every position is BOS, trigger or ordinary: it needs no bias.
    """
    model = TriggerModel(TriggerConfig("relu", hidden_size=dim, length=length))
    attention = model.layers[0].self_attn
    with torch.no_grad():
        for projection in (attention.q_proj, attention.k_proj):
            projection.weight.zero_()
        attention.q_proj.weight[0, task.TRIGGER] = 1
        attention.k_proj.weight[0, [task.TRIGGER, dim - 1]] = 1
        attention.v_proj.weight.copy_(torch.eye(dim))
        attention.o_proj.weight.copy_(torch.eye(dim))
    return model.eval()


@dataclass(frozen=True)
class Forced:
    """Loss (mean squared error) and largest absolute error, with `mass` forced onto BOS in every non-trigger row."""

    mass: float
    loss: float
    error: float


def forced_mass(mass: float, count: int = 1000, dim: int = 16, length: int = 16, seed: int = 0) -> Forced:
    """The least loss of a one-layer softmax head that puts `mass` on BOS in every row but the trigger's.

    The trigger's row is the exact mean. In other rows 1 - mass is spread evenly over x_1 .. x_i, which has the least
    variance among weights that do not depend on the data. W_O W_V is the least-squares optimum for that attention
    (float64), so no read-out has a smaller loss. Triggers are uniform over 2 .. L-1, as in training.
    """
    data = task.draw(count, length, dim, torch.Generator().manual_seed(seed))
    x, y = data.inputs.double(), task.targets(data, residual=False).double()
    read = _pattern(data, mass) @ x
    readout = torch.linalg.lstsq(read.flatten(0, 1), y.flatten(0, 1), driver="gelsd").solution
    errors = read @ readout - y
    return Forced(mass, float(errors.square().mean()), float(errors.abs().max()))


def _pattern(data: task.Draw, mass: float) -> Float[Tensor, "batch query key"]:
    """Attention rows that sum to 1: row 0 on BOS, the trigger's row even over x_1 .. x_j, all others `mass` on BOS."""
    count, length = data.inputs.shape[:2]
    steps = torch.arange(length, dtype=torch.float64)
    even = torch.ones(length, length, dtype=torch.float64).tril() / steps.clamp(min=1)[:, None]
    even[:, 0] = 0
    rows = (1 - mass) * even
    rows[:, 0] = mass
    rows[0] = 0
    rows[0, 0] = 1
    pattern = rows.repeat(count, 1, 1)
    pattern[torch.arange(count), data.trigger] = even[data.trigger]
    return pattern


def forced_curve(masses: tuple[float, ...] = MASSES, dim: int = 16, length: int = 16) -> list[Forced]:
    """`forced_mass` at several masses."""
    return [forced_mass(mass, dim=dim, length=length) for mass in masses]
