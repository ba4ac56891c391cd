"""What is read of the vectors x_i + W_O^h y_i that heads would make of the tokens, and groups of alike tokens."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from types import ModuleType
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sinkscope.capture import loops
from sinkscope.capture.precision import as_float64, like
from sinkscope.capture.token_sums import inverse
from sinkscope.wiring.mixes import Mixed, Rows, Tokens, Written, dots, largest_square, running_mean, share, squares

ALIKE = 0.5
"""Two tokens of one signal and orthogonal nuisances have this cosine where the signal is as long as the nuisance."""


@dataclass
class TokenGroups:
    """Tokens and the group of each.

    Attributes:
        rows: float64. labels: numbers from 0 on.
    """

    rows: Tokens
    labels: Int[Tensor, " token"]

    @property
    def count(self) -> int:
        """Number of groups."""
        return int(self.labels.max()) + 1

    @cached_property
    def sizes(self) -> Float[Tensor, " group"]:
        """Number of tokens in each group."""
        return torch.bincount(self.labels).to(self.rows)

    @cached_property
    def inside(self) -> Tokens:
        """Each token less the mean of its group."""
        sums = self.rows.new_zeros(self.count, self.rows.shape[1]).index_add_(0, self.labels, self.rows)
        return self.rows - (sums / self.sizes[:, None])[self.labels]

    @property
    def shared(self) -> Tokens:
        """The rows of `inside` whose group has several tokens; all others are 0."""
        return self.inside[self.sizes[self.labels] > 1]

    @property
    def top(self) -> Float[Tensor, ""]:
        """The largest eigenvalue of the mean of (z_i - z_j) (z_i - z_j)^T / 2 over the pairs i != j of one group; NaN
        where every group has one token."""
        pairs = (self.sizes * (self.sizes - 1)).sum()
        if pairs == 0:
            return self.rows.new_tensor(torch.nan)
        # over the pairs of a group of m tokens, the sum is m times their scatter around their mean
        return largest_square(self.inside * self.sizes[self.labels, None].sqrt()) / pairs


def group_tokens(rows: Tokens) -> TokenGroups:
    """Joins tokens whose cosine is above ALIKE, and those that a chain of such pairs joins. A zero vector stays alone.

    Takes about 9 n^2 bytes for n tokens, and 5 more for each pair that is alike.
    """
    from scipy.sparse import csr_array  # takes a tenth of a second, as csgraph does
    from scipy.sparse.csgraph import connected_components

    unit = rows * inverse(squares(rows).sqrt())[:, None]
    near = (unit @ unit.mT > ALIKE).cpu().numpy()
    _, labels = connected_components(csr_array(near), directed=False)
    return TokenGroups(rows, torch.from_numpy(labels).to(rows.device, torch.int64))


# What is read of the vectors x_i + W_O^h y_i that heads would make of the tokens i >= 1 by three mixes y of values.
#
# Norms, unit vectors and products follow from |x + W y|^2 = |x|^2 + 2 (W_O^T x).y + |R y|^2, so that nothing D wide is
# formed for each head. A compiled loop reads large float32 tensors on a CPU all at once; elsewhere torch computes each
# number when it is first asked for.


PerHead = Float[Tensor, " head"]


class Units(NamedTuple):
    """The unit vectors of x_i + W_O^h y_i for each mix, float64. Mixes are those of IDENTITY, UNIFORM and ATTENTION;
    the last is absent where it is not known.

    `weights`: w_i = 1 / |x_i + W_O^h y_i|, 0 for a zero vector. `change`: what the heads change in the squared norm of
    their sum, |sum w_i (x_i + W_O^h y_i)|^2 - |sum w_i x_i|^2.
    """

    weights: Float[Tensor, "mix head token"]
    change: Float[Tensor, "mix head"]


IDENTITY, UNIFORM, ATTENTION = range(3)
"""y_i is u_i: each token attends to itself alone. The mean of u_j over j <= i, token 0 included; over all j unless
causal. What the head attends."""


@dataclass
class Added:
    """The vectors of one sequence, by mix; n tokens i = 1..n.

    Attributes:
        read: W_O^hT (x_i - xbar), and behind the last token W_O^hT xbar, (H, n + 1, dv).
        sizes: |x_i|^2, (n), float64.
        values, values_out: u_j and R_h u_j with the same norms and angles as W_O^h u_j, of token 0 too; (G, n + 1, dv)
            and (H, n + 1, rank).
        attended, attended_out: what each head attends, and R_h of it; (H, n, dv) and (H, n, rank). None where unknown.
        causal: whether uniform attention is that to the tokens up to i, else to all.
    """

    read: Float[Tensor, "head more vdim"]
    sizes: Float[Tensor, " token"]
    values: Float[Tensor, "group more vdim"]
    values_out: Float[Tensor, "head more rank"]
    attended: Float[Tensor, "head token vdim"] | None
    attended_out: Written | None
    causal: bool

    @cached_property
    def around(self) -> Rows:
        """(x_i - xbar).W_O^h u_i."""
        return dots(self.read[:, :-1], self.values[:, 1:])

    @cached_property
    def along(self) -> Rows:
        """xbar.W_O^h u_i."""
        return as_float64(share(self.read[:, -1], self.values[:, 1:]))

    @cached_property
    def values_mean(self) -> Float[Tensor, "head vdim"]:
        """ubar, the mean of u_i over i >= 1."""
        return as_float64(self.values[:, 1:].mean(1)).repeat_interleave(len(self.read) // len(self.values), dim=0)

    @cached_property
    def out_mean(self) -> Float[Tensor, "head rank"]:
        """R_h ubar."""
        return as_float64(self.values_out[:, 1:].mean(1))

    @cached_property
    def out_spread(self) -> PerHead:
        """The mean of |W_O^h (u_i - ubar)|^2 over i >= 1."""
        out = self.values_out[:, 1:]
        return squares(out - out.mean(1, keepdim=True)).mean(-1)

    @cached_property
    def units(self) -> Units:
        """The unit vectors of x_i + W_O^h y_i for each mix that is known."""
        values, out = self.values, self.values_out
        units = [self._units(values[:, 1:], out[:, 1:], self.around + self.along)]
        units.append(self._units(self._even(values), self._even(out)))
        if self.attended is not None and self.attended_out is not None:
            units.append(self._units(self.attended, self.attended_out))
        return Units(*(torch.stack(per_mix) for per_mix in zip(*units, strict=True)))

    def _even(self, rows: Mixed) -> Float[Tensor, "group token-1 vdim"]:
        """The mean over the tokens that each token i >= 1 sees under uniform attention."""
        return running_mean(rows)[:, 1:] if self.causal else rows.mean(1, keepdim=True).expand_as(rows)[:, 1:]

    @property
    def half(self) -> tuple[Rows, PerHead]:
        """As `units`, of the mix half way between IDENTITY and UNIFORM."""
        values, out = self.values, self.values_out
        return self._units((values[:, 1:] + self._even(values)) / 2, (out[:, 1:] + self._even(out)) / 2)

    @cached_property
    def _out_change(self) -> Written:
        """R_h of what uniform attention changes in each token's mix, around its mean over tokens."""
        change = self._even(self.values_out) - self.values_out[:, 1:]
        return change - change.mean(1, keepdim=True)

    @cached_property
    def towards(self) -> PerHead:
        """The mean over tokens of (p_i - pbar).(q_i - p_i) for p_i = x_i + W_O^h u_i and q_i = x_i + W_O^h y_i, y
        uniform: below 0 where the first step towards uniform attention brings tokens together."""
        written = self.values_out[:, 1:]
        through = dots(self.read[:, :-1], self._even(self.values) - self.values[:, 1:])
        inside = as_float64(((written - written.mean(1, keepdim=True)) * self._out_change).sum(-1))
        return (through + inside).mean(-1)

    @cached_property
    def moved(self) -> PerHead:
        """The mean over tokens of |q_i - p_i|^2 around their mean, p and q as in `towards`."""
        return squares(self._out_change).mean(-1)

    def _units(self, mixed: Mixed, out: Written, inside: Rows | None = None) -> tuple[Rows, PerHead]:
        """`inside`: x_i.W_O^h y_i, where it is known."""
        around, mean = self.read[:, :-1], self.read[:, -1]
        if inside is None:
            inside = dots(around, mixed) + as_float64(share(mean, mixed))
        weights = inverse((self.sizes + 2 * inside + squares(out)).clamp(min=0.0).sqrt())
        factors = like(weights, around)
        moved = (factors.unflatten(0, (len(mixed), -1)) @ mixed).flatten(0, 1)
        summed = (factors.unsqueeze(1) @ around)[:, 0] + factors.sum(-1, keepdim=True) * mean
        return weights, 2 * as_float64((summed * moved).sum(-1)) + squares((factors.unsqueeze(1) @ out)[:, 0])


