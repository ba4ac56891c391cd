"""The figures of a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from sinkscope.errors import SinkscopeError, did_you_mean
from sinkscope.present.colors import DIVERGING, LINES, MAP
from sinkscope.present.figures import SINGLE
from sinkscope.present.figures.canvas import NO_TITLE, drawn, inches, need_finite, plain_axis
from sinkscope.present.paper.cells import in_words, mathematics
from sinkscope.present.text import printable, run_id
from sinkscope.runs.catalogue import elsewhere, find_column, near_column
from sinkscope.runs.dormancy import parse_rule
from sinkscope.runs.paper_table import describe_run
from sinkscope.runs.per_sequence import domains, sequences_of, tells_sinks, tokens_of, unit_in
from sinkscope.runs.words import first_mass

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from sinkscope.runs.run import Run


PROFILES = ("mean_bos_mass", "cos_first_residual", "norm_ratio")
PANELS = ("heatmap", "length", "scatter")
"""The figures that `draw_on` draws."""
STRONGEST = 6
ASIDE, AROUND, TITLED = 0.45, 0.9, 0.135
"""Inches that a heat map leaves to words: beside its cells, above and below them without the colour bar and the title,
and for each line of the title."""
GAPS = 1.02
"""A heat map's height with the gap that the colour bar keeps, which grows with it, over its own."""
BAR = 40
"""Length of a colour bar, over its height."""
LETTER, LINE = 0.07, 0.13
"""Inches that a digit of a tick's label takes, and a line of such labels."""
NAMED = 8
"""Most layers that an axis names."""
STEPS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 10_000)
"""Every how many cells one is named."""
TITLE = 36
"""Characters of a title's line that fit beside the axes of the narrowest figure."""


def draw(
    run: Run, figure: str, form: str, size: str = "column", metric: str | None = None, title: str | None = None,
    domain: str | None = None,
) -> bytes:  # fmt: skip
    """Draws `figure` (heatmap, profile, length or scatter) of a run's first stream, as PNG, SVG or PDF.

    `domain`: the one that is drawn where the run has several; the first where it is None.

    `metric`: the column of heads.csv that a heat map shows; bos_mass where it is None. `title`: replaces the figure's
    own; `none` leaves it out.
    Raises SinkscopeError for an unknown figure, format, size or metric, for a metric with another figure than heatmap,
    and where matplotlib is not installed.
    """
    run = of_domain(run, domain)
    if figure == "heatmap":
        ratio = _map_ratio(run, size)
        return _drawn(run, lambda canvas: _heatmap(canvas, run, metric), form, size, ratio, title)
    painters = {"profile": (_profile, 1.25), "length": (_length, 0.95), "scatter": (_scatter, 0.85)}
    if figure not in painters:
        raise SinkscopeError(f"--figure {figure!r}: choose one of {', '.join(SINGLE)}{did_you_mean(figure, SINGLE)}")
    if metric is not None:
        raise SinkscopeError(f"--metric belongs to --figure heatmap: {figure} always shows the same columns")
    paint, ratio = painters[figure]
    return _drawn(run, lambda canvas: paint(canvas, run), form, size, ratio, title)


def draw_on(
    axes: Axes, run: Run, figure: str, metric: str | None = None, title: str | None = None, domain: str | None = None
) -> Axes:
    """Draws a figure of one panel on axes that are there already, in their own style, and returns them.

    Raises SinkscopeError for another figure than those of PANELS, and otherwise as `draw` does.
    """
    if figure not in PANELS:
        raise SinkscopeError(
            f"ax= takes {', '.join(PANELS)}, which have one panel; {figure!r} has more, or is no figure of one run"
        )
    if metric is not None and figure != "heatmap":
        raise SinkscopeError(f"metric belongs to heatmap: {figure} always shows the same columns")
    run = of_domain(run, domain)
    if figure == "heatmap":
        _heatmap(axes.get_figure(), run, metric, axes)
    else:
        {"length": _length, "scatter": _scatter}[figure](axes.get_figure(), run, axes)
    if title is not None:
        axes.set_title("" if title == NO_TITLE else printable(title), loc="left", parse_math=False)
    return axes


def _drawn(
    run: Run, paint: Callable[[Figure], None], form: str, size: str, ratio: float, title: str | None = None
) -> bytes:
    return drawn(paint, f"sinkscope run {run_id(run)}: {describe_run(run)}", form, inches(size, ratio), title)


