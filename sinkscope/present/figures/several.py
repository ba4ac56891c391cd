"""Figures over several runs: each domain of each run under a name that tells it from the others, and the figures that
need the tables of questions alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from sinkscope.errors import SinkscopeError
from sinkscope.present.figures.canvas import Grid, drawn, legend_below
from sinkscope.present.text import printable, run_id, sentence
from sinkscope.runs.catalogue import find_column
from sinkscope.runs.per_sequence import counted, domains
from sinkscope.runs.questions import QUESTIONS
from sinkscope.runs.words import first_mass

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from sinkscope.runs.run import Run
    from sinkscope.runs.schema.manifest import DomainFacts, ModelFacts


MADE_BY = {table.name: question.name for question in QUESTIONS.values() for table in question.tables}
"""The question that writes each table on request."""
ENOUGH = 3
"""Points that a curve over length needs to look like one."""


@dataclass(frozen=True)
class Series:
    """One domain of one run, and its first stream. `label`: its name in the figure."""

    run: Run
    data: DomainFacts
    stream: str
    label: str

    def rows(self, table: str) -> pd.DataFrame:
        """Its rows of a run's table, by the table's name. Raises SinkscopeError where the run lacks the table."""
        frame = self.run.measured.get(table)
        frame = self.run.tables().get(table) if frame is None else frame
        if frame is None or frame.empty:
            how = f": scan it with --measure {MADE_BY[table]}" if table in MADE_BY else ""
            raise SinkscopeError(f"{self.run.path or self.run.manifest.model.id} has no table {table}{how}")
        rows = frame[frame["stream"] == self.stream]
        return rows[rows["domain"] == self.data.domain] if "domain" in rows else rows


def all_series(runs: list[Run]) -> list[Series]:
    """Every domain of every run, in order. Raises SinkscopeError where there is no run."""
    if not runs:
        raise SinkscopeError("no run: name at least one run folder")
    parts = [(run, data) for run in runs for data in domains(run)]
    return [
        Series(run, data, run.heads["stream"].iloc[0], label)
        for (run, data), label in zip(parts, _labels(parts), strict=True)
    ]


def _labels(parts: list[tuple[Run, DomainFacts]]) -> list[str]:
    """Model, domain and dtype, as far as they differ; runs that share all of them are numbered."""
    names = [short(run.manifest.model) for run, _ in parts]
    texts = [printable(data.domain) for _, data in parts]
    kinds = [str(run.manifest.model.dtype) for run, _ in parts]
    chosen = [names] if len(set(names)) > 1 or len(parts) == 1 else []
    chosen += [column for column in (texts, kinds) if len(set(column)) > 1]
    labels = [", ".join(words) for words in zip(*(chosen or [names]), strict=True)]
    return [
        f"{label} ({labels[: place + 1].count(label)})" if labels.count(label) > 1 else label
        for place, label in enumerate(labels)
    ]


def common(series: list[Series]) -> str:
    """The model's name, where all series are of one model; its only domain too. Empty where models differ."""
    models = {short(part.run.manifest.model) for part in series}
    if len(models) > 1:
        return ""
    return f"{models.pop()}, {printable(series[0].data.domain)}" if len(series) == 1 else models.pop()


def short(model: ModelFacts) -> str:
    """The model's name in a legend: of an example, without `example:`."""
    return printable(model.short if model.name else model.short.removeprefix("example:"))


def measured(series: list[Series]) -> str:
    """What was read, as a sentence for a caption; of a run with several streams, which one is drawn."""
    told = dict.fromkeys(
        f"{short(part.run.manifest.model)} ({part.run.manifest.model.dtype}): "
        f"{counted(part.run, part.data)} of {printable(part.data.domain)}"
        f"{f', stream {part.stream}' if part.run.heads['stream'].nunique() > 1 else ''}"
        for part in series
    )
    return "; ".join(told) + "."


def caption(run: Run, figure: str, metric: str | None = None, domain: str | None = None) -> str:
    """The caption of a figure that `present.figures.run.draw` draws."""
    request, mass = run.manifest.request, sentence(first_mass(run.summary.first_token))
    drawn = [part for part in all_series([run]) if domain in (None, part.data.domain)]
    lengths = sorted(drawn[0].rows("length_curve")["length"].unique()) if figure == "length" else []
    what = {
        "heatmap": _said(run, metric or "bos_mass"),
        "profile": f"{mass}, alignment and norm of the first token, by layer: mean attention of queries 1.. on the "
        "first token over the layer's heads, mean cosine of the first token's residual stream with that of every "
        "other token, and its norm over theirs. Bands: standard error over sequences.",
        "length": f"Sink score alpha_0 over the first n tokens of the sequences, n = {', '.join(map(str, lengths))}, "
        "all from one pass: the strongest sinks, the mean of all heads, and what uniform attention would give. "
        f"{'Bands' if len(lengths) > 1 else 'Bars'}: standard error over sequences."
        f"{_few(len(lengths), request.lengths is None)}",
        "scatter": f"{mass} against HONOR, one dot a head. Circled: heads that the rule {request.dormant_rule} "
        "calls dormant.",
    }[figure]
    return f"{what} {measured(drawn[:1])}"


