"""Attention maps in the HTML report: a small drawing of each, its cells for the page's script, and its rows as text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from markupsafe import Markup, escape

from sinkscope.errors import SinkscopeError
from sinkscope.present.colors import CIVIDIS, mixed
from sinkscope.present.figures.maps import is_causal, kind_of, named_heads, sinks
from sinkscope.present.html.svg import legend
from sinkscope.present.numbers import fixed
from sinkscope.present.text import printable, token_text

if TYPE_CHECKING:
    from sinkscope.experiments.attention_map import HeadMap
    from sinkscope.runs.run import Run

MOST_HEADS, MOST_TOKENS = 12, 64
"""Most maps of a run, and most tokens of a map, in a report: with them its size stays small."""
LEVELS = 25
"""Colours of a map: neighbours of one colour are drawn as one stroke."""
UNIT = 1e-4
"""What the cells are whole multiples of in the page's data."""
NAMED, LEAST = 3, 0.05
"""Keys that a row of text names: at most so many, each with at least so much of the query's attention."""


@dataclass(frozen=True)
class AttentionMaps:
    """Maps of a run's model on one text."""

    text: str
    maps: list[HeadMap]


@dataclass(frozen=True)
class Drawn:
    """`view`: what the template shows. `weights`: tokens and cells of each map for the page's script, in whole `UNIT`;
    a row of a causal map ends at its query."""

    view: dict[str, Any]
    weights: list[dict[str, Any]]


def attention_view(run: Run, found: AttentionMaps) -> Drawn:
    """What the report shows of a run's maps.

    Raises SinkscopeError where there are more maps than MOST_HEADS, or more tokens than MOST_TOKENS.
    """
    if len(found.maps) > MOST_HEADS:
        raise SinkscopeError(f"a report shows at most {MOST_HEADS} attention maps of a run, not {len(found.maps)}")
    patterns = named_heads(run)
    views, weights = [], []
    for drawn in found.maps:
        if len(drawn.tokens) > MOST_TOKENS:
            raise SinkscopeError(
                f"a report shows attention maps of at most {MOST_TOKENS} tokens, and the text has {len(drawn.tokens)}: "
                "give a shorter --text"
            )
        tokens = [token_text(token).replace("\\n", "\u21b5") for token in drawn.tokens]
        pattern = patterns.get((drawn.layer, drawn.head), "")
        caption = f"layer {drawn.layer}, head {drawn.head}" + (f" ({pattern})" if pattern else "")
        views.append({
            "caption": f"{caption}; {_sinks(run, drawn, tokens)}", "svg": _svg(drawn.weights, caption),
            "rows": [_row(drawn.weights, tokens, query) for query in range(len(tokens))],
        })  # fmt: skip
        weights.append({"tokens": tokens, "weights": _cells(drawn.weights)})
    scale = legend((0, 1), "attention (probability)")
    return Drawn({"text": f"\u2018{found.text}\u2019", "maps": views, "legend": scale}, weights)


def _sinks(run: Run, of: HeadMap, tokens: list[str]) -> str:
    """Names the keys whose mean attention is above the run's epsilon."""
    epsilon = run.manifest.request.epsilon
    keys = sinks(of.weights, epsilon, kind_of(run, of))
    listed = ", ".join(_named(tokens, key) for key in keys)
    return f"sinks (alpha_k > {epsilon:g}): {listed}" if keys else f"no sink (alpha_k > {epsilon:g})"


def _named(tokens: list[str], place: int) -> str:
    return f"{place} \u2018{tokens[place]}\u2019"


def _cells(weights: np.ndarray) -> list[list[int]]:
    causal = is_causal(weights)
    rows = np.rint(weights / UNIT).astype(int).tolist()
    return [row[: query + 1] if causal else row for query, row in enumerate(rows)]


def _row(weights: np.ndarray, tokens: list[str], query: int) -> tuple[str, str]:
    """A query's token, and the keys with the most of its attention."""
    row = weights[query]
    keys = [int(key) for key in np.argsort(-row, kind="stable")[:NAMED] if row[key] >= LEAST]
    told = ", ".join(f"{_named(tokens, key)} {fixed(float(row[key]), 2)}" for key in keys)
    return _named(tokens, query), told or f"no key has {LEAST:g} or more"


def _svg(weights: np.ndarray, label: str) -> Markup:
    """One unit a cell: strokes of one colour along the rows. Cells that a causal query cannot see are left out."""
    length, causal = len(weights), is_causal(weights)
    levels = np.rint(np.clip(weights, 0.0, 1.0) * (LEVELS - 1)).astype(int)
    strokes: dict[int, list[str]] = {}
    for query, row in enumerate(levels):
        seen = row[: query + 1] if causal else row
        ends = np.flatnonzero(np.diff(seen, append=-1)) + 1
        for start, end in zip([0, *ends[:-1]], ends, strict=True):
            strokes.setdefault(int(seen[start]), []).append(f"M{start} {query + 0.5:g}h{end - start}")
    paths = "".join(
        f'<path stroke="{mixed(CIVIDIS, level / (LEVELS - 1))}" d="{"".join(strokes[level])}"/>'
        for level in sorted(strokes)
    )
    return Markup(
        f'<svg class="weights" viewBox="0 0 {length} {length}" width="420" height="420" role="img" tabindex="0" '
        f'aria-label="attention of {escape(printable(label))}; its rows are below as text">{paths}</svg>'
    )
