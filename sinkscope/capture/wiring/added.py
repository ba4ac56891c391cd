"""Tokens to which heads have added: the norms of x_i + W_O^h y_i and the sum of their unit vectors.

Both follow from |x + W y|^2 = |x|^2 + 2 (W_O^T x).y + |R y|^2, so that nothing D wide is formed for each head. A
compiled loop reads large float32 tensors on a CPU, torch all others.
"""

from __future__ import annotations

from types import ModuleType

from jaxtyping import Float
from torch import Tensor

from sinkscope.capture import loops
from sinkscope.capture.precision import float64, like
from sinkscope.capture.token_sums import inverse
from sinkscope.capture.wiring.mixes import Mixed, Rows, Written, dots, share, squares

Read = Float[Tensor, "head more vdim"]
"""W_O^hT (x_i - xbar), and behind the last token W_O^hT xbar."""


def unit_vectors(
    read: Read, mixed: Mixed, out: Written, sizes: Float[Tensor, " token"], centred: Rows | None
) -> tuple[Rows, Float[Tensor, " head"]]:
    """The inverse norms w_i of the vectors x_i + W_O^h y_i, 0 for a zero vector, and what the heads change in the
    squared norm of their sum: |sum w_i (x_i + W_O^h y_i)|^2 - |sum w_i x_i|^2. Both are float64.

    Args:
        mixed, out: y_i, and R_h y_i with the same norms and angles as W_O^h y_i.
        sizes: |x_i|^2.
        centred: (x_i - xbar).W_O^h y_i, where it is known.
    """
    loop = loops.loops_over("mixes", mixed, mixed.shape[1] * mixed.shape[2])
    return _by_torch(read, mixed, out, sizes, centred) if loop is None else _by_loop(loop, read, mixed, out, sizes)


def _by_torch(
    read: Read, mixed: Mixed, out: Written, sizes: Tensor, centred: Rows | None
) -> tuple[Rows, Float[Tensor, " head"]]:
    around, mean = read[:, :-1], read[:, -1]
    inside = (dots(around, mixed) if centred is None else centred) + float64(share(mean, mixed))
    weights = inverse((sizes + 2 * inside + squares(out)).clamp(min=0.0).sqrt())
    own = like(weights, read)
    moved = (own.unflatten(0, (len(mixed), -1)) @ mixed).flatten(0, 1)
    summed = (own.unsqueeze(1) @ around)[:, 0] + own.sum(-1, keepdim=True) * mean
    return weights, 2 * float64((summed * moved).sum(-1)) + squares((own.unsqueeze(1) @ out)[:, 0])


def _by_loop(
    loop: ModuleType, read: Read, mixed: Mixed, out: Written, sizes: Tensor
) -> tuple[Rows, Float[Tensor, " head"]]:
    weights, totals = sizes.new_empty(out.shape[:2]), sizes.new_empty(len(out))
    rows = [loops.in_rows(each) for each in (read, mixed, out)]
    loops.run(loop.add_mixes, *rows, sizes.numpy(), weights.numpy(), totals.numpy())
    return weights, totals
