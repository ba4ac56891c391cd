"""The figures that go with claims, over the runs of all subjects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sinkscope.claims.claim import Claim, NotTested
from sinkscope.claims.needs import TEXT
from sinkscope.errors import SinkscopeError, in_one_line

if TYPE_CHECKING:
    from sinkscope.claims.subject import Subject
    from sinkscope.runs.run import Run


def draw_figures(
    claims: Sequence[Claim], subjects: Sequence[Subject]
) -> tuple[dict[str, bytes], dict[str, tuple[str, str]], list[str]]:
    """The PNG of each figure by its file's name; file and caption by the figure's name; why others were not drawn.

    A figure shows those runs that hold its tables.
    """
    from sinkscope.present.figures.several import draw_several, table_figures

    images: dict[str, bytes] = {}
    captions: dict[str, tuple[str, str]] = {}
    left_out: list[str] = []
    for name in dict.fromkeys(each.figure for each in claims if each.figure):
        tables = table_figures()[name].tables if name in table_figures() else ()
        runs = [run for run in map(_run, subjects) if run is not None and {*tables} <= {*run.measured}]
        file = f"claims-{name}.png"
        drawable = [run for run in runs if _can_be_drawn(run, name, left_out)] if len(runs) > 1 else runs
        try:
            if drawable:
                images[file], caption = draw_several(drawable, name, "png", "page")
                captions[name] = (file, caption)
        except SinkscopeError as error:
            left_out.append(f"figure {name} is not drawn: {in_one_line(error)}")
    return images, captions, left_out


def _can_be_drawn(run: Run, name: str, left_out: list[str]) -> bool:
    """Whether a figure of the run alone can be drawn; else says why it is left out of the figure."""
    from sinkscope.present.figures.several import draw_several

    try:
        draw_several([run], name, "svg", "page")
    except SinkscopeError as error:
        left_out.append(f"figure {name}: {in_one_line(error)}")
        return False
    return True


def _run(subject: Subject) -> Run | None:
    """The run over text; None where there is none."""
    try:
        return TEXT.of(subject).run
    except NotTested:
        return None
