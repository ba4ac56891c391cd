"""Attention maps: square cells with the sinks, the diagonal and the trigger's row marked, singly and as galleries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from sinkscope.errors import SinkscopeError, did_you_mean
from sinkscope.present.colors import LINES, MAP
from sinkscope.present.figures.canvas import drawn, fitting, headline, inches
from sinkscope.present.figures.several import short
from sinkscope.present.text import printable, run_id, token_cell, token_text
from sinkscope.runs.defaults import EPSILON

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from sinkscope.experiments.attention_map import HeadMap
    from sinkscope.runs.run import Run
    from sinkscope.runs.schema.manifest import Kind


DIAGONAL = 0.5
"""A map has a diagonal from this mean A[i,i] on, i >= 1: the bound of the column `pattern`."""
MARKS: dict[str, dict[str, Any]] = {
    "sink": {"color": LINES[5], "linestyle": "-"},
    "diagonal": {"color": LINES[4], "linestyle": "--"},
    "trigger": {"color": LINES[3], "linestyle": ":"},
}
POINTER: dict[str, Any] = {"marker": "v", "markersize": 2.5, "markeredgewidth": 0}
WIDE = 2
"""Maps beside each other up to which ticks and tokens have room."""
READABLE = 64
"""Tokens up to which each is written at the axes."""
OUTLINED = 4.0
"""Points of a cell from which a sink's column is outlined. A line would hide smaller cells: there a triangle above the
map points at the column."""
CAPTION = (
    f"Attention probabilities, queries down, keys across; cells that a causal head cannot see are left white. Solid: "
    f"sinks, keys k with alpha_k > {{epsilon:g}}; where cells are small, a triangle stands above the key instead. "
    f"Dashed: the diagonal, where the mean of A[i,i] over i >= 1 is {DIAGONAL:g} or more."
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
        side = (width - room) / columns
        letters = min(_letters(tile.name, side) for row in tiles for tile in row)
        for row, places in zip(tiles, grid, strict=True):
            for axes in places[len(row) :]:
                axes.set_visible(False)  # the colour bar takes its room from all of them
            for tile, axes in zip(row, places, strict=False):
                points = 72 * (side - 0.6 if columns <= WIDE else side)
                image = paint_map(axes, tile, most, epsilon, points, columns <= WIDE)
                name = "\n".join(map(printable, tile.name.splitlines()))
                axes.set_title(name, parse_math=False, fontsize=letters, pad=5)
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


def paint_map(axes: Axes, tile: Tile, most: float, epsilon: float, points: float = 200.0, ticks: bool = False) -> Any:
    """Draws one map with its marks; returns the image, for a colour bar.

    `points`: its width. `ticks`: whether tokens or positions stand along the axes.
    """
    weights, length = tile.weights, len(tile.weights)
    causal = is_causal(weights)
    hidden = np.triu(np.ones_like(weights, bool), 1) & causal
    image = axes.imshow(np.ma.masked_array(weights, hidden), cmap=MAP, vmin=0, vmax=most, interpolation="nearest")
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.tick_params(length=0)
    if tile.tokens and ticks and length <= READABLE:
        names = [_shown(token) for token in tile.tokens]
        axes.set_xticks(range(length), names, rotation=90, parse_math=False)
        axes.set_yticks(range(length), names, parse_math=False)
        axes.tick_params(labelsize=max(2.0, min(7.0, 0.9 * points / length)))
    elif ticks:
        shown = list(range(0, length, max(1, length // 4)))
        axes.set_xticks(shown)
        axes.set_yticks(shown)
    else:
        axes.set_xticks([])
        axes.set_yticks([])
    if tile.marked:
        for key in sinks(weights, epsilon, tile.kind):
            if points / length >= OUTLINED:
                _box(axes, "sink", key, key if causal else 0, 1, length - (key if causal else 0))
            else:
                _point(axes, key)
        if length > 1 and np.diagonal(weights)[1:].mean() >= DIAGONAL:
            for shift in (-0.5, 0.5):
                ends = np.array([-0.5, length - 0.5])
                axes.plot(ends + shift, ends - shift, linewidth=0.8, label="diagonal", **MARKS["diagonal"])
            axes.set(xlim=(-0.5, length - 0.5), ylim=(length - 0.5, -0.5))
    if tile.trigger is not None:
        _box(axes, "trigger", 0, tile.trigger, tile.trigger + 1 if causal else length, 1)
    return image


def _shown(token: str) -> str:
    """A token without the sign by which vocabularies begin a word, cut to fit beside a map. Blanks are quoted."""
    return (token_text(token).strip() or token_cell(token))[:12]


def sinks(weights: np.ndarray, epsilon: float, kind: Kind | None = None) -> list[int]:
    """Keys k with alpha_k > epsilon, the mean of A[i,k] over the n_k rows i that may see it; n_k >= max(2, n_max/4)."""
    rows = _visible(weights, is_causal(weights), kind).sum(0)
    alpha = weights.sum(0) / rows.clip(1)
    return [int(key) for key in np.flatnonzero((alpha > epsilon) & (rows >= max(2, rows.max() / 4)))]


def _visible(weights: np.ndarray, causal: bool, kind: Kind | None) -> np.ndarray:
    """[query, key]: which keys each query may see under the order and the layer's window or chunks.

    Models differ in what the size of a window both ways counts, so there the map itself tells how far it reaches.
    """
    length = len(weights)
    query, key = np.ogrid[:length, :length]
    seen = query >= key if causal else np.ones((length, length), bool)
    if kind is None or kind.size is None:
        return seen
    if kind.name == "chunked":
        return np.asarray(seen & (query // kind.size == key // kind.size))
    distance = abs(query - key)
    return np.asarray(seen & (distance < kind.size if causal else distance <= distance[weights != 0].max(initial=0)))


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


def _point(axes: Axes, key: int) -> None:
    """A triangle above the map, over the column of a sink."""
    axes.plot(
        [key], [1.02], transform=axes.get_xaxis_transform(), color=MARKS["sink"]["color"], linestyle="", label="sink",
        clip_on=False, **POINTER,
    )  # fmt: skip


def _letters(name: str, width: float) -> float:
    """Points of letters so small that a map's name fits above it. All maps of a figure have those of the longest."""
    longest = max((len(printable(line)) for line in name.splitlines()), default=1)
    return max(3.5, min(8.0, 100 * width / max(1, longest)))


