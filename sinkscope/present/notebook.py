"""Runs and comparisons in a notebook: HTML without script for the answer, SVG for figures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sinkscope.errors import SinkscopeError, did_you_mean
from sinkscope.present.html.comparison import comparison_view
from sinkscope.present.html.page import render_fragment
from sinkscope.present.html.svg import Cell, heat_map, legend, number
from sinkscope.present.numbers import parameters
from sinkscope.present.text import answers
from sinkscope.runs.folder import write_file
from sinkscope.runs.per_sequence import counted, domains
from sinkscope.runs.words import first_mass

if TYPE_CHECKING:
    from sinkscope.comparison.compare_runs import Comparison
    from sinkscope.runs.run import Run

LARGE = 2048
"""Heads past which the maps are left to `Run.plot`: each square of a map has a title of its own."""
MAPS = 4
"""Most maps that are shown."""


@dataclass(frozen=True)
class Figure:
    """A figure, drawn when it is shown or saved.

    Attributes:
        draw: gives the figure as `png`, `svg` or `pdf`.
        caption: what it shows, and what its bands and bars are.
    """

    draw: Callable[[str], bytes] = field(repr=False)
    caption: str

    def _repr_svg_(self) -> str:
        return self.draw("svg").decode()

    def save(self, path: str | Path) -> Path:
        """Writes the figure as PNG, SVG or PDF, by the path's ending, and returns the path. Raises SinkscopeError for
        another ending, and where the file cannot be written."""
        target = Path(path)
        write_file(target, self.draw(target.suffix.lower().lstrip(".")))
        return target


def run_figure(
    run: Run, figure: str, metric: str | None, domain: str | None, size: str, title: str | None
) -> Figure:  # fmt: skip
    """A figure of a run's tables, drawn once to see that it can be. Raises SinkscopeError as `plot` does."""
    from sinkscope.present.figures import SINGLE
    from sinkscope.present.figures.run import draw
    from sinkscope.present.figures.several import caption, draw_several, table_figures

    if figure in SINGLE:
        draw(run, figure, "svg", size, metric, title, domain)
        return Figure(lambda form: draw(run, figure, form, size, metric, title, domain), caption(
            run, figure, metric, domain
        ))  # fmt: skip
    if figure not in table_figures():
        names = (*SINGLE, *table_figures())
        raise SinkscopeError(f"figure {figure!r}: choose one of {', '.join(names)}{did_you_mean(figure, names)}")
    if metric is not None or domain is not None:
        raise SinkscopeError(f"metric and domain belong to {', '.join(SINGLE)}: {figure} shows every text")
    _, said = draw_several([run], figure, "svg", size, title)
    return Figure(lambda form: draw_several([run], figure, form, size, title)[0], said)


def run_axes(run: Run, figure: str, metric: str | None, domain: str | None, title: str | None, axes: Any) -> Any:
    """Draws a figure of one panel on axes of the user's, and returns them. Raises SinkscopeError as `draw_on` does."""
    from sinkscope.present.figures.run import draw_on

    return draw_on(axes, run, figure, metric, title, domain)


def run_html(run: Run) -> str:
    """The answer of a run, and a map of its heads for each text."""
    model = run.manifest.model
    read = [f"{data.domain}: {counted(run, data)}" for data in domains(run)]
    return render_fragment(
        "run_cell.html", name=model.shown, answers=answers(run), warnings=run.summary.warnings,
        facts=[str(model.class_), f"{parameters(model.parameters or 0)} parameters", f"{model.dtype} on {model.device}",
               *read],
        maps=_maps(run), few=len(run.heads) <= LARGE,
    )  # fmt: skip


def _maps(run: Run) -> list[dict[str, Any]]:
    if len(run.heads) > LARGE:
        return []
    keys = [key for key in ("stream", "domain") if key in run.heads and run.heads[key].nunique() > 1]
    groups = run.heads.groupby(keys, sort=False) if keys else [((), run.heads)]
    maps, called = [], first_mass(run.summary.first_token)
    for name, rows in groups:
        layers = list(dict.fromkeys(rows["layer"]))
        cells = [
            Cell(layers.index(layer), int(head), mass, f"layer {layer}, head {head}: {called} {number(mass)}")
            for layer, head, mass in zip(*(rows[key] for key in ("layer", "head", "bos_mass")), strict=True)
        ]
        caption = ", ".join(map(str, name))
        drawn = heat_map(cells, [str(layer) for layer in layers], int(rows["head"].max()) + 1, (0, 1), caption)
        maps.append({"caption": caption, "svg": drawn, "legend": legend((0, 1), called)})
    return maps[:MAPS]


def comparison_html(result: Comparison) -> str:
    """What differs between two runs: the summary's rows, the heads that changed, and a map of each metric."""
    small = len(result.heads) <= LARGE
    view = comparison_view(result)
    names = [f"{facts['model']} ({facts['dtype']})" for facts in (result.a, result.b)]
    return render_fragment(
        "comparison_cell.html", names=names, view=view, maps=view["maps"][:MAPS] if small else [],
        left_out=len(view["maps"]) if not small else max(0, len(view["maps"]) - MAPS),
    )  # fmt: skip
