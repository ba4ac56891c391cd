"""Keys and values rounded, as a quantised cache holds them, with some tokens kept in 16 bits."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from sinkscope.capture import Site
from sinkscope.capture.calls import AttentionCall
from sinkscope.experiments.arms.arm import Arm, Pass
from sinkscope.experiments.arms.changes import WHOLE, between_ends
from sinkscope.experiments.arms.grammar import number
from sinkscope.experiments.arms.positions import PositionArm, read_kept


@dataclass(frozen=True)
class RoundedCache(PositionArm):
    """k and v of every layer rounded to 2^bits levels; those of the kept positions stay."""

    bits: int

    @property
    def family(self) -> str | None:
        return f"kv:{self.bits}" if self.positions.place == "first" else None

    @property
    def kept(self) -> int | None:
        return self.positions.count

    @property
    def name(self) -> str:
        return f"kv:{self.bits}{self.positions.plus}"

    def in_force(self, forward: Pass, mask: Tensor) -> AbstractContextManager[Any]:
        some = mask[:, None, :, None] if bool(mask.any()) else None

        def rounded(site: Site, call: AttentionCall) -> AttentionCall:
            kept = None if some is None else some.to(call.key.device)
            key, value = between_ends(call.key, self.bits, 2, kept), between_ends(call.value, self.bits, 3, kept)
            return replace(call, key=key, value=value)

        return forward.changed(rounded)


def read_kv(rest: str) -> Arm:
    """Reads what follows `kv:`."""
    bits, plus, positions = rest.partition("+")
    return RoundedCache(read_kept(positions if plus else None), number(bits, "BITS", 1, WHOLE))
