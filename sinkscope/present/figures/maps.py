"""Attention maps: square cells, with the sinks, the diagonal and the trigger's row marked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from sinkscope.present.colors import LINES, MAP
from sinkscope.present.figures.canvas import drawn, fitting, headline, inches
from sinkscope.present.text import printable, token_text
from sinkscope.runs.defaults import EPSILON

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from sinkscope.runs.schema.site import Kind

DIAGONAL = 0.5
"""A map has a diagonal from this mean A[i,i] on, i >= 1: the bound of the column `pattern`."""
MARKS: dict[str, dict[str, Any]] = {
    "sink": {"color": LINES[5], "linestyle": "-"},
    "diagonal": {"color": LINES[4], "linestyle": "--"},
    "trigger": {"color": LINES[3], "linestyle": ":"},
}
WIDE = 2
"""Maps beside each other up to which ticks and tokens have room."""
READABLE = 64
"""Tokens up to which each is written at the axes."""
CAPTION = (
    f"Attention probabilities, queries down, keys across; cells that a causal head cannot see are left white. Solid: "
    f"sinks, keys k with alpha_k > {{epsilon:g}}. Dashed: the diagonal, where the mean of A[i,i] over i >= 1 is "
    f"{DIAGONAL:g} or more."
)


@dataclass(frozen=True)
class Tile:
    """One map: `weights` [query, key], its name, the tokens of both axes and the trigger's position, if it has them.

    `kind`: what a query of the layer may see, where a run recorded it; None where every key that the order allows.
    `marked`: whether sinks and the diagonal are marked, as they are for attention and not for its deviation.
    """

    name: str
    weights: np.ndarray
    tokens: tuple[str, ...] = ()
    trigger: int | None = None
    marked: bool = True
    kind: Kind | None = None


def draw_maps(
    tiles: Sequence[Sequence[Tile]], about: str, form: str, size: str = "column", title: str | None = None,
    own_title: str = "", label: str = "attention", epsilon: float = EPSILON, top: float = 1.0,
    rows: Sequence[str] = (),
) -> bytes:  # fmt: skip
    """Rows of maps in one scale, from 0 to `top` or the largest value, as PNG, SVG or PDF.

    A short row leaves its last places empty. `rows`: the names of the rows, if they have any. Raises SinkscopeError as
    `drawn` does.
    """
    most = max(top, *(float(tile.weights.max()) for row in tiles for tile in row))
    columns = max(map(len, tiles))
    width = inches(size, 1)[0]
    room = (0.75 if columns == 1 else 0.45) + (0.2 if rows else 0.0)
    height = len(tiles) * ((width - room) / columns + 0.25) + 0.6

    def paint(canvas: Figure) -> None:
        grid = canvas.subplots(len(tiles), columns, squeeze=False)
        image: Any = None
        own = (width - room) / columns
        letters = min(_letters(tile.name, own) for row in tiles for tile in row)
        for row, places in zip(tiles, grid, strict=True):
            for axes in places[len(row) :]:
                axes.set_visible(False)  # the colour bar takes its room from all of them
            for tile, axes in zip(row, places, strict=False):
                image = paint_map(axes, tile, most, epsilon, 72 * (own - 0.6) if columns <= WIDE else 0.0)
                name = "\n".join(map(printable, tile.name.splitlines()))
                axes.set_title(name, parse_math=False, fontsize=letters, pad=3)
        if own_title:
            headline(canvas, fitting(own_title, width))
        for number, places in enumerate(grid):
            above = f"{fitting(printable(rows[number]), (width - room) / columns)}\n" if rows else ""
            places[0].set_ylabel(f"{above}query", parse_math=False)
        for places in grid.T:
            [axes for axes in places if axes.get_visible()][-1].set_xlabel("key")
        canvas.colorbar(image, ax=grid, label=label, shrink=0.8, aspect=25 if len(tiles) > 1 else 15)
        _legend(canvas)

    return drawn(paint, about, form, (width, height), title)


def paint_map(axes: Axes, tile: Tile, most: float, epsilon: float, points: float = 0.0) -> Any:
    """Draws one map with its marks; returns the image, for a colour bar.

    `points`: the width that is known to be there for tokens or positions along the axes; 0 leaves them out.
    """
    weights, length = tile.weights, len(tile.weights)
    causal = is_causal(weights)
    hidden = np.triu(np.ones_like(weights, bool), 1) & causal
    image = axes.imshow(np.ma.masked_array(weights, hidden), cmap=MAP, vmin=0, vmax=most, interpolation="nearest")
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.tick_params(length=0)
    if tile.tokens and points and length <= READABLE:
        names = [_shown(token) for token in tile.tokens]
        axes.set_xticks(range(length), names, rotation=90, parse_math=False)
        axes.set_yticks(range(length), names, parse_math=False)
        axes.tick_params(labelsize=max(2.0, min(7.0, 0.9 * points / length)))
    elif points:
        shown = list(range(0, length, max(1, length // 4)))
        axes.set_xticks(shown)
        axes.set_yticks(shown)
    else:
        axes.set_xticks([])
        axes.set_yticks([])
    if tile.marked:
        for key in sinks(weights, epsilon, tile.kind):
            _box(axes, "sink", key, key if causal else 0, 1, length - (key if causal else 0))
        if length > 1 and np.diagonal(weights)[1:].mean() >= DIAGONAL:
            for shift in (-0.5, 0.5):
                ends = np.array([-0.5, length - 0.5])
                axes.plot(ends + shift, ends - shift, linewidth=0.8, label="diagonal", **MARKS["diagonal"])
            axes.set(xlim=(-0.5, length - 0.5), ylim=(length - 0.5, -0.5))
    if tile.trigger is not None:
        _box(axes, "trigger", 0, tile.trigger, tile.trigger + 1 if causal else length, 1)
    return image


def _shown(token: str) -> str:
    """A token without the sign by which vocabularies begin a word, cut to fit beside a map."""
    return (token_text(token).strip() or printable(token))[:12]


def sinks(weights: np.ndarray, epsilon: float, kind: Kind | None = None) -> list[int]:
    """Keys k with alpha_k > epsilon, the mean of A[i,k] over the n_k rows i that may see it; n_k >= max(2, n_max/4)."""
    rows = _visible(len(weights), is_causal(weights), kind).sum(0)
    alpha = weights.sum(0) / rows.clip(1)
    return [int(key) for key in np.flatnonzero((alpha > epsilon) & (rows >= max(2, rows.max() / 4)))]


def _visible(length: int, causal: bool, kind: Kind | None) -> np.ndarray:
    """[query, key]: which keys each query may see under the order and the layer's window or chunks."""
    query, key = np.ogrid[:length, :length]
    seen = query >= key if causal else np.ones((length, length), bool)
    if kind is None or kind.size is None:
        return seen
    if kind.name == "chunked":
        return np.asarray(seen & (query // kind.size == key // kind.size))
    return np.asarray(seen & (abs(query - key) < kind.size if causal else abs(query - key) <= kind.size // 2))


def is_causal(weights: np.ndarray) -> bool:
    """Whether no query attends to a key after it."""
    return bool((np.triu(weights, 1) == 0).all())


def _box(axes: Axes, mark: str, x: int, y: int, width: int, height: int) -> None:
    """Outlines cells; `x` and `y` are the first key and query."""
    from matplotlib.patches import Rectangle

    axes.add_patch(
        Rectangle(
            (x - 0.5, y - 0.5), width, height, fill=False, linewidth=0.9, label=mark, clip_on=False, **MARKS[mark]
        )
    )


def _letters(name: str, width: float) -> float:
    """Points of letters so small that a map's name fits above it. All maps of a figure have those of the longest."""
    longest = max((len(printable(line)) for line in name.splitlines()), default=1)
    return max(3.5, min(8.0, 100 * width / max(1, longest)))


def _legend(canvas: Figure) -> None:
    """Explains the marks that some map has."""
    from matplotlib.lines import Line2D

    found = {text for axes in canvas.axes for text in axes.get_legend_handles_labels()[1]}
    names = [name for name in MARKS if name in found]
    if names:
        handles = [Line2D([], [], linewidth=0.9, label=name, **MARKS[name]) for name in names]
        canvas.legend(handles=handles, frameon=False, ncols=len(names), loc="outside lower center")
