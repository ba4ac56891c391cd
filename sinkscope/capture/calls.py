"""The record of one attention call: the model's tensors, with every keyword applied and the mask read on demand."""

from __future__ import annotations

from collections.abc import Callable, Collection
from copy import copy
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from sinkscope.capture.masks.lazy import LazyMask, identity, made_in_strips
from sinkscope.capture.masks.visibility import Visibility, read_mask, strip
from sinkscope.capture.private_doors import times_written


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """One call of an attention function. Change a copy with `dataclasses.replace`; its mask is then read anew.

    Attributes:
        query: (B, H, Tq, d), after rotary embeddings and norms.
        key, value: (B, G, Tk, d) and (B, G, Tk, dv); H is a multiple of G.
        mask: as the model passes it, (b, h, Tq | 1, >= Tk): bool (True = attend), or a float added to the logits.
        causal: query i sees keys 0..i. Used only where `mask` is None; a mask has its own causal order.
        scaling: logits are scaling * q.k.
        softcap: c in c * tanh(logits / c), before bias and mask; None = no cap.
        bias: added to the logits, (b, h, Tq | 1, Tk). bias_of_seen: it is known of the keys alone that a query sees, as
            over a cache that drops keys; what the logits of the others were is not known.
        sinks: extra logits in the denominator of the softmax, (B | 1, H, Tq | 1, n).
        window: the sliding window that the model names. For information only: the mask already applies it.
        score: how logits become attention: softmax, or a name in `scores.SCORES`.
        learned: (1, G, n, dv), the values of learned keys that belong to no token, whose logits are the last n of
            `sinks`; None where all are 0. The output that is computed is without them: `learned_keys.added_output`.
        found: what was found beside the sums by whoever computed the call, by name; a question then need not read the
            logits again.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None = None
    causal: bool = False
    scaling: float = 1.0
    softcap: float | None = None
    bias: Tensor | None = None
    bias_of_seen: bool = False
    sinks: Tensor | None = None
    window: int | None = None
    score: str = "softmax"
    learned: Tensor | None = None
    found: dict[str, Tensor] = field(default_factory=dict, init=False, repr=False)
    _visible: Visibility | None = field(default=None, init=False, repr=False)

    def beyond(self, understood: Collection[str]) -> list[str]:
        """The fields outside of `understood` that are not at their defaults, by name.

        Whoever computes a call names the fields that it understands, so that a field which is added later, here or in a
        subclass, is never left out in silence.
        """
        kind: Any = type(self)
        others = [entry for entry in _given(kind) if entry.name not in understood]
        return [entry.name for entry in others if not _is_default(getattr(self, entry.name), entry)]

    @property
    def lengths(self) -> tuple[int, int]:
        """Tq and Tk."""
        return self.query.shape[2], self.key.shape[2]

    @property
    def square(self) -> bool:
        """Whether there are as many queries as keys, as in self-attention."""
        return self.query.shape[2] == self.key.shape[2]

    @property
    def of_positions(self) -> bool:
        """Whether positions attend to positions. False for a single query: pooling, or attention over layers."""
        return self.query.shape[2] > 1

    def over_layers(self, positions: int | None, width: int | None) -> bool:
        """Whether each of so many positions attends apart from the others, from something else to something else, with
        positions in the place of heads and the residual stream's `width` in that of a head: Inkling's blocks attend so
        over the layers before them."""
        heads, of_head = self.query.shape[1], self.value.shape[-1]
        return heads == positions and of_head == width and positions not in self.lengths

    @property
    def visible(self) -> Visibility:
        """Which keys each query sees. Raises ValueError where the mask does not fit the queries and keys."""
        if self._visible is None:
            _keep(self, read_mask(self.mask, self.causal, *self.lengths, self.query.device))
        assert self._visible is not None
        return self._visible

    @property
    def linear(self) -> bool:
        """Whether logits are plain scaled dot products, whose means can be computed without the logits."""
        return self.softcap is None and self.bias is None and not self.visible.has_bias

    def with_visible(self, visible: Visibility) -> AttentionCall:
        """Returns the call with `visible` already set from an equal mask, so that its own mask is not read."""
        same = copy(self)
        _keep(same, visible)
        return same


def _keep(call: AttentionCall, visible: Visibility) -> None:
    object.__setattr__(call, "_visible", visible)  # the way that dataclasses document for a frozen record's own fields


@cache
def _given(kind: Any) -> tuple[Field[Any], ...]:
    """The fields that a call is made with."""
    return tuple(entry for entry in fields(kind) if entry.init)


def _is_default(value: Any, field: Field[Any]) -> bool:
    default = field.default if field.default_factory is MISSING else field.default_factory()
    if value is default:
        return True
    plain = not isinstance(value, Tensor) and default is not MISSING
    return plain and type(value) is type(default) and bool(value == default)


class MaskReadings:
    """Reads each mask of a pass once, however many layers share it, and again after something was written into it.

    It also keeps the masks alive, because masks are told apart by id and a freed id could be used again.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[Any, ...], tuple[Tensor | None, Visibility]] = {}
        self._copies: dict[tuple[Any, ...], tuple[Tensor, Tensor]] = {}

    def own(self, tensor: Tensor) -> Tensor:
        """A copy that no later pass writes into, made once however many layers share the tensor."""
        key = tensor.data_ptr(), tensor.shape, tensor.stride(), times_written(tensor)
        if key not in self._copies:
            self._copies[key] = tensor, tensor.clone()
        return self._copies[key][1]

    def read(self, call: AttentionCall, whole: Tensor | None = None, row: int | None = None) -> AttentionCall:
        """Returns `call` with its mask read. Where it was cut out of a padded batch, `whole` is the batch's mask and
        `row` the sequence's index."""
        return call.with_visible(self.visible(call, whole, row))

    def visible(self, call: AttentionCall, whole: Tensor | None = None, row: int | None = None) -> Visibility:
        """What `read` reads."""
        owner = call.mask if whole is None else whole
        key = (identity(owner), row, call.causal, *call.lengths, call.query.device)
        if key not in self._kept:
            self._kept[key] = (owner, call.visible)
        return self._kept[key][1]