def _legend(canvas: Figure) -> None:
    """Explains the marks that some map has."""
    from matplotlib.lines import Line2D

    pairs = [pair for axes in canvas.axes for pair in zip(*axes.get_legend_handles_labels(), strict=True)]
    labels = {text for _, text in pairs}
    pointed = any(text == "sink" and isinstance(handle, Line2D) for handle, text in pairs)
    looks = {name: {"linewidth": 0.9, **MARKS[name]} for name in MARKS if name in labels}
    if pointed:
        looks["sink"] = {"linestyle": "", "color": MARKS["sink"]["color"], **POINTER}
    if looks:
        handles = [Line2D([], [], label=name, **look) for name, look in looks.items()]
        canvas.legend(handles=handles, frameon=False, ncols=len(looks), loc="outside lower center")


# Maps of a run's heads: one head at several lengths, and a gallery of heads that a column, a draw or a class picks.


CLEAREST = (
    ("bos_mass", "first token"),
    ("self_mass", "self"),
    ("previous_mass", "previous"),
    ("uniformity", "uniform"),
)
"""Columns of heads.csv by which the gallery chooses heads, and the patterns that they measure."""


CLASSES = {"sink+copy": "sink_rows", "diagonal+copy": "self_rows"}
"""The patterns of section 7 of Lampert et al. 2605.08453, each with the column that counts its resting rows."""
PICKS = ("clearest", "random", *CLASSES)
SOME = 0.05
"""A head of a class has this share of each of both kinds of rows."""
BESIDE = 4
"""Maps of a run that is drawn at random, or by a class."""


@dataclass(frozen=True)
class Pick:
    """How a gallery chooses heads. `seed` draws those of `random`."""

    how: str = "clearest"
    seed: int = 0

    def __post_init__(self) -> None:
        """Raises SinkscopeError for a word that is none of PICKS."""
        if self.how not in PICKS:
            raise SinkscopeError(
                f"--pick {self.how!r}: choose one of {', '.join(PICKS)}{did_you_mean(self.how, PICKS)}"
            )

    @property
    def words(self) -> str:
        """Which heads are shown, as a sentence."""
        if self.how == "clearest":
            return (
                "The heads with the largest mean attention on the first token, on themselves and on the token before, "
                "and the most uniform one, over the run's text (the number above each map)"
            )
        if self.how == "random":
            return (
                f"Heads drawn at random (seed {self.seed}), with the pattern that their means over the run's text have"
            )
        rest = "first token" if self.how == "sink+copy" else "query itself"
        return (
            f"The heads with the largest share of rows that either give the {rest} 0.9 or more or copy (first number: "
            "the former, second: the latter, of the run's text)"
        )


def gallery_heads(run: Run, each: int = 1, pick: Pick | None = None) -> list[tuple[int, int, str]]:
    """Layer, head and what is known of it, for the heads of the run's first stream and domain that `pick` chooses.

    `clearest`, which None stands for: for each of CLEAREST the `each` heads with the largest values that are not chosen
    yet, none for a column that no head has. Otherwise up to four heads. Raises SinkscopeError for a class of which the
    run has no head, or no table.
    """
    pick = pick or Pick()
    rows = _first(run, run.heads)
    if pick.how == "clearest":
        return _clearest(run, rows, each)
    if pick.how in CLASSES:
        return _of_class(run, pick.how)
    order = np.random.default_rng(pick.seed).permutation(len(rows))[:BESIDE]
    drawn = rows.iloc[np.sort(order)]
    return [(int(row.layer), int(row.head), str(row.pattern or "")) for row in drawn.itertuples()]