def of_domain(run: Run, domain: str | None) -> Run:
    """The run with one domain's rows of its tables. Raises SinkscopeError for a domain that it does not have."""
    if domain is None:
        return run
    names = [data.domain for data in domains(run)]
    if domain not in names:
        raise SinkscopeError(f"--domain {domain!r}: the run has {', '.join(names)}{did_you_mean(domain, names)}")
    tables = {name: getattr(run, name) for name in ("heads", "layers", "length_curve") if "domain" in run.heads}
    return replace(run, **{name: table[table["domain"] == domain] for name, table in tables.items()})


def _first(table: pd.DataFrame) -> pd.DataFrame:
    """The rows of the first stream, and of the first domain where there are several."""
    rows = table[table["stream"] == table["stream"].iloc[0]]
    return rows[rows["domain"] == rows["domain"].iloc[0]] if "domain" in rows else rows


def _title(axes: Axes, run: Run, text: str) -> None:
    axes.set_title(_titled(run, text), loc="left", parse_math=False)


def _titled(run: Run, text: str) -> str:
    """The model's name above `text`, and the text that was read where the run has several."""
    if "domain" in run.heads and not text.endswith(shown := _end(str(_first(run.heads)["domain"].iloc[0]))):
        text = f"{text}\non {shown}"
    return f"{_end(run.manifest.model.short)}\n{text}"


def _end(text: str) -> str:
    """As much of the end of a name as fits on a title's line: names of one model's runs and texts begin alike."""
    text = printable(text)
    return text if len(text) <= TITLE else f"...{text[3 - TITLE :]}"


def _first_mass(run: Run) -> str:
    return first_mass(run.summary.first_token)


def _unit(run: Run, name: str) -> str:
    column = find_column(run.manifest, name, "heads")
    return f" ({unit_in([run], column.unit, _stream(run))})" if column else ""


def _stream(run: Run) -> str:
    """The stream that is drawn."""
    return str(run.heads["stream"].iloc[0])


def _heatmap(canvas: Any, run: Run, chosen: str | None, axes: Axes | None = None) -> None:
    rows, metric = _first(run.heads), "bos_mass" if chosen is None else chosen
    shown = rows.select_dtypes("number").columns.difference(["layer", "head"])
    if metric not in shown:
        place = "" if metric in rows else elsewhere(run.manifest, metric)
        raise SinkscopeError(
            f"--metric {metric!r}: not a measured number of heads.csv{place}; `sinkscope metrics` lists the "
            f"columns{near_column(metric, shown)}"
        )
    grid = rows.pivot_table(index="layer", columns="head", values=metric, dropna=False)
    grid = grid.T if _lies(grid.shape) else grid
    values, unit = grid.to_numpy(float), _unit(run, metric)
    wide = canvas.get_figwidth() * (1 if axes is None else axes.get_position().width)
    axes = axes or canvas.subplots()
    image = axes.imshow(values, **_scale(values, unit), interpolation="nearest")
    axes.set(xlabel=grid.columns.name, ylabel=grid.index.name)
    cell = (wide - ASIDE) / len(grid.columns)
    across = LETTER * (1 + len(str(grid.columns[-1])))
    for axis, names, room in ((axes.xaxis, grid.columns, across), (axes.yaxis, grid.index, LINE)):
        step = next(step for step in STEPS if step * cell >= room)
        axis.set_ticks(range(0, len(names), step), [str(name) for name in names[::step]])
    _title(axes, run, _measured(run, rows))
    label = mathematics(metric)
    bar = canvas.colorbar(image, ax=axes, location="bottom", aspect=BAR)
    bar.set_label(f"{label or in_words(metric, _first_mass(run))}{unit}", parse_math=label is not None)


def _lies(shape: tuple[int, int]) -> bool:
    """Whether layers lie across the map: there are more of them than heads, and cells are square."""
    return shape[0] > shape[1]


def _map_ratio(run: Run, size: str) -> float:
    """The height of a heat map of square cells, over its width."""
    rows, width = _first(run.heads), inches(size, 1)[0]
    shape = sorted((rows["layer"].nunique(), rows["head"].nunique()))
    title = TITLED * len(_titled(run, _measured(run, rows)).splitlines())
    return ((width - ASIDE) * shape[0] / shape[1] * GAPS + AROUND + title + width / BAR) / width


