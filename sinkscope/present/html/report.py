"""Runs as one HTML file that needs no network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sinkscope.present.html.arms import arms_view
from sinkscope.present.html.attention import attention_view
from sinkscope.present.html.comparison import comparison_view
from sinkscope.present.html.head_data import head_data
from sinkscope.present.html.page import blocks, embedded, listed, packed, parked, render_page, trusted
from sinkscope.present.html.section import groups, head_scatter, sections
from sinkscope.present.html.svg import Cell, Line, heat_map, legend, line_chart, number, points
from sinkscope.present.numbers import MISSING, fixed, is_missing
from sinkscope.present.text import (
    answers,
    first_token,
    printable,
    run_id,
    sentence,
    shortened,
    span,
    token_cell,
)
from sinkscope.runs.paper_table import model_labels
from sinkscope.runs.per_sequence import counted, tells_sinks, unit_in
from sinkscope.runs.words import computed_in, dormant_count, first_mass

if TYPE_CHECKING:
    import pandas as pd

    from sinkscope.comparison.compare_runs import Comparison
    from sinkscope.present.html.attention import AttentionMaps
    from sinkscope.runs.run import Run
    from sinkscope.runs.saved.arms import SavedArms

PROFILES = (
    ("alignment with the first token (x: residual stream; z: x after the norm)", "cosine", False,
     (("cos_first_residual", "cos(x_0, x_j)"), ("cos_first_input", "cos(z_0, z_j)"),
      ("avg_cos_residual", "cos(x_i, x_j), i, j > 0"))),
    ("norms of the residual stream", "norm", True, (("norm_first", "first token"), ("norm_other", "other tokens"))),
    ("massive activations", "largest |x|", True, (("inf_norm", "of a sequence, mean"),)),
    ("attention on the first token", "probability", False, (("mean_bos_mass", "bos_mass, mean over heads"),)),
)  # fmt: skip
CHARTS = ("maps", "profiles", "scatter")
PACKED, LARGE = 200_000, 2_500_000
"""Characters of data past which the page holds its data compressed, which only its script reads; and past which it
holds its charts so too, so that they need the script."""


def render_report(
    runs: list[Run], comparison: Comparison | None = None, arms: Sequence[Sequence[SavedArms]] = (),
    maps: Sequence[AttentionMaps] = (),
) -> str:  # fmt: skip
    """The whole page.

    `arms`: what was measured of each run's model under arms; none by default. `maps`: attention maps of each run's
    model; none by default.

    Names, tokens and paths are escaped as text, in markup and in the embedded JSON.
    """
    heads = [head_data(run) for run in runs]
    curves = [[embedded(block) for block in blocks(run.pop("curves"))] for run in heads]
    _one_scale(heads)
    data = embedded(heads)
    length = len(data) + sum(len(block) for of_run in curves for block in of_run)
    large, dense = length > LARGE, length > min(PACKED, LARGE)
    views = [_view(run, index, large, runs) for index, run in enumerate(runs)]
    _side_by_side(views)
    compared = None if comparison is None else comparison_view(comparison, large)
    for view, saved in zip(views, arms, strict=False):
        view["arms"] = [arms_view(experiment) for experiment in saved]
    drawn_maps = [attention_view(run, attention) for run, attention in zip(runs, maps, strict=False)]
    for view, drawn in zip(views, drawn_maps, strict=False):
        view["attention"] = drawn.view
    drawings = ""
    if large:
        charts = [chart for view in views for name in CHARTS for chart in view[name]]
        charts += [chart for view in views for section in view["sections"] if section for chart in section.charts]
        drawings = packed(embedded(parked([*charts, *(compared["maps"] if compared else [])])))
    if dense:
        data, curves = packed(data), [[embedded(packed(block)) for block in of_run] for of_run in curves]
    return render_page(
        "report.html", ("page.css", "report.css"), ("charts.js", "maps.js", "attention.js", "report.js"),
        data=trusted(data), weights=trusted(embedded([drawn.weights for drawn in drawn_maps])), dense=dense,
        curves=trusted(listed(listed(of_run) for of_run in curves)), drawings=trusted(drawings), runs=views,
        comparison=compared, large=large,
    )  # fmt: skip


def _one_scale(known: list[dict[str, Any]]) -> None:
    """Lets the colours of a score span its values in all runs."""
    for name in {name for run in known for name in run["scores"]}:
        columns = [run["columns"][run["scores"].index(name)] for run in known if name in run["scores"]]
        spans = [column for column in columns if column["low"] is not None]
        for column in spans:
            column["low"], column["high"] = min(span["low"] for span in spans), max(span["high"] for span in spans)


def _side_by_side(views: list[dict[str, Any]]) -> None:
    """Gives all runs the same sections in the same order, None where a run has none, so that equal parts stand in one
    row."""
    titles = dict.fromkeys(section.title for view in views for section in view["sections"])
    for view in views:
        by_title = {section.title: section for section in view["sections"]}
        view["sections"] = [by_title.get(title) for title in titles]


def _view(run: Run, index: int, dense: bool, runs: list[Run]) -> dict[str, Any]:
    """What the template shows of one run.

    `dense`: its maps and charts are of many heads. `runs`: all runs of the page; their charts have one scale.
    """
    manifest, summary = run.manifest, run.summary
    model = manifest.model
    facts = {
        "model": f"{model.shown} ({model.class_}, {model.parameters or 0:,} parameters)",
        "computed in": computed_in(model.dtype, model.device, model.quantization),
        "weights SHA-256": model.weights_sha256 or "-",
        "data": "; ".join(f"{data.domain}: {counted(run, data)}" for data in manifest.data),
        "first token": first_token(run),
        "sink": f"mean alpha_0 above {summary.epsilon:g}",
        "dormant": manifest.request.dormant_rule,
        "command": manifest.command or "made in Python",
        "made on": manifest.created,
        "made by": f"sinkscope {manifest.sinkscope}, run {run_id(run)}",
    }
    return {
        "index": index,
        "name": f"{model.short}{model_labels(runs)[index].removeprefix(model.shown)}",
        "facts": facts,
        "words": answers(run),
        "warnings": summary.warnings,
        "epsilon": f"{summary.epsilon:g}",
        "first_mass": sentence(_first_mass(run)),
        "maps": _maps(run, index, dense, runs),
        "profiles": _profiles(run, runs),
        "scatter": _scatter(run, dense, runs),
        "tokens": token_tables(run),
        "sections": sections(run, dense),
        "arms": [],
        "attention": None,
        "domains": _domains(run),
        "mixed": summary.dormant_in_some_domains,
    }


def _first_mass(run: Run) -> str:
    return first_mass(run.summary.first_token)


def _maps(run: Run, index: int, dense: bool, runs: list[Run]) -> list[dict[str, Any]]:
    # Weights of attention that is no softmax may lie beyond 0 and 1.
    masses = [run.heads["bos_mass"] for run in runs]
    bounds = min(0.0, *(float(mass.min()) for mass in masses)), max(1.0, *(float(mass.max()) for mass in masses))
    heads, called = run.heads.reset_index(drop=True), _first_mass(run)
    maps = []
    for caption, rows in groups(heads):
        layers = list(dict.fromkeys(rows["layer"]))
        order = {layer: place for place, layer in enumerate(layers)}
        cells = [
            Cell(order[layer], int(head), mass,
                 f"layer {layer}, head {head}: {called} {number(mass)}, alpha_0 {number(alpha)}", int(place))
            for place, layer, head, mass, alpha in zip(
                rows.index, *(rows[name] for name in ("layer", "head", "bos_mass", "sink_score")), strict=True)
        ]  # fmt: skip
        names, most = [str(layer) for layer in layers], int(rows["head"].max()) + 1
        drawn = heat_map(cells, names, most, bounds, f"{called} {caption}", run=index, dense=dense)
        maps.append({"caption": caption, "svg": drawn, "points": points(cells) if dense else [],
                     "legend": legend(bounds, f"{called} ({unit_in([run], 'probability')})")})  # fmt: skip
    return maps


def _profiles(run: Run, runs: list[Run]) -> list[dict[str, Any]]:
    charts = []
    for caption, rows in groups(run.layers):
        for title, unit, log, columns in PROFILES:
            lines = _lines(rows, columns)
            if lines:
                beside = [line for other in runs if len(runs) > 1 for line in _lines(other.layers, columns)]
                whole = f"{title}, {caption}" if caption else title
                labels = [line.label for line in lines]
                charts.append({"title": whole, "svg": line_chart(lines, "layer", unit_in([run], unit), log, beside),
                               "labels": labels})  # fmt: skip
    return charts


def _lines(rows: pd.DataFrame, columns: tuple[tuple[str, str], ...]) -> list[Line]:
    """A line for each column that the rows hold."""
    x = [float(layer) for layer in rows["layer"]]
    return [
        Line(label, x, rows[name].astype(float).tolist())
        for name, label in columns
        if name in rows and rows[name].notna().any()
    ]


def _scatter(run: Run, dense: bool, runs: list[Run]) -> list[dict[str, Any]]:
    called = _first_mass(run)
    heads = run.heads.assign(dormant=run.heads["dormant"].fillna(False).astype(object))
    return head_scatter(
        heads, "bos_mass", "honor", (f"{called} ({unit_in([run], 'probability')})", "HONOR (ratio)"),
        lambda row: f"layer {row['layer']}, head {row['head']}: {called} {number(row['bos_mass'])}, HONOR "
        f"{number(row['honor'])}", dense, "dormant", _reach(runs, "bos_mass", "honor"),
    )  # fmt: skip


def _reach(runs: list[Run], *columns: str) -> tuple[float, float]:
    """The largest value of two columns of the heads over all runs; 0 for one run, whose chart has its own scale."""
    x, y = (max(0.0, *(float(run.heads[name].max()) for run in runs)) for name in columns)
    return (x, y) if len(runs) > 1 else (0.0, 0.0)


def _domains(run: Run) -> list[dict[str, Any]]:
    rows = []
    for name, domain in run.summary.domains.items():
        for stream, summary in domain.streams.items():
            epsilon = run.summary.epsilon
            told = tells_sinks(run, stream, summary.uniform_alpha_0.T, epsilon)
            count, judged = dormant_count(summary.dormant, summary.heads), summary.heads - summary.dormant.unknown
            rows.append({
                "domain": name, "stream": stream,
                "sink_rate": summary.sink_rate_percent[f"{epsilon:g}"].T if told else None,
                "bos_mass": summary.bos_mass.mean, "entropy": summary.entropy.mean,
                "dormant": MISSING if count is None else f"{count} of {judged}",
            })  # fmt: skip
    return rows


TOKENS, WIDEST = 12, 40
"""Most tokens of each text, and most characters of each."""


def token_tables(run: Run) -> list[dict[str, Any]]:
    """The tokens with the most attention on them as sinks, for each text; none for a run of an older sinkscope."""
    if run.tokens is None:
        return []
    tokens = run.tokens[run.tokens["kind"] == "attention"]
    tables = []
    for caption, rows in groups(tokens):
        shown = [_token(row) for row in rows.head(TOKENS).to_dict("records")]
        if shown:
            tables.append({"caption": caption, "rows": shown, "more": max(0, len(rows) - TOKENS)})
    return tables


def _token(row: dict[Any, Any]) -> dict[str, str]:
    raw = MISSING if is_missing(row["token"]) else printable(str(row["token"]))
    text = raw if is_missing(row["token"]) else token_cell(str(row["token"]))
    return {
        "token": shortened(text, WIDEST), "raw": raw,
        "region": str(row["region"]), "place": "first" if row["first"] else "later",
        "sinks": f"{row['sinks']} of {row['occurrences']}", "rate": fixed(row["rate"], 3),
        "heads": MISSING if is_missing(row["heads"]) else str(row["heads"]),
        "layers": span(row["first_layer"], row["last_layer"], " to "), "alpha": fixed(row["mean_alpha"], 3),
        "share": fixed(row["sink_share"], 3),
    }  # fmt: skip