def _first(run: Run, table: pd.DataFrame) -> pd.DataFrame:
    """The rows of the run's first stream and domain."""
    rows = table[table["stream"] == run.heads["stream"].iloc[0]]
    return rows[rows["domain"] == rows["domain"].iloc[0]] if "domain" in rows else rows


def _clearest(run: Run, rows: pd.DataFrame, each: int) -> list[tuple[int, int, str]]:
    chosen: list[tuple[int, int, str]] = []
    for column, pattern in CLEAREST:
        taken = {(layer, head) for layer, head, _ in chosen}
        order = rows.dropna(subset=[column]).sort_values(column, ascending=False, kind="stable")
        name = "BOS" if column == "bos_mass" and run.summary.first_token.is_bos else pattern
        free = [row for row in order.to_dict("records") if (row["layer"], row["head"]) not in taken]
        chosen += [(int(row["layer"]), int(row["head"]), f"{name} {row[column]:.2f}") for row in free[:each]]
    return chosen


def _of_class(run: Run, how: str) -> list[tuple[int, int, str]]:
    table = run.measured.get("switch")
    name = run.path or run.manifest.model.id
    if table is None or "copy_rows" not in table:
        raise SinkscopeError(f"{name} has no column copy_rows: scan it with --measure switch")
    rows = _first(run, table)
    resting, copying = rows[CLASSES[how]], rows["copy_rows"]
    rows = rows.assign(both=resting + copying)[(resting >= SOME) & (copying >= SOME)]
    if rows.empty:
        raise SinkscopeError(
            f"{name}: no head is near to {how}: none has {100 * SOME:g} % of its rows of each kind ({CLASSES[how]}, "
            "copy_rows)"
        )
    best = rows.sort_values("both", ascending=False, kind="stable").head(BESIDE)
    return [
        (int(row["layer"]), int(row["head"]), f"{row[CLASSES[how]]:.2f} + {row['copy_rows']:.2f}")
        for row in best.to_dict("records")
    ]


def named_heads(run: Run) -> dict[tuple[int, int], str]:
    """What is known of the clearest heads of a run, by layer and head: the pattern and its value."""
    return {(layer, head): pattern for layer, head, pattern in gallery_heads(run, 2)}


def draw_gallery(
    galleries: list[tuple[Run, list[HeadMap]]], text: str, form: str, size: str = "column", title: str | None = None,
    pick: Pick | None = None,
) -> tuple[bytes, str]:  # fmt: skip
    """A row for each run: its maps of `gallery_heads`, in that order. Returns the figure and its caption."""
    pick = pick or Pick()
    tiles = [
        [
            Tile(f"head {head_map.layer}.{head_map.head}\n{pattern}", head_map.weights, kind=kind_of(run, head_map))
            for head_map, (_, _, pattern) in zip(maps, gallery_heads(run, pick=pick), strict=True)
        ]
        for run, maps in galleries
    ]
    names = [short(run.manifest.model) for run, _ in galleries]
    about = "sinkscope gallery of runs " + ", ".join(run_id(run) for run, _ in galleries)
    many = len(galleries) > 1
    own_title = "" if many else names[0]
    epsilon = galleries[0][0].manifest.request.epsilon
    content = draw_maps(tiles, about, form, size, title, own_title, epsilon=epsilon, rows=names if many else ())
    return content, (f"{CAPTION.format(epsilon=epsilon)} {pick.words}; the maps are of the text {printable(text)!r}.")


def kind_of(run: Run, of: HeadMap) -> Kind | None:
    """What a query of the map's layer may see."""
    return next((site.kind for site in run.manifest.attention if site.layer == of.layer), None)


def draw_attention(
    run: Run, maps: list[HeadMap], text: str, form: str, size: str = "column", title: str | None = None
) -> tuple[bytes, str]:
    """One head's map at each length, beside each other, with its tokens along both axes where they have room."""
    first = maps[0]
    many = len(maps) > 1
    names = [f"T = {len(head_map.tokens)}" if many else "" for head_map in maps]
    tiles = [
        Tile(name, head_map.weights, tuple(head_map.tokens), kind=kind_of(run, head_map))
        for name, head_map in zip(names, maps, strict=True)
    ]
    own_title = f"{short(run.manifest.model)}, layer {first.layer}, head {first.head}"
    epsilon = run.manifest.request.epsilon
    content = draw_maps([tiles], f"sinkscope run {run_id(run)}", form, size, title, own_title, epsilon=epsilon)
    said = f" {own_title}"
    said += f", the first {', '.join(str(len(head_map.tokens)) for head_map in maps)} tokens" if many else ""
    return content, f"{CAPTION.format(epsilon=epsilon)}{said} of the text {printable(text)!r}."