# A call's mask with some more keys hidden, made in strips on demand: never T x T.


Allowed = Callable[[Tensor, Tensor], Tensor]
"""Takes query numbers (rows, 1) and key numbers (1, keys); returns which keys they may see, bool (b | 1, h | 1,
rows, keys)."""


class Narrowing:
    """Hides keys from the calls of one pass. Calls that share a mask share the narrowed one, so that
    it is read once."""

    def __init__(self, allowed: Allowed) -> None:
        self._allowed = allowed
        self._made: dict[tuple[Any, ...], tuple[Tensor | None, LazyMask]] = {}

    def __call__(self, call: AttentionCall) -> AttentionCall:
        """The call whose queries see what its own mask and `allowed` both let them see. A float mask keeps what it adds
        elsewhere."""
        key = (identity(call.mask), call.causal, *call.lengths, len(call.query), call.query.device)
        if key not in self._made:  # the call's own mask is kept alive with it, since masks are told apart by id
            self._made[key] = (call.mask, self._narrowed(call))
        return replace(call, mask=self._made[key][1])

    def _narrowed(self, call: AttentionCall) -> LazyMask:
        queries, keys = call.lengths
        device, mask = call.query.device, _whole_rows(call, queries, keys)

        def part(start: int, stop: int, low: int, high: int) -> Tensor:
            rows = torch.arange(start, stop, device=device)[:, None]
            columns = torch.arange(low, high, device=device)[None]
            seen = self._allowed(rows, columns)
            if mask is None:
                return seen & (columns <= rows) if call.causal else seen
            piece = strip(mask, start, stop, low, high)
            if piece.dtype == torch.bool:
                return piece & seen
            return torch.where(seen, piece, torch.finfo(piece.dtype).min)

        return made_in_strips(part, len(call.query), queries, keys)


def _whole_rows(call: AttentionCall, queries: int, keys: int) -> Tensor | None:
    """The call's own mask with a row for each query and a column for each key; None where it has none."""
    mask = call.mask
    if mask is None:
        return None
    mask = mask[..., :keys]
    if isinstance(mask, LazyMask):
        if mask.shape[-2] == queries:
            return mask
        mask = mask.whole()
    return mask.expand(-1, -1, queries, keys)
