"""Keys and values rounded, as a quantised cache holds them, with some tokens kept in 16 bits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from sinkscope.capture import Site
from sinkscope.capture.calls import AttentionCall
from sinkscope.experiments.arms.arm import Arm, Pass, Setting
from sinkscope.experiments.arms.calls import check_calls
from sinkscope.experiments.arms.grammar import arm_kind, number
from sinkscope.experiments.arms.positions import GRAMMAR, Positions, read_kept
from sinkscope.experiments.arms.rounding import WHOLE, between_ends


@dataclass(frozen=True)
class RoundedCache(Arm):
    """k and v of every layer rounded to 2^bits levels; those of the kept positions stay."""

    bits: int
    positions: Positions

    @property
    def family(self) -> str | None:
        return f"kv:{self.bits}" if self.positions.place == "first" else None

    @property
    def kept(self) -> int | None:
        return self.positions.count

    @property
    def name(self) -> str:
        return f"kv:{self.bits}{self.positions.plus}"

    @property
    def random(self) -> bool:
        return self.positions.random

    def ready(self, setting: Setting) -> Arm:
        check_calls(setting)
        self.positions.check(setting)
        return self

    @contextmanager
    def applied(self, one: Pass) -> Iterator[None]:
        mask = self.positions.mask(one)
        one.touches(mask.sum(-1))
        some = mask[:, None, :, None] if bool(mask.any()) else None

        def rounded(site: Site, call: AttentionCall) -> AttentionCall:
            kept = None if some is None else some.to(call.key.device)
            key, value = between_ends(call.key, self.bits, 2, kept), between_ends(call.value, self.bits, 3, kept)
            return replace(call, key=key, value=value)

        with one.changed(rounded):
            yield

    def control(self) -> Arm | None:
        control = self.positions.control()
        return None if control is None else RoundedCache(self.bits, control)


@arm_kind("kv", f"kv:BITS or kv:BITS+POSITIONS with {GRAMMAR}", "KVSink 2508.04257")
def read_kv(rest: str) -> Arm:
    """Keys and values rounded to the nearest of 2^BITS levels: keys between the ends of each channel over the sequence,
    after rotary embeddings, values between the ends of each token. Those of some positions stay in 16 bits and have no
    part in the ends. 16 bits change nothing."""
    bits, plus, positions = rest.partition("+")
    return RoundedCache(number(bits, "BITS", 1, WHOLE), read_kept(positions if plus else None))
