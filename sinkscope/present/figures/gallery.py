"""Maps of a run's heads: one head at several lengths, and a gallery of heads that a column, a draw or a class picks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from sinkscope.errors import SinkscopeError, did_you_mean
from sinkscope.present.figures.maps import CAPTION, Tile, draw_maps
from sinkscope.present.figures.series import short
from sinkscope.present.text import printable, run_id

if TYPE_CHECKING:
    import pandas as pd

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
            Tile(f"head {each.layer}.{each.head}\n{pattern}", each.weights, kind=kind_of(run, each))
            for each, (_, _, pattern) in zip(maps, gallery_heads(run, pick=pick), strict=True)
        ]
        for run, maps in galleries
    ]
    names = [short(run.manifest.model.shown) for run, _ in galleries]
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
