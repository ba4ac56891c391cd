"""The parts of the battery, by name, and the sizes they run at."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from agreement import GROUPS, cases, family, named_families, one_layer
from ratios import DTYPES, SHAPES, ratio
from roofline import roofline

Figures = dict[str, Any]
Part = Callable[[], tuple[Figures, bool]]
"""Returns figures by name, and whether all bounds are kept."""


@dataclass(frozen=True)
class Setting:
    """Where the parts run. `tiny`: small sizes, to try them out."""

    device: str
    tiny: bool

    @property
    def lengths(self) -> tuple[int, ...]:
        return (64, 80) if self.tiny else (2048, 8192, 32_768, 131_072)


def named(setting: Setting) -> dict[str, Part]:
    """Every part in the order in which they run: what is cheap and must hold comes first."""
    parts: dict[str, Part] = {}
    for group in GROUPS:
        parts[f"kernels-{group}"] = partial(cases, group, setting.device)
    for shape in SHAPES:
        for dtype in DTYPES:
            parts[f"layer-{shape}-{dtype}"] = partial(one_layer, shape, dtype, setting.device, setting.tiny)
    for name in named_families():
        parts[f"family-{name}"] = partial(family, name, setting.device)
    for length in setting.lengths:
        for dtype in DTYPES:
            for shape in SHAPES:
                parts[f"ratio-{shape}-{dtype}-{length}"] = partial(
                    ratio, shape, dtype, length, setting.device, setting.tiny
                )
                parts[f"roofline-{shape}-{dtype}-{length}"] = partial(
                    roofline, shape, dtype, length, setting.device, setting.tiny
                )
    return parts