def _scale(values: np.ndarray, unit: str) -> dict[str, Any]:
    """The colour map and its bounds: 0 to 1 for shares, and to the largest weight where attention is no softmax and one
    exceeds 1; symmetric about 0, with a colour for each sign, where any value is negative; else from the lowest value
    to the highest."""
    finite = values[np.isfinite(values)]
    if unit in (" (probability)", " (unnormalised weight)", " (share)") and not (finite < 0).any():
        return {"cmap": MAP, "vmin": 0, "vmax": max(1.0, float(finite.max(initial=1.0)))}
    if not (finite < 0).any():
        return {"cmap": MAP}
    from matplotlib.colors import LinearSegmentedColormap

    most = float(np.abs(finite).max())
    return {"cmap": LinearSegmentedColormap.from_list("signed", DIVERGING), "vmin": -most, "vmax": most}


def _measured(run: Run, rows: pd.DataFrame) -> str:
    """The number of sequences and tokens, the precision and the text that were measured: a title's line, or two."""
    first = rows["domain"].iloc[0] if "domain" in rows else domains(run)[0].domain
    data = next(facts for facts in domains(run) if facts.domain == first)
    size = f"{sequences_of(run, data)} x {tokens_of(data)} tokens, {run.manifest.model.dtype}"
    line = f"{size}, {printable(data.domain)}"
    return line if len(line) <= TITLE else f"{size}\n{_end(data.domain)}"


def _profile(canvas: Figure, run: Run) -> None:
    rows = _first(run.layers)
    need_finite(rows, [*PROFILES, *(f"{name}_sem" for name in PROFILES)], "profile")
    panels = canvas.subplots(len(PROFILES), 1, sharex=True)
    for axes, name, color in zip(panels, PROFILES, LINES, strict=False):
        _band(axes, rows["layer"], rows[name], rows.get(f"{name}_sem"), color, None)
        axes.set_ylabel(mathematics(name) or in_words(name, _first_mass(run)))
        plain_axis(axes, name == "norm_ratio" and bool((rows[name] > 0).any()))
    panels[-1].set_xlabel("layer")
    panels[-1].set_xticks(_whole(rows["layer"]))
    _title(panels[0], run, "by layer, ± standard error")


def _whole(layers: pd.Series) -> list[int]:
    """The layers that an axis names: at most NAMED of them, evenly spaced."""
    step = next(step for step in STEPS if layers.nunique() <= NAMED * step)
    return sorted({int(layer) for layer in layers})[::step]


def _band(axes: Axes, x: Any, y: Any, error: Any, color: str, label: str | None) -> None:
    """A line with the band of its standard error."""
    axes.plot(x, y, color=color, marker="o", markersize=2, linewidth=1, label=label)
    if error is not None:
        axes.fill_between(x, y - error, y + error, color=color, alpha=0.25, linewidth=0)


def _length(canvas: Any, run: Run, axes: Axes | None = None) -> None:
    """alpha_0 over the first n tokens: curves over n; where the run has one length, the heads beside each other."""
    curve = _first(run.length_curve)
    heads = _first(run.heads).sort_values("sink_score", ascending=False, kind="stable")
    need_finite(curve, ("sink_score", "sink_score_sem"), "length")
    given, axes = axes is not None, axes or canvas.subplots()
    lengths = np.sort(curve["length"].unique())
    several = len(lengths) > 1
    names = []
    for row, color in zip(heads.head(STRONGEST).to_dict("records"), LINES, strict=False):
        rows = curve[(curve["layer"] == row["layer"]) & (curve["head"] == row["head"])]
        names.append(f"{row['layer']}.{row['head']}")
        if several:
            _band(axes, rows["length"], rows["sink_score"], rows["sink_score_sem"], color, f"head {names[-1]}")
        else:
            axes.errorbar(
                [len(names)], rows["sink_score"], rows["sink_score_sem"], color=color, marker="o", ms=3, capsize=2
            )

    def level(values: Any, color: str, style: str, label: str) -> None:
        look: dict[str, Any] = {"color": color, "linestyle": style, "linewidth": 1, "label": label}
        if several:
            axes.plot(lengths, values, **look)
        else:
            axes.axhline(values[0], **look)

    level(curve.groupby("length")["sink_score"].mean().to_numpy(), "black", "-", "mean of all heads")
    uniform = _uniform(run, heads, lengths)
    if uniform is not None:
        level(uniform, "gray", "--", "uniform attention")
    epsilon = run.manifest.request.epsilon
    axes.axhline(epsilon, color="gray", linestyle=":", linewidth=1, label=f"threshold {epsilon:g}")
    axes.set(ylabel=mathematics("sink_score"), ylim=(0, None))
    _name_lengths(axes, lengths, names)
    if given:
        axes.legend(frameon=False)
    else:
        canvas.legend(frameon=False, ncols=2, loc="outside lower center")
    _title(axes, run, f"{_strongest(run, heads)}, ± standard error")


