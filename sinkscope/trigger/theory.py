"""What attention can solve of the task, and what mass off BOS costs a softmax: derived, and computed without training.

One layer, no residual, d >= 6. A token is u (its data) and its marks, which sum to 1, so that a value may hold a
constant. W = W_O W_V of a head, f_i(t) a logit. Keys t are ordinary, and so is row i unless it is the trigger's row j.
The trigger's row asks for every direction of u, so W turns none of them into 0.

One softmax head:
- zero, constant: no finite weights have zero error, a sink comes as close as asked (`explicit`), and nothing else
  does. Row 0 sees BOS alone, so W x_0 = c. Where x_1 .. x_i are all v, row i reads c + (1 - A[i,0]) (W v - c): an error
  below e forces 1 - A[i,0] < e / |W v - c|.
- self: no solution, with a sink or without. Where x_1 .. x_i are all v, a row of any pattern reads a mix of W x_0 and
  W v: the trigger's row asks W for v, the others ask it for G v, and G is no multiple of 1, not even up to the one
  direction of W x_0. What is learned can only be a compromise.

Logits do not reach the diagonal on all inputs either: f_i is affine in u_t, so where u_i is the midpoint of u_s and
u_t, f_i(i) is no larger than both f_i(s) and f_i(t), and A[i,i] <= 1/2 in any head.

One head of the other kinds:
- relu, zero: solved with all rows but the trigger's empty (`explicit`). constant, self: no solution. Its rows obey
  sum_t relu(f_i(t)) W x_t = i y_i. One more token x_t before the same x_i adds one term, which is to be y_i: so all
  W x_t would have one direction, and with them what the trigger's row reads.
- sigmoid: no solution for any default and any number of heads. One more token x_t before the same trigger adds a term
  of x_j and x_t alone to its row; it should add (x_t - the mean so far) / (j + 1), which depends on all the others.
- relu-norm, sigmoid-norm: a row that sums to 1 is as softmax's, and needs its sink for the same reason. A row of
  relu-norm may also be empty, since 0 / 0 is 0: zero is solved with all rows but the trigger's empty.
- exp-free, sigmoid-free: no zero error for zero, but rows as near to empty as asked: logits -b on all keys of rows
  without a trigger, and in the trigger's row 0 (exp), or b (sigmoid). No sink.
- softmax1, learned-sink: the extra logit may take the mass; its value is 0. zero: the mass may lie there, on BOS, or on
  both. constant: only BOS can give c, but any mass p > 0 does if its value is c / p. self: no solution, as softmax.
- gated: zero: the gate can close, under any attention. constant: a channel that is 1 for all tokens, open in rows
  without a trigger, and all others shut, give c under any attention.

Other targets of the trigger's row, with zero elsewhere and one softmax head: x_j itself needs the sink as the mean
does, since W keeps v. The trigger's mark does not: W is 0 on all other tokens, and a row has to leave its key out.

Two softmax heads need no sink for zero and constant: in ordinary rows both attend alike and their values sum to c, in
the trigger's row one of them goes to BOS (`explicit`). With two heads self asks for A[i,i] = 1 in the first, and for a
sink or a diagonal in the second (`forced_patterns`): either would do, if logits reached the diagonal.
Lampert et al. (2605.08453) relax the switch so that a row may keep what its own token says. A sink does that where a
residual path or an MLP carries the token; this model has neither in one layer, so that only the diagonal could.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from sinkscope.trigger import task
from sinkscope.trigger.task import DEFAULTS, ZERO, Default, draw_default

MASSES = (0.0, 0.25, 0.5, 0.75, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999, 1.0)

PATTERNS = {
    "sink": ("sink",),
    "diagonal": ("diagonal",),
    "spread": ("spread",),
    "diagonal, trigger's row on BOS": ("diagonal, off",),
    "sink + sink": ("sink, off", "sink"),
    "diagonal + sink": ("diagonal, off", "sink"),
    "diagonal + diagonal": ("diagonal, off", "diagonal"),
    "spread + spread": ("spread, off", "spread"),
}
"""Patterns of one head and of two. A head's trigger row is the even mean over x_1 .. x_j, or, with `off`, on BOS."""


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
    return Forced(mass, *_least(data, [_pattern(data, mass)], ZERO))


def forced_patterns(count: int = 300, dim: int = 16, length: int = 16, seed: int = 0) -> list[dict[str, Any]]:
    """The least loss of one softmax layer, for each default and each of PATTERNS forced onto its heads.

    One row per default and pattern: default, heads, pattern, loss, error; the best W_O W_V as in `forced_mass`. `seed`
    draws the sequences and the default. An error of (nearly) 0 says that the pattern would solve the task; whether
    logits can form it is another question, see the module's docstring.
    """
    data = task.draw(count, length, dim, torch.Generator().manual_seed(seed))
    rows = []
    for kind in DEFAULTS:
        default = draw_default(kind, dim, seed)
        for name, heads in PATTERNS.items():
            loss, error = _least(data, [_named(data, head) for head in heads], default)
            rows.append({"default": kind, "heads": len(heads), "pattern": name, "loss": loss, "error": error})
    return rows


def _least(data: task.Draw, patterns: list[Tensor], default: Default) -> tuple[float, float]:
    """Mean squared and largest absolute error of the best read-out of what heads of these patterns gather (float64)."""
    x, y = data.inputs.double(), task.targets(data, residual=False, default=default).double()
    read = torch.cat([pattern @ x for pattern in patterns], -1)
    readout = torch.linalg.lstsq(read.flatten(0, 1), y.flatten(0, 1), driver="gelsd").solution
    errors = read @ readout - y
    return float(errors.square().mean()), float(errors.abs().max())


def _named(data: task.Draw, name: str) -> Float[Tensor, "batch query key"]:
    kind, _, off = name.partition(", ")
    pattern = _pattern(data, {"sink": 1.0}.get(kind, 0.0))
    rows = torch.arange(len(pattern))
    if kind == "diagonal":
        trigger = pattern[rows, data.trigger]
        pattern = torch.eye(pattern.shape[1], dtype=pattern.dtype).repeat(len(pattern), 1, 1)
        pattern[rows, data.trigger] = trigger
    if off:
        pattern[rows, data.trigger] = torch.eye(pattern.shape[1], dtype=pattern.dtype)[task.BOS]
    return pattern


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