def _few(points: int, usual: bool) -> str:
    """Why a curve over length has so few points, and how to measure more; empty where they show a curve, or were asked
    for."""
    if points >= ENOUGH or not usual:
        return ""
    counted = "shows one length" if points == 1 else f"has {points} points"
    return f" It {counted} because a scan measures 64, 128, 256, ... tokens unless --lengths names others."


def _said(run: Run, metric: str) -> str:
    """What a heat map of a column of heads.csv shows, as sentences."""
    column, base = find_column(run.manifest, metric, "heads"), metric.removesuffix("_sem")
    if column is None and base != metric and base in run.heads:
        return f"{metric}: standard error of {base} over sequences. One cell a head."
    what = f"{metric}: {column.formula.rstrip('.')}." if column else f"{metric}."
    return f"{what} One cell a head, mean over sequences."


# Figures over several runs that need the tables of questions alone: what one declares, and how it is drawn.
#
# A question's module `figure` lists its figures in FIGURES.


OFFSET = 0.35
"""Heads of a layer stand at most this far from the layer's place."""


@dataclass(frozen=True)
class TableFigure:
    """A figure over several runs.

    Attributes:
        tables: the tables of a run that it shows.
        parts: panels of each series.
        height: inches of a panel.
        paint: paints the panels of one series; told whether they stand at the left, where axes are named.
        caption: what it shows, and what its bands and bars are; plain text.
        legend_columns: entries of the legend beside each other, in a column.
        layers_below: whether layers are the horizontal axis of all parts.
        lacks: says why a series that has the tables has nothing to draw, and is left out; empty where it has.
    """

    name: str
    tables: tuple[str, ...]
    parts: int
    height: float
    paint: Callable[[Series, list[Axes], bool], None]
    caption: str
    legend_columns: int = 3
    layers_below: bool = True
    lacks: Callable[[Series], str] = lambda series: ""


@cache
def table_figures() -> dict[str, TableFigure]:
    """Every figure of every question, by name, in the order of the questions.

    Raises SinkscopeError where two questions have a figure of one name, and where one draws others than it declares.
    """
    figures: dict[str, TableFigure] = {}
    for question in QUESTIONS.values():
        with QUESTIONS.blaming(question.name):
            offered = {figure.name: figure for figure in question.need("figure").FIGURES} if question.figures else {}
        if tuple(offered) != question.figures or offered.keys() & figures.keys():
            raise SinkscopeError(
                f"--measure {question.name}: it draws the figures {', '.join(offered)} and declares "
                f"{', '.join(question.figures)}; names must agree, and no other question may have them"
            )
        figures |= offered
    return figures


def by_layer(axes: Axes) -> None:
    """Names the horizontal axis: layers, at whole numbers. A single layer gets room of its own."""
    from matplotlib.ticker import MaxNLocator

    low, high = axes.get_xlim()
    if high - low < 1:
        axes.set_xlim((low + high - 1) / 2, (low + high + 1) / 2)
    axes.set_xlabel("layer")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6, min_n_ticks=1))


def beside_layers(rows: pd.DataFrame) -> pd.Series:
    """The horizontal place of each head: its layer's, with the heads of a layer beside each other."""
    last = int(rows["head"].max())
    return rows["layer"] + (OFFSET * (2 * rows["head"] / last - 1) if last else 0.0)


def draw_several(
    runs: list[Run], figure: str, form: str, size: str = "column", title: str | None = None
) -> tuple[bytes, str]:
    """`figure` (one of `table_figures`) of every domain of every run, as PNG, SVG or PDF, and its caption.

    The caption names the series that have nothing to draw. `title`: replaces the figure's own; `none` leaves it out.
    Raises SinkscopeError for an unknown figure, format or size, where a run lacks the figure's table, where no series
    has anything to draw, and where matplotlib is not installed.
    """
    kinds = table_figures()
    if figure not in kinds:
        raise SinkscopeError(f"--figure {figure!r}: choose one of {', '.join(kinds)}")
    kind, series = kinds[figure], all_series(runs)
    asker = next(question.name for question in QUESTIONS.values() if figure in question.figures)
    for part in series:
        for table in kind.tables:
            part.rows(table)
    with QUESTIONS.blaming(asker):
        left_out = {part.label: why for part in series if (why := kind.lacks(part))}
    reasons = "; ".join(f"{label}: {why}" for label, why in left_out.items())
    series = [part for part in series if part.label not in left_out]
    if not series:
        raise SinkscopeError(reasons)
    grid = Grid(tuple(part.label for part in series), kind.parts, size, kind.height, common(series))

    def paint(canvas: Figure) -> None:
        panels = grid.panels(canvas)
        for number, (part, stack) in enumerate(zip(series, panels, strict=True)):
            with QUESTIONS.blaming(asker):
                kind.paint(part, stack, grid.is_left(number))
        if kind.layers_below:
            grid.share_layers(panels)
        legend_below(canvas, [axes for stack in panels for axes in stack], kind.legend_columns * (1 + (size == "page")))

    content = drawn(paint, f"sinkscope {figure} of {ids(series)}", form, grid.inches, title, twice=True)
    return content, f"{kind.caption} {measured(series)}" + (f" Left out: {reasons}." if reasons else "")


def ids(series: list[Series]) -> str:
    """The ids of the runs, each once."""
    return "runs " + ", ".join(dict.fromkeys(run_id(part.run) for part in series))