def _name_lengths(axes: Axes, lengths: np.ndarray, heads: list[str]) -> None:
    """Names the horizontal axis: the lengths; the heads where there is one length."""
    if len(lengths) > 1:
        axes.set_xscale("log", base=2)
        axes.set_xticks(lengths, [str(length) for length in lengths])
        axes.set_xlabel("tokens")
    else:
        axes.set_xlim(0.5, len(heads) + 0.5)
        axes.set_xticks(range(1, len(heads) + 1), heads)
        axes.set_xlabel(f"head, {lengths[0]} tokens")
    axes.minorticks_off()


def _strongest(run: Run, heads: pd.DataFrame) -> str:
    """What the heads with the largest alpha_0 are called."""
    stream, epsilon = _stream(run), run.manifest.request.epsilon
    if not tells_sinks(run, stream, run.summary.streams[stream].uniform_alpha_0.T, epsilon):
        return "largest alpha_0"
    return "strongest sinks" if heads["sink_score"].max() > epsilon else "largest alpha_0, no sink"


def _uniform(run: Run, heads: pd.DataFrame, lengths: np.ndarray) -> np.ndarray | None:
    """Mean over heads of the alpha_0 of uniform attention, over the first n queries for each n of `lengths`.

    In a causal head it is H_m / n, where m = min(n, W) queries reach key 0 under a window or chunks of W. Where every
    query sees every key it is 1 / keys for any n. None where the run's files do not tell it.
    """
    stream = run.summary.streams[heads["stream"].iloc[0]]
    if not stream.causal:
        share = stream.uniform_alpha_0.T
        flat = share is not None and np.isclose(share * stream.tokens_per_sequence, 1)
        return np.full(len(lengths), share) if flat else None
    sizes = [float(kind.partition(":")[2] or "inf") for kind in heads["kind"]]
    harmonic = np.cumsum(1 / np.arange(1, lengths.max() + 1))
    reached = np.minimum.outer(lengths, sizes).astype(int)
    return np.asarray((harmonic[reached - 1] / lengths[:, None]).mean(1))


def _scatter(canvas: Any, run: Run, axes: Axes | None = None) -> None:
    rows = _first(run.heads)
    need_finite(rows, ("bos_mass", "honor"), "scatter")
    axes = axes or canvas.subplots()
    points = axes.scatter(rows["bos_mass"], rows["honor"], c=rows["layer"], cmap=MAP, s=8, linewidths=0)
    dormant = rows[rows["dormant"].fillna(False).astype(bool)]
    axes.scatter(
        dormant["bos_mass"], dormant["honor"], s=28, facecolors="none", edgecolors=LINES[5], linewidths=0.8,
        label=f"dormant: {run.manifest.request.dormant_rule}" if len(dormant) else None,
    )  # fmt: skip
    rule = parse_rule(run.manifest.request.dormant_rule)
    line = {"honor": axes.axhline, "bos_mass": axes.axvline}.get(rule.column)
    if line is not None:
        line(rule.bound, color=LINES[5], linestyle=":", linewidth=0.8, label=f"threshold {rule.bound:g}")
    # Weights of attention that is no softmax may lie beyond 0 and 1.
    low, high = min(0.0, float(rows["bos_mass"].min())), max(1.0, float(rows["bos_mass"].max()))
    room = 0.02 * (high - low)
    axes.set(xlabel=f"{_first_mass(run)}{_unit(run, 'bos_mass')}", ylabel="HONOR (ratio)")
    axes.set_xlim(low - room, high + room)
    axes.set_ylim(0, None)
    if len(dormant) or line is not None:
        axes.legend(frameon=False)
    _title(axes, run, "dormant scores, one dot a head")
    bar = canvas.colorbar(points, ax=axes, label="layer")
    bar.set_ticks(_whole(rows["layer"]))