def read_added(added: Added) -> Added:
    """The same, read by the compiled loop where that is worth it."""
    loop = loops.loops_over("mixes", added.values, added.values.shape[1] * added.values.shape[2])
    if loop is not None:
        loops.fill(added, _read(loop, added))
    return added


def _read(loop: ModuleType, added: Added) -> dict[str, Any]:
    heads, rank, tokens, width = *added.values_out.shape[::2], len(added.sizes), added.values.shape[-1]
    known = added.attended is not None and added.attended_out is not None
    attended = (added.attended, added.attended_out) if known else (added.values, added.values_out)
    tensors = (added.read, added.values, added.values_out, *(tensor for tensor in attended if tensor is not None))
    shapes = (2 + known, heads, tokens), (2 + known, heads), (2, heads, tokens), (heads, width), (heads, rank), (heads,)
    weights, change, products, values_mean, out_mean, spread = sums = [added.sizes.new_empty(shape) for shape in shapes]
    loops.run(
        loop.add_mixes, *map(loops.rows, tensors), heads // len(added.values), added.causal, added.sizes.numpy(),
        *(total.numpy() for total in sums),
    )  # fmt: skip
    return {
        "around": products[loop.AROUND], "along": products[loop.ALONG], "values_mean": values_mean,
        "out_mean": out_mean, "out_spread": spread, "units": Units(weights, change),
    }  # fmt: skip
