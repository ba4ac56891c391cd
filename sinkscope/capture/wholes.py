"""One attention call over whole sequences: what is known of it before its rows are put together, and those rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from sinkscope.capture.calls import AttentionCall
from sinkscope.capture.heard import Heard
from sinkscope.capture.kernels.map_walk import MapRows
from sinkscope.capture.masks.visibility import Visibility
from sinkscope.capture.views import Cut, Part, Stream


@dataclass(eq=False)
class Whole:
    """The rows of one attention call over whole sequences.

    `call`: None where the model formed its maps itself. The other tensors are as in AttentionMap, with every row.
    `stream` gives the residual stream around the call, from the path of the block that holds it.
    """

    call: AttentionCall | None
    query: Tensor | None
    key: Tensor | None
    value: Tensor | None
    output: Tensor | None
    projected: Tensor | None
    stream: Callable[[str | None], Stream]
    of_tokens: Tensor | None = None


@dataclass(eq=False)
class Outline:
    """What is known of one attention call over whole sequences before its rows are put together.

    Attributes:
        heard: the call in the first pass.
        queries, keys: how many there are. cross: the keys are named as another text's.
        visible: which keys each query sees; None where the model formed its maps itself.
        maps: what was taken of such maps: of the whole batch (one), or of each sequence of a padded one.
        one: the call in some pass, which computes attention as the whole does; None where there are maps.
        query, value: the shapes of these tensors; None where they were not seen.
        key: puts all keys together, and leaves their pieces where they are; None where they were let go.
        load: puts the rows together, once: the pieces of several passes are let go, so that no more than one call has
            its rows in memory twice.
    """

    heard: Heard
    queries: int
    keys: int
    cross: bool
    visible: Visibility | None
    maps: list[MapRows] | None
    one: AttentionCall | None
    query: torch.Size | None
    value: torch.Size | None
    key: Callable[[], Tensor | None]
    load: Callable[[], Whole]

    @property
    def ends(self) -> Tensor:
        """[Tq]: the key after the last one that any sequence lets a query see; of a map, the most keys that it sees."""
        if self.visible is not None:
            return self.visible.reach[3].cpu()
        assert self.maps is not None
        return self.maps[0].visible.amax((0, 1)).cpu()

    @property
    def causal(self) -> bool:
        """Whether no query sees a key after its own."""
        if self.visible is not None:
            return self.visible.causal
        assert self.maps is not None
        return all(rows.causal for rows in self.maps)

    @property
    def hides(self) -> bool:
        """Whether some query does not see some key, or nothing shows that all see all."""
        return self.visible is None or bool((self.visible.seen_by < self.queries).any())

    @property
    def chosen(self) -> bool:
        """Whether the model chose the keys of each query, so that one which no query sees need be no padding."""
        return self.visible is not None and self.visible.chosen

    def parts(self, cuts: list[Cut] | None) -> list[Part]:
        """The sums of maps, cut as `cuts`."""
        assert self.maps is not None
        if cuts is None:
            return [(slice(0, self.heard.rows), None, self.maps[0].sums(), {})]
        own = self.maps if len(self.maps) == len(cuts) else [self.maps[0].row(cut.index) for cut in cuts]
        parts = list[Part]()
        for cut, rows in zip(cuts, own, strict=True):
            queries, keys = (
                len(range(size)[cut.rows(size, side)])
                for side, size in (("queries", self.queries), ("keys", self.keys))
            )
            parts.append((cut.batch_row, cut, rows.begun(queries, keys).sums(), {}))
        return parts
