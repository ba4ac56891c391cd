"""The part of the HTML report that shows a comparison."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from sinkscope.comparison.levels import CHANGED, parting
from sinkscope.present.colors import DIVERGING
from sinkscope.present.differences import equivalences, largest, layers_between, no_difference, partings, states
from sinkscope.present.html.svg import Cell, Line, heat_map, legend, line_chart, points
from sinkscope.present.numbers import change, interval, probability, signed, significant
from sinkscope.present.text import sentence, within_noise

if TYPE_CHECKING:
    import pandas as pd

    from sinkscope.comparison.compare_runs import Comparison


def comparison_view(result: Comparison, dense: bool = False) -> dict[str, Any]:
    """What the template shows: rows of the summary, the profiles of both runs on one set of axes, a map of each
    metric's differences, the heads that changed. `dense`: the maps are of many heads."""
    rows = [
        {"place": _where(result.summary, row["domain"], row["stream"]) or row["domain"], "metric": row["metric"],
         "a": significant(row["a"]), "b": significant(row["b"]),
         "difference": change(row["difference"], row["sem"]),
         "interval": interval(row["low"], row["high"]), "p": probability(row["p"])}
        for row in result.summary.to_dict("records")
    ]  # fmt: skip
    how = "Paired: the same token sequences in both" if result.paired else "Separate samples: Welch's test"
    said = [*partings(result), *map(sentence, [*states(result), *equivalences(result)])]  # the first name columns
    return {
        "a": result.a, "b": result.b, "how": how, "said": said, "lead": _lead(result), "notes": result.notes,
        "rows": rows, "profiles": _profiles(result), "maps": _maps(result, dense),
        "changes": _changes(result) if result.same_shape else [],
    }  # fmt: skip


def _lead(result: Comparison) -> str:
    """The first row of the summary and the number of heads that changed, in one sentence."""
    if result.summary.empty:
        return ""
    row = result.summary.iloc[0]
    where = _where(result.summary, row["domain"], row["stream"])
    ends = interval(row["low"], row["high"])
    said = f"From A to B{f' on {where}' if where else ''}: mean {row['metric']} {significant(row['a'])} to "
    said += significant(row["b"])
    said += f" (95 % interval of the difference {ends})"
    if result.a["tokens"] != result.b["tokens"]:
        said += (
            f", though the sequences differ in length ({' and '.join(_tokens(side) for side in (result.a, result.b))})"
        )
    counts = [f"{len(heads)} {CHANGED[name]}" for name, heads in result.changes.items() if heads]
    changed = (
        f"; heads: {', '.join(counts)}"
        if counts
        else "; no head gained or lost a sink or its dormancy by a difference with q < 0.05"
    )
    return f"{said}{changed if result.same_shape else ''}."


def _tokens(side: dict[str, Any]) -> str:
    return f"{', '.join(dict.fromkeys(side['tokens']))} tokens"


def _changes(result: Comparison) -> list[tuple[str, list[dict[str, Any]], str]]:
    """For each change of state: its label, its heads, and how many crossed the threshold by noise."""
    return [
        (CHANGED[name], [row | {"q": probability(row["q"])} for row in heads],
         within_noise(len(result.within_noise[name]), bool(heads)))
        for name, heads in result.changes.items()
    ]  # fmt: skip


def _where(rows: pd.DataFrame, domain: str, stream: str) -> str:
    """Domain and stream, each only where `rows` has several."""
    return ", ".join(name for key, name in (("domain", domain), ("stream", stream)) if rows[key].nunique() > 1)


def _profiles(result: Comparison) -> list[dict[str, Any]]:
    """A chart of each metric of layers, both runs in it: by layer, or over relative depth where layers cannot be
    matched. The stretch where they part is shaded."""
    over_depth = len(result.depths) > 0
    table, axis = (result.depths, "depth") if over_depth else (result.layers, "layer")
    charts: list[dict[str, Any]] = []
    if not len(table):
        return charts
    for (domain, stream, metric), rows in table.groupby(["domain", "stream", "metric"], sort=False):
        where = _where(table, domain, stream)
        split = parting(rows)
        stretch = None if split is None else (float(split.stretch[axis].min()), float(split.stretch[axis].max()))
        lines = [
            Line(run.upper(), rows[axis].astype(float).tolist(), rows[run].astype(float).tolist(),
                 places=[layers_between(layer, layer) for layer in rows[f"layer_{run}" if over_depth else "layer"]])
            for run in "ab"
        ]  # fmt: skip
        label = "relative depth (0: first layer, 1: last)" if over_depth else "layer"
        charts.append({
            "caption": f"{metric}{f' on {where}' if where else ''}", "labels": [line.label for line in lines],
            "svg": line_chart(lines, label, metric, stretch=stretch), "parts": stretch is not None,
        })  # fmt: skip
    return charts


def _maps(result: Comparison, dense: bool) -> list[dict[str, Any]]:
    """A map for each metric; only a caption where no head differs."""
    maps: list[dict[str, Any]] = []
    if not len(result.heads):
        return maps
    for (domain, stream, metric), rows in result.heads.groupby(["domain", "stream", "metric"], sort=False):
        where = _where(result.heads, domain, stream)
        label = f"difference of {metric}" + (f" on {where}" if where else "")
        most = largest(rows)
        if not most > 0:
            maps.append({"caption": f"{label}: {no_difference(rows)}", "svg": "", "legend": ""})
            continue
        layers = list(dict.fromkeys(rows["layer"]))
        cells = [
            Cell(layers.index(row["layer"]), int(row["head"]), float(np.clip(row["difference"], -most, most)),
                 f"layer {row['layer']}, head {row['head']}: {significant(row['a'])} to {significant(row['b'])} "
                 f"({signed(row['difference'])}, q {probability(row['q'])})")
            for row in rows.to_dict("records")
        ]  # fmt: skip
        bounds = (-most, most)
        names, most = [str(layer) for layer in layers], int(rows["head"].max()) + 1
        drawn = heat_map(cells, names, most, bounds, label, DIVERGING, dense=dense)
        maps.append({"caption": label, "svg": drawn, "points": points(cells) if dense else [],
                     "legend": legend(bounds, f"{metric}, B - A", DIVERGING)})  # fmt: skip
    return maps
