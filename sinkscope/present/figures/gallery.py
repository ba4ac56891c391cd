"""Maps of a run's heads: one head at several lengths, and a gallery of the heads with the clearest patterns."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sinkscope.present.figures.maps import CAPTION, Tile, draw_maps
from sinkscope.present.figures.series import short
from sinkscope.present.text import printable, run_id

if TYPE_CHECKING:
    from sinkscope.experiments.attention_map import HeadMap
    from sinkscope.runs.run import Run
    from sinkscope.runs.schema.site import Kind

CLEAREST = (
    ("bos_mass", "first token"),
    ("self_mass", "self"),
    ("previous_mass", "previous"),
    ("uniformity", "uniform"),
)
"""Columns of heads.csv by which the gallery chooses heads, and the patterns that they measure."""


def gallery_heads(run: Run, each: int = 1) -> list[tuple[int, int, str]]:
    """Layer, head and pattern: for each of CLEAREST the `each` heads with the largest values that are not chosen yet.

    Heads of the run's first stream and domain; none for a column that no head has.
    """
    rows = run.heads[run.heads["stream"] == run.heads["stream"].iloc[0]]
    rows = rows[rows["domain"] == rows["domain"].iloc[0]] if "domain" in rows else rows
    chosen: list[tuple[int, int, str]] = []
    for column, pattern in CLEAREST:
        taken = {(layer, head) for layer, head, _ in chosen}
        order = rows.dropna(subset=[column]).sort_values(column, ascending=False, kind="stable")
        name = "BOS" if column == "bos_mass" and run.summary.first_token.is_bos else pattern
        free = [row for row in order.to_dict("records") if (row["layer"], row["head"]) not in taken]
        chosen += [(int(row["layer"]), int(row["head"]), f"{name} {row[column]:.2f}") for row in free[:each]]
    return chosen


def named_heads(run: Run) -> dict[tuple[int, int], str]:
    """What is known of the clearest heads of a run, by layer and head: the pattern and its value."""
    return {(layer, head): pattern for layer, head, pattern in gallery_heads(run, 2)}


def draw_gallery(
    galleries: list[tuple[Run, list[HeadMap]]], text: str, form: str, size: str = "column", title: str | None = None
) -> tuple[bytes, str]:
    """A row for each run: its maps of `gallery_heads`, in that order. Returns the figure and its caption."""
    tiles = [
        [
            Tile(f"head {each.layer}.{each.head}\n{pattern}", each.weights, kind=kind_of(run, each))
            for each, (_, _, pattern) in zip(maps, gallery_heads(run), strict=True)
        ]
        for run, maps in galleries
    ]
    names = [short(run.manifest.model.shown) for run, _ in galleries]
    about = "sinkscope gallery of runs " + ", ".join(run_id(run) for run, _ in galleries)
    many = len(galleries) > 1
    own_title = "" if many else names[0]
    epsilon = galleries[0][0].manifest.request.epsilon
    said = " The heads with the largest mean attention on the first token, on themselves and on the token before, and "
    said += "the most uniform one, over the run's text (the number above each map); the maps are of the text "
    content = draw_maps(tiles, about, form, size, title, own_title, epsilon=epsilon, rows=names if many else ())
    return content, f"{CAPTION.format(epsilon=epsilon)}{said}{printable(text)!r}."


def kind_of(run: Run, of: HeadMap) -> Kind | None:
    """What a query of the map's layer may see."""
    return next((site.kind for site in run.manifest.attention if site.layer == of.layer), None)


def draw_attention(
    run: Run, maps: list[HeadMap], text: str, form: str, size: str = "column", title: str | None = None
) -> tuple[bytes, str]:
    """One head's map at each length, beside each other, with its tokens along both axes where they have room."""
    first = maps[0]
    many = len(maps) > 1
    names = [f"T = {len(each.tokens)}" if many else "" for each in maps]
    tiles = [
        Tile(name, each.weights, tuple(each.tokens), kind=kind_of(run, each))
        for name, each in zip(names, maps, strict=True)
    ]
    own_title = f"{short(run.manifest.model.shown)}, layer {first.layer}, head {first.head}"
    epsilon = run.manifest.request.epsilon
    content = draw_maps([tiles], f"sinkscope run {run_id(run)}", form, size, title, own_title, epsilon=epsilon)
    said = f" {own_title}"
    said += f", the first {', '.join(str(len(each.tokens)) for each in maps)} tokens" if many else ""
    return content, f"{CAPTION.format(epsilon=epsilon)}{said} of the text {printable(text)!r}."
