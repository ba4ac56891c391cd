"""Moves BOS, or takes it away, and asks where a trained head's attention goes then: by mark or by position?

The model has no positions, and a row reads the keys up to its own as a set. So rows after BOS must be as they were,
with BOS's mass on its new place: a check of the code. Rows up to BOS, its own among them, and all rows without one are
not trained for, and no one-head model that solves the task could write 0 in them: row 0 writes W x_0, and the trigger's
row asks for the data of x_0 elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from sinkscope.errors import SinkscopeError
from sinkscope.trigger import task
from sinkscope.trigger.model import TriggerModel

PLACES = {
    "BOS at 3, rows after it: key 3": (3, slice(4, None), 3),
    "BOS at 3, rows up to it: key 0": (3, slice(0, 4), 0),
    "no BOS: key 0": (None, slice(0, None), 0),
}
"""By the words of a case: BOS's position, or None for an ordinary token in its place; the rows; the key whose mass is
asked."""


@dataclass(frozen=True)
class Moved:
    """Over the rows asked for but the trigger's and, for the masses, the key's own.

    Attributes:
        error: the largest absolute error, the trigger's row included where BOS stands before it.
        mass, share: mean A[i,key], and mean |A[i,key]| / sum_t |A[i,t]|, of all heads of the first layer.
        total: mean sum_t |A[i,t]|.
    """

    error: float
    mass: float
    share: float
    total: float


def moved(model: TriggerModel, place: str, seed: int = 0, count: int = task.EVALUATION_SEQUENCES) -> Moved:
    """Evaluates a model of one layer with BOS moved as PLACES says. Raises SinkscopeError for several layers."""
    config = model.config
    if config.residual:
        raise SinkscopeError(f"{config.num_hidden_layers} layers: BOS is moved in models of one layer")
    where, rows, key = PLACES[place]
    data = task.evaluation(count, config.length, config.hidden_size, seed)
    asked = task.targets(data, False, config.off, config.target)
    trigger = int(data.trigger[0])
    with torch.no_grad():
        outputs = model(inputs_embeds=_inputs(data.inputs, where, seed), output_attentions=True)
    errors = (outputs.last_hidden_state - asked).abs()
    others = [i for i in range(config.length)[rows] if i != trigger]
    judged = others + [trigger] * (where is not None and trigger in range(config.length)[rows])
    sizes = outputs.attentions[0][:, :, [i for i in others if i != key]].double().abs()
    total = sizes.sum(-1)
    share = torch.where(total > 0, sizes[..., key] / total, 0.0)
    return Moved(
        float(errors[:, judged].max()), float(sizes[..., key].mean()), float(share.mean()), float(total.mean())
    )


def _inputs(
    x: Float[Tensor, "batch token channel"], where: int | None, seed: int
) -> Float[Tensor, "batch token channel"]:
    """x with BOS and the token at `where` exchanged, or with an ordinary token in BOS's place."""
    x = x.clone()
    if where is None:
        other = task.draw(len(x), x.shape[1], x.shape[2], torch.Generator().manual_seed(seed), trigger=2)
        x[:, 0] = other.inputs[:, 1]
    else:
        x[:, [0, where]] = x[:, [where, 0]]
    return x
